//! Restores evicted blocks from storage: decides which blocks are restored, for which request, and where they are
//! written.

use std::ops::Range;

use super::Scheduler;
use crate::block::BlockParent;
use crate::block_keys::{BlockKey, BlockKeyScheme, BlockKeys, EvictedBlock};
use crate::block_pool::RegisterResult;
use crate::restore::{BlockRestore, RestoreId, RestoreRequest, RestoreTarget};
use crate::sequence::{RestoreState, Sequence};

impl Scheduler {
    /// Starts reporting evicted blocks, so that the caller can store them under their keys, which are derived according
    /// to `scheme`. The keys must identify the content reliably, because the content of restored blocks is not
    /// verified.
    ///
    /// # Panics
    /// Panics if a request has already been submitted, or prefix caching is off.
    pub fn enable_spill(&mut self, scheme: BlockKeyScheme) {
        assert!(self.arrivals == 0, "spilling must be enabled before the first request");
        assert!(self.config.prefix_caching, "without prefix caching no blocks are evicted");
        self.pool.set_keys(Some(BlockKeys::new(scheme, self.cache.blocks_total)));
        self.restores = Some(Box::default());
    }

    /// Stops reporting evicted blocks, and ends all restores.
    pub fn disable_spill(&mut self) {
        while self.end_youngest_restore() {}
        self.pool.set_keys(None);
        self.restores = None;
    }

    /// Returns the blocks that were evicted since the last call. The caller must copy them before the next batch is
    /// computed, and before it writes the block of a restore.
    pub fn drain_evicted(&mut self) -> Vec<EvictedBlock> {
        self.pool.keys_mut().map(BlockKeys::drain_evicted).unwrap_or_default()
    }

    /// Returns the restores that were requested since the last call.
    pub fn drain_restores(&mut self) -> Vec<RestoreRequest> {
        self.restores.as_mut().map(|restores| std::mem::take(&mut restores.requests)).unwrap_or_default()
    }

    /// Records that the block with this key is stored and can be restored.
    pub fn add_stored(&mut self, key: BlockKey) {
        if let Some(restores) = &mut self.restores {
            restores.stored.insert(key);
        }
    }

    /// Records that the block with this key is no longer stored.
    pub fn remove_stored(&mut self, key: BlockKey) {
        if let Some(restores) = &mut self.restores {
            restores.stored.remove(&key);
        }
    }

    /// Whether requests wait for blocks that are being restored. In this case, batches may be empty.
    pub fn is_restoring(&self) -> bool {
        self.restores.as_ref().is_some_and(|restores| !restores.active.is_empty())
    }

    /// Whether this restore is still in progress.
    pub fn is_restore_active(&self, id: RestoreId) -> bool {
        self.restores.as_ref().is_some_and(|restores| restores.position(id).is_some())
    }

    /// Begins to restore the next block, and returns where to write it, if it must be written. Ends the restore if no
    /// block is free.
    ///
    /// # Panics
    /// Panics if a batch is in flight, or the previous block was not finished with [`Self::finish_block_restore`].
    pub fn begin_block_restore(&mut self, id: RestoreId) -> RestoreTarget {
        assert!(self.in_flight.is_empty(), "blocks are restored between steps");
        let Self { restores: Some(restores), sequences, pool, .. } = self else {
            return RestoreTarget::Cancelled;
        };
        let Some(position) = restores.position(id) else { return RestoreTarget::Cancelled };
        let restore = &mut restores.active[position];
        assert!(restore.pending.is_none(), "the previous block must be finished first");
        let sequence = sequences.get(restore.slot);
        if let Some(block) = pool.find(sequence.next_content(&restore.block_table, pool)) {
            pool.acquire(block);
            restore.block_table.push(block);
            self.end_restore_if_complete(id);
            return RestoreTarget::AlreadyCached;
        }
        let Some(block) = pool.allocate() else {
            self.end_restore(id);
            return RestoreTarget::Cancelled;
        };
        restore.pending = Some(block);
        RestoreTarget::Write(block)
    }

    /// Caches the block that [`Self::begin_block_restore`] returned, which the caller has written.
    ///
    /// # Panics
    /// Panics if the restore has no such block.
    pub fn finish_block_restore(&mut self, id: RestoreId) {
        let Self { restores, sequences, pool, .. } = self;
        let restores = restores.as_mut().expect("the restore must be active");
        let position = restores.position(id).expect("the restore must be active");
        let restore = &mut restores.active[position];
        let block = restore.pending.take().expect("the restore must have a block to finish");
        let sequence = sequences.get(restore.slot);
        let content = sequence.next_content(&restore.block_table, pool);
        match pool.register(block, content) {
            RegisterResult::Cached => {
                restore.block_table.push(block);
                self.end_restore_if_complete(id);
            }
            // `begin_block_restore` did not find the content in the cache, and no step runs between the two calls, so
            // the cache contains different content with the same hash.
            RegisterResult::Duplicate(_) | RegisterResult::Collision => {
                pool.release(block);
                self.end_restore(id);
            }
        }
    }

