//! A mock of the Hugging Face Hub with one repository, for tests that fetch models. It lists the files, and serves them
//! with support for range requests.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context as _;
use axum::Router;
use axum::extract::{Path as UrlPath, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use serde_json::{Value, json};

use crate::mock::{self, MockServer};

/// The commit that every revision resolves to.
pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// A mock Hub that runs until it is dropped.
#[derive(Debug)]
pub struct Hub {
    server: MockServer,
}

#[derive(Debug)]
struct Repository {
    name: String,
    files: BTreeMap<String, File>,
    /// The token that every request must carry, if one is set.
    token: Option<String>,
}

#[derive(Debug)]
struct File {
    path: PathBuf,
    bytes: u64,
    sha256: String,
}

impl Hub {
    /// Serves `files` as the repository `name` (`owner/name`), on a free port of `host`.
    ///
    /// # Errors
    /// A file cannot be read, or this machine does not have the address `host`.
    pub async fn start(host: &str, name: &str, files: &[&Path]) -> anyhow::Result<Self> {
        Self::start_with_token(host, name, files, None).await
    }

    /// Starts a mock Hub like [`Hub::start`] that requires `token`, if one is given.
    ///
    /// # Errors
    /// Returns the same errors as [`Hub::start`].
    pub async fn start_with_token(
        host: &str,
        name: &str,
        files: &[&Path],
        token: Option<&str>,
    ) -> anyhow::Result<Self> {
        let token = token.map(str::to_owned);
        let mut repository = Repository { name: name.to_owned(), files: BTreeMap::new(), token };
        for path in files {
            let content =
                std::fs::read(path).with_context(|| format!("failed to read {}", path.display()))?;
            let sha256 = mock::sha256(&content);
            let name = path.file_name().context("the path has no file name")?.to_string_lossy().into_owned();
            let file = File { path: (*path).to_owned(), bytes: content.len() as u64, sha256 };
            repository.files.insert(name, file);
        }
        let routes = Router::new()
            .route("/api/models/{owner}/{name}/revision/{revision}", get(revision))
            .route("/{owner}/{name}/resolve/{revision}/{*file}", get(resolve))
            .with_state(Arc::new(repository));
        Ok(Self { server: MockServer::start(host, routes).await? })
    }

    /// The URL to configure as the endpoint of the Hub.
    #[must_use]
    pub fn url(&self) -> String {
        self.server.url()
    }
}

type RepositoryState = State<Arc<Repository>>;

impl Repository {
    /// Checks the name of the requested repository and the token, and returns an error status if either is wrong.
    fn authorize(&self, owner: &str, name: &str, headers: &HeaderMap) -> Result<(), StatusCode> {
        let shown = headers.get(header::AUTHORIZATION).and_then(|shown| shown.to_str().ok());
        let expected = self.token.as_ref().map(|token| format!("Bearer {token}"));
        match expected {
            Some(_) if shown.is_none() => Err(StatusCode::UNAUTHORIZED),
            Some(expected) if shown != Some(&*expected) => Err(StatusCode::FORBIDDEN),
            _ if self.name != format!("{owner}/{name}") => Err(StatusCode::NOT_FOUND),
            _ => Ok(()),
        }
    }
}

async fn revision(
    UrlPath((owner, name, _)): UrlPath<(String, String, String)>,
    State(repository): RepositoryState,
    headers: HeaderMap,
) -> Response {
    if let Err(status) = repository.authorize(&owner, &name, &headers) {
        return status.into_response();
    }
    let siblings: Vec<Value> = repository
        .files
        .iter()
        .map(|(name, file)| {
            let lfs = json!({"sha256": file.sha256, "size": file.bytes});
            json!({"rfilename": name, "size": file.bytes, "lfs": lfs})
        })
        .collect();
    axum::Json(json!({"id": repository.name, "sha": COMMIT, "siblings": siblings})).into_response()
}

async fn resolve(
    UrlPath((owner, name, _, file)): UrlPath<(String, String, String, String)>,
    State(repository): RepositoryState,
    headers: HeaderMap,
) -> Response {
    if let Err(status) = repository.authorize(&owner, &name, &headers) {
        return status.into_response();
    }
    let Some(file) = repository.files.get(&file) else { return StatusCode::NOT_FOUND.into_response() };
    let Ok(content) = tokio::fs::read(&file.path).await else {
        return StatusCode::INTERNAL_SERVER_ERROR.into_response();
    };
    let metadata = [
        (header::ETAG.as_str(), format!("\"{}\"", file.sha256)),
        (header::ACCEPT_RANGES.as_str(), "bytes".to_owned()),
        ("x-linked-etag", format!("\"{}\"", file.sha256)),
        ("x-linked-size", file.bytes.to_string()),
        ("x-repo-commit", COMMIT.to_owned()),
    ];
    match mock::range_start(&headers) {
        Some(from) if from >= content.len() => (StatusCode::RANGE_NOT_SATISFIABLE, metadata).into_response(),
        Some(from) => {
            let range = format!("bytes {from}-{}/{}", content.len() - 1, content.len());
            let rest = content[from..].to_vec();
            (StatusCode::PARTIAL_CONTENT, metadata, [(header::CONTENT_RANGE, range)], rest).into_response()
        }
        None => (metadata, content).into_response(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http;

    #[tokio::test]
    async fn lists_files_and_serves_them_with_range_requests() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("model.gguf");
        std::fs::write(&path, "0123456789").unwrap();
        let hub = Hub::start("127.0.0.1", "owner/name", &[&path]).await.unwrap();
        let url = |path: &str| format!("{}{path}", hub.url());
        let page = http::get(&url("/api/models/owner/name/revision/main?blobs=true")).await.unwrap();
        let sibling = &page.body["siblings"][0];
        assert_eq!((&sibling["rfilename"], &sibling["size"]), (&json!("model.gguf"), &json!(10)));
        let file = url("/owner/name/resolve/main/model.gguf");
        let part = crate::http::client().get(&file).header("range", "bytes=7-").send().await.unwrap();
        assert_eq!(part.status().as_u16(), 206);
        assert_eq!(part.text().await.unwrap(), "789");
        assert_eq!(http::get(&url("/owner/other/resolve/main/model.gguf")).await.unwrap().status, 404);
    }
}
