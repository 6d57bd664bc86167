//! The replica token: the secret with which routers authenticate themselves to replicas.
//!
//! Routers and replicas read the token from a file, which can contain several tokens, one per line. They reload the
//! file when it changes. A router sends all tokens of its file with each HTTP request and each gRPC call, and a replica
//! accepts requests with at least one token of its own file. Two processes can therefore communicate if their files
//! have at least one token in common. This makes it possible to replace the token while requests are served: add the
//! new token, wait until every process has read the file, and remove the old one.

use std::fmt;
use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use arc_swap::ArcSwap;
use http::{HeaderMap, HeaderValue};
use subtle::{Choice, ConstantTimeEq as _};

/// The header of HTTP requests and gRPC calls that contains the tokens of a router, separated by commas.
pub const HEADER: &str = "x-ovfleet-replica-token";
/// The authentication scheme that a replica names in `WWW-Authenticate` when it rejects a request without a valid
/// token. The scheme shows the router that the replica has rejected the router and not the client.
pub const SCHEME: &str = "ovfleet-replica-token";

/// Number of tokens in the file given by `--replica-token-file`.
///
/// If exceeded: the process does not start; if the file changes while the process runs, the previous tokens stay in
/// effect.
const TOKENS_MAX: usize = 8;
/// Minimum number of characters of a token. A shorter token could be guessed.
const TOKEN_CHARACTERS_MIN: usize = 16;
/// Length of a token in the file given by `--replica-token-file`, in characters.
///
/// If exceeded: the process does not start; if the file changes while the process runs, the previous tokens stay in
/// effect.
const TOKEN_CHARACTERS_MAX: usize = 256;
/// Size of the file given by `--replica-token-file`.
///
/// If exceeded: the process does not start; if the file changes while the process runs, the previous tokens stay in
/// effect.
const FILE_BYTES_MAX: u64 = 64 * 1024;

/// The reason why a token file is rejected.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file cannot be read.
    #[error("failed to read the replica token from {}", path.display())]
    Read {
        /// The path of the file.
        path: PathBuf,
        /// The reason why the file cannot be read.
        #[source]
        source: io::Error,
    },
    /// The content of the file is invalid.
    #[error("{}: {problem}", path.display())]
    Invalid {
        /// The path of the file.
        path: PathBuf,
        /// The error in its content.
        problem: Invalid,
    },
}

/// An error in the content of a token file. Messages never contain a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Invalid {
    /// The file contains no token.
    #[error("the file contains no token")]
    Empty,
    /// The file contains too many tokens.
    #[error("the file contains more than {TOKENS_MAX} tokens")]
    TooMany,
    /// A line is not a token.
    #[error(
        "line {0} is not a token: a token has {TOKEN_CHARACTERS_MIN} to {TOKEN_CHARACTERS_MAX} characters, which are \
         letters, digits and -._~+/="
    )]
    Line(usize),
}

/// One or more tokens.
#[derive(Clone)]
pub struct ReplicaTokens {
    tokens: Vec<Box<[u8]>>,
    header: HeaderValue,
}

impl ReplicaTokens {
    /// Reads tokens from `text`, one per line. Empty lines and spaces around a token are ignored.
    ///
    /// # Errors
    /// The text contains no token or too many tokens, or a line is not a token.
    pub fn parse(text: &str) -> Result<Self, Invalid> {
        let mut tokens = Vec::new();
        for (number, line) in (1..).zip(text.lines()) {
            let token = line.trim();
            if token.is_empty() {
                continue;
            }
            if !is_token(token) {
                return Err(Invalid::Line(number));
            }
            tokens.push(token);
        }
        if tokens.is_empty() {
            return Err(Invalid::Empty);
        }
        if tokens.len() > TOKENS_MAX {
            return Err(Invalid::TooMany);
        }
        let mut header = HeaderValue::try_from(tokens.join(","))
            .expect("invariant: letters, digits and punctuation are a header value");
        header.set_sensitive(true);
        Ok(Self { tokens: tokens.into_iter().map(|token| token.as_bytes().into()).collect(), header })
    }

