//! Which blocks are in use, by how many sequences, and what the others still hold.
//!
//! The pool decides which block is given out and which cached content is lost. It knows nothing of
//! sequences: its callers hold references and give each back once.
//!
//! ```text
//!            allocate              register                release (last holder)
//!   free ───────────────► active ──────────► active, cached ──────────► evictable
//!    ▲                       │                      ▲                     │   │
//!    └────────── release ────┘                      └─────── share ───────┘   │
//!    ▲                                                                        │
//!    └───────────── allocate, when nothing is free: the least recently ───────┘
//! ```
//!
//! The prefix cache maps the hash of a block to the block. A hit must also have equal tokens and follow the
//! same cached content: every registration has its own serial, and a block keeps its parent's. So a collision
//! of hashes costs a hit and never yields foreign content.
//!
//! A cached block's parent is cached too: whoever holds a block holds those before it, and gives back the
//! later ones first, so that the eviction order has children before parents.

use crate::TokenId;
use crate::block::{BlockHash, BlockId, IdMap};

#[cfg(test)]
mod tests;

/// No neighbour.
const NONE: u32 = u32::MAX;

/// One registration of content; never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Serial(u64);

impl Serial {
    /// What the first block of a sequence follows.
    pub(crate) const ROOT: Self = Self(0);
}

/// The content of a full block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Content<'a> {
    pub(crate) hash: BlockHash,
    pub(crate) parent: Serial,
    pub(crate) tokens: &'a [TokenId],
}

/// What became of content that was to be cached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Registered {
    /// It is found from now on.
    New,
    /// It was cached already, in this block (possibly the same).
    Duplicate(BlockId),
    /// Other content has the same hash; this one is not cached.
    Collision,
}

#[derive(Clone, Debug)]
struct Block {
    /// Holders.
    refs: u32,
    /// Neighbours among the evictable blocks.
    older: u32,
    newer: u32,
    cached: Option<Cached>,
}

#[derive(Clone, Copy, Debug)]
struct Cached {
    hash: BlockHash,
    serial: Serial,
    parent: Serial,
}

#[derive(Debug)]
pub(crate) struct BlockPool {
    block_tokens: usize,
    blocks: Vec<Block>,
    /// Tokens of the cached blocks, block after block.
    tokens: Vec<TokenId>,
    free: Vec<BlockId>,
    /// Ends of the list of evictable blocks.
    oldest: u32,
    newest: u32,
    evictable: u32,
    by_hash: IdMap<BlockHash, BlockId>,
    serials: u64,
}

impl BlockPool {
    pub(crate) fn new(blocks_total: u32, block_tokens: u32) -> Self {
        let blank = Block { refs: 0, older: NONE, newer: NONE, cached: None };
        Self {
            block_tokens: block_tokens as usize,
            blocks: vec![blank; blocks_total as usize],
            tokens: vec![0; blocks_total as usize * block_tokens as usize],
            // Taken from the end: the first block first.
            free: (0..blocks_total).rev().map(BlockId).collect(),
            oldest: NONE,
            newest: NONE,
            evictable: 0,
            // Twice as much as is ever in it, so that removals never make it grow.
            by_hash: IdMap::with_capacity_and_hasher(2 * blocks_total as usize, Default::default()),
            serials: 0,
        }
    }

    pub(crate) fn blocks_total(&self) -> u32 {
        self.blocks.len() as u32
    }

    pub(crate) fn blocks_free(&self) -> u32 {
        self.free.len() as u32
    }

    pub(crate) fn blocks_evictable(&self) -> u32 {
        self.evictable
    }

    /// How many calls of [`Self::allocate`] in a row succeed.
    pub(crate) fn blocks_available(&self) -> u32 {
        self.blocks_free() + self.evictable
    }

    /// A block for its caller alone, its content undefined; `None` when all are held.
    pub(crate) fn allocate(&mut self) -> Option<BlockId> {
        let block = match self.free.pop() {
            Some(block) => block,
            None => self.evict()?,
        };
        let entry = &mut self.blocks[block.0 as usize];
        assert!(entry.refs == 0 && entry.cached.is_none(), "invariant: a block given out is nobody's");
        entry.refs = 1;
        Some(block)
    }

    /// One more holder of a block that is held or cached.
    pub(crate) fn share(&mut self, block: BlockId) {
        let entry = &mut self.blocks[block.0 as usize];
        assert!(entry.refs > 0 || entry.cached.is_some(), "invariant: a free block has nothing to share");
        entry.refs += 1;
        if entry.refs == 1 {
            self.unlink(block);
        }
    }

    /// One holder less. A holder of several blocks of a sequence releases the last one first.
    pub(crate) fn release(&mut self, block: BlockId) {
        let entry = &mut self.blocks[block.0 as usize];
        assert!(entry.refs > 0, "invariant: a block is released by its holders only");
        entry.refs -= 1;
        if entry.refs > 0 {
            return;
        }
        if entry.cached.is_some() {
            self.link_newest(block);
        } else {
            self.free.push(block);
        }
    }

    /// Whether more than one holds `block`.
    pub(crate) fn is_shared(&self, block: BlockId) -> bool {
        self.blocks[block.0 as usize].refs > 1
    }

    /// The registration of a cached block.
    pub(crate) fn serial(&self, block: BlockId) -> Option<Serial> {
        self.blocks[block.0 as usize].cached.map(|cached| cached.serial)
    }

