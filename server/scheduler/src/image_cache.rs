//! The outputs of the image encoder: which exist, which are needed, and which are evicted.
//!
//! The cache decides only; its caller stores the outputs. Its size is limited in rows, of which each output has a
//! known number. A sequence reserves all images that its uncomputed tokens read before it is admitted, and holds them
//! until these tokens are computed. An output that no sequence holds remains cached until its space is needed; the
//! least recently held output is evicted first.

use std::collections::BTreeMap;

use crate::images::{ImageDigest, NeededImage};
use crate::request::SequenceId;

/// An image whose encoder output a waiting sequence needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageRequest {
    /// Identifies the image to encode.
    pub digest: ImageDigest,
    /// A sequence whose prompt has the image.
    pub sequence: SequenceId,
}

/// The result of a reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reservation {
    /// All outputs exist.
    Ready,
    /// The images are reserved, and some of them must be encoded first.
    Pending,
    /// There is no room for the images. Nothing is reserved.
    NoRoom,
}

#[derive(Clone, Debug)]
struct Entry {
    rows: u32,
    /// Number of sequences that hold the output.
    holders: u32,
    /// Whether the output exists. Otherwise it was requested.
    is_available: bool,
    /// The number of releases at the time when the last holder released the output.
    released: u64,
}

/// The encoder outputs that exist or were requested.
#[derive(Clone, Debug)]
pub(crate) struct ImageCache {
    rows_max: u32,
    entries: BTreeMap<ImageDigest, Entry>,
    /// The outputs that exist and that no sequence holds, in the order of their release.
    unheld: BTreeMap<u64, ImageDigest>,
    /// Number of rows of all entries.
    rows: u64,
    releases: u64,
    requests: Vec<ImageRequest>,
    evicted: Vec<ImageDigest>,
}

impl ImageCache {
    pub(crate) fn new(rows_max: u32) -> Self {
        Self {
            rows_max,
            entries: BTreeMap::new(),
            unheld: BTreeMap::new(),
            rows: 0,
            releases: 0,
            requests: Vec::new(),
            evicted: Vec::new(),
        }
    }

    pub(crate) fn set_rows_max(&mut self, rows_max: u32) {
        self.rows_max = rows_max;
        self.evict();
    }

    /// Reserves `images` for a sequence that holds none, and requests the missing outputs. The images of one sequence
    /// may exceed the size of the cache, but only if no other sequence holds any.
    pub(crate) fn reserve(&mut self, sequence: SequenceId, images: &[NeededImage]) -> Reservation {
        let new: u64 = images
            .iter()
            .filter(|image| !self.is_held(image.digest))
            .map(|image| u64::from(image.rows))
            .sum();
        let held_entries = self.entries.values().filter(|entry| entry.holders > 0);
        let held: u64 = held_entries.map(|entry| u64::from(entry.rows)).sum();
        if held > 0 && held + new > u64::from(self.rows_max) {
            return Reservation::NoRoom;
        }
        let mut reservation = Reservation::Ready;
        for image in images {
            let entry = self.entries.entry(image.digest).or_insert_with(|| {
                self.requests.push(ImageRequest { digest: image.digest, sequence });
                self.rows += u64::from(image.rows);
                Entry { rows: image.rows, holders: 0, is_available: false, released: 0 }
            });
            entry.holders += 1;
            if entry.is_available {
                self.unheld.remove(&entry.released);
            } else {
                reservation = Reservation::Pending;
            }
        }
        self.evict();
        reservation
    }

    /// Number of rows of the outputs that exist or were requested.
    pub(crate) fn rows(&self) -> u64 {
        self.rows
    }

    /// Number of rows of the outputs that were requested and do not exist yet.
    pub(crate) fn rows_requested(&self) -> u64 {
        let requested = self.entries.values().filter(|entry| !entry.is_available);
        requested.map(|entry| u64::from(entry.rows)).sum()
    }

