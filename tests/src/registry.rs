//! A registry of images with one image, which holds a file: what containerd asks of a registry to pull it, and nothing
//! else. It may ask for a user and a password.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context as _, ensure};
use axum::Router;
use axum::extract::{Path as UrlPath, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use serde_json::json;
use sha2::{Digest as _, Sha256};
use tokio::task::JoinSet;

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";

/// A registry that answers until it is dropped.
#[derive(Debug)]
pub struct Registry {
    address: SocketAddr,
    name: String,
    digest: String,
    _server: JoinSet<()>,
}

/// What the registry stores.
#[derive(Debug)]
struct Content {
    /// By digest: the media type, and the bytes.
    blobs: BTreeMap<String, (&'static str, Vec<u8>)>,
    /// The value of the header `Authorization` without which nothing is served.
    authorization: Option<&'static str>,
}

impl Registry {
    /// Serves an image called `name` that holds `file` at its root, on a free port of `host`. Only requests with
    /// `authorization` are answered, if one is given.
    ///
    /// # Errors
    /// The file cannot be read, or the address does not exist.
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
        let pages = Router::new()
            .route("/v2/", get(version))
            .route("/v2/{*path}", get(blob))
            .with_state(Arc::new(Content { blobs, authorization }));
        let listener = tokio::net::TcpListener::bind((host, 0)).await?;
        let address = listener.local_addr()?;
        let mut server = JoinSet::new();
        server.spawn(async move {
            drop(axum::serve(listener, pages).await);
        });
        Ok(Self { address, name: name.to_owned(), digest: image, _server: server })
    }

    /// The host and port of the registry.
    #[must_use]
    pub fn host(&self) -> String {
        self.address.to_string()
    }

    /// The image, with its digest.
    #[must_use]
    pub fn image(&self) -> String {
        format!("{}/{}@{}", self.address, self.name, self.digest)
    }
}

fn digest(bytes: &[u8]) -> String {
    let digest = Sha256::digest(bytes);
    let hex: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{hex}")
}

/// An archive of one file that everybody may read.
fn tar(file: &Path) -> anyhow::Result<Vec<u8>> {
    let (folder, name) = file.parent().zip(file.file_name()).context("not a file")?;
    let output = std::process::Command::new("tar")
        .args(["--create", "--mode=0444", "--owner=0", "--group=0", "--directory"])
        .arg(folder)
        .arg(name)
        .output()
        .context("failed to start tar")?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(output.stdout)
}

impl Content {
    /// The answer to a client that may not read here, `None` for one that may.
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

/// A manifest (`NAME/manifests/DIGEST`) or a blob (`NAME/blobs/DIGEST`).
async fn blob(
    UrlPath(path): UrlPath<String>,
    State(content): State<Arc<Content>>,
    headers: HeaderMap,
) -> Response {
    if let Some(refused) = content.refusal(&headers) {
        return refused;
    }
    let found = path.rsplit('/').next().and_then(|digest| Some((digest, content.blobs.get(digest)?)));
    let Some((digest, (media, bytes))) = found else { return StatusCode::NOT_FOUND.into_response() };
    let described =
        [(header::CONTENT_TYPE.as_str(), (*media).to_owned()), ("docker-content-digest", digest.to_owned())];
    (described, bytes.clone()).into_response()
}
