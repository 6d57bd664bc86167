//! Evicted blocks that are stored outside the cache, and their restoration for a waiting request.
//!
//! A restore holds the cached blocks of the request's prompt, including those restored so far, so that none of them is
//! evicted in the meantime. When the restore ends, successfully or not, all these blocks are in the prefix cache, where
//! the request finds them like any other block. A restore ends early if running sequences need the space.

use std::collections::BTreeSet;

use crate::block::BlockId;
use crate::block_keys::BlockKey;

/// Identifies a restore for the life of the scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RestoreId(pub u64);

/// The blocks that a waiting request needs from storage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RestoreRequest {
    /// The identifier of the restore.
    pub id: RestoreId,
    /// The keys of the blocks, in the order in which they are to be restored.
    pub keys: Vec<BlockKey>,
}

/// The destination of the next block of a restore.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RestoreTarget {
    /// The caller writes the content into this block and then calls
    /// [`Scheduler::finish_block_restore`](crate::Scheduler::finish_block_restore).
    Write(BlockId),
    /// Nothing is written, because the cache already has the content.
    AlreadyCached,
    /// Nothing is written, because the restore has ended or no block is free.
    Cancelled,
}

/// A restore in progress.
#[derive(Clone, Debug)]
pub(crate) struct BlockRestore {
    pub(crate) id: RestoreId,
    /// The slot of the sequence that waits for the restore.
    pub(crate) slot: u32,
    /// The blocks that the restore holds: the first blocks of the sequence.
    pub(crate) block_table: Vec<BlockId>,
    /// The number of blocks in `block_table` once the restore is complete.
    pub(crate) num_blocks: usize,
    /// The block that is being written, which is not cached yet.
    pub(crate) pending: Option<BlockId>,
}

/// All restores in progress, and the keys of the stored blocks.
#[derive(Clone, Debug, Default)]
pub(crate) struct BlockRestores {
    pub(crate) stored: BTreeSet<BlockKey>,
    pub(crate) active: Vec<BlockRestore>,
    /// The restores that have not been reported to the caller yet.
    pub(crate) requests: Vec<RestoreRequest>,
    pub(crate) next_id: u64,
}

impl BlockRestores {
    pub(crate) fn position(&self, id: RestoreId) -> Option<usize> {
        self.active.iter().position(|restore| restore.id == id)
    }

    /// The number of blocks that are still to be allocated for restores.
    pub(crate) fn outstanding_blocks(&self) -> u32 {
        let missing = |restore: &BlockRestore| {
            restore.num_blocks - restore.block_table.len() - usize::from(restore.pending.is_some())
        };
        self.active.iter().map(missing).sum::<usize>() as u32
    }

    /// All blocks that restores hold.
    pub(crate) fn held_blocks(&self) -> impl Iterator<Item = BlockId> {
        self.active.iter().flat_map(|restore| restore.block_table.iter().copied().chain(restore.pending))
    }
}
