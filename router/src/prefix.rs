//! Which beginnings of prompts a replica has in its cache, as far as the router can tell from what it sent.
//!
//! A prompt is cut into blocks, and each block's hash takes in the one before: equal hashes mean equal prompts
//! up to there. A text is cut by bytes, of as many as a block of tokens has on average, since the router does
//! not tokenise. What was sent to a replica is remembered in the order in which the replica would forget it
//! (least recently used first, ends before beginnings), and no more of it than the replica's cache holds.
//!
//! A wrong guess costs time, never correctness: the replica looks into its own cache.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Number of blocks of a prompt that the router compares with the prefix caches of replicas.
///
/// Beyond it: the rest of the prompt counts as not cached.
pub const CHAIN_BLOCKS_MAX: usize = 4096;

/// Number of cached blocks that the router remembers of each replica, however large its cache is.
///
/// Beyond it: the least recently used blocks are forgotten.
pub const INDEX_BLOCKS_MAX: usize = 1 << 15;

/// The hashes of a prompt's leading full blocks, each of all that goes before it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Chain {
    hashes: Vec<u64>,
    /// Of text, bytes; of tokens, tokens.
    block_len: usize,
    unit: Unit,
}

/// What a prompt is counted in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Unit {
    /// Bytes of text.
    #[default]
    Bytes,
    /// Tokens.
    Tokens,
}

/// What a replica's cache depends on beside the prompt's text: prompts that differ in it share no blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PromptContext<'a> {
    /// The model, which may be an adapter on the same replicas.
    pub model: &'a str,
    /// The tenant that replicas are told, whose cached blocks no other shares; empty if there is none.
    pub tenant: &'a [u8],
    /// The salt that separates the cached blocks of clients.
    pub cache_salt: &'a [u8],
    /// The tools, which templates put before the messages.
    pub tools: &'a [u8],
}

impl PromptContext<'_> {
    /// The seed of the chains of such prompts. `secret` is the router's own and random, so that nobody can prepare
    /// prompts that collide.
    #[must_use]
    pub fn seed(&self, secret: u64) -> u64 {
        let Self { model, tenant, cache_salt, tools } = *self;
        [model.as_bytes(), tenant, cache_salt, tools]
            .into_iter()
            .fold(secret, |seed, part| xxh3_64_with_seed(part, seed))
    }
}

impl Chain {
    /// The chain of a text, in blocks of `block_bytes` (see [`BlockBytes`]), with a seed of [`PromptContext`].
    ///
    /// # Panics
    /// If `block_bytes` is 0.
    #[must_use]
    pub fn of_text(text: &[u8], block_bytes: usize, seed: u64) -> Self {
        let blocks = text.chunks_exact(block_bytes).take(CHAIN_BLOCKS_MAX);
        let hashes = linked(seed, blocks.map(|block| move |parent| xxh3_64_with_seed(block, parent)));
        Self { hashes, block_len: block_bytes, unit: Unit::Bytes }
    }

    /// The chain of a prompt of tokens.
    ///
    /// # Panics
    /// If `block_tokens` is 0.
    #[must_use]
    pub fn of_tokens(tokens: &[u32], block_tokens: usize, seed: u64) -> Self {
        let mut bytes = Vec::with_capacity(block_tokens * size_of::<u32>());
        let mut hashes = Vec::with_capacity((tokens.len() / block_tokens).min(CHAIN_BLOCKS_MAX));
        // Tokens and text of the same bytes are different prompts.
        let mut parent = !seed;
        for block in tokens.chunks_exact(block_tokens).take(CHAIN_BLOCKS_MAX) {
            bytes.clear();
            bytes.extend(block.iter().flat_map(|token| token.to_le_bytes()));
            parent = xxh3_64_with_seed(&bytes, parent);
            hashes.push(parent);
        }
        Self { hashes, block_len: block_tokens, unit: Unit::Tokens }
    }

    /// Full blocks.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.hashes.len()
    }

    /// How much of the prompt `blocks` leading blocks are, and in what unit.
    #[must_use]
    pub fn len_of(&self, blocks: usize) -> (usize, Unit) {
        (blocks * self.block_len, self.unit)
    }

    /// The tokens that `blocks` leading blocks have, at this many bytes a token where it is text.
    #[must_use]
    pub fn tokens_of(&self, blocks: usize, bytes_per_token: f64) -> u32 {
        let (length, unit) = self.len_of(blocks);
        let tokens = match unit {
            Unit::Tokens => length as f64,
            Unit::Bytes => length as f64 / bytes_per_token,
        };
        tokens.min(f64::from(u32::MAX)) as u32
    }
}

fn linked<H: FnOnce(u64) -> u64>(seed: u64, blocks: impl Iterator<Item = H>) -> Vec<u64> {
    let mut parent = seed;
    blocks
        .map(|hash| {
            parent = hash(parent);
            parent
        })
        .collect()
}

