//! Bringing one file: into a `.part` beside its place, going on with what an earlier attempt left, and under its own name
//! once it is whole and checked.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use reqwest::header::{CONTENT_RANGE, ETAG, IF_RANGE, RANGE};
use reqwest::{Client, Response, StatusCode};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use tokio::fs;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::Error;
use super::progress::Progress;
use super::source::File;

/// The pauses between attempts: the first, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(10));
/// Bytes that are read from a disk at once.
const CHUNK_BYTES: usize = 1 << 20;

/// A file that is there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Fetched {
    /// Its path among the model's files.
    pub(crate) path: String,
    /// Its size.
    pub(crate) bytes: u64,
    /// Its SHA-256.
    pub(crate) sha256: String,
}

/// Somebody who brings files.
#[derive(Debug)]
pub(crate) struct Downloader<'a> {
    pub(crate) client: Client,
    pub(crate) progress: &'a Arc<Progress>,
    /// Attempts in a row that may bring nothing.
    pub(crate) attempts_max: u32,
}

/// What has come of a file.
struct Part {
    path: PathBuf,
    /// Beside it: by what the source tells this content from others.
    mark: PathBuf,
    file: fs::File,
    hash: Sha256,
    bytes: u64,
}

impl Downloader<'_> {
    /// Brings `file` below `folder`.
    ///
    /// # Cancel safety
    /// What has come so far is kept, and the next attempt goes on with it.
    pub(crate) async fn fetch(&mut self, folder: &Path, file: &File) -> Result<Fetched, Error> {
        let path = folder.join(&file.path);
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent).await.map_err(|source| Error::disk("create", parent, source))?;
        }
        if let Some(fetched) = self.present(&path, file).await? {
            return Ok(fetched);
        }
        let mut part = Part::open(&path).await?;
        self.progress.add(part.bytes);
        let mut is_resumed = part.bytes > 0;
        let mut failures = 0;
        loop {
            let before = part.bytes;
            let error = match self.attempt(&mut part, file).await {
                Ok(()) => match self.place(&mut part, &path, file).await {
                    // What was left of an earlier attempt may have been of another file.
                    Err(Error::Digest { .. }) if is_resumed => {
                        is_resumed = false;
                        continue;
                    }
                    placed => return placed,
                },
                Err(error) if !error.may_pass() => return Err(error),
                Err(error) => error,
            };
            failures = if part.bytes > before { 0 } else { failures + 1 };
            if failures >= self.attempts_max {
                return Err(error);
            }
            tracing::warn!(file = file.path, bytes = part.bytes, %error, "will go on from there");
            tokio::time::sleep(PAUSES.0.saturating_mul(1 << failures.min(8)).min(PAUSES.1)).await;
        }
    }

    /// The file, if an earlier fetch has placed it.
    async fn present(&self, path: &Path, file: &File) -> Result<Option<Fetched>, Error> {
        // Without a digest to compare with, it could be of another revision.
        let Some(wanted) = &file.sha256 else { return Ok(None) };
        let Ok(mut present) = fs::File::open(path).await else { return Ok(None) };
        let (sha256, bytes) = hash(&mut present).await.map_err(|source| Error::disk("read", path, source))?;
        let sha256 = digits(sha256);
        if sha256 != *wanted {
            return Ok(None);
        }
        self.progress.add(bytes);
        Ok(Some(Fetched { path: file.path.clone(), bytes, sha256 }))
    }

    /// Goes on until the file is whole.
    async fn attempt(&self, part: &mut Part, file: &File) -> Result<(), Error> {
        if file.bytes.is_some_and(|bytes| part.bytes == bytes) && part.bytes > 0 {
            return Ok(());
        }
        let url = file.place.url();
        let mut request = file.place.request(&self.client);
        if part.bytes > 0 {
            match fs::read_to_string(&part.mark).await {
                Ok(mark) => {
                    request = request.header(RANGE, format!("bytes={}-", part.bytes)).header(IF_RANGE, mark)
                }
                // In the end the digest will tell.
                Err(_) if file.sha256.is_some() => {
                    request = request.header(RANGE, format!("bytes={}-", part.bytes))
                }
                // Nothing says that it is of the same content.
                Err(_) => self.restart(part).await?,
            }
        }
        let answer = request.send().await.map_err(|error| Error::transport(url.as_str(), &error))?;
        match answer.status() {
            StatusCode::PARTIAL_CONTENT if begins_at(&answer) == Some(part.bytes) => {}
            StatusCode::PARTIAL_CONTENT | StatusCode::RANGE_NOT_SATISFIABLE => {
                self.restart(part).await?;
                return Err(Error::Source {
                    url: file.place.url().path().to_owned(),
                    problem: "it answers with another part than was asked for".to_owned(),
                });
            }
            status => {
                if let Some(error) = Error::status(url.as_str(), status, file.place.has_credentials()) {
                    return Err(error);
                }
                // All of it, from the beginning.
                self.restart(part).await?;
            }
        }
        part.note(&answer).await?;
        let announced = answer.content_length().map(|rest| part.bytes + rest);
        self.receive(part, answer).await?;
        let wanted = file.bytes.or(announced);
        match wanted {
            Some(wanted) if part.bytes < wanted => Err(Error::Source {
                url: url.path().to_owned(),
                problem: format!("it ended after {} of {wanted} bytes", part.bytes),
            }),
            _ => Ok(()),
        }
    }

    async fn receive(&self, part: &mut Part, mut answer: Response) -> Result<(), Error> {
        let url = answer.url().as_str().to_owned();
        loop {
            let chunk = match answer.chunk().await {
                Ok(Some(chunk)) => chunk,
                Ok(None) => break,
                Err(error) => {
                    part.flush().await?;
                    return Err(Error::transport(&url, &error));
                }
            };
            part.file.write_all(&chunk).await.map_err(|source| Error::disk("write", &part.path, source))?;
            part.hash.update(&chunk);
            part.bytes += chunk.len() as u64;
            self.progress.add(chunk.len() as u64);
        }
        part.flush().await
    }

    /// Begins anew.
    async fn restart(&self, part: &mut Part) -> Result<(), Error> {
        self.progress.remove(part.bytes);
        part.empty().await
    }

    /// Gives the whole file its name, if it is the one that was asked for. What is not is emptied.
    async fn place(&self, part: &mut Part, path: &Path, file: &File) -> Result<Fetched, Error> {
        let found = digits(part.hash.clone());
        let bytes = part.bytes;
        let error = match (&file.sha256, file.bytes) {
            (Some(wanted), _) if *wanted != found => {
                Some(Error::Digest { name: file.path.clone(), found: found.clone(), wanted: wanted.clone() })
            }
            (_, Some(wanted)) if wanted != bytes => Some(Error::Wrong(format!(
                "{} has {bytes} bytes, not {wanted} as the source says",
                file.path
            ))),
            _ => None,
        };
        if let Some(error) = error {
            self.restart(part).await?;
            return Err(error);
        }
        part.file.sync_all().await.map_err(|source| Error::disk("write", &part.path, source))?;
        fs::rename(&part.path, path).await.map_err(|source| Error::disk("rename", &part.path, source))?;
        // It is of no use any more, and no harm if it stays.
        let _ = fs::remove_file(&part.mark).await;
        Ok(Fetched { path: file.path.clone(), bytes, sha256: found })
    }
}