    /// Sets [`HEADER`] to all tokens, replacing any value in `headers`.
    pub fn add_to(&self, headers: &mut HeaderMap) {
        headers.insert(HEADER, self.header.clone());
    }

    /// Returns whether one of these tokens is among the first `TOKENS_MAX` tokens in `headers`. The time of the
    /// comparison depends on the number and the lengths of the tokens, but not on their content.
    #[must_use]
    pub fn are_in(&self, headers: &HeaderMap) -> bool {
        let values = headers.get_all(HEADER).iter().map(HeaderValue::as_bytes);
        let sent = values.flat_map(|value| value.split(|&byte| byte == b',')).take(TOKENS_MAX);
        let mut is_known = Choice::from(0);
        for sent in sent {
            for token in &self.tokens {
                is_known |= token.ct_eq(sent.trim_ascii());
            }
        }
        is_known.into()
    }
}

fn is_token(text: &str) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~+/=".contains(&byte);
    (TOKEN_CHARACTERS_MIN..=TOKEN_CHARACTERS_MAX).contains(&text.len()) && text.bytes().all(is_allowed)
}

impl fmt::Debug for ReplicaTokens {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("ReplicaTokens").field("count", &self.tokens.len()).finish_non_exhaustive()
    }
}

/// The tokens of the last valid version of a file. Clones share them.
#[derive(Clone, Debug)]
pub struct ReplicaTokenFile(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    path: PathBuf,
    tokens: ArcSwap<ReplicaTokens>,
    /// The reason why the file could not be reloaded, if the last attempt failed.
    problem: Mutex<Option<String>>,
}

impl ReplicaTokenFile {
    /// Reads the tokens of the file at `path`.
    ///
    /// # Errors
    /// The file cannot be read, or its content is invalid.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let tokens = ArcSwap::from_pointee(read(path)?);
        Ok(Self(Arc::new(Inner { path: path.to_owned(), tokens, problem: Mutex::default() })))
    }

    /// The tokens of the last valid version of the file.
    #[must_use]
    pub fn tokens(&self) -> Arc<ReplicaTokens> {
        self.0.tokens.load_full()
    }

    /// Reads the file again. Returns the number of tokens if they have changed.
    ///
    /// # Errors
    /// The file cannot be read, or its content is invalid. The previous tokens stay in effect. If the previous call
    /// failed for the same reason, the error is not repeated: the result is `Ok(None)`.
    pub fn reload(&self) -> Result<Option<usize>, Error> {
        let mut problem = self.0.problem.lock().unwrap_or_else(PoisonError::into_inner);
        let tokens = match read(&self.0.path) {
            Ok(tokens) => tokens,
            Err(error) => {
                let previous = problem.replace(format!("{error:?}"));
                return if *problem == previous { Ok(None) } else { Err(error) };
            }
        };
        *problem = None;
        // Both values are from trusted files, so this comparison need not take constant time.
        if tokens.header == self.0.tokens.load().header {
            return Ok(None);
        }
        let count = tokens.tokens.len();
        self.0.tokens.store(Arc::new(tokens));
        Ok(Some(count))
    }
}

fn read(path: &Path) -> Result<ReplicaTokens, Error> {
    let failed = |source| Error::Read { path: path.to_owned(), source };
    let mut text = String::new();
    let file = File::open(path).map_err(failed)?;
    file.take(FILE_BYTES_MAX + 1).read_to_string(&mut text).map_err(failed)?;
    if text.len() as u64 > FILE_BYTES_MAX {
        return Err(failed(io::Error::other(format!("the file is larger than {FILE_BYTES_MAX} bytes"))));
    }
    ReplicaTokens::parse(&text).map_err(|problem| Error::Invalid { path: path.to_owned(), problem })
}

