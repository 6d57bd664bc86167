//! The Hugging Face Hub: which files a repository has.

use reqwest::{Client, Url};
use serde::Deserialize;

use super::source::{Credentials, File, Place, checked_path};
use super::{Error, Source};

/// Size of the file list of a Hugging Face repository.
///
/// Beyond it: `server fetch` fails with exit code 13.
const LIST_BYTES_MAX: usize = 32 << 20;
/// Number of files that are fetched from a Hugging Face repository.
///
/// Beyond it: `server fetch` fails with exit code 13.
const FILES_MAX: usize = 10_000;

/// A repository.
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
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
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
    /// The files whose names are like one of `patterns`, or all that are not hidden, and the commit that they are of.
    pub(crate) async fn files(
        &self,
        client: &Client,
        credentials: &Credentials,
        patterns: &[String],
    ) -> Result<Source, Error> {
        let listing = self.listing(client, credentials).await?;
        let is_wanted = |name: &str| {
            if patterns.is_empty() {
                !name.starts_with('.')
            } else {
                patterns.iter().any(|pattern| is_like(name, pattern))
            }
        };
        if let Some(missing) = patterns
            .iter()
            .find(|pattern| !listing.siblings.iter().any(|sibling| is_like(&sibling.rfilename, pattern)))
        {
            return Err(Error::Wrong(format!(
                "{} has no file like {missing:?} at {}",
                self.repo, self.revision
            )));
        }
        let mut files = Vec::new();
        let siblings = listing.siblings.into_iter();
        for sibling in siblings.filter(|sibling| is_wanted(&sibling.rfilename)) {
            let path = checked_path(&sibling.rfilename)?;
            // By the commit: a branch may move meanwhile.
            let mut url = self.base()?;
            self.extend(&mut url, &["resolve", &listing.sha])?;
            url.path_segments_mut().map_err(|()| self.no_address())?.extend(path.split('/'));
            let (sha256, size) = sibling.lfs.map_or((None, None), |lfs| (lfs.sha256, lfs.size));
            let place = Place::Web { url, login: credentials.login() };
            files.push(File { path, place, bytes: sibling.size.or(size), sha256 });
        }
        if files.is_empty() || files.len() > FILES_MAX {
            return Err(Error::Wrong(format!(
                "{} has {} files to fetch, 1 to {FILES_MAX} will do",
                self.repo,
                files.len()
            )));
        }
        Ok(Source { files, revision: Some(listing.sha) })
    }

    async fn listing(&self, client: &Client, credentials: &Credentials) -> Result<Listing, Error> {
        let login = credentials.login();
        let mut url = self.base()?;
        url.path_segments_mut().map_err(|()| self.no_address())?.extend(["api", "models"]);
        self.extend(&mut url, &["revision", self.revision])?;
        url.set_query(Some("blobs=true"));
        let failed = |error: reqwest::Error| Error::transport(url.as_str(), &error);
        let mut answer = login.show(client.get(url.clone())).send().await.map_err(failed)?;
        let had_credentials = login != super::source::Login::Nobody;
        if let Some(error) = Error::status(url.as_str(), answer.status(), had_credentials) {
            return Err(error);
        }
        let mut body = Vec::new();
        while let Some(chunk) = answer.chunk().await.map_err(failed)? {
            body.extend_from_slice(&chunk);
            if body.len() > LIST_BYTES_MAX {
                return Err(Error::Wrong(format!("the list of files of {} is too long", self.repo)));
            }
        }
        serde_json::from_slice(&body)
            .map_err(|error| Error::Wrong(format!("{url} is not what the Hub answers: {error}")))
    }

    fn base(&self) -> Result<Url, Error> {
        let mut url = Url::parse(self.endpoint).map_err(|_| self.no_address())?;
        url.path_segments_mut().map_err(|()| self.no_address())?.pop_if_empty();
        Ok(url)
    }

    /// Appends the repository and `parts`.
    fn extend(&self, url: &mut Url, parts: &[&str]) -> Result<(), Error> {
        let mut path = url.path_segments_mut().map_err(|()| self.no_address())?;
        // A branch's slash is part of its name, which `extend` keeps by encoding it.
        path.extend(self.repo.split('/')).extend(parts);
        Ok(())
    }

    fn no_address(&self) -> Error {
        Error::Wrong(format!("{:?} is no address of a hub", self.endpoint))
    }
}

/// Whether `name` is like `pattern`, in which `*` stands for anything.
pub(crate) fn is_like(name: &str, pattern: &str) -> bool {
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