impl Part {
    async fn open(path: &Path) -> Result<Self, Error> {
        let beside = |suffix: &str| {
            let mut name = path.as_os_str().to_owned();
            name.push(suffix);
            PathBuf::from(name)
        };
        let (path, mark) = (beside(".part"), beside(".part.etag"));
        let mut file = fs::OpenOptions::new()
            .read(true)
            .append(true)
            .create(true)
            .open(&path)
            .await
            .map_err(|source| Error::disk("open", &path, source))?;
        let (hash, bytes) = hash(&mut file).await.map_err(|source| Error::disk("read", &path, source))?;
        Ok(Self { path, mark, file, hash, bytes })
    }

    async fn empty(&mut self) -> Result<(), Error> {
        self.file.set_len(0).await.map_err(|source| Error::disk("write", &self.path, source))?;
        self.hash = Sha256::new();
        self.bytes = 0;
        match fs::remove_file(&self.mark).await {
            Err(source) if source.kind() != std::io::ErrorKind::NotFound => {
                Err(Error::disk("remove", &self.mark, source))
            }
            _ => Ok(()),
        }
    }

    /// Notes by what the source tells this content from others. A weak mark tells nothing of bytes.
    async fn note(&self, answer: &Response) -> Result<(), Error> {
        let mark = answer.headers().get(ETAG).and_then(|mark| mark.to_str().ok());
        match mark.filter(|mark| mark.starts_with('"')) {
            Some(mark) => {
                fs::write(&self.mark, mark).await.map_err(|source| Error::disk("write", &self.mark, source))
            }
            None => Ok(()),
        }
    }

    async fn flush(&mut self) -> Result<(), Error> {
        self.file.flush().await.map_err(|source| Error::disk("write", &self.path, source))
    }
}

/// What a file holds.
async fn hash(file: &mut fs::File) -> std::io::Result<(Sha256, u64)> {
    let mut hash = Sha256::new();
    let mut chunk = vec![0; CHUNK_BYTES];
    let mut bytes = 0;
    loop {
        match file.read(&mut chunk).await? {
            0 => return Ok((hash, bytes)),
            read => {
                hash.update(&chunk[..read]);
                bytes += read as u64;
            }
        }
    }
}

fn digits(hash: Sha256) -> String {
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Where the part of an answer begins.
fn begins_at(answer: &Response) -> Option<u64> {
    let range = answer.headers().get(CONTENT_RANGE)?.to_str().ok()?;
    range.strip_prefix("bytes ")?.split('-').next()?.parse().ok()
}
