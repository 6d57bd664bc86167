//! Authenticates clients by API keys from a file, and enforces the rate limits of each key.

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use arc_swap::ArcSwapOption;
use http::{HeaderMap, header};
use sha2::{Digest as _, Sha256};

use crate::config;
use crate::error::Error;
use crate::limits::{RateLimits, Rates};

/// Number of keys in the file given by `--api-keys`.
///
/// If exceeded: the router does not start; if the file changes while the router runs, the previous version remains in
/// effect.
const KEYS_MAX: usize = 65_536;

/// The reason why a file of API keys is rejected.
#[derive(Debug, thiserror::Error)]
pub enum KeysError {
    /// The file cannot be read.
    #[error(transparent)]
    Read(#[from] config::Error),
    /// A line contains more than a key and a name.
    #[error("line {0} must contain only a key and an optional name")]
    Line(usize),
    /// The file has too many keys.
    #[error("the file has more than {KEYS_MAX} keys")]
    TooMany,
}

/// A client that has sent a valid API key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Client {
    /// Identifies the key in the rate limits.
    pub(crate) id: u64,
    /// The name of the client in logs. With `--key-isolation name`, it also determines the tenant.
    pub(crate) name: Box<str>,
}

/// The SHA-256 digest of a key. Keys are looked up by their digests, so that the time of a lookup reveals nothing about
/// valid keys, and the router does not have to store the keys themselves.
type KeyDigest = [u8; 32];

/// The valid keys, if keys are required, and the usage of each.
#[derive(Debug, Default)]
pub struct Access {
    keys: ArcSwapOption<HashMap<KeyDigest, Client>>,
    rate_limits: Mutex<RateLimits>,
}

impl Access {
    /// Replaces the keys with those in the file at `path`, and returns their number. A file without keys revokes all
    /// keys, so that every API request is rejected. The usage of keys that are no longer in the file is forgotten, so
    /// that the number of token buckets does not grow with each replacement of keys.
    ///
    /// # Errors
    /// The file cannot be read or is invalid. The previous keys remain valid.
    pub fn read(&self, path: &Path) -> Result<usize, KeysError> {
        let keys = parse(&config::read(path)?)?;
        let count = keys.len();
        let ids: HashSet<u64> = keys.values().map(|client| client.id).collect();
        self.keys.store(Some(keys.into()));
        self.rate_limits().retain_keys(|id| ids.contains(&id));
        Ok(count)
    }

    /// The client to which the key in `headers` belongs, or `None` if no key is required.
    ///
    /// # Errors
    /// The key is missing or invalid.
    pub(crate) fn client(&self, headers: &HeaderMap) -> Result<Option<Client>, Error> {
        let keys = self.keys.load();
        let Some(keys) = keys.as_ref() else { return Ok(None) };
        let given = headers.get(header::AUTHORIZATION).ok_or(Error::MissingKey)?.as_bytes();
        let (scheme, key) = given.split_at_checked(7).ok_or(Error::InvalidKey)?;
        if !scheme.eq_ignore_ascii_case(b"bearer ") {
            return Err(Error::InvalidKey);
        }
        keys.get(&digest(key.trim_ascii())).cloned().map(Some).ok_or(Error::InvalidKey)
    }

    /// Charges a request of about `tokens` tokens to the client.
    ///
    /// # Errors
    /// The request exceeds a rate limit of the client.
    pub(crate) fn charge(&self, client: &Client, rates: Rates, tokens: u32) -> Result<(), Error> {
        self.rate_limits().charge(client.id, rates, tokens, Instant::now()).map_err(Error::RateExceeded)
    }

    /// Corrects the charge of a request that used `used` tokens instead of `charged`.
    pub(crate) fn settle(&self, client: &Client, charged: u32, used: u32) {
        self.rate_limits().settle(client.id, charged, used);
    }

