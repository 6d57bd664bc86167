//! The blocks of the cache: how many references each block has, and what content is cached in it.
//!
//! The pool decides which block is allocated and which cached content is evicted. It knows nothing about sequences: its
//! callers hold references and release each reference once.
//!
//! ```text
//!            allocate              register                release (last reference)
//!   free ───────────────► active ──────────► active, cached ──────────► evictable
//!    ▲                       │                      ▲                     │   │
//!    └────────── release ────┘                      └────── acquire ──────┘   │
//!    ▲                                                                        │
//!    └───────────── allocate, when no block is free: the first in the queue ──┘
//! ```
//!
//! The prefix cache maps the hash of a block to the block. A hit must also have equal tokens and images, and the same
//! parent: the same cached block or, for the first block of a sequence, the same prefix seed and adapter. A hash
//! collision can therefore only cause a cache miss, and never returns the content of another prefix.
//!
//! As long as a block is cached, its parent remains cached, with the same content: a sequence that holds a cached block
//! also holds the blocks before it, releases the later blocks first, and acquires a cached block only after the blocks
//! before it. Therefore, blocks enter the eviction queue before their parents.

use std::collections::BTreeMap;

use crate::block::{BlockHash, BlockId, BlockParent, TokenId};
use crate::block_keys::BlockKeys;
use crate::id_map::IdMap;
use eviction_queue::{EvictionQueue, RETENTION};

mod eviction_queue;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod traces;

/// Several hits of a block count as one if fewer blocks than the cache size divided by this number were evicted between
/// them: requests that arrive in a burst say little about later ones.
const BURSTS_PER_CACHE: u32 = 2;

/// The content of a full block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockContent<'a> {
    pub(crate) hash: BlockHash,
    pub(crate) parent: BlockParent,
    pub(crate) tokens: &'a [TokenId],
    /// The words that identify the images of the block, or an empty slice if it has none.
    pub(crate) images: &'a [u32],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RegisterResult {
    /// The block is cached.
    Cached,
    /// The content was already cached, in this block (which may be the same block).
    Duplicate(BlockId),
    /// Other content has the same hash; this content is not cached.
    Collision,
}

#[derive(Clone, Debug)]
struct Block {
    ref_count: u32,
    cached: Option<CachedBlock>,
}

#[derive(Clone, Copy, Debug)]
struct CachedBlock {
    hash: BlockHash,
    parent: BlockParent,
    /// Number of cached blocks that directly follow this one.
    children: u32,
    /// Number of counted hits.
    hits: u8,
    /// The number of evictions at the time of the last counted hit, or of the registration if no hit has counted.
    last_hit: u64,
    /// Whether the cached prefix of some request ended with this block.
    has_ended_hit: bool,
}

#[derive(Clone, Debug)]
pub(crate) struct BlockPool {
    block_tokens: usize,
    blocks: Vec<Block>,
    /// The tokens of the cached blocks, block after block.
    tokens: Vec<TokenId>,
    /// The words that identify the images of the cached blocks that have any.
    images: BTreeMap<BlockId, Box<[u32]>>,
    free: Vec<BlockId>,
    evictable: EvictionQueue,
    /// Number of evictions during which several hits of a block count as one.
    burst_evictions: u64,
    by_hash: IdMap<BlockHash, BlockId>,
    /// The keys of the blocks, if evictions are reported.
    keys: Option<BlockKeys>,
}

impl BlockPool {
    pub(crate) fn new(blocks_total: u32, block_tokens: u32) -> Self {
        Self::with_retention(blocks_total, block_tokens, RETENTION)
    }

