//! A cache of compiled forms.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::limits::{CACHED_BYTES_MAX, CACHED_GUIDES_MAX, CACHED_USES_MAX, GuideLimits};
use crate::memory::TotalMemory;

/// The cached forms of a compiler, and the memory of all of its compiled forms, whether cached or not.
#[derive(Debug)]
pub(crate) struct CompiledForms<V> {
    pub(crate) limits: GuideLimits,
    pub(crate) memory: Arc<TotalMemory>,
    cache: Mutex<Cache<V>>,
}

impl<V: CacheValue> CompiledForms<V> {
    pub(crate) fn new(limits: GuideLimits) -> Arc<Self> {
        Arc::new(Self { limits, memory: Arc::default(), cache: Mutex::default() })
    }

    pub(crate) fn cache(&self) -> MutexGuard<'_, Cache<V>> {
        // A panic leaves no half-finished change in the cache.
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A compiled form in the cache.
pub(crate) trait CacheValue: Clone {
    /// Whether no other clone exists, so that dropping this one frees its memory.
    fn is_idle(&self) -> bool;
}

/// Compiled forms, keyed by their sources. Their number, the total size of the keys and the memory are limited.
#[derive(Debug)]
pub(crate) struct Cache<V> {
    entries: HashMap<String, Entry<V>>,
    /// The total size of the keys, in bytes.
    bytes: usize,
    /// The number of lookups so far.
    uses: u64,
}

#[derive(Debug)]
struct Entry<V> {
    value: V,
    last_used: u64,
}

impl<V> Default for Cache<V> {
    fn default() -> Self {
        Self { entries: HashMap::new(), bytes: 0, uses: 0 }
    }
}

impl<V: CacheValue> Cache<V> {
    pub(crate) fn get(&mut self, key: &str) -> Option<V> {
        self.uses += 1;
        let entry = self.entries.get_mut(key)?;
        entry.last_used = self.uses;
        Some(entry.value.clone())
    }

    /// Adds a compiled form. Evicts forms that the last [`CACHED_USES_MAX`] lookups did not use and, as far as the
    /// limits require it, the least recently used ones. A form whose key alone exceeds the limit on the total size of
    /// the keys is not cached.
    pub(crate) fn put(&mut self, key: String, value: V, forms: &CompiledForms<V>) {
        let expired = self.uses.saturating_sub(CACHED_USES_MAX);
        while let Some(oldest) = self.oldest(|entry| entry.last_used < expired) {
            self.remove(&oldest);
        }
        // The total memory already includes the new value, although the value is not in the cache yet.
        self.evict_idle(forms, forms.limits.cached_memory_bytes_max);
        if key.len() > CACHED_BYTES_MAX || self.entries.contains_key(&key) {
            return;
        }
        while self.entries.len() >= CACHED_GUIDES_MAX || self.bytes + key.len() > CACHED_BYTES_MAX {
            let Some(oldest) = self.oldest(|_| true) else { break };
            self.remove(&oldest);
        }
        self.bytes += key.len();
        self.entries.insert(key, Entry { value, last_used: self.uses });
    }

    /// Evicts idle values, least recently used first, until all compiled forms together take at most `bytes_max` bytes
    /// or no idle value remains.
    pub(crate) fn evict_idle(&mut self, forms: &CompiledForms<V>, bytes_max: usize) {
        while forms.memory.bytes() > bytes_max
            && let Some(oldest) = self.oldest(|entry| entry.value.is_idle())
        {
            self.remove(&oldest);
        }
    }

    fn oldest(&self, is_candidate: impl Fn(&Entry<V>) -> bool) -> Option<String> {
        let candidates = self.entries.iter().filter(|(_, entry)| is_candidate(entry));
        candidates.min_by_key(|(_, entry)| entry.last_used).map(|(key, _)| key.clone())
    }

    fn remove(&mut self, key: &str) {
        self.entries.remove(key);
        self.bytes -= key.len();
    }
}
