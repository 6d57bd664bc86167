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
//!    └───────────── allocate, when nothing is free: the first of these ───────┘
//! ```
//!
//! The prefix cache maps the hash of a block to the block. A hit must also have equal tokens and follow the
//! same cached content: every registration has its own serial, and a block keeps its parent's. So a collision
//! of hashes costs a hit and never yields foreign content.
//!
//! A cached block's parent is cached too: whoever holds a block holds those before it, gives back the later ones
//! first, and finds none without finding those before it, so that the order of eviction (`evictable`) has children
//! before parents.

use crate::TokenId;
use crate::block::{BlockHash, BlockId, IdMap};
use crate::keys::Keys;
use evictable::{Evictable, STAYS};

mod evictable;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod traces;

/// Uses of a block between which less than this part of the cache is given up count as one: what is asked several times
/// in a row is as likely as not never asked again.
const BURSTS_PER_CACHE: u32 = 2;

/// One registration of content; never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Serial(u64);

impl Serial {
    /// Set in those that no registration has.
    const ROOTS: u64 = 1 << 63;

    /// What the first block of a sequence follows that is computed with this adapter: content of one adapter is never
    /// found for another, whatever the hashes.
    pub(crate) fn root(adapter: u32) -> Self {
        Self(Self::ROOTS | u64::from(adapter))
    }

    fn is_root(self) -> bool {
        self.0 & Self::ROOTS != 0
    }
}

/// The content of a full block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Content<'a> {
    pub(crate) hash: BlockHash,
    pub(crate) parent: Serial,
    pub(crate) tokens: &'a [TokenId],
}

/// What a block that is to be cached comes after.
#[derive(Clone, Copy, Debug)]
pub(crate) enum After {
    /// Nothing: it is the first of a sequence with this salt and this adapter.
    Root(BlockHash, u32),
    /// A cached block.
    Block(BlockId),
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
    cached: Option<Cached>,
}

#[derive(Clone, Copy, Debug)]
struct Cached {
    hash: BlockHash,
    serial: Serial,
    parent: Serial,
    /// How many requests used it again, as far as that is counted.
    reused: u8,
    /// When that was counted last, in blocks given up.
    counted: u64,
    /// Cached blocks that follow it.
    children: u32,
    /// Whether a request found it and nothing that follows it.
    left: bool,
    /// The block that it follows.
    after: Option<BlockId>,
}

#[derive(Debug)]
pub(crate) struct BlockPool {
    block_tokens: usize,
    blocks: Vec<Block>,
    /// Tokens of the cached blocks, block after block.
    tokens: Vec<TokenId>,
    free: Vec<BlockId>,
    evictable: Evictable,
    /// Uses of a block count as one until so many blocks were given up.
    burst_evictions: u64,
    by_hash: IdMap<BlockHash, BlockId>,
    serials: u64,
    /// If what is evicted is told.
    keys: Option<Keys>,
}

impl BlockPool {
    pub(crate) fn new(blocks_total: u32, block_tokens: u32) -> Self {
        Self::staying(blocks_total, block_tokens, STAYS)
    }

    /// As [`Self::new`], with another order of eviction.
    fn staying(blocks_total: u32, block_tokens: u32, stays: [u32; STAYS.len()]) -> Self {
        let blank = Block { refs: 0, cached: None };
        Self {
            block_tokens: block_tokens as usize,
            blocks: vec![blank; blocks_total as usize],
            tokens: vec![0; blocks_total as usize * block_tokens as usize],
            // Taken from the end: the first block first.
            free: (0..blocks_total).rev().map(BlockId).collect(),
            evictable: Evictable::new(blocks_total, stays),
            burst_evictions: u64::from(blocks_total / BURSTS_PER_CACHE),
            // Twice as much as is ever in it, so that removals never make it grow.
            by_hash: IdMap::with_capacity_and_hasher(2 * blocks_total as usize, Default::default()),
            serials: 0,
            keys: None,
        }
    }

    /// Whether blocks have keys, which is to be said before anything is cached.
    pub(crate) fn set_keys(&mut self, keys: Option<Keys>) {
        self.keys = keys;
    }