#[cfg(test)]
mod tests {
    use super::*;

    const OLD: &str = "old-0123456789abcdef";
    const NEW: &str = "new-0123456789abcdef";

    fn headers(values: &[&str]) -> HeaderMap {
        values.iter().map(|value| (HEADER.parse().unwrap(), HeaderValue::from_str(value).unwrap())).collect()
    }

    #[test]
    fn a_request_is_accepted_only_if_it_contains_one_of_the_tokens() {
        let tokens = ReplicaTokens::parse(&format!("{NEW}\n\n  {OLD}\r\n")).unwrap();
        let mut sent = headers(&["what-a-client-claims", OLD]);
        tokens.add_to(&mut sent);
        assert_eq!(sent, headers(&[&format!("{NEW},{OLD}")]));
        for accepted in [
            vec![NEW],
            vec![OLD],
            vec!["another-0123456789, old-0123456789abcdef"],
            vec!["another-0123456789", OLD],
        ] {
            assert!(tokens.are_in(&headers(&accepted)), "{accepted:?}");
        }
        for refused in [
            vec![],
            vec![""],
            vec![","],
            vec!["new-0123456789abcde"],
            vec!["new-0123456789abcdef0"],
            vec!["NEW-0123456789abcdef"],
            vec!["Bearer new-0123456789abcdef"],
        ] {
            assert!(!tokens.are_in(&headers(&refused)), "{refused:?}");
        }
        let beyond_the_limit = format!("{}{NEW}", "x,".repeat(TOKENS_MAX));
        assert!(!tokens.are_in(&headers(&[&beyond_the_limit])));
    }

    #[test]
    fn malformed_files_are_refused_without_showing_a_token() {
        for (text, problem) in [
            (String::new(), Invalid::Empty),
            ("\n \n".to_owned(), Invalid::Empty),
            ("short".to_owned(), Invalid::Line(1)),
            (format!("{OLD}\ntwo words 0123456789"), Invalid::Line(2)),
            (format!("{OLD},{NEW}"), Invalid::Line(1)),
            ("x".repeat(TOKEN_CHARACTERS_MAX + 1), Invalid::Line(1)),
            (format!("{OLD}\n").repeat(TOKENS_MAX + 1), Invalid::TooMany),
        ] {
            assert_eq!(ReplicaTokens::parse(&text).unwrap_err(), problem, "{text:?}");
            assert!(text.trim().is_empty() || !problem.to_string().contains(text.trim()));
        }
        let tokens = ReplicaTokens::parse(OLD).unwrap();
        let mut sent = HeaderMap::new();
        tokens.add_to(&mut sent);
        assert!(!format!("{tokens:?} {sent:?}").contains(OLD));
    }

    #[test]
    fn a_valid_file_replaces_the_tokens_and_an_invalid_one_does_not() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("token");
        assert!(matches!(ReplicaTokenFile::open(&path), Err(Error::Read { .. })));
        std::fs::write(&path, OLD).unwrap();
        let file = ReplicaTokenFile::open(&path).unwrap();
        assert_eq!(file.reload().unwrap(), None);
        std::fs::write(&path, format!("{NEW}\n{OLD}")).unwrap();
        assert_eq!(file.reload().unwrap(), Some(2));
        for broken in ["", "short", &"x\n".repeat(100_000)] {
            std::fs::write(&path, broken).unwrap();
            file.reload().unwrap_err();
            assert_eq!(file.reload().unwrap(), None, "the same error is not repeated");
            assert!(file.tokens().are_in(&headers(&[OLD])));
        }
        std::fs::remove_file(&path).unwrap();
        file.reload().unwrap_err();
        std::fs::write(&path, NEW).unwrap();
        assert_eq!(file.reload().unwrap(), Some(1));
        assert!(!file.tokens().are_in(&headers(&[OLD])));
    }
}
