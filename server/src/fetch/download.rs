//! Downloads a file into a `.part` file, from which a later attempt can continue. The file gets its final name once it
//! is complete and verified.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use reqwest::header::{CONTENT_RANGE, ETAG, IF_NONE_MATCH, IF_RANGE, RANGE};
use reqwest::{Client, Response, StatusCode};
use sha2::{Digest as _, Sha256};
use tokio::fs;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::error::Error;
use super::finish::{FetchedFile, PreviousModel};
use super::progress::Progress;
use super::source::File;

/// The pause after an attempt that has transferred data. Each consecutive attempt without data doubles the pause, up to
/// `PAUSE_MAX`.
const PAUSE_MIN: Duration = Duration::from_millis(250);
const PAUSE_MAX: Duration = Duration::from_secs(10);
/// Size of the chunks in which files are read from disk.
const CHUNK_BYTES: usize = 1 << 20;

/// Returns the pause after this many consecutive attempts without data.
pub(crate) fn retry_pause(failures: u32) -> Duration {
    PAUSE_MIN.saturating_mul(1 << failures.min(8)).min(PAUSE_MAX)
}

/// Downloads files.
#[derive(Debug)]
pub(crate) struct Downloader<'a> {
    pub(crate) client: Client,
    pub(crate) progress: &'a Arc<Progress>,
    /// The download fails after this many consecutive attempts without progress, or after this many attempts that
    /// discarded the downloaded part.
    pub(crate) attempts_max: u32,
    /// The model of an earlier fetch into the same directory.
    pub(crate) previous: PreviousModel,
}

/// The part of a file that has been downloaded so far.
struct Part {
    path: PathBuf,
    /// The path of the file that stores the ETag of the content.
    etag: PathBuf,
    file: fs::File,
    hash: Sha256,
    bytes: u64,
}