/// How many bytes a block of text has. It stays the same while the measured bytes a token move a little: with
/// another length all hashes are others, and everything that is remembered is of no more use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockBytes(usize);

impl BlockBytes {
    /// For replicas with blocks of `block_tokens`.
    #[must_use]
    pub fn new(block_tokens: u32, bytes_per_token: f64) -> Self {
        let wanted = (f64::from(block_tokens.max(1)) * bytes_per_token).clamp(8.0, 65536.0);
        Self(1 << wanted.log2().round() as u32)
    }

    /// Follows what is measured, once it is off by more than the rounding explains.
    pub fn update(&mut self, block_tokens: u32, bytes_per_token: f64) {
        let wanted = f64::from(block_tokens.max(1)) * bytes_per_token;
        let off = wanted / self.0 as f64;
        if !(1.0 / 1.7..=1.7).contains(&off) {
            *self = Self::new(block_tokens, bytes_per_token);
        }
    }

    /// The bytes.
    #[must_use]
    pub fn get(self) -> usize {
        self.0
    }
}

/// What one replica is believed to have in its cache. Bounded by [`INDEX_BLOCKS_MAX`].
#[derive(Debug)]
pub struct PrefixIndex {
    slots: HashMap<u64, u32, BuildHasherDefault<Hashed>>,
    /// A ring in the order of use: `next` of the sentinel (node 0) was used last.
    nodes: Vec<Node>,
    unused: Vec<u32>,
    capacity: usize,
}

#[derive(Clone, Copy, Debug)]
struct Node {
    /// `None`: a block of output, which is in the cache but in no prompt so far.
    hash: Option<u64>,
    previous: u32,
    next: u32,
}

const SENTINEL: u32 = 0;

impl Default for PrefixIndex {
    fn default() -> Self {
        let sentinel = Node { hash: None, previous: SENTINEL, next: SENTINEL };
        Self {
            slots: HashMap::default(),
            nodes: vec![sentinel],
            unused: Vec::new(),
            capacity: INDEX_BLOCKS_MAX,
        }
    }
}

impl PrefixIndex {
    /// The leading blocks of `chain` that are believed to be cached.
    #[must_use]
    pub fn cached_blocks(&self, chain: &Chain) -> usize {
        // A block is never forgotten before those that follow it.
        chain.hashes.partition_point(|hash| self.slots.contains_key(hash))
    }

    /// Remembers that `chain` was sent there, with an answer expected of `output_blocks`.
    pub fn record(&mut self, chain: &Chain, output_blocks: usize) {
        for _ in 0..output_blocks.min(self.capacity) {
            self.insert(None);
        }
        // From the end, so that the beginning is the last to be forgotten.
        for &hash in chain.hashes.iter().rev() {
            match self.slots.get(&hash) {
                Some(&slot) => {
                    self.unlink(slot);
                    self.link(slot);
                }
                None => self.insert(Some(hash)),
            }
        }
        self.shrink();
    }

    /// Keeps no more than the replica can have: the blocks that it reports to be active or evictable, and those
    /// of requests that have none yet.
    pub fn trim(&mut self, blocks: usize) {
        self.capacity = blocks.min(INDEX_BLOCKS_MAX);
        self.shrink();
    }

    /// Forgets everything: another process has its place.
    pub fn reset(&mut self) {
        *self = Self { capacity: self.capacity, ..Self::default() };
    }

    /// Blocks remembered, those of output included.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.nodes.len() - 1 - self.unused.len()
    }

    fn shrink(&mut self) {
        while self.blocks() > self.capacity {
            let oldest = self.nodes[SENTINEL as usize].previous;
            self.unlink(oldest);
            if let Some(hash) = self.nodes[oldest as usize].hash.take() {
                self.slots.remove(&hash);
            }
            self.unused.push(oldest);
        }
    }

    fn insert(&mut self, hash: Option<u64>) {
        let node = Node { hash, previous: SENTINEL, next: SENTINEL };
        let slot = match self.unused.pop() {
            Some(slot) => {
                self.nodes[slot as usize] = node;
                slot
            }
            None => {
                self.nodes.push(node);
                (self.nodes.len() - 1) as u32
            }
        };
        if let Some(hash) = hash {
            self.slots.insert(hash, slot);
        }
        self.link(slot);
    }

    fn link(&mut self, slot: u32) {
        let next = self.nodes[SENTINEL as usize].next;
        self.nodes[slot as usize].previous = SENTINEL;
        self.nodes[slot as usize].next = next;
        self.nodes[next as usize].previous = slot;
        self.nodes[SENTINEL as usize].next = slot;
    }

    fn unlink(&mut self, slot: u32) {
        let Node { previous, next, .. } = self.nodes[slot as usize];
        self.nodes[previous as usize].next = next;
        self.nodes[next as usize].previous = previous;
    }
}

/// Keys that are hashes already.
#[derive(Clone, Copy, Debug, Default)]
struct Hashed(u64);

impl Hasher for Hashed {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(byte);
        }
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = value;
    }
}

#[cfg(test)]
mod tests;
