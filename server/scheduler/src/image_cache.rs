//! The outputs of the image encoder: which exist, which are needed, and which are evicted.
//!
//! The cache only makes these decisions; its caller stores the outputs. The total number of rows of the outputs is
//! limited. Before a sequence is admitted, it reserves all images that its uncomputed tokens read, and it holds them
//! until these tokens are computed. An output that no sequence holds remains cached until its space is needed; the
//! least recently held output is evicted first.
//!
//! Until a sequence reserves its images, they are *expected* images. The cache only counts them, so that the load
//! includes the work of the encoder for all waiting sequences.
//!
//! A reserved image is requested from the encoder only while the requested images have fewer tokens than the encoder's
//! budget, so that the images of the first sequences in the queue are encoded next even if these sequences arrived
//! last.

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

/// The limits of the encoder outputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageLimits {
    /// Maximum number of rows of encoder outputs that the caller stores, including the rows of images that are reserved
    /// or being encoded. If the images of a single prompt have more rows, only these images are stored.
    pub rows_max: u32,
    /// No further image is requested while the requested images that are not encoded yet have at least this many tokens
    /// in total. The last requested image may exceed the limit, however many tokens it has.
    pub max_num_encoder_input_tokens: u32,
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
    state: EntryState,
    /// The number of releases at the time when the last holder released the output.
    released: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum EntryState {
    /// A sequence needs the output, which has not been requested from the encoder yet.
    Reserved,
    /// The output was requested from the encoder and does not exist yet.
    Requested,
    Available,
}

/// An image that sequences may need and have not reserved yet.
#[derive(Clone, Copy, Debug)]
struct ExpectedImage {
    rows: u32,
    /// Number of sequences that expect the image.
    sequences: u32,
}

/// The encoder outputs that exist, were requested or are reserved, and the images that are expected.
#[derive(Clone, Debug)]
pub(crate) struct ImageCache {
    limits: ImageLimits,
    entries: BTreeMap<ImageDigest, Entry>,
    /// The outputs that exist and that no sequence holds, in the order of their release.
    unheld: BTreeMap<u64, ImageDigest>,
    /// The expected images, some of which may have an entry.
    expected: BTreeMap<ImageDigest, ExpectedImage>,
    /// Number of rows of the expected images without an entry.
    rows_expected: u64,
    /// Number of rows of all entries.
    rows: u64,
    /// Number of rows of the outputs that exist.
    rows_available: u64,
    /// Number of rows of the outputs that were requested and do not exist yet.
    rows_requested: u64,
    /// Number of reserved images that were not requested yet.
    num_reserved: usize,
    releases: u64,
    requests: Vec<ImageRequest>,
    evicted: Vec<ImageDigest>,
}

impl ImageCache {
    pub(crate) fn new(limits: ImageLimits) -> Self {
        Self {
            limits,
            entries: BTreeMap::new(),
            unheld: BTreeMap::new(),
            expected: BTreeMap::new(),
            rows_expected: 0,
            rows: 0,
            rows_available: 0,
            rows_requested: 0,
            num_reserved: 0,
            releases: 0,
            requests: Vec::new(),
            evicted: Vec::new(),
        }
    }

    pub(crate) fn set_limits(&mut self, limits: ImageLimits) {
        self.limits = limits;
        self.evict();
    }

    /// Counts the images of a sequence as expected. The sequence must hold none of them. `images` must not contain
    /// duplicates.
    pub(crate) fn add_expected(&mut self, images: &[NeededImage]) {
        for image in images {
            let expected = self.expected.entry(image.digest).or_insert_with(|| {
                if !self.entries.contains_key(&image.digest) {
                    self.rows_expected += u64::from(image.rows);
                }
                ExpectedImage { rows: image.rows, sequences: 0 }
            });
            expected.sequences += 1;
        }
    }

    /// Reverses [`Self::add_expected`].
    pub(crate) fn remove_expected(&mut self, images: &[NeededImage]) {
        for image in images {
            let expected =
                self.expected.get_mut(&image.digest).expect("invariant: an expected image is counted");
            expected.sequences -= 1;
            if expected.sequences == 0 {
                let rows = u64::from(expected.rows);
                self.expected.remove(&image.digest);
                if !self.entries.contains_key(&image.digest) {
                    self.rows_expected -= rows;
                }
            }
        }
    }

