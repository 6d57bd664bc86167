//! Compiled forms that were used last.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::Guide;
use crate::lane::Memory;
use crate::limits::{CACHED_BYTES_MAX, CACHED_GUIDES_MAX, CACHED_USES_MAX, Limits};

/// The compiled forms of a compiler: those that are kept, and the memory of all there are.
#[derive(Debug)]
pub(crate) struct Forms {
    pub(crate) limits: Limits,
    pub(crate) memory: Arc<Memory>,
    cache: Mutex<Cache>,
}

impl Forms {
    pub(crate) fn new(limits: Limits) -> Arc<Self> {
        Arc::new(Self { limits, memory: Arc::default(), cache: Mutex::default() })
    }

    pub(crate) fn cache(&self) -> MutexGuard<'_, Cache> {
        // Nothing is left half done by a panic that the next user would see.
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Guides by what they were compiled from, within limits of count, bytes and memory.
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

    /// Keeps a guide, and lets go of those that were not used for longest. One whose form is too large by itself is not
    /// kept.
    pub(crate) fn put(&mut self, key: String, guide: Guide, forms: &Forms) {
        let expired = self.uses.saturating_sub(CACHED_USES_MAX);
        while let Some(oldest) = self.oldest(|entry| entry.used < expired) {
            self.remove(&oldest);
        }
        // The new one is not idle: its caller has it.
        self.let_go_of_idle(forms, forms.limits.cached_lexer_bytes_max);
        if key.len() > CACHED_BYTES_MAX || self.guides.contains_key(&key) {
            return;
        }
        while self.guides.len() >= CACHED_GUIDES_MAX || self.bytes + key.len() > CACHED_BYTES_MAX {
            let Some(oldest) = self.oldest(|_| true) else { break };
            self.remove(&oldest);
        }
        self.bytes += key.len();
        self.guides.insert(key, Entry { guide, used: self.uses });
    }

    /// Lets go of guides that nobody has, those first that were not used for longest, until all lexers take no more than
    /// `bytes_max`.
    pub(crate) fn let_go_of_idle(&mut self, forms: &Forms, bytes_max: usize) {
        while forms.memory.bytes() > bytes_max
            && let Some(oldest) = self.oldest(|entry| entry.guide.is_idle())
        {
            self.remove(&oldest);
        }
    }

    fn oldest(&self, is_meant: impl Fn(&Entry) -> bool) -> Option<String> {
        let meant = self.guides.iter().filter(|(_, entry)| is_meant(entry));
        meant.min_by_key(|(_, entry)| entry.used).map(|(key, _)| key.clone())
    }

    fn remove(&mut self, key: &str) {
        self.guides.remove(key);
        self.bytes -= key.len();
    }
}
