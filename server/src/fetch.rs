//! `server fetch`: brings a model's files into a folder, whole and checked or not at all. What is there is either the
//! file that was asked for or a `.part` of it, which the next attempt goes on with; `current`, which leads to the model,
//! appears last. It knows where files come from and nothing of what is in them.
//!
//! ```text
//! source (hub, http, s3) ─► [File] ─► download, each ─► finish: manifest.json, current
//! ```

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::{ArgGroup, Args as ClapArgs, ValueEnum};
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinSet;

mod download;
mod error;
mod finish;
mod former;
mod hub;
mod progress;
mod s3;
mod source;

use download::Downloader;
pub(crate) use error::Error;
use finish::{Finished, Origin, finish};
use progress::Progress;
use source::{Credentials, File};

/// Bring a model's files into a folder, whole and checked.
#[derive(Clone, Debug, ClapArgs)]
#[command(group(ArgGroup::new("source").required(true).args(["hf_repo", "url", "s3_object"])))]
pub struct FetchArgs {
    /// The folder. `current` in it leads to the model once all of it is there.
    #[arg(long, value_name = "PATH")]
    pub into: PathBuf,

    /// Remove first what fetches of other sources have left in folders beside that one.
    #[arg(long)]
    pub remove_former: bool,

    /// The name of a folder beside that one that is not to be removed. Repeatable.
    #[arg(long, value_name = "NAME")]
    pub keep: Vec<String>,

    /// A repository of the Hugging Face Hub, OWNER/NAME.
    #[arg(long, value_name = "NAME", help_heading = "Source")]
    pub hf_repo: Option<String>,

    /// Its branch, tag or commit.
    #[arg(long, value_name = "NAME", default_value = "main", help_heading = "Source")]
    pub hf_revision: String,

    /// A file of it, `*` standing for any part of a name. Repeatable. Default: all.
    #[arg(long = "hf-file", value_name = "PATTERN", help_heading = "Source")]
    pub hf_files: Vec<String>,

    /// The Hub's address.
    #[arg(long, value_name = "URL", default_value = "https://huggingface.co", help_heading = "Source")]
    pub hf_endpoint: String,

    /// The address of a file.
    #[arg(long, value_name = "URL", help_heading = "Source")]
    pub url: Option<String>,

    /// An object in S3, BUCKET/KEY; or, ending in /, all objects whose keys begin so.
    #[arg(long, value_name = "OBJECT", help_heading = "Source")]
    pub s3_object: Option<String>,

    /// The region of S3.
    #[arg(long, value_name = "NAME", default_value = "us-east-1", help_heading = "Source")]
    pub s3_region: String,

    /// The address of S3. Default: that of AWS in the region.
    #[arg(long, value_name = "URL", help_heading = "Source")]
    pub s3_endpoint: Option<String>,

    /// The SHA-256 of the file, where there is only one.
    #[arg(long, value_name = "DIGITS", help_heading = "Source")]
    pub sha256: Option<String>,

    /// What the files are. Default: go by their names.
    #[arg(long, value_enum, default_value = "auto", help_heading = "Source")]
    pub format: Format,

    /// A folder of files with credentials: token; username and password; accessKeyId, secretAccessKey and
    /// sessionToken.
    #[arg(long, value_name = "PATH", help_heading = "Source")]
    pub credentials: Option<PathBuf>,

    /// A file into which is written, as JSON, how it ended.
    #[arg(long, value_name = "PATH")]
    pub report: Option<PathBuf>,

    /// A port at which GET /progress tells, as JSON, how far it is.
    #[arg(long, value_name = "PORT")]
    pub progress_port: Option<u16>,

    /// Time in seconds for which a source of `server fetch` may send nothing.
    ///
    /// Beyond it: the attempt fails; see `--attempts`.
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    pub idle_timeout: u64,

    /// Number of consecutive attempts of `server fetch` that transfer nothing.
    ///
    /// Beyond it: the command fails with exit code 21 (the source is too slow) or 22 (the source cannot be reached).
    #[arg(long, value_name = "COUNT", default_value_t = 5)]
    pub attempts: u32,
}

/// What a source consists of.
#[derive(Debug)]
pub(crate) struct Source {
    files: Vec<File>,
    /// The commit of the repository that they are of, if the source has commits.
    revision: Option<String>,
}