    /// Reserves `images` for a sequence that holds none. Images that are held already need no room. The other images
    /// may together exceed the size of the cache, but only if no image is held.
    pub(crate) fn reserve(&mut self, images: &[NeededImage]) -> Reservation {
        let new: u64 = images
            .iter()
            .filter(|image| !self.is_held(image.digest))
            .map(|image| u64::from(image.rows))
            .sum();
        let held_entries = self.entries.values().filter(|entry| entry.holders > 0);
        let held: u64 = held_entries.map(|entry| u64::from(entry.rows)).sum();
        if new > 0 && held > 0 && held + new > u64::from(self.limits.rows_max) {
            return Reservation::NoRoom;
        }
        let mut reservation = Reservation::Ready;
        for image in images {
            if !self.entries.contains_key(&image.digest) {
                self.insert(image);
            }
            let entry = self.entries.get_mut(&image.digest).expect("invariant: the image has an entry");
            entry.holders += 1;
            if entry.state == EntryState::Available {
                self.unheld.remove(&entry.released);
            } else {
                reservation = Reservation::Pending;
            }
        }
        self.evict();
        reservation
    }

    /// Number of these images that are neither encoded nor requested nor reserved.
    pub(crate) fn num_missing(&self, images: &[NeededImage]) -> usize {
        images.iter().filter(|image| !self.entries.contains_key(&image.digest)).count()
    }

    /// Whether there are reserved images that were not requested yet, and the encoder's budget is not exhausted.
    pub(crate) fn can_request(&self) -> bool {
        let has_room = self.rows_requested < u64::from(self.limits.max_num_encoder_input_tokens);
        self.num_reserved > 0 && (has_room || self.rows_requested == 0)
    }