    /// Like [`Self::new`], with another retention of reused blocks.
    fn with_retention(blocks_total: u32, block_tokens: u32, retention: [u32; RETENTION.len()]) -> Self {
        let blank = Block { ref_count: 0, cached: None };
        Self {
            block_tokens: block_tokens as usize,
            blocks: vec![blank; blocks_total as usize],
            tokens: vec![0; blocks_total as usize * block_tokens as usize],
            images: BTreeMap::new(),
            // Blocks are allocated from the end of the list, so the order is reversed to begin with the first block.
            free: (0..blocks_total).rev().map(BlockId).collect(),
            evictable: EvictionQueue::new(blocks_total, retention),
            burst_evictions: u64::from(blocks_total / BURSTS_PER_CACHE),
            // The capacity is twice the largest number of entries, so that the map never grows because of removals.
            by_hash: IdMap::with_capacity_and_hasher(2 * blocks_total as usize, Default::default()),
            keys: None,
        }
    }

    /// Sets whether blocks have keys and evictions are reported. Blocks that were cached before this call have no keys.
    pub(crate) fn set_keys(&mut self, keys: Option<BlockKeys>) {
        self.keys = keys;
    }

    pub(crate) fn keys(&self) -> Option<&BlockKeys> {
        self.keys.as_ref()
    }

    pub(crate) fn keys_mut(&mut self) -> Option<&mut BlockKeys> {
        self.keys.as_mut()
    }