    fn rate_limits(&self) -> MutexGuard<'_, RateLimits> {
        self.rate_limits.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn digest(key: &[u8]) -> KeyDigest {
    Sha256::digest(key).into()
}

fn parse(text: &str) -> Result<HashMap<KeyDigest, Client>, KeysError> {
    let mut keys = HashMap::new();
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.split('#').next().unwrap_or_default();
        let mut words = line.split_whitespace();
        let Some(key) = words.next() else { continue };
        let digest = digest(key.as_bytes());
        let id = digest[..8].iter().fold(0, |id, &byte| id << 8 | u64::from(byte));
        // A client without a name gets a generated name that does not reveal its key.
        let name = words.next().map_or_else(|| format!("key-{number}"), str::to_owned);
        if words.next().is_some() {
            return Err(KeysError::Line(number));
        }
        keys.insert(digest, Client { id, name: name.into() });
    }
    if keys.len() > KEYS_MAX { Err(KeysError::TooMany) } else { Ok(keys) }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn with(value: &'static str) -> HeaderMap {
        HeaderMap::from_iter([(header::AUTHORIZATION, HeaderValue::from_static(value))])
    }

    #[test]
    fn only_keys_in_the_file_are_valid_and_an_invalid_file_changes_nothing() {
        let access = Access::default();
        assert_eq!(access.client(&HeaderMap::new()), Ok(None));
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("keys");
        std::fs::write(&path, "# ours\nsecret alice\n\nother # no name\n").unwrap();
        assert_eq!(access.read(&path).unwrap(), 2);
        let name = |value| access.client(&with(value)).map(|client| client.unwrap().name.into_string());
        assert_eq!(name("Bearer secret"), Ok("alice".to_owned()));
        assert_eq!(name("bearer  other"), Ok("key-4".to_owned()));
        for wrong in ["Bearer", "Bearer secre", "Basic secret", "Bearer # ours", ""] {
            assert_eq!(name(wrong), Err(Error::InvalidKey), "{wrong}");
        }
        assert_eq!(access.client(&HeaderMap::new()), Err(Error::MissingKey));
        std::fs::write(&path, "a b c\n").unwrap();
        assert!(access.read(&path).is_err());
        assert!(name("Bearer secret").is_ok());
        for empty in ["# nobody\n", ""] {
            std::fs::write(&path, empty).unwrap();
            assert_eq!(access.read(&path).unwrap(), 0, "the last key is revoked");
            assert_eq!(name("Bearer secret"), Err(Error::InvalidKey));
        }
    }

    #[test]
    fn usage_is_counted_per_key() {
        let access = Access::default();
        let client = |id| Client { id, name: "c".into() };
        let rates = Rates { requests_per_minute: Some(2), tokens_per_minute: Some(1000) };
        access.charge(&client(1), rates, 900).unwrap();
        assert!(access.charge(&client(1), rates, 900).is_err());
        access.settle(&client(1), 900, 10);
        access.charge(&client(1), rates, 900).unwrap();
        assert!(access.charge(&client(1), rates, 1).is_err(), "the limit of requests is reached");
        access.charge(&client(2), rates, 900).unwrap();
    }

    #[test]
    fn a_reload_forgets_the_usage_of_removed_keys_only() {
        let access = Access::default();
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("keys");
        let rates = Rates { requests_per_minute: Some(1), tokens_per_minute: None };
        std::fs::write(&path, "removed\nretained\n").unwrap();
        access.read(&path).unwrap();
        let client = |value| access.client(&with(value)).unwrap().unwrap();
        let (removed, retained) = (client("Bearer removed"), client("Bearer retained"));
        for client in [&removed, &retained] {
            access.charge(client, rates, 0).unwrap();
            assert!(access.charge(client, rates, 0).is_err(), "{client:?}");
        }
        std::fs::write(&path, "retained\nadded\n").unwrap();
        access.read(&path).unwrap();
        assert!(access.charge(&retained, rates, 0).is_err());
        access.charge(&removed, rates, 0).unwrap();
    }
}
