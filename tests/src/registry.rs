//! A mock image registry with one image that contains one file. It implements only the requests that containerd sends
//! to pull the image, optionally with basic authentication.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context as _, ensure};
use axum::Router;
use axum::extract::{Path as UrlPath, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use serde_json::json;

use crate::mock::{self, MockServer};

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";

/// A registry that runs until it is dropped.
#[derive(Debug)]
pub struct Registry {
    server: MockServer,
    name: String,
    digest: String,
}

/// The content of the registry.
#[derive(Debug)]
struct Content {
    /// The media type and the bytes of each blob, by digest.
    blobs: BTreeMap<String, (&'static str, Vec<u8>)>,
    /// The value that the header `Authorization` of every request must have, if one is set.
    authorization: Option<&'static str>,
}

impl Registry {
    /// Serves an image called `name` with `file` at its root, on a free port of `host`. If `authorization` is given,
    /// only requests with this value of the header `Authorization` are allowed.
    ///
    /// # Errors
    /// The file cannot be read, or this machine does not have the address `host`.
    pub async fn start(
        host: &str,
        name: &str,
        file: &Path,
        authorization: Option<&'static str>,
    ) -> anyhow::Result<Self> {
        let layer = tar(file)?;
        let config = json!({
            "architecture": "amd64",
            "os": "linux",
            "config": {},
            "rootfs": {"type": "layers", "diff_ids": [digest(&layer)]},
        });
        let config = config.to_string().into_bytes();
        let descriptor =
            |media, bytes: &[u8]| json!({"mediaType": media, "digest": digest(bytes), "size": bytes.len()});
        let manifest = json!({
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": descriptor(CONFIG, &config),
            "layers": [descriptor(LAYER, &layer)],
        });
        let manifest = manifest.to_string().into_bytes();
        let image = digest(&manifest);
        let blobs = [(MANIFEST, manifest), (CONFIG, config), (LAYER, layer)];
        let blobs = blobs.into_iter().map(|(media, bytes)| (digest(&bytes), (media, bytes))).collect();
        let routes = Router::new()
            .route("/v2/", get(version))
            .route("/v2/{*path}", get(blob))
            .with_state(Arc::new(Content { blobs, authorization }));
        let server = MockServer::start(host, routes).await?;
        Ok(Self { server, name: name.to_owned(), digest: image })
    }

    /// The host and port of the registry.
    #[must_use]
    pub fn host(&self) -> String {
        self.server.address.to_string()
    }

    /// The image reference, with its digest.
    #[must_use]
    pub fn image(&self) -> String {
        format!("{}/{}@{}", self.server.address, self.name, self.digest)
    }
}

fn digest(bytes: &[u8]) -> String {
    format!("sha256:{}", mock::sha256(bytes))
}

/// A tar archive of one world-readable file.
fn tar(file: &Path) -> anyhow::Result<Vec<u8>> {
    let (directory, name) = file.parent().zip(file.file_name()).context("the path has no file name")?;
    let output = std::process::Command::new("tar")
        .args(["--create", "--mode=0444", "--owner=0", "--group=0", "--directory"])
        .arg(directory)
        .arg(name)
        .output()
        .context("failed to start tar")?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(output.stdout)
}

impl Content {
    /// The response to an unauthorized client; `None` if the client is authorized.
    fn refusal(&self, headers: &HeaderMap) -> Option<Response> {
        let shown = headers.get(header::AUTHORIZATION).and_then(|shown| shown.to_str().ok());
        if self.authorization.is_none() || shown == self.authorization {
            return None;
        }
        let challenge = [(header::WWW_AUTHENTICATE, "Basic realm=\"models\"")];
        Some((StatusCode::UNAUTHORIZED, challenge).into_response())
    }
}

async fn version(State(content): State<Arc<Content>>, headers: HeaderMap) -> Response {
    content.refusal(&headers).unwrap_or_else(|| StatusCode::OK.into_response())
}

/// Serves a manifest (`NAME/manifests/DIGEST`) or a blob (`NAME/blobs/DIGEST`).
async fn blob(
    UrlPath(path): UrlPath<String>,
    State(content): State<Arc<Content>>,
    headers: HeaderMap,
) -> Response {
    if let Some(refused) = content.refusal(&headers) {
        return refused;
    }
    let requested = path.rsplit('/').next().and_then(|digest| Some((digest, content.blobs.get(digest)?)));
    let Some((digest, (media, bytes))) = requested else { return StatusCode::NOT_FOUND.into_response() };
    let metadata =
        [(header::CONTENT_TYPE.as_str(), (*media).to_owned()), ("docker-content-digest", digest.to_owned())];
    (metadata, bytes.clone()).into_response()
}