    /// Requests the reserved images of a sequence, in this order, until the encoder's budget is exhausted.
    pub(crate) fn request<'a>(
        &mut self,
        sequence: SequenceId,
        images: impl Iterator<Item = &'a ImageDigest>,
    ) {
        for &digest in images {
            if !self.can_request() {
                return;
            }
            let entry = self.entries.get_mut(&digest).filter(|entry| entry.state == EntryState::Reserved);
            if let Some(entry) = entry {
                entry.state = EntryState::Requested;
                self.rows_requested += u64::from(entry.rows);
                self.num_reserved -= 1;
                self.requests.push(ImageRequest { digest, sequence });
            }
        }
    }

    /// Number of rows of the outputs that exist.
    pub(crate) fn rows_encoded(&self) -> u64 {
        self.rows_available
    }

    /// Number of rows of the outputs that are expected, reserved or requested, and do not exist yet.
    pub(crate) fn rows_unencoded(&self) -> u64 {
        self.rows - self.rows_available + self.rows_expected
    }

    /// Whether the outputs of all these reserved images exist.
    pub(crate) fn are_available<'a>(&self, mut images: impl Iterator<Item = &'a ImageDigest>) -> bool {
        images
            .all(|digest| self.entries.get(digest).is_some_and(|entry| entry.state == EntryState::Available))
    }

    /// Releases images that a sequence holds.
    pub(crate) fn release(&mut self, images: impl Iterator<Item = ImageDigest>) {
        for digest in images {
            // If the image could not be encoded, `cancel` has removed the entry.
            let Some(entry) = self.entries.get_mut(&digest) else { continue };
            entry.holders -= 1;
            if entry.holders > 0 {
                continue;
            }
            self.releases += 1;
            entry.released = self.releases;
            match entry.state {
                EntryState::Reserved => self.remove(digest),
                EntryState::Requested => {}
                EntryState::Available => {
                    self.unheld.insert(entry.released, digest);
                }
            }
        }
        self.evict();
    }

    /// Records that a requested output exists.
    pub(crate) fn provide(&mut self, digest: ImageDigest) {
        let requested = |entry: &&mut Entry| entry.state == EntryState::Requested;
        let Some(entry) = self.entries.get_mut(&digest).filter(requested) else { return };
        entry.state = EntryState::Available;
        self.rows_requested -= u64::from(entry.rows);
        self.rows_available += u64::from(entry.rows);
        if entry.holders == 0 {
            self.unheld.insert(entry.released, digest);
        }
        self.evict();
    }

    /// Removes a requested output that will not be provided. Returns whether it was requested.
    pub(crate) fn cancel(&mut self, digest: ImageDigest) -> bool {
        let is_requested =
            self.entries.get(&digest).is_some_and(|entry| entry.state == EntryState::Requested);
        if is_requested {
            self.remove(digest);
        }
        is_requested
    }

    /// Whether a sequence holds the image.
    pub(crate) fn is_held(&self, digest: ImageDigest) -> bool {
        self.entries.get(&digest).is_some_and(|entry| entry.holders > 0)
    }

    /// Whether a sequence waits for an output that does not exist yet.
    pub(crate) fn is_awaited(&self) -> bool {
        self.entries.values().any(|entry| entry.state != EntryState::Available && entry.holders > 0)
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

    /// Panics unless `held` lists the images that each sequence holds, and the cache is consistent.
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
                entry.holders == 0 && entry.state == EntryState::Available,
                "invariant: unheld outputs are evictable"
            );
            assert!(
                entry.holders > 0 || entry.state != EntryState::Reserved,
                "invariant: an image that no sequence needs is not reserved"
            );
        }
        let rows: u64 = self.entries.values().map(|entry| u64::from(entry.rows)).sum();
        assert_eq!(self.rows, rows, "invariant: the rows of images are counted");
        assert!(
            rows <= u64::from(self.limits.rows_max) || self.unheld.is_empty(),
            "invariant: a cache that is too large has no output that can be evicted"
        );
        let in_state = |state| self.entries.values().filter(move |entry| entry.state == state);
        assert_eq!(
            self.num_reserved,
            in_state(EntryState::Reserved).count(),
            "invariant: reserved images are counted"
        );
        let available = in_state(EntryState::Available).map(|entry| u64::from(entry.rows));
        assert_eq!(
            self.rows_available,
            available.sum::<u64>(),
            "invariant: the rows of existing outputs are counted"
        );
        let requested = || in_state(EntryState::Requested).map(|entry| u64::from(entry.rows));
        assert_eq!(
            self.rows_requested,
            requested().sum::<u64>(),
            "invariant: the rows of requested images are counted"
        );
        // Only the image that was requested last may exceed the budget. The cache does not record which image that is,
        // so subtract the largest one.
        let before_last = self.rows_requested - requested().max().unwrap_or(0);
        let budget = u64::from(self.limits.max_num_encoder_input_tokens);
        assert!(
            before_last == 0 || before_last < budget,
            "invariant: only the last requested image exceeds the encoder's budget"
        );
    }

    /// Panics unless `expected` lists the images that each sequence expects, and the cache counts the rows of each
    /// image without an entry once.
    pub(crate) fn check_expected(&self, expected: impl Iterator<Item = NeededImage>) {
        let mut sequences: BTreeMap<ImageDigest, u32> = BTreeMap::new();
        for image in expected {
            *sequences.entry(image.digest).or_default() += 1;
        }
        let counted = self.expected.iter().map(|(&digest, expected)| (digest, expected.sequences));
        assert!(counted.eq(sequences), "invariant: the sequences that expect an image are counted");
        let without_entry = self.expected.iter().filter(|(digest, _)| !self.entries.contains_key(*digest));
        let rows: u64 = without_entry.map(|(_, expected)| u64::from(expected.rows)).sum();
        assert_eq!(self.rows_expected, rows, "invariant: the rows of expected images are counted");
    }

    /// Adds the entry of an image that a sequence reserves.
    fn insert(&mut self, image: &NeededImage) {
        let entry = Entry { rows: image.rows, holders: 0, state: EntryState::Reserved, released: 0 };
        self.entries.insert(image.digest, entry);
        self.num_reserved += 1;
        self.rows += u64::from(image.rows);
        self.rows_expected -= self.expected_rows(image.digest);
    }

    /// Removes the entry of an image. If sequences expect the image, its rows count as expected again.
    fn remove(&mut self, digest: ImageDigest) {
        let entry = self.entries.remove(&digest).expect("invariant: the image has an entry");
        let rows = u64::from(entry.rows);
        match entry.state {
            EntryState::Reserved => self.num_reserved -= 1,
            EntryState::Requested => self.rows_requested -= rows,
            EntryState::Available => self.rows_available -= rows,
        }
        self.rows -= rows;
        self.rows_expected += self.expected_rows(digest);
    }

    /// Number of rows of an expected image, or 0 if the image is not expected.
    fn expected_rows(&self, digest: ImageDigest) -> u64 {
        self.expected.get(&digest).map_or(0, |expected| u64::from(expected.rows))
    }

    /// Evicts outputs that no sequence holds until the cache is small enough.
    fn evict(&mut self) {
        while self.rows > u64::from(self.limits.rows_max) && self.evict_one() {}
    }

    fn evict_one(&mut self) -> bool {
        let Some((_, digest)) = self.unheld.pop_first() else { return false };
        self.remove(digest);
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

    fn cache(max_num_encoder_input_tokens: u32) -> ImageCache {
        ImageCache::new(ImageLimits { rows_max: 10, max_num_encoder_input_tokens })
    }

    /// Reserves images and requests them.
    fn reserve(cache: &mut ImageCache, images: &[NeededImage]) -> Reservation {
        let reservation = cache.reserve(images);
        cache.request(SEQUENCE, images.iter().map(|image| &image.digest));
        reservation
    }

    /// Returns the images that were requested and those that were evicted since the last call.
    fn drained(cache: &mut ImageCache) -> (Vec<u8>, Vec<u8>) {
        let requested = cache.drain_requests().iter().map(|request| request.digest.0[0]).collect();
        (requested, cache.drain_evicted().iter().map(|digest| digest.0[0]).collect())
    }

    #[test]
    fn the_least_recently_held_output_is_evicted() {
        let mut cache = cache(100);
        for image in 1..=2 {
            assert_eq!(reserve(&mut cache, &[needed(image, 4)]), Reservation::Pending);
            cache.provide(digest(image));
            cache.release([digest(image)].into_iter());
        }
        assert_eq!(drained(&mut cache), (vec![1, 2], vec![]));
        assert_eq!(reserve(&mut cache, &[needed(1, 4)]), Reservation::Ready, "the image is cached");
        cache.release([digest(1)].into_iter());
        assert_eq!(reserve(&mut cache, &[needed(3, 4)]), Reservation::Pending);
        assert_eq!(drained(&mut cache), (vec![3], vec![2]));
        cache.check_invariants([digest(3)].into_iter());
    }

    #[test]
    fn held_outputs_are_not_evicted_and_leave_no_room_for_others() {
        let mut cache = cache(100);
        assert_eq!(reserve(&mut cache, &[needed(1, 7)]), Reservation::Pending);
        assert_eq!(reserve(&mut cache, &[needed(2, 4)]), Reservation::NoRoom);
        assert_eq!(
            reserve(&mut cache, &[needed(1, 7)]),
            Reservation::Pending,
            "another holder needs no room"
        );
        cache.provide(digest(1));
        cache.release([digest(1)].into_iter());
        assert_eq!(reserve(&mut cache, &[needed(2, 4)]), Reservation::NoRoom, "one holder is left");
        cache.release([digest(1)].into_iter());
        assert_eq!(reserve(&mut cache, &[needed(2, 4)]), Reservation::Pending);
        assert_eq!(drained(&mut cache), (vec![1, 2], vec![1]));
        cache.check_invariants([digest(2)].into_iter());
    }

    #[test]
    fn one_sequence_may_exceed_the_size() {
        let mut cache = cache(100);
        assert_eq!(reserve(&mut cache, &[needed(1, 7), needed(2, 7)]), Reservation::Pending);
        cache.provide(digest(1));
        cache.provide(digest(2));
        assert!(cache.are_available([digest(1), digest(2)].iter()));
        assert_eq!(drained(&mut cache), (vec![1, 2], vec![]));
        cache.release([digest(1), digest(2)].into_iter());
        assert_eq!(drained(&mut cache), (vec![], vec![1]));
        cache.check_invariants([].into_iter());
    }

    #[test]
    fn images_that_exceed_the_size_have_room_for_further_holders() {
        let mut cache = cache(100);
        let images = [needed(1, 7), needed(2, 7)];
        for _ in 0..2 {
            assert_eq!(reserve(&mut cache, &images), Reservation::Pending);
        }
        assert_eq!(reserve(&mut cache, &[needed(3, 1)]), Reservation::NoRoom);
        assert_eq!(drained(&mut cache), (vec![1, 2], vec![]));
        cache.check_invariants([1, 2, 1, 2].map(digest).into_iter());
    }

    #[test]
    fn cancelled_and_unneeded_images_leave_the_cache_consistent() {
        let mut cache = cache(100);
        reserve(&mut cache, &[needed(1, 6), needed(2, 3)]);
        assert!(cache.is_awaited() && cache.is_held(digest(1)));
        cache.cancel(digest(1));
        // The sequence ends, because image 1 could not be encoded. Image 2 is encoded nevertheless.
        cache.release([digest(1), digest(2)].into_iter());
        assert!(!cache.is_held(digest(2)) && !cache.is_awaited());
        cache.provide(digest(2));
        cache.provide(digest(1));
        cache.check_invariants([].into_iter());
        cache.evict_all();
        assert_eq!(drained(&mut cache), (vec![1, 2], vec![2]));
    }

    #[test]
    fn the_encoder_has_a_budget_of_tokens() {
        let mut cache = cache(4);
        let images = [needed(1, 3), needed(2, 3), needed(3, 1), needed(4, 1)];
        assert_eq!(reserve(&mut cache, &images), Reservation::Pending);
        assert_eq!(drained(&mut cache).0, [1, 2], "the second image exceeds the budget");
        assert_eq!((cache.rows, cache.rows_unencoded(), cache.can_request()), (8, 8, false));
        cache.provide(digest(1));
        assert_eq!((cache.rows_encoded(), cache.rows_unencoded()), (3, 5));
        cache.check_invariants(images.iter().map(|image| image.digest));
        assert!(cache.can_request());
        cache.request(SEQUENCE, [digest(4), digest(3)].iter());
        assert_eq!(drained(&mut cache).0, [4], "the order is that of the call");
        assert!(cache.cancel(digest(2)));
        assert!(!cache.cancel(digest(3)) && cache.is_held(digest(3)), "only requested images are canceled");
        cache.request(SEQUENCE, [digest(3)].iter());
        assert_eq!((drained(&mut cache).0, cache.can_request()), (vec![3], false));
        cache.check_invariants([1, 3, 4].map(digest).into_iter());
    }

    #[test]
    fn a_single_image_may_exceed_the_budget() {
        for budget in [0, 4] {
            let mut cache = cache(budget);
            reserve(&mut cache, &[needed(1, 5), needed(2, 5)]);
            assert_eq!(drained(&mut cache).0, [1]);
            cache.provide(digest(1));
            cache.request(SEQUENCE, [digest(1), digest(2)].iter());
            assert_eq!(drained(&mut cache).0, [2]);
            cache.check_invariants([1, 2].map(digest).into_iter());
        }
    }

    #[test]
    fn an_expected_image_counts_once_until_it_is_encoded() {
        let mut cache = cache(100);
        let images = [needed(1, 4), needed(2, 3)];
        cache.add_expected(&images);
        cache.add_expected(&images[..1]);
        assert_eq!((cache.rows_encoded(), cache.rows_unencoded()), (0, 7));
        assert_eq!(cache.num_missing(&images), 2);
        reserve(&mut cache, &images);
        assert_eq!(cache.num_missing(&images), 0);
        cache.remove_expected(&images);
        assert_eq!((cache.rows_encoded(), cache.rows_unencoded()), (0, 7), "the images are requested");
        cache.provide(digest(1));
        assert_eq!((cache.rows_encoded(), cache.rows_unencoded()), (4, 3));
        cache.check_expected([needed(1, 4)].into_iter());
        cache.release(images.iter().map(|image| image.digest));
        cache.cancel(digest(2));
        cache.evict_all();
        assert_eq!((cache.rows_encoded(), cache.rows_unencoded()), (0, 4), "the output was evicted");
        cache.remove_expected(&images[..1]);
        assert_eq!(cache.rows_unencoded(), 0);
        cache.check_expected([].into_iter());
        cache.check_invariants([].into_iter());
    }

    #[test]
    fn a_reserved_image_that_is_released_needs_no_room() {
        let mut cache = cache(4);
        reserve(&mut cache, &[needed(1, 5)]);
        assert_eq!(reserve(&mut cache, &[needed(2, 5)]), Reservation::Pending);
        cache.release([digest(2)].into_iter());
        assert_eq!((cache.rows, cache.is_held(digest(2))), (5, false));
        assert_eq!(reserve(&mut cache, &[needed(3, 5)]), Reservation::Pending);
        cache.provide(digest(2));
        assert_eq!(cache.reserve(&[needed(2, 5)]), Reservation::NoRoom);
        assert_eq!(drained(&mut cache), (vec![1], vec![]));
        cache.check_invariants([1, 3].map(digest).into_iter());
    }
}