impl Downloader<'_> {
    /// Downloads `file` into `directory`.
    ///
    /// # Cancel safety
    /// If the future is dropped, the downloaded part remains, and a later fetch can continue from it.
    pub(crate) async fn fetch(&mut self, directory: &Path, file: &File) -> Result<FetchedFile, Error> {
        let path = directory.join(&file.path);
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent).await.map_err(|source| Error::disk("create", parent, source))?;
        }
        if let Some(fetched) = self.present(&path, file).await? {
            return Ok(fetched);
        }
        let mut part = Part::open(&path).await?;
        self.progress.add(part.bytes);
        let mut is_resumed = part.bytes > 0;
        let (mut failures, mut restarts) = (0, 0);
        loop {
            let before = part.bytes;
            let error = match self.attempt(&mut part, file).await {
                Ok(()) => match self.place(&mut part, &path, file).await {
                    // The part from an earlier fetch may belong to another version of the file, so start the download
                    // again from the beginning.
                    Err(Error::Digest { .. }) if is_resumed => {
                        is_resumed = false;
                        continue;
                    }
                    placed => return placed,
                },
                Err(error) if !error.is_transient() => return Err(error),
                Err(error) => error,
            };
            failures = if part.bytes > before { 0 } else { failures + 1 };
            // Without this count, the download would restart forever if the source never confirmed that the downloaded
            // part is current.
            restarts += u32::from(part.bytes < before);
            if failures.max(restarts) >= self.attempts_max {
                return Err(error);
            }
            tracing::warn!(file = file.path, bytes = part.bytes, %error, "failed to download the file; trying again");
            tokio::time::sleep(retry_pause(failures)).await;
        }
    }

    /// Returns the file if an earlier fetch has completed it. This can be determined only if the digest is known.
    async fn present(&self, path: &Path, file: &File) -> Result<Option<FetchedFile>, Error> {
        // Without a digest, the file could belong to another revision.
        let Some(expected) = &file.sha256 else { return Ok(None) };
        let Ok(mut present) = fs::File::open(path).await else { return Ok(None) };
        let (sha256, bytes) = hash(&mut present).await.map_err(|source| Error::disk("read", path, source))?;
        let sha256 = digits(sha256);
        if sha256 != *expected {
            return Ok(None);
        }
        self.progress.add(bytes);
        Ok(Some(FetchedFile { path: file.path.clone(), bytes, sha256 }))
    }

    /// Downloads the rest of the file in one attempt.
    async fn attempt(&self, part: &mut Part, file: &File) -> Result<(), Error> {
        let is_complete = part.bytes > 0 && file.bytes == Some(part.bytes);
        let has_digest = file.sha256.is_some();
        if is_complete && has_digest {
            return Ok(());
        }
        let url = file.location.url();
        let mut request = file.location.request(&self.client);
        let etag = part.stored_etag().await;
        if part.bytes > 0 {
            match &etag {
                // Without a digest, only the source can confirm that the complete part is still current.
                Some(etag) if is_complete => request = request.header(IF_NONE_MATCH, etag),
                Some(etag) => {
                    request = request.header(RANGE, format!("bytes={}-", part.bytes)).header(IF_RANGE, etag)
                }
                // Resuming is safe without an ETag, because the digest is verified at the end.
                None if has_digest => request = request.header(RANGE, format!("bytes={}-", part.bytes)),
                // The content may have changed since the earlier attempt.
                None => self.restart(part).await?,
            }
        }
        let answer = request.send().await.map_err(|error| Error::transport(url.as_str(), &error))?;
        let is_unchanged = part.bytes > 0 && etag.is_some() && strong_etag(&answer) == etag.as_deref();
        match answer.status() {
            StatusCode::NOT_MODIFIED if is_complete && etag.is_some() => return Ok(()),
            // Some sources, such as MinIO, ignore `If-Range` and return a range of the changed content. Therefore, the
            // range is accepted only if the ETag is unchanged, or if the digest is known and can be verified.
            StatusCode::PARTIAL_CONTENT
                if begins_at(&answer) == Some(part.bytes) && (is_unchanged || has_digest) => {}
            StatusCode::PARTIAL_CONTENT | StatusCode::RANGE_NOT_SATISFIABLE => {
                self.restart(part).await?;
                return Err(Error::Source {
                    url: file.location.url().path().to_owned(),
                    problem: "the response is not the requested range, or the content has changed".to_owned(),
                });
            }
            status => {
                if let Some(error) = Error::status(url.as_str(), status, file.location.has_credentials()) {
                    return Err(error);
                }
                // The source has ignored `If-None-Match`, but its ETag shows that the part is current, so the body is
                // not needed.
                if is_complete && is_unchanged {
                    return Ok(());
                }
                // The source sends the whole file, so discard the part.
                self.restart(part).await?;
            }
        }
        part.store_etag(&answer).await?;
        let announced = answer.content_length().map(|rest| part.bytes + rest);
        self.receive(part, answer).await?;
        match file.bytes.or(announced) {
            Some(expected) if part.bytes < expected => Err(Error::Source {
                url: url.path().to_owned(),
                problem: format!("the download ended after {} of {expected} bytes", part.bytes),
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

    /// Truncates the part to zero bytes.
    async fn restart(&self, part: &mut Part) -> Result<(), Error> {
        self.progress.remove(part.bytes);
        part.empty().await
    }

    /// Verifies the complete `.part` file and renames it to its final name. If the verification fails, truncates the
    /// `.part` file to zero bytes.
    async fn place(&mut self, part: &mut Part, path: &Path, file: &File) -> Result<FetchedFile, Error> {
        let found = digits(part.hash.clone());
        let bytes = part.bytes;
        let stored =
            part.file.metadata().await.map_err(|source| Error::disk("read", &part.path, source))?.len();
        let error = match (&file.sha256, file.bytes) {
            // The digest covers the bytes that this process has read or received. If the directory could not be locked,
            // another process may have changed the file since then.
            _ if stored != bytes => Some(Error::Disk {
                verb: "write",
                path: part.path.clone(),
                problem: format!(
                    "the file has {stored} bytes, but {bytes} bytes were downloaded; another process may have changed it"
                ),
            }),
            (Some(expected), _) if *expected != found => Some(Error::Digest {
                name: file.path.clone(),
                found: found.clone(),
                expected: expected.clone(),
            }),
            (_, Some(expected)) if expected != bytes => Some(Error::Wrong(format!(
                "{} has {bytes} bytes, but the source lists {expected} bytes",
                file.path
            ))),
            _ => None,
        };
        if let Some(error) = error {
            self.restart(part).await?;
            return Err(error);
        }
        part.file.sync_all().await.map_err(|source| Error::disk("write", &part.path, source))?;
        let fetched = FetchedFile { path: file.path.clone(), bytes, sha256: found };
        self.previous.withdraw_unless_it_contains(&fetched)?;
        fs::rename(&part.path, path).await.map_err(|source| Error::disk("rename", &part.path, source))?;
        // A leftover ETag file is harmless.
        let _ = fs::remove_file(&part.etag).await;
        Ok(fetched)
    }
}

impl Part {
    async fn open(path: &Path) -> Result<Self, Error> {
        let beside = |suffix: &str| {
            let mut name = path.as_os_str().to_owned();
            name.push(suffix);
            PathBuf::from(name)
        };
        let (path, etag) = (beside(".part"), beside(".part.etag"));
        let mut file = fs::OpenOptions::new()
            .read(true)
            .append(true)
            .create(true)
            .open(&path)
            .await
            .map_err(|source| Error::disk("open", &path, source))?;
        let (hash, bytes) = hash(&mut file).await.map_err(|source| Error::disk("read", &path, source))?;
        Ok(Self { path, etag, file, hash, bytes })
    }

    async fn empty(&mut self) -> Result<(), Error> {
        self.file.set_len(0).await.map_err(|source| Error::disk("write", &self.path, source))?;
        self.hash = Sha256::new();
        self.bytes = 0;
        match fs::remove_file(&self.etag).await {
            Err(source) if source.kind() != std::io::ErrorKind::NotFound => {
                Err(Error::disk("remove", &self.etag, source))
            }
            _ => Ok(()),
        }
    }

    /// Returns the stored ETag of the content.
    async fn stored_etag(&self) -> Option<String> {
        fs::read_to_string(&self.etag).await.ok()
    }

    /// Stores the ETag of an answer if it is a strong ETag.
    async fn store_etag(&self, answer: &Response) -> Result<(), Error> {
        match strong_etag(answer) {
            Some(etag) => {
                fs::write(&self.etag, etag).await.map_err(|source| Error::disk("write", &self.etag, source))
            }
            None => Ok(()),
        }
    }

    async fn flush(&mut self) -> Result<(), Error> {
        self.file.flush().await.map_err(|source| Error::disk("write", &self.path, source))
    }
}

/// Returns the hash and the size of a file.
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

/// Returns the ETag of an answer. A weak ETag does not identify bytes and is ignored.
fn strong_etag(answer: &Response) -> Option<&str> {
    answer.headers().get(ETAG)?.to_str().ok().filter(|etag| etag.starts_with('"'))
}

/// Returns the start of the range in an answer.
fn begins_at(answer: &Response) -> Option<u64> {
    let range = answer.headers().get(CONTENT_RANGE)?.to_str().ok()?;
    range.strip_prefix("bytes ")?.split('-').next()?.parse().ok()
}