    /// Ends a restore, so that the request can be admitted and compute the blocks that were not restored. Does nothing
    /// if the restore has ended.
    pub fn end_restore(&mut self, id: RestoreId) {
        let Some(restores) = &mut self.restores else { return };
        let Some(position) = restores.position(id) else { return };
        let BlockRestore { slot, block_table, pending, .. } = restores.active.remove(position);
        self.sequences.get_mut(slot).restore = RestoreState::Finished;
        for block in block_table.into_iter().chain(pending).rev() {
            self.pool.release(block);
        }
    }

    /// Ends the restore of a sequence that is removed, if it has one.
    pub(super) fn end_restore_of(&mut self, slot: u32) {
        let active = self.restores.as_ref().map_or(&[][..], |restores| &restores.active);
        if let Some(id) = active.iter().find(|restore| restore.slot == slot).map(|restore| restore.id) {
            self.end_restore(id);
        }
    }

    /// Ends the youngest restore because its blocks are needed. Returns false if there is no restore.
    pub(super) fn end_youngest_restore(&mut self) -> bool {
        let youngest = self.restores.as_ref().and_then(|restores| restores.active.last());
        let Some(id) = youngest.map(|restore| restore.id) else { return false };
        self.end_restore(id);
        true
    }

    /// Begins a restore for a waiting sequence for which there is room, if its first uncached block is stored and no
    /// other restore includes this block. Returns whether the sequence has to wait, for its own restore or for the one
    /// that includes the block.
    pub(super) fn begin_restore(&mut self, slot: u32) -> bool {
        let sequence = self.sequences.get(slot);
        if self.restores.is_none() || sequence.restore != RestoreState::Eligible {
            return false;
        }
        let block_tokens = self.cache.block_tokens;
        let cacheable = (sequence.cacheable_tokens() / block_tokens) as usize;
        let cacheable = cacheable.min(sequence.prefix.hashes.len());
        let block_table = self.find_cached(sequence, cacheable);
        let first = block_table.len();
        let keys = self.stored_keys(sequence, sequence.prefix.parent(&block_table), first..cacheable);
        if keys.is_empty() {
            return false;
        }
        let Self { restores: Some(restores), sequences, pool, .. } = self else { return false };
        let first_hash = sequences.get(slot).prefix.hashes.get(first);
        let restores_first = |restore: &BlockRestore| {
            first < restore.num_blocks && sequences.get(restore.slot).prefix.hashes.get(first) == first_hash
        };
        if restores.active.iter().any(restores_first) {
            return true;
        }
        block_table.iter().for_each(|&block| pool.acquire(block));
        let id = RestoreId(restores.next_id);
        restores.next_id += 1;
        let num_blocks = first + keys.len();
        restores.active.push(BlockRestore { id, slot, block_table, num_blocks, pending: None });
        restores.requests.push(RestoreRequest { id, keys });
        sequences.get_mut(slot).restore = RestoreState::Restoring;
        true
    }

    /// The keys of the sequence's blocks in the range `blocks`, up to the first block that is not stored. `parent` is
    /// the parent of the first block in the range.
    fn stored_keys(&self, sequence: &Sequence, parent: BlockParent, blocks: Range<usize>) -> Vec<BlockKey> {
        let restores = self.restores.as_ref().filter(|restores| !restores.stored.is_empty());
        let Some((restores, keys)) = restores.zip(self.pool.keys()) else { return Vec::new() };
        let mut key = keys.parent_key(parent);
        let block_tokens = self.cache.block_tokens as usize;
        let next_key = |index| {
            let tokens = &sequence.tokens[index * block_tokens..][..block_tokens];
            key = keys.block_key(key, tokens, sequence.group.words_of_block(index));
            restores.stored.contains(&key).then_some(key)
        };
        blocks.map_while(next_key).collect()
    }

    fn end_restore_if_complete(&mut self, id: RestoreId) {
        let restores = self.restores.as_ref().expect("invariant: the restore is active");
        let position = restores.position(id).expect("invariant: the restore is active");
        let BlockRestore { block_table, num_blocks, .. } = &restores.active[position];
        if block_table.len() == *num_blocks {
            self.end_restore(id);
        }
    }
}
