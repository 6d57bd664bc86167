//! Compiled forms that were used last.

use std::collections::HashMap;

use crate::Guide;
use crate::limits::{CACHED_BYTES_MAX, CACHED_GUIDES_MAX};

/// Guides by what they were compiled from, within limits of count and bytes.
#[derive(Debug, Default)]
pub(crate) struct Cache {
    guides: HashMap<String, Entry>,
    bytes: usize,
    /// Grows with each use.
    uses: u64,
}

#[derive(Debug)]
struct Entry {
    guide: Guide,
    used: u64,
}

impl Cache {
    pub(crate) fn get(&mut self, key: &str) -> Option<Guide> {
        self.uses += 1;
        let entry = self.guides.get_mut(key)?;
        entry.used = self.uses;
        Some(entry.guide.clone())
    }

    /// Keeps a guide, and lets go of those that were not used for longest. One that is too large by itself is not
    /// kept.
    pub(crate) fn put(&mut self, key: String, guide: Guide) {
        if key.len() > CACHED_BYTES_MAX || self.guides.contains_key(&key) {
            return;
        }
        while self.guides.len() >= CACHED_GUIDES_MAX || self.bytes + key.len() > CACHED_BYTES_MAX {
            let oldest = self.guides.iter().min_by_key(|(_, entry)| entry.used).map(|(key, _)| key.clone());
            let Some(oldest) = oldest else { break };
            self.guides.remove(&oldest);
            self.bytes -= oldest.len();
        }
        self.bytes += key.len();
        self.guides.insert(key, Entry { guide, used: self.uses });
    }
}
