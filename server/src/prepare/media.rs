//! The media of a request that are not in its body.
//!
//! Preparing a request must not wait for the network. The preparation therefore reports which media it needs
//! ([`Error::MediaNeeded`]), the caller fetches them, and the request is prepared again, until it needs no others.

use std::collections::HashMap;

use axum::body::Bytes;

use crate::error::{Error, MediaReference};

/// The media that were fetched for a request.
#[derive(Clone, Debug, Default)]
pub(crate) struct Media(HashMap<String, Bytes>);

impl Media {
    /// Adds a medium.
    pub(crate) fn insert(&mut self, url: String, bytes: Bytes) {
        self.0.insert(url, bytes);
    }

    /// Returns the medium at a URL or path, unless the URL contains it.
    pub(crate) fn get(&self, url: &str) -> Option<&Bytes> {
        self.0.get(url)
    }

    /// The total size of the media.
    pub(crate) fn bytes(&self) -> usize {
        self.0.values().map(Bytes::len).sum()
    }

    /// Checks that all media have been fetched. The pairs are URLs and the parameters that contain them.
    ///
    /// # Errors
    /// [`Error::MediaNeeded`] with the media that have to be fetched.
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

/// Whether a URL contains the medium.
fn is_data(url: &str) -> bool {
    url.get(..5).is_some_and(|scheme| scheme.eq_ignore_ascii_case("data:"))
}