    pub(crate) fn block_tokens(&self) -> usize {
        self.block_tokens
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

    /// Number of blocks that can be allocated.
    pub(crate) fn blocks_available(&self) -> u32 {
        self.blocks_free() + self.evictable.len()
    }

    /// Allocates a block with one reference and undefined content. `None` if all blocks are active.
    pub(crate) fn allocate(&mut self) -> Option<BlockId> {
        let block = match self.free.pop() {
            Some(block) => block,
            None => self.evict()?,
        };
        let entry = &mut self.blocks[block.0 as usize];
        assert!(entry.ref_count == 0 && entry.cached.is_none(), "invariant: an allocated block was free");
        entry.ref_count = 1;
        Some(block)
    }

    /// Adds a reference to a block that is active or cached.
    pub(crate) fn acquire(&mut self, block: BlockId) {
        let entry = &mut self.blocks[block.0 as usize];
        assert!(entry.ref_count > 0 || entry.cached.is_some(), "invariant: a free block has no content");
        entry.ref_count += 1;
        if entry.ref_count == 1 {
            self.evictable.remove(block);
        }
    }

    /// Records that a request found these consecutive blocks in the cache.
    ///
    /// The hit is counted only if another request's hit has ended with the same last block, or if other cached blocks
    /// follow the last block: in both cases, several requests have this prefix. Otherwise, the request is most likely
    /// the next turn of the same conversation, whose earlier turns are useless to other requests.
    pub(crate) fn record_hit(&mut self, blocks: impl DoubleEndedIterator<Item = BlockId>) {
        let mut blocks = blocks.rev();
        let Some(last) = blocks.next() else { return };
        let last_cached = self.blocks[last.0 as usize].cached.as_mut();
        let last_cached = last_cached.expect("invariant: a block that was hit is cached");
        if !std::mem::replace(&mut last_cached.has_ended_hit, true) && last_cached.children == 0 {
            return;
        }
        let now = self.evictable.evictions();
        for block in std::iter::once(last).chain(blocks) {
            let Block { ref_count, cached } = &mut self.blocks[block.0 as usize];
            let cached = cached.as_mut().expect("invariant: a block that was hit is cached");
            // A parent has at least as many hits as its child: a hit that counts for the child also counts for the
            // parent, unless another hit of the parent was counted within the same burst.
            if now - cached.last_hit >= self.burst_evictions {
                cached.last_hit = now;
                cached.hits = cached.hits.saturating_add(1);
            }
            if *ref_count == 0 {
                self.evictable.remove(block);
                self.evictable.push(block, cached.hits);
            }
        }
    }

    /// Removes a reference. The blocks of a sequence must be released in reverse order.
    pub(crate) fn release(&mut self, block: BlockId) {
        let entry = &mut self.blocks[block.0 as usize];
        assert!(entry.ref_count > 0, "invariant: each reference is released once");
        entry.ref_count -= 1;
        if entry.ref_count > 0 {
            return;
        }
        match entry.cached {
            Some(cached) => self.evictable.push(block, cached.hits),
            None => self.free.push(block),
        }
    }

    /// Whether `block` has more than one reference.
    pub(crate) fn is_shared(&self, block: BlockId) -> bool {
        self.blocks[block.0 as usize].ref_count > 1
    }

    /// Whether the content of `block` is in the prefix cache.
    pub(crate) fn is_cached(&self, block: BlockId) -> bool {
        self.blocks[block.0 as usize].cached.is_some()
    }

    /// Whether a block with this hash is cached. Its content may differ.
    pub(crate) fn contains_hash(&self, hash: BlockHash) -> bool {
        self.by_hash.contains_key(&hash)
    }

    /// Whether a block with this hash is cached and active. Its content may differ.
    pub(crate) fn is_hash_active(&self, hash: BlockHash) -> bool {
        self.by_hash.get(&hash).is_some_and(|block| self.blocks[block.0 as usize].ref_count > 0)
    }

    /// The cached block that has exactly this content, and follows exactly this parent.
    pub(crate) fn find(&self, content: BlockContent<'_>) -> Option<BlockId> {
        let block = *self.by_hash.get(&content.hash)?;
        self.has_content(block, content).then_some(block)
    }

    /// Caches the content of `block`, which the caller holds. The caller holds its parent as well.
    pub(crate) fn register(&mut self, block: BlockId, content: BlockContent<'_>) -> RegisterResult {
        if let Some(&present) = self.by_hash.get(&content.hash) {
            let is_same = self.has_content(present, content);
            return if is_same { RegisterResult::Duplicate(present) } else { RegisterResult::Collision };
        }
        let start = block.0 as usize * self.block_tokens;
        self.tokens[start..start + self.block_tokens].copy_from_slice(content.tokens);
        if !content.images.is_empty() {
            self.images.insert(block, content.images.into());
        }
        if let Some(keys) = &mut self.keys {
            keys.record_cached(block, content.parent, content.tokens, content.images);
        }
        if let Some(parent) = self.cached_parent(content.parent) {
            parent.children += 1;
        }
        let entry = &mut self.blocks[block.0 as usize];
        let can_register = entry.ref_count > 0 && entry.cached.is_none();
        assert!(can_register, "invariant: an active block is registered once");
        entry.cached = Some(CachedBlock {
            hash: content.hash,
            parent: content.parent,
            children: 0,
            hits: 0,
            last_hit: self.evictable.evictions(),
            has_ended_hit: false,
        });
        self.by_hash.insert(content.hash, block);
        RegisterResult::Cached
    }

    /// Removes the content of an active block from the prefix cache, so that the block can be overwritten. Returns
    /// false and does nothing if the block is not cached, has several references, or is followed by cached blocks.
    pub(crate) fn unregister(&mut self, block: BlockId) -> bool {
        let entry = &mut self.blocks[block.0 as usize];
        let is_exclusive = entry.ref_count == 1 && entry.cached.is_some_and(|cached| cached.children == 0);
        if is_exclusive {
            self.uncache(block);
        }
        is_exclusive
    }

    /// Evicts all evictable blocks.
    pub(crate) fn evict_all(&mut self) {
        while let Some(block) = self.evict() {
            self.free.push(block);
        }
    }

    /// Panics unless `references` are all references to blocks and the pool is consistent.
    pub(crate) fn check_invariants(&self, references: impl Iterator<Item = BlockId>) {
        let mut ref_counts = vec![0; self.blocks.len()];
        for block in references {
            ref_counts[block.0 as usize] += 1;
        }
        let mut active = 0;
        let (mut cached_blocks, mut children) = (0, vec![0; self.blocks.len()]);
        for (index, block) in self.blocks.iter().enumerate() {
            assert_eq!(
                block.ref_count, ref_counts[index],
                "invariant: the references of block {index} are counted"
            );
            active += u32::from(block.ref_count > 0);
            if let Some(cached) = block.cached {
                assert_eq!(self.by_hash.get(&cached.hash), Some(&BlockId(index as u32)));
                cached_blocks += 1;
                if let BlockParent::Block(parent) = cached.parent {
                    children[parent.0 as usize] += 1;
                    let parent = self.blocks[parent.0 as usize].cached;
                    let parent = parent.expect("invariant: the parent of a cached block is cached");
                    assert!(parent.hits >= cached.hits, "invariant: a hit of a block is a hit of its parent");
                }
            }
        }
        let counted = self.blocks.iter().map(|block| block.cached.map_or(0, |cached| cached.children));
        assert!(counted.eq(children), "invariant: the children of each block are counted");
        assert_eq!(self.by_hash.len(), cached_blocks, "invariant: the map has only cached blocks");
        assert!(
            self.images.keys().all(|block| self.is_cached(*block)),
            "invariant: only cached blocks have images"
        );
        self.check_inactive(active);
    }

    fn check_inactive(&self, active: u32) {
        let mut seen = vec![false; self.blocks.len()];
        for block in &self.free {
            let entry = &self.blocks[block.0 as usize];
            let is_free = entry.ref_count == 0 && entry.cached.is_none();
            assert!(is_free, "invariant: a free block has no references and no content");
            assert!(
                !std::mem::replace(&mut seen[block.0 as usize], true),
                "invariant: a block is freed once"
            );
        }
        let evictable = self.evictable.check_invariants();
        let mut deadlines = BTreeMap::new();
        for &(block, list, deadline) in &evictable {
            let entry = &self.blocks[block.0 as usize];
            let hits = entry.cached.expect("invariant: an evictable block is cached").hits;
            deadlines.insert(block, deadline);
            assert_eq!(entry.ref_count, 0, "invariant: an evictable block has no references");
            assert_eq!(
                hits.min(RETENTION.len() as u8 - 1),
                list,
                "invariant: a block is in the list of its number of hits"
            );
            assert!(
                !std::mem::replace(&mut seen[block.0 as usize], true),
                "invariant: a block is evictable once"
            );
        }
        for (index, block) in self.blocks.iter().enumerate() {
            let Some(CachedBlock { parent: BlockParent::Block(parent), .. }) = block.cached else { continue };
            let parent = deadlines.get(&parent);
            let child = deadlines.get(&BlockId(index as u32));
            let is_ordered = parent.is_none_or(|parent| child.is_some_and(|child| child < parent));
            assert!(is_ordered, "invariant: a block is evicted before its parent");
        }
        assert_eq!(
            self.blocks_total(),
            self.blocks_free() + evictable.len() as u32 + active,
            "invariant: no block is lost"
        );
    }

    fn has_content(&self, block: BlockId, content: BlockContent<'_>) -> bool {
        let start = block.0 as usize * self.block_tokens;
        self.blocks[block.0 as usize].cached.is_some_and(|cached| cached.parent == content.parent)
            && self.tokens[start..start + self.block_tokens] == *content.tokens
            && self.images.get(&block).map_or(&[][..], |images| &images[..]) == content.images
    }

    fn evict(&mut self) -> Option<BlockId> {
        let block = self.evictable.pop()?;
        self.uncache(block);
        Some(block)
    }

    /// Removes the content of a block from the prefix cache.
    fn uncache(&mut self, block: BlockId) {
        let cached = self.blocks[block.0 as usize].cached.take();
        let cached = cached.expect("invariant: only a cached block is removed from the cache");
        assert_eq!(cached.children, 0, "invariant: a block is removed from the cache before its parent");
        self.by_hash.remove(&cached.hash);
        self.images.remove(&block);
        if let Some(keys) = &mut self.keys {
            keys.record_evicted(block);
        }
        if let Some(parent) = self.cached_parent(cached.parent) {
            parent.children -= 1;
        }
    }

    /// The parent of a cached block, unless it is the start of a sequence.
    fn cached_parent(&mut self, parent: BlockParent) -> Option<&mut CachedBlock> {
        let BlockParent::Block(parent) = parent else { return None };
        let cached = self.blocks[parent.0 as usize].cached.as_mut();
        Some(cached.expect("invariant: the parent of a cached block is cached"))
    }
}