impl Source {
    /// A source without commits.
    fn of(files: Vec<File>) -> Self {
        Self { files, revision: None }
    }
}

/// What the files are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// Go by their names.
    Auto,
    /// One GGUF file.
    Gguf,
    /// A folder with openvino_model.xml.
    #[value(name = "openvino-ir")]
    OpenvinoIr,
}

impl FetchArgs {
    /// Fetches.
    ///
    /// # Errors
    /// It did not succeed; the code is the process's exit code.
    pub(crate) async fn run(self) -> Result<(), Error> {
        let progress = Arc::new(Progress::default());
        let outcome = tokio::select! {
            outcome = self.work(&progress) => outcome,
            // The first process of a container has no default for this.
            interrupted = interrupted() => Err(interrupted),
        };
        self.report(&outcome, &progress).await?;
        outcome.map(|finished| {
            tracing::info!(digest = finished.digest, path = %finished.current.display(), "fetched");
        })
    }

    async fn work(&self, progress: &Arc<Progress>) -> Result<Finished, Error> {
        if self.sha256.as_ref().is_some_and(|digits| !is_sha256(digits)) {
            return Err(Error::Wrong("the SHA-256 is not 64 hexadecimal digits in lower case".to_owned()));
        }
        if self.remove_former {
            let (into, keep) = (self.into.clone(), self.keep.clone());
            let removal = tokio::task::spawn_blocking(move || former::remove(&into, &keep));
            removal
                .await
                .map_err(|error| Error::Wrong(format!("failed to remove former sources: {error}")))?;
        }
        if let Some(finished) = Finished::load(&self.into, &self.identity()) {
            tracing::info!("everything is there already");
            progress.expect(finished.bytes());
            progress.add(finished.bytes());
            return Ok(finished);
        }
        let mut told = JoinSet::new();
        if let Some(port) = self.progress_port {
            told.spawn(progress::serve(port, Arc::clone(progress)));
        }
        told.spawn(progress::log(Arc::clone(progress)));
        let credentials = Credentials::load(self.credentials.as_deref())?;
        let client = source::client(Duration::from_secs(self.idle_timeout))?;
        let Source { files, revision } = self.source(&client, &credentials).await?;
        if let Some(total) = files.iter().map(|file| file.bytes).sum::<Option<u64>>() {
            progress.expect(total);
        }
        let mut downloader = Downloader { client, progress, attempts_max: self.attempts.max(1) };
        let mut fetched = Vec::new();
        for file in files {
            fetched.push(downloader.fetch(&self.into.join(finish::FILES), &file).await?);
        }
        let identity = self.identity();
        finish(&self.into, Origin { source: &identity, revision }, fetched, self.format)
    }

    /// What the source consists of.
    async fn source(&self, client: &reqwest::Client, credentials: &Credentials) -> Result<Source, Error> {
        let mut source = match (&self.hf_repo, &self.url, &self.s3_object) {
            (Some(repo), ..) => {
                let hub = hub::Hub { endpoint: &self.hf_endpoint, repo, revision: &self.hf_revision };
                hub.files(client, credentials, &self.hf_files).await?
            }
            (None, Some(url), _) => Source::of(vec![source::web(url, credentials)?]),
            (None, None, Some(object)) => {
                let place = s3::Place { endpoint: self.s3_endpoint.as_deref(), region: &self.s3_region };
                Source::of(s3::files(client, credentials, place, object).await?)
            }
            (None, None, None) => Source::of(Vec::new()),
        };
        match (&self.sha256, &mut source.files[..]) {
            (None, _) => {}
            (Some(sha256), [file]) => file.sha256 = Some(sha256.clone()),
            (Some(_), files) => {
                let message = format!("a SHA-256 is given, for one file, but the source has {}", files.len());
                return Err(Error::Wrong(message));
            }
        }
        Ok(source)
    }

    /// What distinguishes this from other fetches into the same folder.
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

    async fn report(&self, outcome: &Result<Finished, Error>, progress: &Progress) -> Result<(), Error> {
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
    let (Ok(mut terminate), Ok(mut interrupt)) =
        (signal(SignalKind::terminate()), signal(SignalKind::interrupt()))
    else {
        return std::future::pending().await;
    };
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    Error::Interrupted
}

#[cfg(test)]
mod tests;
