//! Blocks that were evicted, are kept elsewhere, and come back for a request that waits.
//!
//! A reading holds the blocks that the request's tokens have in the cache, and those that have come back since, so that
//! none of them goes meanwhile. When it ends, by success or not, all it held is in the prefix cache, where the request
//! finds it as it finds any other; so what reads a sequence's history need not know where it comes from. A reading gives
//! way to whatever needs the room.

use std::collections::BTreeSet;

use crate::block::BlockId;
use crate::keys::BlockKey;

/// Names a reading for the life of the scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ReadingId(pub u64);

/// Blocks that a request wants back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadBack {
    /// What to call it by.
    pub id: ReadingId,
    /// The blocks, in the order in which they are to come.
    pub keys: Vec<BlockKey>,
}

/// Where the next block of a reading goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// It is to be written into this block, and then told by [`Scheduler::placed`](crate::Scheduler::placed).
    Write(BlockId),
    /// The cache has it by now.
    Present,
    /// Nobody wants it any more, or there is no room.
    Unwanted,
}

/// A reading that is under way.
#[derive(Debug)]
pub(crate) struct Reading {
    pub(crate) id: ReadingId,
    /// Of the sequence that waits for it.
    pub(crate) slot: u32,
    /// Blocks it holds, the first of the sequence's.
    pub(crate) table: Vec<BlockId>,
    /// How many there are in the end.
    pub(crate) end: usize,
    /// The block that is being written, which is nobody else's.
    pub(crate) written: Option<BlockId>,
}

/// What is known of blocks elsewhere.
#[derive(Debug, Default)]
pub(crate) struct Readings {
    pub(crate) stored: BTreeSet<BlockKey>,
    pub(crate) under_way: Vec<Reading>,
    /// Not told yet.
    pub(crate) asked: Vec<ReadBack>,
    pub(crate) count: u64,
}

impl Readings {
    pub(crate) fn position(&self, id: ReadingId) -> Option<usize> {
        self.under_way.iter().position(|reading| reading.id == id)
    }

    /// Blocks that are still to come, for which there has to be room.
    pub(crate) fn outstanding(&self) -> u32 {
        let missing =
            |reading: &Reading| reading.end - reading.table.len() - usize::from(reading.written.is_some());
        self.under_way.iter().map(missing).sum::<usize>() as u32
    }

    /// All blocks that readings hold.
    pub(crate) fn held(&self) -> impl Iterator<Item = BlockId> {
        self.under_way.iter().flat_map(|reading| reading.table.iter().copied().chain(reading.written))
    }
}