    pub(crate) fn keys(&self) -> Option<&Keys> {
        self.keys.as_ref()
    }

    pub(crate) fn keys_mut(&mut self) -> Option<&mut Keys> {
        self.keys.as_mut()
    }

    pub(crate) fn blocks_total(&self) -> u32 {
        self.blocks.len() as u32
    }

    pub(crate) fn blocks_free(&self) -> u32 {
        self.free.len() as u32
    }

    pub(crate) fn blocks_evictable(&self) -> u32 {
        self.evictable.len()
    }

    /// How many calls of [`Self::allocate`] in a row succeed.
    pub(crate) fn blocks_available(&self) -> u32 {
        self.blocks_free() + self.evictable.len()
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
            self.evictable.remove(block);
        }
    }

    /// A request found these blocks, each of which follows the one before, and goes on from the last of them.
    ///
    /// They count as used again only if somebody has gone on from there before. Else this is most likely the same
    /// conversation a turn later, and its earlier turns are of no use to anybody else.
    pub(crate) fn found(&mut self, blocks: impl DoubleEndedIterator<Item = BlockId>) {
        let mut blocks = blocks.rev();
        let Some(last) = blocks.next() else { return };
        let known = self.blocks[last.0 as usize].cached.as_mut();
        let known = known.expect("invariant: what is found is cached");
        if !std::mem::replace(&mut known.left, true) && known.children == 0 {
            return;
        }
        let now = self.evictable.evictions();
        for block in std::iter::once(last).chain(blocks) {
            let Block { refs, cached } = &mut self.blocks[block.0 as usize];
            let cached = cached.as_mut().expect("invariant: what is found is cached");
            // As often as for what follows it at least: when that counts, this does, or did within the same burst.
            if now - cached.counted >= self.burst_evictions {
                cached.counted = now;
                cached.reused = cached.reused.saturating_add(1);
            }
            if *refs == 0 {
                self.evictable.remove(block);
                self.evictable.add(block, cached.reused);
            }
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
        match entry.cached {
            Some(cached) => self.evictable.add(block, cached.reused),
            None => self.free.push(block),
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

    /// Caches what was computed into `block`, which its caller holds, and the block `after` which it comes as well.
    pub(crate) fn register(&mut self, block: BlockId, after: After, content: Content<'_>) -> Registered {
        if let Some(&present) = self.by_hash.get(&content.hash) {
            let same = self.has(present, content);
            return if same { Registered::Duplicate(present) } else { Registered::Collision };
        }
        let start = block.0 as usize * self.block_tokens;
        self.tokens[start..start + self.block_tokens].copy_from_slice(content.tokens);
        if let Some(keys) = &mut self.keys {
            keys.cached(block, after, content.tokens);
        }
        let after = match after {
            After::Root(..) => None,
            After::Block(before) => Some(before),
        };
        if let Some(after) = after {
            let after = self.blocks[after.0 as usize].cached.as_mut();
            after.expect("invariant: the parent of a cached block is cached").children += 1;
        }
        self.serials += 1;
        let entry = &mut self.blocks[block.0 as usize];
        assert!(entry.refs > 0 && entry.cached.is_none(), "invariant: held content is registered once");
        let serial = Serial(self.serials);
        entry.cached = Some(Cached {
            hash: content.hash,
            serial,
            parent: content.parent,
            reused: 0,
            counted: self.evictable.evictions(),
            children: 0,
            left: false,
            after,
        });
        self.by_hash.insert(content.hash, block);
        Registered::New
    }

    /// Takes a block that is held out of the cache: it is its holder's alone then. False, and nothing happens, if there are others,
    /// or cached blocks that follow it.
    pub(crate) fn unregister(&mut self, block: BlockId) -> bool {
        let entry = &mut self.blocks[block.0 as usize];
        let is_own = entry.refs == 1 && entry.cached.is_some_and(|cached| cached.children == 0);
        if is_own {
            self.uncache(block);
        }
        is_own
    }

    /// Forgets all content that nobody holds, so that its blocks are free.
    pub(crate) fn forget_evictable(&mut self) {
        while let Some(block) = self.evict() {
            self.free.push(block);
        }
    }

    /// Panics unless `holders` are all the references to blocks there are, and the pool is consistent.
    pub(crate) fn check_invariants(&self, holders: impl Iterator<Item = BlockId>) {
        let mut refs = vec![0; self.blocks.len()];
        for block in holders {
            refs[block.0 as usize] += 1;
        }
        let mut active = 0;
        let mut serials = std::collections::BTreeMap::new();
        for (index, block) in self.blocks.iter().enumerate() {
            assert_eq!(block.refs, refs[index], "invariant: block {index} is held by as many as hold it");
            active += u32::from(block.refs > 0);
            if let Some(cached) = block.cached {
                assert_eq!(self.by_hash.get(&cached.hash), Some(&BlockId(index as u32)));
                let former = serials.insert(cached.serial, cached.reused);
                assert!(former.is_none(), "invariant: a serial is used once");
            }
        }
        let cached = self.blocks.iter().filter_map(|block| block.cached);
        for block in cached {
            // Roots are used with whatever follows them.
            let parent = if block.parent.is_root() { Some(&u8::MAX) } else { serials.get(&block.parent) };
            let parent = parent.expect("invariant: the parent of a cached block is cached");
            assert!(*parent >= block.reused, "invariant: a block is used with those before it");
        }
        assert_eq!(self.by_hash.len(), serials.len(), "invariant: the map has cached blocks only");
        self.check_unheld(active);
    }

    fn check_unheld(&self, active: u32) {
        let mut seen = vec![false; self.blocks.len()];
        for block in &self.free {
            let entry = &self.blocks[block.0 as usize];
            assert!(entry.refs == 0 && entry.cached.is_none(), "invariant: a free block is nobody's");
            assert!(!std::mem::replace(&mut seen[block.0 as usize], true), "invariant: freed once");
        }
        let evictable = self.evictable.check_invariants();
        let mut due = std::collections::BTreeMap::new();
        for &(block, list, when) in &evictable {
            let entry = &self.blocks[block.0 as usize];
            let Cached { serial, reused, .. } = entry.cached.expect("invariant: evictable is cached");
            due.insert(serial, when);
            assert_eq!(entry.refs, 0, "invariant: evictable is not held");
            assert_eq!(
                reused.min(STAYS.len() as u8 - 1),
                list,
                "invariant: a block is in the list of its kind"
            );
            assert!(!std::mem::replace(&mut seen[block.0 as usize], true), "invariant: evictable once");
        }
        for cached in self.blocks.iter().filter_map(|block| block.cached) {
            let parent = due.get(&cached.parent);
            let before =
                parent.is_none_or(|parent| due.get(&cached.serial).is_some_and(|child| child < parent));
            assert!(before, "invariant: a block goes before the one that it follows");
        }
        assert_eq!(
            self.blocks_total(),
            self.blocks_free() + evictable.len() as u32 + active,
            "invariant: no block is lost"
        );
    }

    fn has(&self, block: BlockId, content: Content<'_>) -> bool {
        let start = block.0 as usize * self.block_tokens;
        self.blocks[block.0 as usize].cached.is_some_and(|cached| cached.parent == content.parent)
            && self.tokens[start..start + self.block_tokens] == *content.tokens
    }

    fn evict(&mut self) -> Option<BlockId> {
        let block = self.evictable.evict()?;
        self.uncache(block);
        Some(block)
    }

    /// What a block holds is not found any more.
    fn uncache(&mut self, block: BlockId) {
        let cached = self.blocks[block.0 as usize].cached.take();
        let cached = cached.expect("invariant: a block that leaves the cache is in it");
        self.by_hash.remove(&cached.hash);
        if let Some(keys) = &mut self.keys {
            keys.evicted(block);
        }
        if let Some(after) = cached.after {
            let after = self.blocks[after.0 as usize].cached.as_mut();
            after.expect("invariant: the parent of a cached block is cached").children -= 1;
        }
    }
}