    /// Whether all of these reserved outputs exist.
    pub(crate) fn are_available<'a>(&self, mut images: impl Iterator<Item = &'a ImageDigest>) -> bool {
        images.all(|digest| self.entries.get(digest).is_some_and(|entry| entry.is_available))
    }

    /// Releases images that a sequence holds.
    pub(crate) fn release(&mut self, images: impl Iterator<Item = ImageDigest>) {
        for digest in images {
            // The entry is missing if the image could not be encoded.
            let Some(entry) = self.entries.get_mut(&digest) else { continue };
            entry.holders -= 1;
            if entry.holders == 0 {
                self.releases += 1;
                entry.released = self.releases;
                if entry.is_available {
                    self.unheld.insert(entry.released, digest);
                }
            }
        }
        self.evict();
    }

    /// Records that a requested output exists.
    pub(crate) fn provide(&mut self, digest: ImageDigest) {
        let Some(entry) = self.entries.get_mut(&digest).filter(|entry| !entry.is_available) else { return };
        entry.is_available = true;
        if entry.holders == 0 {
            self.unheld.insert(entry.released, digest);
        }
        self.evict();
    }

    /// Removes a requested output that will not be provided.
    pub(crate) fn cancel(&mut self, digest: ImageDigest) {
        if let Some(entry) = self.entries.get(&digest).filter(|entry| !entry.is_available) {
            self.rows -= u64::from(entry.rows);
            self.entries.remove(&digest);
        }
    }

    /// Whether a sequence holds the image.
    pub(crate) fn is_held(&self, digest: ImageDigest) -> bool {
        self.entries.get(&digest).is_some_and(|entry| entry.holders > 0)
    }

    /// Whether a sequence waits for an output that does not exist yet.
    pub(crate) fn is_awaited(&self) -> bool {
        self.entries.values().any(|entry| !entry.is_available && entry.holders > 0)
    }

    /// Evicts all outputs that no sequence holds.
    pub(crate) fn evict_all(&mut self) {
        while self.evict_one() {}
    }

    pub(crate) fn drain_requests(&mut self) -> Vec<ImageRequest> {
        std::mem::take(&mut self.requests)
    }

    pub(crate) fn drain_evicted(&mut self) -> Vec<ImageDigest> {
        std::mem::take(&mut self.evicted)
    }

    /// Panics unless `held` are all images that sequences hold and the cache is consistent.
    pub(crate) fn check_invariants(&self, held: impl Iterator<Item = ImageDigest>) {
        let mut holders: BTreeMap<ImageDigest, u32> = BTreeMap::new();
        for digest in held.filter(|digest| self.entries.contains_key(digest)) {
            *holders.entry(digest).or_default() += 1;
        }
        for (digest, entry) in &self.entries {
            let counted = holders.get(digest).copied().unwrap_or(0);
            assert_eq!(entry.holders, counted, "invariant: the holders of an image are counted");
            let is_unheld = self.unheld.get(&entry.released) == Some(digest);
            assert_eq!(
                is_unheld,
                entry.holders == 0 && entry.is_available,
                "invariant: unheld outputs are evictable"
            );
        }
        let rows: u64 = self.entries.values().map(|entry| u64::from(entry.rows)).sum();
        assert_eq!(self.rows, rows, "invariant: the rows of images are counted");
        assert!(
            rows <= u64::from(self.rows_max) || self.unheld.is_empty(),
            "invariant: a cache that is too large has no output that can be evicted"
        );
    }

    /// Evicts outputs until the cache is small enough, as far as no sequence holds them.
    fn evict(&mut self) {
        while self.rows > u64::from(self.rows_max) && self.evict_one() {}
    }

    fn evict_one(&mut self) -> bool {
        let Some((_, digest)) = self.unheld.pop_first() else { return false };
        let entry = self.entries.remove(&digest).expect("invariant: an unheld output has an entry");
        self.rows -= u64::from(entry.rows);
        self.evicted.push(digest);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEQUENCE: SequenceId = SequenceId::new(1, 0);

    fn digest(image: u8) -> ImageDigest {
        ImageDigest([image; 32])
    }

    fn needed(image: u8, rows: u32) -> NeededImage {
        NeededImage { digest: digest(image), rows }
    }

    /// The images that were requested and evicted since the last call.
    fn drained(cache: &mut ImageCache) -> (Vec<u8>, Vec<u8>) {
        let requested = cache.drain_requests().iter().map(|request| request.digest.0[0]).collect();
        (requested, cache.drain_evicted().iter().map(|digest| digest.0[0]).collect())
    }

    #[test]
    fn the_least_recently_held_output_is_evicted() {
        let mut cache = ImageCache::new(10);
        for image in 1..=2 {
            assert_eq!(cache.reserve(SEQUENCE, &[needed(image, 4)]), Reservation::Pending);
            cache.provide(digest(image));
            cache.release([digest(image)].into_iter());
        }
        assert_eq!(drained(&mut cache), (vec![1, 2], vec![]));
        assert_eq!(cache.reserve(SEQUENCE, &[needed(1, 4)]), Reservation::Ready, "it is cached");
        cache.release([digest(1)].into_iter());
        assert_eq!(cache.reserve(SEQUENCE, &[needed(3, 4)]), Reservation::Pending);
        assert_eq!(drained(&mut cache), (vec![3], vec![2]));
        cache.check_invariants([digest(3)].into_iter());
    }

    #[test]
    fn held_outputs_are_not_evicted_and_leave_no_room_for_others() {
        let mut cache = ImageCache::new(10);
        assert_eq!(cache.reserve(SEQUENCE, &[needed(1, 7)]), Reservation::Pending);
        assert_eq!(cache.reserve(SEQUENCE, &[needed(2, 4)]), Reservation::NoRoom);
        assert_eq!(
            cache.reserve(SEQUENCE, &[needed(1, 7)]),
            Reservation::Pending,
            "another holder needs no room"
        );
        cache.provide(digest(1));
        cache.release([digest(1)].into_iter());
        assert_eq!(cache.reserve(SEQUENCE, &[needed(2, 4)]), Reservation::NoRoom, "one holder is left");
        cache.release([digest(1)].into_iter());
        assert_eq!(cache.reserve(SEQUENCE, &[needed(2, 4)]), Reservation::Pending);
        assert_eq!(drained(&mut cache), (vec![1, 2], vec![1]));
        cache.check_invariants([digest(2)].into_iter());
    }

    #[test]
    fn one_sequence_may_exceed_the_size() {
        let mut cache = ImageCache::new(10);
        assert_eq!(cache.reserve(SEQUENCE, &[needed(1, 7), needed(2, 7)]), Reservation::Pending);
        cache.provide(digest(1));
        cache.provide(digest(2));
        assert!(cache.are_available([digest(1), digest(2)].iter()));
        assert_eq!(drained(&mut cache), (vec![1, 2], vec![]));
        cache.release([digest(1), digest(2)].into_iter());
        assert_eq!(drained(&mut cache), (vec![], vec![1]));
        cache.check_invariants([].into_iter());
    }

    #[test]
    fn cancelled_and_unneeded_images_leave_the_cache_consistent() {
        let mut cache = ImageCache::new(10);
        cache.reserve(SEQUENCE, &[needed(1, 6), needed(2, 3)]);
        assert!(cache.is_awaited() && cache.is_held(digest(1)));
        cache.cancel(digest(1));
        // The sequence ends, because the image could not be encoded. The other image is encoded nevertheless.
        cache.release([digest(1), digest(2)].into_iter());
        assert!(!cache.is_held(digest(2)) && !cache.is_awaited());
        cache.provide(digest(2));
        cache.provide(digest(1));
        cache.check_invariants([].into_iter());
        cache.evict_all();
        assert_eq!(drained(&mut cache), (vec![1, 2], vec![2]));
    }
}