    /// Whether a block of this hash is cached. Its content may be another.
    pub(crate) fn may_have(&self, hash: BlockHash) -> bool {
        self.by_hash.contains_key(&hash)
    }

    /// Whether a block of this hash is cached and held. Its content may be another.
    pub(crate) fn may_hold(&self, hash: BlockHash) -> bool {
        self.by_hash.get(&hash).is_some_and(|block| self.blocks[block.0 as usize].refs > 0)
    }

    /// The cached block with exactly this content, after exactly this parent.
    pub(crate) fn find(&self, content: Content<'_>) -> Option<BlockId> {
        let block = *self.by_hash.get(&content.hash)?;
        self.has(block, content).then_some(block)
    }

    /// Caches what was computed into `block`, which its caller holds.
    pub(crate) fn register(&mut self, block: BlockId, content: Content<'_>) -> Registered {
        if let Some(&present) = self.by_hash.get(&content.hash) {
            let same = self.has(present, content);
            return if same { Registered::Duplicate(present) } else { Registered::Collision };
        }
        let start = block.0 as usize * self.block_tokens;
        self.tokens[start..start + self.block_tokens].copy_from_slice(content.tokens);
        self.serials += 1;
        let entry = &mut self.blocks[block.0 as usize];
        assert!(entry.refs > 0 && entry.cached.is_none(), "invariant: held content is registered once");
        let serial = Serial(self.serials);
        entry.cached = Some(Cached { hash: content.hash, serial, parent: content.parent });
        self.by_hash.insert(content.hash, block);
        Registered::New
    }

    /// Panics unless `holders` are all the references to blocks there are, and the pool is consistent.
    pub(crate) fn check_invariants(&self, holders: impl Iterator<Item = BlockId>) {
        let mut refs = vec![0; self.blocks.len()];
        for block in holders {
            refs[block.0 as usize] += 1;
        }
        let mut active = 0;
        let mut serials = std::collections::BTreeSet::from([Serial::ROOT]);
        for (index, block) in self.blocks.iter().enumerate() {
            assert_eq!(block.refs, refs[index], "invariant: block {index} is held by as many as hold it");
            active += u32::from(block.refs > 0);
            if let Some(cached) = block.cached {
                assert_eq!(self.by_hash.get(&cached.hash), Some(&BlockId(index as u32)));
                assert!(serials.insert(cached.serial), "invariant: a serial is used once");
            }
        }
        let cached = self.blocks.iter().filter_map(|block| block.cached);
        for block in cached {
            assert!(serials.contains(&block.parent), "invariant: the parent of a cached block is cached");
        }
        assert_eq!(self.by_hash.len() + 1, serials.len(), "invariant: the map has cached blocks only");
        self.check_unheld(active);
    }

    fn check_unheld(&self, active: u32) {
        let mut seen = vec![false; self.blocks.len()];
        for block in &self.free {
            let entry = &self.blocks[block.0 as usize];
            assert!(entry.refs == 0 && entry.cached.is_none(), "invariant: a free block is nobody's");
            assert!(!std::mem::replace(&mut seen[block.0 as usize], true), "invariant: freed once");
        }
        let (mut older, mut at, mut evictable) = (NONE, self.oldest, 0);
        while at != NONE {
            let entry = &self.blocks[at as usize];
            assert!(entry.refs == 0 && entry.cached.is_some(), "invariant: evictable is cached and not held");
            assert!(!std::mem::replace(&mut seen[at as usize], true), "invariant: evictable once");
            assert_eq!(entry.older, older, "invariant: neighbours know each other");
            (older, at) = (at, entry.newer);
            evictable += 1;
        }
        assert_eq!(self.newest, older, "invariant: the list ends at the newest");
        assert_eq!(self.evictable, evictable, "invariant: the evictable blocks are counted");
        assert_eq!(
            self.blocks_total(),
            self.blocks_free() + evictable + active,
            "invariant: no block is lost"
        );
    }

    fn has(&self, block: BlockId, content: Content<'_>) -> bool {
        let start = block.0 as usize * self.block_tokens;
        self.blocks[block.0 as usize].cached.is_some_and(|cached| cached.parent == content.parent)
            && self.tokens[start..start + self.block_tokens] == *content.tokens
    }

    fn evict(&mut self) -> Option<BlockId> {
        if self.oldest == NONE {
            return None;
        }
        let block = BlockId(self.oldest);
        self.unlink(block);
        let cached = self.blocks[block.0 as usize].cached.take();
        let cached = cached.expect("invariant: an evictable block is cached");
        self.by_hash.remove(&cached.hash);
        Some(block)
    }

    fn link_newest(&mut self, block: BlockId) {
        let older = std::mem::replace(&mut self.newest, block.0);
        match self.blocks.get_mut(older as usize) {
            Some(neighbour) => neighbour.newer = block.0,
            None => self.oldest = block.0,
        }
        let entry = &mut self.blocks[block.0 as usize];
        (entry.older, entry.newer) = (older, NONE);
        self.evictable += 1;
    }

    fn unlink(&mut self, block: BlockId) {
        let Block { older, newer, .. } = self.blocks[block.0 as usize];
        match self.blocks.get_mut(older as usize) {
            Some(neighbour) => neighbour.newer = newer,
            None => self.oldest = newer,
        }
        match self.blocks.get_mut(newer as usize) {
            Some(neighbour) => neighbour.older = older,
            None => self.newest = older,
        }
        self.evictable -= 1;
    }
}
