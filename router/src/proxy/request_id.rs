//! Request IDs, which identify a request in the logs of clients, routers and replicas. The client can choose the ID.

use std::hash::{BuildHasher as _, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};

use http::{HeaderMap, HeaderValue};

use super::headers::REQUEST_ID;

/// Size of an `x-request-id` that a client chooses.
///
/// If exceeded: the router replaces the ID with a new one.
const REQUEST_ID_BYTES_MAX: usize = 128;

/// Generates IDs that consist of a random number, which differs between threads and processes, and a counter.
#[derive(Debug)]
pub(crate) struct RequestIds {
    prefix: u64,
    next: AtomicU64,
}

impl RequestIds {
    pub(crate) fn new() -> Self {
        // The standard library seeds the hasher with random numbers from the operating system.
        Self { prefix: RandomState::new().hash_one("request"), next: AtomicU64::new(1) }
    }

    /// The ID that the client has chosen, if it is safe to log, and otherwise a new one.
    pub(super) fn of(&self, headers: &HeaderMap) -> HeaderValue {
        match headers.get(REQUEST_ID) {
            Some(id) if is_valid(id.as_bytes()) => id.clone(),
            _ => self.generate(),
        }
    }

    fn generate(&self) -> HeaderValue {
        let id = format!("req_{:016x}{:016x}", self.prefix, self.next.fetch_add(1, Ordering::Relaxed));
        HeaderValue::try_from(id).expect("invariant: letters and digits are a header value")
    }
}

fn is_valid(id: &[u8]) -> bool {
    (1..=REQUEST_ID_BYTES_MAX).contains(&id.len()) && id.iter().all(u8::is_ascii_graphic)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_visible_ascii_and_not_longer_than_the_limit() {
        let longest = "x".repeat(REQUEST_ID_BYTES_MAX);
        for valid in ["a", "req_1", "0f:1/2.{}", &longest] {
            assert!(is_valid(valid.as_bytes()), "{valid}");
        }
        for invalid in ["", "a b", "a\tb", "\u{e9}", &format!("{longest}x")] {
            assert!(!is_valid(invalid.as_bytes()), "{invalid}");
        }
    }
}
