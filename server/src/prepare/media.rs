//! Holds the media that were fetched for a request, and the memory budget for the media that the request body contains.
//!
//! Preparing a request must not wait for the network. The preparation therefore reports which media it needs
//! ([`Error::MediaNeeded`]), the caller fetches them, and the request is prepared again, until it needs no further
//! media.

use std::collections::HashMap;
use std::sync::Arc;

use axum::body::Bytes;

use crate::error::{Error, MediaReference};
#[cfg(test)]
use crate::limits::HttpLimits;
use crate::limits::{BudgetExhausted, ByteBudget, ByteReservation};

/// The media that were fetched for a request, and the budget for the bytes of its media.
#[derive(Clone, Debug)]
pub(crate) struct Media {
    fetched: HashMap<String, Bytes>,
    /// The budget that the media of all requests share with the bodies of the requests.
    budget: Arc<ByteBudget>,
}

impl Media {
    /// Creates the media of a request before any of them have been fetched.
    pub(crate) fn new(budget: Arc<ByteBudget>) -> Self {
        Self { fetched: HashMap::new(), budget }
    }

    /// Adds a medium that was fetched from `url`.
    pub(crate) fn insert(&mut self, url: String, bytes: Bytes) {
        self.fetched.insert(url, bytes);
    }

    /// Returns the medium that was fetched from `url`, which may be a path.
    pub(crate) fn get(&self, url: &str) -> Option<&Bytes> {
        self.fetched.get(url)
    }

    /// Returns the total size in bytes of the media that were fetched.
    pub(crate) fn bytes(&self) -> usize {
        self.fetched.values().map(Bytes::len).sum()
    }

    /// Returns the maximum total size in bytes of the media of one request.
    pub(super) fn bytes_max(&self) -> usize {
        self.budget.large_bytes_max()
    }

    /// Reserves memory for the bytes of a medium that a URL contains.
    ///
    /// # Errors
    /// Other requests use the memory.
    pub(super) fn reserve(&self, bytes: usize) -> Result<ByteReservation, Error> {
        let mut reservation = self.budget.empty_reservation();
        let grown = reservation.grow_to(bytes);
        grown.map_err(|BudgetExhausted| Error::body_buffer_full(self.budget.bytes_max()))?;
        Ok(reservation)
    }

    /// Checks that all media have been fetched, except for those in `data:` URLs. The pairs are URLs and the parameters
    /// that contain them.
    ///
    /// # Errors
    /// Media have to be fetched; [`Error::MediaNeeded`] lists them.
    pub(super) fn require<'a>(
        &self,
        references: impl Iterator<Item = (&'a str, &'a str)>,
    ) -> Result<(), Error> {
        let mut needed: Vec<MediaReference> = Vec::new();
        for (url, param) in references {
            if !is_data(url) && self.get(url).is_none() && needed.iter().all(|medium| medium.url != url) {
                needed.push(MediaReference { url: url.to_owned(), param: param.to_owned() });
            }
        }
        if needed.is_empty() { Ok(()) } else { Err(Error::MediaNeeded(needed)) }
    }
}

/// Returns media with the default budget.
#[cfg(test)]
impl Default for Media {
    fn default() -> Self {
        Self::new(HttpLimits::default().body_budget())
    }
}

/// Whether a URL contains the medium itself.
pub(super) fn is_data(url: &str) -> bool {
    url.get(..5).is_some_and(|scheme| scheme.eq_ignore_ascii_case("data:"))
}
