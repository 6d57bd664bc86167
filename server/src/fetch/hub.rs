//! Lists the files of a repository on the Hugging Face Hub.

use reqwest::{Client, Url};
use serde::Deserialize;

use super::error::Error;
use super::parts::first_part;
use super::source::{File, HttpCredentials, Location, Source, SourceCredentials, checked_path};

/// Size of the file list of a Hugging Face repository.
///
/// If exceeded: `ovfleet-server fetch` fails with exit code 13.
const LIST_BYTES_MAX: usize = 32 << 20;
/// Number of files that are fetched from a Hugging Face repository.
///
/// If exceeded: `ovfleet-server fetch` fails with exit code 13.
const FILES_MAX: usize = 10_000;

/// A repository on the Hub.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Hub<'a> {
    pub(crate) endpoint: &'a str,
    pub(crate) repo: &'a str,
    pub(crate) revision: &'a str,
}

#[derive(Deserialize)]
struct Listing {
    sha: String,
    #[serde(default)]
    siblings: Vec<RepositoryFile>,
}

#[derive(Deserialize)]
struct RepositoryFile {
    rfilename: String,
    size: Option<u64>,
    lfs: Option<Lfs>,
}

#[derive(Deserialize)]
struct Lfs {
    sha256: Option<String>,
    size: Option<u64>,
}

impl Hub<'_> {
    /// Returns the files that match one of `patterns`, and their commit. Without patterns, returns all files whose
    /// paths do not begin with a dot. If the first part of a split model matches, returns all parts of the model.
    pub(crate) async fn files(
        &self,
        client: &Client,
        credentials: &SourceCredentials,
        patterns: &[String],
    ) -> Result<Source, Error> {
        let listing = self.listing(client, credentials).await?;
        let is_selected = |name: &str| {
            if patterns.is_empty() {
                !name.starts_with('.')
            } else {
                let matches = |name: &str| patterns.iter().any(|pattern| matches_pattern(name, pattern));
                matches(name) || first_part(name).is_some_and(|first| matches(&first))
            }
        };
        if let Some(missing) = patterns.iter().find(|pattern| {
            !listing.siblings.iter().any(|sibling| matches_pattern(&sibling.rfilename, pattern))
        }) {
            return Err(Error::Wrong(format!(
                "{} has no file that matches {missing:?} at the revision {}",
                self.repo, self.revision
            )));
        }
        let mut files = Vec::new();
        let siblings = listing.siblings.into_iter();
        for sibling in siblings.filter(|sibling| is_selected(&sibling.rfilename)) {
            let path = checked_path(&sibling.rfilename)?;
            // The URL contains the commit, because a branch may move in the meantime.
            let mut url = self.base()?;
            self.extend(&mut url, &["resolve", &listing.sha])?;
            url.path_segments_mut().map_err(|()| self.invalid_url())?.extend(path.split('/'));
            let (sha256, size) = sibling.lfs.map_or((None, None), |lfs| (lfs.sha256, lfs.size));
            let location = Location::Web { url, credentials: credentials.http_credentials() };
            files.push(File { path, location, bytes: sibling.size.or(size), sha256 });
        }
        if files.is_empty() || files.len() > FILES_MAX {
            return Err(Error::Wrong(format!(
                "{} has {} files to fetch (allowed: 1 to {FILES_MAX})",
                self.repo,
                files.len()
            )));
        }
        Ok(Source { files, revision: Some(listing.sha) })
    }

    async fn listing(&self, client: &Client, credentials: &SourceCredentials) -> Result<Listing, Error> {
        let http_credentials = credentials.http_credentials();
        let mut url = self.base()?;
        url.path_segments_mut().map_err(|()| self.invalid_url())?.extend(["api", "models"]);
        self.extend(&mut url, &["revision", self.revision])?;
        url.set_query(Some("blobs=true"));
        let failed = |error: reqwest::Error| Error::transport(url.as_str(), &error);
        let mut answer = http_credentials.add_to(client.get(url.clone())).send().await.map_err(failed)?;
        let had_credentials = http_credentials != HttpCredentials::Anonymous;
        if let Some(error) = Error::status(url.as_str(), answer.status(), had_credentials) {
            return Err(error);
        }
        let mut body = Vec::new();
        while let Some(chunk) = answer.chunk().await.map_err(failed)? {
            body.extend_from_slice(&chunk);
            if body.len() > LIST_BYTES_MAX {
                return Err(Error::Wrong(format!(
                    "the list of files of {} is longer than {LIST_BYTES_MAX} bytes",
                    self.repo
                )));
            }
        }
        serde_json::from_slice(&body).map_err(|error| {
            Error::Wrong(format!("the response from {url} is not a valid list of files: {error}"))
        })
    }

    fn base(&self) -> Result<Url, Error> {
        let mut url = Url::parse(self.endpoint).map_err(|_| self.invalid_url())?;
        url.path_segments_mut().map_err(|()| self.invalid_url())?.pop_if_empty();
        Ok(url)
    }

    /// Appends the repository and `parts` to the path of `url`.
    fn extend(&self, url: &mut Url, parts: &[&str]) -> Result<(), Error> {
        let mut path = url.path_segments_mut().map_err(|()| self.invalid_url())?;
        // `PathSegmentsMut::extend` encodes the slashes in the name of a branch.
        path.extend(self.repo.split('/')).extend(parts);
        Ok(())
    }

    fn invalid_url(&self) -> Error {
        Error::Wrong(format!("--hf-endpoint: {:?} is not a valid URL", self.endpoint))
    }
}

/// Whether `name` matches `pattern`, in which `*` matches any sequence of characters.
pub(crate) fn matches_pattern(name: &str, pattern: &str) -> bool {
    let mut parts = pattern.split('*');
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = name.strip_prefix(first) else { return false };
    let mut parts: Vec<&str> = parts.collect();
    let Some(last) = parts.pop() else { return rest.is_empty() };
    for part in parts {
        match rest.find(part) {
            Some(at) => rest = &rest[at + part.len()..],
            None => return false,
        }
    }
    rest.ends_with(last)
}
