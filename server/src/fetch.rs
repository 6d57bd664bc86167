//! `ovfleet-server fetch` downloads and verifies the files of a model. Each model file in the directory is either
//! complete or a `.part` file, from which the next attempt can continue. The link `current` to the model is created
//! once all files are complete, and it is removed before one of them is replaced. Only one fetch at a time uses a
//! directory if its file system supports locks. This module does not interpret the content of the files.
//!
//! ```text
//! lock ─► source (hub, http, s3) ─► [File] ─► download, each ─► finish: manifest.json, current
//! ```

use std::sync::Arc;
use std::time::Duration;

use process::signals::EndSignals;
use tokio::task::JoinSet;

mod args;
mod download;
mod error;
mod finish;
mod hub;
mod lock;
mod parts;
mod previous;
mod progress;
mod s3;
mod source;

pub use args::{FetchArgs, Format};
use download::{Downloader, retry_pause};
pub(crate) use error::Error;
use finish::{FetchedModel, Origin, PreviousModel, finish};
use lock::DirectoryLock;
use progress::Progress;
use source::{Source, SourceCredentials};

impl FetchArgs {
    /// Fetches the model.
    ///
    /// # Errors
    /// The fetch failed; the error determines the exit code of the process.
    pub(crate) async fn run(self) -> Result<(), Error> {
        let progress = Arc::new(Progress::default());
        let outcome = tokio::select! {
            outcome = self.work(&progress) => outcome,
            // Handle signals explicitly: in a container, this process may be PID 1, and the kernel ignores signals for
            // which PID 1 has no handler.
            interrupted = interrupted() => Err(interrupted),
        };
        self.report(&outcome, &progress).await?;
        outcome.map(|finished| {
            tracing::info!(digest = finished.digest, path = %finished.current.display(), "fetched the model");
        })
    }

    async fn work(&self, progress: &Arc<Progress>) -> Result<FetchedModel, Error> {
        if let Some(digits) = self.sha256.as_ref().filter(|digits| !is_sha256(digits)) {
            let message = format!("--sha256 must be 64 lowercase hexadecimal digits, not {digits:?}");
            return Err(Error::Wrong(message));
        }
        if self.remove_previous {
            let (into, keep) = (self.into.clone(), self.keep.clone());
            let removal = tokio::task::spawn_blocking(move || previous::remove(&into, &keep));
            removal
                .await
                .map_err(|error| Error::Wrong(format!("failed to remove earlier fetches: {error}")))?;
        }
        // The reporters start first, so that a fetch that waits for the lock reports its progress.
        let mut reporters = JoinSet::new();
        if let Some(port) = self.progress_port {
            reporters.spawn(progress::serve(port, Arc::clone(progress)));
        }
        reporters.spawn(progress::log(Arc::clone(progress)));
        let lock = DirectoryLock::acquire(&self.into).await;
        if let Some(finished) = FetchedModel::load(&self.into, &self.identity()) {
            tracing::info!("the model is already complete");
            progress.expect(finished.bytes());
            progress.add(finished.bytes());
            return Ok(finished);
        }
        // If locking the directory failed, return the error only now, because a directory that this process cannot
        // write to may contain a complete model.
        let _lock = lock?;
        let credentials = SourceCredentials::load(self.credentials.as_deref())?;
        let client = source::client(Duration::from_secs(self.idle_timeout))?;
        let Source { files, revision } = self.source(&client, &credentials).await?;
        let model = finish::model_path(&files, self.format)?;
        if let Some(total) = files.iter().map(|file| file.bytes).sum::<Option<u64>>() {
            progress.expect(total);
        }
        let previous = PreviousModel::load(&self.into);
        let mut downloader = Downloader { client, progress, attempts_max: self.attempts.max(1), previous };
        let mut fetched = Vec::new();
        for file in files {
            fetched.push(downloader.fetch(&self.into.join(finish::FILES), &file).await?);
        }
        let identity = self.identity();
        finish(&self.into, Origin { source: &identity, revision }, fetched, &model)
    }

    /// Returns the files of the source. A transient failure is retried in the same way as during a download.
    async fn source(
        &self,
        client: &reqwest::Client,
        credentials: &SourceCredentials,
    ) -> Result<Source, Error> {
        let mut failures = 0;
        loop {
            match self.list(client, credentials).await {
                Err(error) if error.is_transient() && failures + 1 < self.attempts => {
                    failures += 1;
                    tracing::warn!(%error, "failed to list the files; trying again");
                    tokio::time::sleep(retry_pause(failures)).await;
                }
                listed => return listed,
            }
        }
    }

    async fn list(&self, client: &reqwest::Client, credentials: &SourceCredentials) -> Result<Source, Error> {
        let mut source = match (&self.hf_repo, &self.url, &self.s3_object) {
            (Some(repo), ..) => {
                let hub = hub::Hub { endpoint: &self.hf_endpoint, repo, revision: &self.hf_revision };
                hub.files(client, credentials, &self.hf_files).await?
            }
            (None, Some(url), _) => Source::of(source::web(url, credentials)?),
            (None, None, Some(object)) => {
                let server =
                    s3::S3Endpoint { endpoint: self.s3_endpoint.as_deref(), region: &self.s3_region };
                Source::of(s3::files(client, credentials, server, object).await?)
            }
            (None, None, None) => Source::of(Vec::new()),
        };
        match (&self.sha256, &mut source.files[..]) {
            (None, _) => {}
            (Some(sha256), [file]) => file.sha256 = Some(sha256.clone()),
            (Some(_), files) => {
                let message = format!(
                    "--sha256 requires a source with one file, but the source has {} files",
                    files.len()
                );
                return Err(Error::Wrong(message));
            }
        }
        Ok(source)
    }

    /// Returns a string that distinguishes this fetch from fetches of other models into the same directory.
    fn identity(&self) -> String {
        let source = match (&self.hf_repo, &self.url, &self.s3_object) {
            (Some(repo), ..) => {
                format!("{} {repo} {} {:?}", self.hf_endpoint, self.hf_revision, self.hf_files)
            }
            (_, Some(url), _) => url.clone(),
            (.., object) => format!("s3 {:?} {} {object:?}", self.s3_endpoint, self.s3_region),
        };
        format!("{source} {:?} {:?}", self.sha256, self.format)
    }

    async fn report(&self, outcome: &Result<FetchedModel, Error>, progress: &Progress) -> Result<(), Error> {
        let Some(path) = &self.report else { return Ok(()) };
        let (bytes, total) = progress.read();
        let report = match outcome {
            Ok(finished) => {
                let mut report = serde_json::json!({
                    "reason": "Fetched", "digest": finished.digest, "bytes": finished.bytes(), "bytes_total": finished.bytes(),
                });
                if let Some(revision) = &finished.revision {
                    report["revision"] = serde_json::json!(revision);
                }
                report
            }
            Err(error) => serde_json::json!({
                "reason": error.reason(), "message": error.to_string(), "bytes": bytes, "bytes_total": total,
            }),
        };
        tokio::fs::write(path, report.to_string()).await.map_err(|source| Error::disk("write", path, source))
    }
}

fn is_sha256(digits: &str) -> bool {
    digits.len() == 64 && digits.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

async fn interrupted() -> Error {
    match EndSignals::new() {
        Ok(mut signals) => signals.next().await,
        Err(_) => std::future::pending().await,
    }
    Error::Interrupted
}

#[cfg(test)]
mod tests;
