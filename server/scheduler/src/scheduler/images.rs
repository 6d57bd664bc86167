//! Reserves the encoder outputs that waiting sequences need. A sequence is admitted only when all outputs that it needs
//! exist, so that a running sequence never waits for the encoder. The images of the first sequences in the queue are
//! requested first.

use std::ops::Range;

use super::Scheduler;
use crate::image_cache::{ImageLimits, ImageRequest, Reservation};
use crate::images::{ImageDigest, NeededImage};
use crate::request::SequenceId;
use crate::sequence::Sequence;

impl Scheduler {
    /// Sets the limits of the encoder outputs.
    pub fn set_image_limits(&mut self, limits: ImageLimits) {
        self.images.set_limits(limits);
    }

    /// Returns the images whose encoder outputs were requested since the last call, in the order in which they are
    /// needed. The caller encodes them and calls [`Self::provide_image`] or [`Self::cancel_image`] for each.
    pub fn drain_image_requests(&mut self) -> Vec<ImageRequest> {
        self.images.drain_requests()
    }

    /// Returns the images whose encoder outputs were evicted since the last call. The batch in flight may still read
    /// these outputs. Outputs that are needed again are requested again.
    pub fn drain_evicted_images(&mut self) -> Vec<ImageDigest> {
        self.images.drain_evicted()
    }

    /// Records that the caller has stored the requested encoder output of an image.
    pub fn provide_image(&mut self, digest: ImageDigest) {
        self.images.provide(digest);
    }

    /// Records that a requested encoder output will not be provided. Unless the caller aborts the sequences that need
    /// it ([`Self::sequences_with_image`]), they request it again.
    pub fn cancel_image(&mut self, digest: ImageDigest) {
        if !self.images.cancel(digest) {
            return;
        }
        // Remove the image from the sequences. Otherwise, they would later release a new entry of the image, which does
        // not count them as holders.
        for slot in self.slots_with_image(digest) {
            let sequence = self.sequences.get_mut(slot);
            sequence.held_images.retain(|held| *held != digest);
            if sequence.held_images.is_empty() {
                self.expect_images(slot);
            }
        }
    }

    /// Returns the sequences that hold or wait for the encoder output of this image. If a sequence represents its
    /// siblings, only its own ID is returned.
    pub fn sequences_with_image(&self, digest: ImageDigest) -> Vec<SequenceId> {
        self.slots_with_image(digest).into_iter().map(|slot| self.sequences.get(slot).id).collect()
    }

    /// Whether waiting sequences need encoder outputs that do not exist yet. In this case, batches may be empty.
    pub fn is_waiting_for_images(&self) -> bool {
        self.images.is_awaited()
    }

    /// Counts the images of a waiting sequence as *expected* images. The sequence must hold none of them. Repeated
    /// calls have no effect.
    pub(super) fn expect_images(&mut self, slot: u32) {
        let sequence = self.sequences.get_mut(slot);
        if !std::mem::replace(&mut sequence.expects_images, true) {
            self.images.add_expected(&sequence.group.distinct_images);
        }
    }

    /// Ends the effect of [`Self::expect_images`], because the sequence holds images, runs or is removed.
    pub(super) fn stop_expecting_images(&mut self, slot: u32) {
        let sequence = self.sequences.get_mut(slot);
        if std::mem::take(&mut sequence.expects_images) {
            self.images.remove_expected(&sequence.group.distinct_images);
        }
    }

    fn slots_with_image(&self, digest: ImageDigest) -> Vec<u32> {
        let holds = |slot: &u32| self.sequences.get(*slot).held_images.contains(&digest);
        self.sequences.iter().map(|(slot, _)| slot).filter(holds).collect()
    }

    /// Requests reserved images in the order of the waiting sequences, until the encoder's budget is exhausted.
    pub(super) fn request_images(&mut self) {
        let Self { waiting, sequences, images, .. } = self;
        for entry in &*waiting {
            if !images.can_request() {
                return;
            }
            let sequence = sequences.get(entry.slot);
            images.request(sequence.id, sequence.held_images.iter());
        }
        assert!(!images.can_request(), "invariant: reserved images belong to waiting sequences");
    }

