//! What is kept, in the order in which it was used, within its bounds. Pure: it reads no clock and no disk.
//!
//! A response stands on those that it follows: without them it is of no use to who goes on from it. So whatever is
//! used makes what it follows the more recently used, and of a chain the end goes before the beginning.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::CHAIN_MAX;
use super::id::Key;

/// How much may be kept.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    pub(super) entries_max: usize,
    pub(super) bytes_max: u64,
}

/// What is kept, and when it was used.
#[derive(Debug)]
pub(super) struct Index {
    bounds: Bounds,
    entries: HashMap<Key, Entry>,
    /// By when it was used, counted in uses.
    order: BTreeMap<u64, Key>,
    uses: u64,
    bytes: u64,
}

#[derive(Debug)]
struct Entry {
    used: u64,
    bytes: u64,
    /// None if it is elsewhere.
    data: Option<Arc<[u8]>>,
    previous: Option<Key>,
}

impl Index {
    pub(super) fn new(bounds: Bounds) -> Self {
        Self { bounds, entries: HashMap::new(), order: BTreeMap::new(), uses: 0, bytes: 0 }
    }

    pub(super) fn bounds(&self) -> Bounds {
        self.bounds
    }

    /// What is kept under `key`, whose data may be elsewhere. It counts as used.
    pub(super) fn get(&mut self, key: Key) -> Option<Option<Arc<[u8]>>> {
        let data = self.entries.get(&key)?.data.clone();
        self.touch(key);
        Some(data)
    }

    /// Keeps this, in place of what was under `key`, and gives what has to go for it.
    pub(super) fn insert(
        &mut self,
        key: Key,
        (bytes, data): (u64, Option<Arc<[u8]>>),
        previous: Option<Key>,
    ) -> Vec<Key> {
        self.remove(key);
        self.uses += 1;
        self.entries.insert(key, Entry { used: self.uses, bytes, data, previous });
        self.order.insert(self.uses, key);
        self.bytes += bytes;
        self.touch(key);
        let mut dropped = Vec::new();
        while self.entries.len() > self.bounds.entries_max || self.bytes > self.bounds.bytes_max {
            let Some((_, &oldest)) = self.order.first_key_value() else { break };
            self.remove(oldest);
            dropped.push(oldest);
        }
        dropped
    }

    pub(super) fn remove(&mut self, key: Key) -> bool {
        let Some(entry) = self.entries.remove(&key) else { return false };
        self.order.remove(&entry.used);
        self.bytes -= entry.bytes;
        true
    }

    /// Makes `key` the most recently used, but for what it follows.
    fn touch(&mut self, key: Key) {
        let mut next = Some(key);
        for _ in 0..CHAIN_MAX {
            let Some(key) = next else { return };
            let Some(entry) = self.entries.get_mut(&key) else { return };
            self.uses += 1;
            self.order.remove(&std::mem::replace(&mut entry.used, self.uses));
            self.order.insert(self.uses, key);
            next = entry.previous;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::id::{Id, Kind};
    use super::*;

    fn key(number: u128) -> Key {
        Id::new(Kind::Response, 1, number).key()
    }

    fn bytes(count: usize) -> (u64, Option<Arc<[u8]>>) {
        (count as u64, Some(vec![0; count].into()))
    }

    impl Index {
        fn check_invariants(&self) {
            assert!(self.entries.len() <= self.bounds.entries_max && self.bytes <= self.bounds.bytes_max);
            assert_eq!(self.order.len(), self.entries.len());
            assert_eq!(self.bytes, self.entries.values().map(|entry| entry.bytes).sum::<u64>());
            for (used, key) in &self.order {
                assert_eq!(self.entries[key].used, *used);
            }
            for entry in self.entries.values() {
                if let Some(previous) = entry.previous.and_then(|previous| self.entries.get(&previous)) {
                    assert!(previous.used > entry.used, "what it follows is the more recent");
                }
            }
        }
    }

    #[test]
    fn what_was_used_least_recently_goes_first() {
        let mut index = Index::new(Bounds { entries_max: 2, bytes_max: 100 });
        assert_eq!(index.insert(key(1), bytes(10), None), []);
        assert_eq!(index.insert(key(2), bytes(10), None), []);
        assert!(index.get(key(1)).is_some());
        assert_eq!(index.insert(key(3), bytes(10), None), [key(2)]);
        assert_eq!(index.insert(key(4), bytes(95), None), [key(1), key(3)]);
        assert_eq!((index.bytes, index.entries.len()), (95, 1));
        assert_eq!(index.insert(key(4), bytes(1), None), [], "it is replaced, not added");
        assert_eq!(index.bytes, 1);
    }

    #[test]
    fn of_a_chain_the_end_goes_before_the_beginning() {
        let mut index = Index::new(Bounds { entries_max: 3, bytes_max: 100 });
        index.insert(key(1), bytes(1), None);
        index.insert(key(2), bytes(1), Some(key(1)));
        index.insert(key(3), bytes(1), Some(key(2)));
        assert_eq!(index.insert(key(4), bytes(1), None), [key(3)]);
        index.check_invariants();
    }

    #[test]
    fn with_no_room_nothing_is_kept() {
        let mut index = Index::new(Bounds { entries_max: 0, bytes_max: 100 });
        assert_eq!(index.insert(key(1), bytes(1), None), [key(1)]);
        assert!(index.get(key(1)).is_none());
    }

    #[test]
    fn whatever_is_done_the_bounds_hold_and_chains_are_in_order() {
        let mut state = 11_u64;
        println!("seed {state}");
        let mut random = |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % below
        };
        let mut index = Index::new(Bounds { entries_max: 20, bytes_max: 300 });
        for number in 1..5000_u128 {
            match random(4) {
                0 => drop(index.get(key(u128::from(random(5000))))),
                1 => drop(index.remove(key(number - u128::from(random(20)).min(number)))),
                _ => {
                    // It follows something earlier, or nothing; chains and trees come of it.
                    let previous = number.saturating_sub(1 + u128::from(random(8)));
                    let previous = (random(3) > 0 && previous > 0).then(|| key(previous));
                    index.insert(key(number), bytes(random(60) as usize), previous);
                }
            }
            index.check_invariants();
        }
    }
}