    /// Whether a waiting sequence needs images whose outputs do not exist yet, or that it cannot reserve because an
    /// earlier sequence has found no room for its images.
    pub(super) fn awaits_images(&self, sequence: &Sequence) -> bool {
        let Some(last) = sequence.group.images.end().checked_sub(1) else { return false };
        let may_start = if sequence.held_images.is_empty() {
            self.images_have_room
        } else {
            self.images.are_available(sequence.held_images.iter())
        };
        // If the block with the last image is cached, so are those before it, and the sequence needs no image.
        let last_hash = sequence.prefix.hashes.get((last / self.cache.block_tokens) as usize);
        !may_start && !last_hash.is_some_and(|&hash| self.pool.contains_hash(hash))
    }

    /// Reserves the images that the waiting sequences of a group need. Returns whether all of their encoder outputs
    /// exist.
    pub(super) fn reserve_images(&mut self, group: Range<usize>) -> bool {
        let mut are_ready = true;
        for position in group {
            let slot = self.waiting[position].slot;
            let sequence = self.sequences.get(slot);
            if sequence.group.images.spans.is_empty() {
                continue;
            }
            let block_tokens = self.cache.block_tokens;
            let cacheable = (sequence.cacheable_tokens() / block_tokens) as usize;
            let cached = sequence.reusable_blocks(self.find_cached(sequence, cacheable).len(), block_tokens);
            // The last token is computed even if its block is cached.
            let computed_tokens = (cached as u32 * block_tokens).min(sequence.num_tokens() - 1);
            let needed = sequence.group.images.needed_after(computed_tokens);
            let holds = |image: &NeededImage| sequence.held_images.contains(&image.digest);
            if needed.len() != sequence.held_images.len() || !needed.iter().all(holds) {
                self.unreserve_images(slot);
                if !self.hold_images(position, &needed) {
                    are_ready = false;
                    continue;
                }
            }
            are_ready &= self.images.are_available(self.sequences.get(slot).held_images.iter());
        }
        are_ready
    }

    /// Reserves images for the waiting sequence at `position`, which holds none. If there is no room, waiting sequences
    /// behind it release their images. Returns false if that does not suffice, or if an earlier sequence has found no
    /// room.
    fn hold_images(&mut self, position: usize, needed: &[NeededImage]) -> bool {
        if needed.is_empty() {
            return true;
        }
        // No sequence overtakes one that waits for room for its images.
        while self.images_have_room {
            let num_missing = self.images.num_missing(needed);
            if self.images.reserve(needed) != Reservation::NoRoom {
                let slot = self.waiting[position].slot;
                let sequence = self.sequences.get_mut(slot);
                sequence.held_images = needed.iter().map(|image| image.digest).collect();
                if !std::mem::replace(&mut sequence.has_reserved_images, true) {
                    self.image_cache_hits_total += (needed.len() - num_missing) as u64;
                    self.image_cache_misses_total += num_missing as u64;
                }
                self.stop_expecting_images(slot);
                return true;
            }
            let behind = self.waiting.range(position + 1..).rev();
            let holder =
                behind.map(|entry| entry.slot).find(|slot| !self.sequences.get(*slot).held_images.is_empty());
            match holder {
                Some(slot) => self.unreserve_images(slot),
                None => self.images_have_room = false,
            }
        }
        false
    }

    /// Releases the encoder outputs that a waiting sequence holds or waits for.
    fn unreserve_images(&mut self, slot: u32) {
        self.release_images(slot);
        self.expect_images(slot);
    }

    /// Releases the encoder outputs that a sequence holds or waits for.
    pub(super) fn release_images(&mut self, slot: u32) {
        let held = std::mem::take(&mut self.sequences.get_mut(slot).held_images);
        if !held.is_empty() {
            self.images.release(held.into_iter());
        }
    }
}
