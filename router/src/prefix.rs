//! Estimates which prefixes of prompts a replica has in its cache, from the requests that the router has sent to it.
//!
//! A prompt is divided into blocks, and the hash of each block includes the hash of the previous block, so equal hashes
//! mean that the prompts are equal up to the end of that block. The router does not tokenize, so it divides a text into
//! blocks of about as many bytes as a block of tokens has on average. The index of a replica evicts the least recently
//! used blocks first, and the end of a prompt before its beginning. The replica evicts in a similar order, but retains
//! for longer the prefixes that requests have continued in different ways (decision 0042). If the replica has reported
//! the size of its cache, the index contains no more blocks than the cache.
//!
//! A wrong estimate costs time but never affects answers, because the replica looks up prompts in its own cache.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Number of blocks of a prompt that the router compares with the prefix caches of replicas.
///
/// If exceeded: the rest of the prompt counts as not cached.
pub const PREFIX_BLOCKS_MAX: usize = 4096;

/// Number of cached blocks that the router tracks for each replica, regardless of the size of its cache.
///
/// If exceeded: the least recently used blocks are removed from the index.
pub const INDEX_BLOCKS_MAX: usize = 1 << 15;

/// The hashes of the leading full blocks of a prompt. Each hash depends on its block and all previous blocks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PrefixHashes {
    hashes: Vec<u64>,
    /// The length of a block in the unit of the prompt.
    block_len: usize,
    unit: LengthUnit,
}

/// The unit of the length of a prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LengthUnit {
    /// The prompt is text, counted in bytes.
    #[default]
    Bytes,
    /// The prompt is a list of tokens.
    Tokens,
}

/// The properties of a request, apart from the prompt itself, that must be equal for prompts to share cached blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PromptContext<'a> {
    /// The name of the adapter, or empty for the base model of the replicas, all of whose names share cached blocks.
    pub adapter: &'a str,
    /// The tenant of the request, or empty if the request has none.
    pub tenant: &'a [u8],
    /// The salt that the client has set. Only prompts with the same salt share cached blocks.
    pub cache_salt: &'a [u8],
    /// The tools, which chat templates insert before the messages.
    pub tools: &'a [u8],
    /// The value of `functions`, the deprecated form of the tools.
    pub functions: &'a [u8],
    /// The instructions, which precede the conversation of a response.
    pub instructions: &'a [u8],
    /// The documents, which chat templates insert before the messages.
    pub documents: &'a [u8],
}

impl PromptContext<'_> {
    /// The seed of the hashes of prompts with this context. `secret` is a random number of the router, so that clients
    /// cannot construct prompts whose hashes collide.
    #[must_use]
    pub fn seed(&self, secret: u64) -> u64 {
        let Self { adapter, tenant, cache_salt, tools, functions, instructions, documents } = *self;
        [adapter.as_bytes(), tenant, cache_salt, tools, functions, instructions, documents]
            .into_iter()
            .fold(secret, |seed, part| xxh3_64_with_seed(part, seed))
    }
}

impl PrefixHashes {
    /// The hashes of a text, in blocks of `block_bytes` (see [`BlockBytes`]), with a seed from [`PromptContext`].
    ///
    /// # Panics
    /// Panics if `block_bytes` is 0.
    #[must_use]
    pub fn of_text(text: &[u8], block_bytes: usize, seed: u64) -> Self {
        let blocks = text.chunks_exact(block_bytes).take(PREFIX_BLOCKS_MAX);
        let hashes = linked(seed, blocks.map(|block| move |parent| xxh3_64_with_seed(block, parent)));
        Self { hashes, block_len: block_bytes, unit: LengthUnit::Bytes }
    }

    /// The hashes of a prompt that is a list of tokens, in blocks of `block_tokens` tokens, with a seed from
    /// [`PromptContext`].
    ///
    /// # Panics
    /// Panics if `block_tokens` is 0.
    #[must_use]
    pub fn of_tokens(tokens: &[u32], block_tokens: usize, seed: u64) -> Self {
        let mut bytes = Vec::with_capacity(block_tokens * size_of::<u32>());
        let mut hashes = Vec::with_capacity((tokens.len() / block_tokens).min(PREFIX_BLOCKS_MAX));
        // Tokens and text with the same bytes are different prompts.
        let mut parent = !seed;
        for block in tokens.chunks_exact(block_tokens).take(PREFIX_BLOCKS_MAX) {
            bytes.clear();
            bytes.extend(block.iter().flat_map(|token| token.to_le_bytes()));
            parent = xxh3_64_with_seed(&bytes, parent);
            hashes.push(parent);
        }
        Self { hashes, block_len: block_tokens, unit: LengthUnit::Tokens }
    }

    /// The number of full blocks.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.hashes.len()
    }

    /// The length of the first `blocks` blocks, and its unit.
    #[must_use]
    pub fn len_of(&self, blocks: usize) -> (usize, LengthUnit) {
        (blocks * self.block_len, self.unit)
    }

    /// The number of tokens in the first `blocks` blocks. For text, the number is estimated from `bytes_per_token`.
    #[must_use]
    pub fn tokens_of(&self, blocks: usize, bytes_per_token: f64) -> u32 {
        let (length, unit) = self.len_of(blocks);
        let tokens = match unit {
            LengthUnit::Tokens => length as f64,
            LengthUnit::Bytes => length as f64 / bytes_per_token,
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

/// The number of bytes in a block of text. It changes only if the measured size of a block of tokens changes a lot,
/// because a new length changes all hashes and therefore makes the index useless.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockBytes(usize);

impl BlockBytes {
    /// Computes the number of bytes for replicas whose blocks have `block_tokens` tokens.
    #[must_use]
    pub fn new(block_tokens: u32, bytes_per_token: f64) -> Self {
        let target = (f64::from(block_tokens.max(1)) * bytes_per_token).clamp(8.0, 65536.0);
        Self(1 << target.log2().round() as u32)
    }

    /// Recomputes the number if the measured size of a block differs from it by a factor of more than 1.7. (Rounding to
    /// a power of two alone causes a factor of up to 1.42.)
    pub fn update(&mut self, block_tokens: u32, bytes_per_token: f64) {
        let target = f64::from(block_tokens.max(1)) * bytes_per_token;
        let ratio = target / self.0 as f64;
        if !(1.0 / 1.7..=1.7).contains(&ratio) {
            *self = Self::new(block_tokens, bytes_per_token);
        }
    }

    /// The number of bytes.
    #[must_use]
    pub fn get(self) -> usize {
        self.0
    }
}

/// The blocks that one replica is expected to have in its cache, up to [`INDEX_BLOCKS_MAX`].
#[derive(Debug)]
pub struct PrefixIndex {
    slots: HashMap<u64, u32, BuildHasherDefault<IdentityHasher>>,
    /// The nodes form a ring in the order of use: the `next` node of the sentinel (node 0) was used most recently.
    nodes: Vec<Node>,
    unused: Vec<u32>,
    /// The size of the replica's cache in blocks, up to [`INDEX_BLOCKS_MAX`], which also applies while the size is
    /// unknown.
    capacity: usize,
}

#[derive(Clone, Copy, Debug)]
struct Node {
    /// `None` for a block of output, which is in the cache but has not been part of a prompt yet.
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
    /// The number of leading blocks of `prompt` that are expected to be cached.
    #[must_use]
    pub fn cached_blocks(&self, prompt: &PrefixHashes) -> usize {
        // A block is never evicted before the blocks that follow it, so the cached blocks are a prefix of the prompt.
        prompt.hashes.partition_point(|hash| self.slots.contains_key(hash))
    }

    /// Records that a prompt with these hashes was sent to the replica. Its answer is expected to fill `output_blocks`
    /// blocks.
    pub fn record(&mut self, prompt: &PrefixHashes, output_blocks: usize) {
        for _ in 0..output_blocks.min(self.capacity) {
            self.insert(None);
        }
        // Insert the blocks from the end of the prompt, so that its beginning is evicted last.
        for &hash in prompt.hashes.iter().rev() {
            match self.slots.get(&hash) {
                Some(&slot) => {
                    self.unlink(slot);
                    self.link(slot);
                }
                None => self.insert(Some(hash)),
            }
        }
        self.trim(self.capacity);
    }

    /// Sets the size of the replica's cache in blocks, which the index never exceeds.
    pub fn set_capacity(&mut self, blocks: usize) {
        self.capacity = blocks.min(INDEX_BLOCKS_MAX);
        self.trim(self.capacity);
    }

    /// Evicts the least recently used blocks until at most `blocks` remain: as many as the replica reports as active or
    /// evictable, plus those that requests without blocks will need. With prompts that are recorded later, the index
    /// may exceed this number again, because these prompts use free blocks of the cache.
    pub fn trim(&mut self, blocks: usize) {
        while self.blocks() > blocks {
            let oldest = self.nodes[SENTINEL as usize].previous;
            self.unlink(oldest);
            if let Some(hash) = self.nodes[oldest as usize].hash.take() {
                self.slots.remove(&hash);
            }
            self.unused.push(oldest);
        }
    }

    /// Clears the index, because the process of the replica has been replaced. The size of the new process's cache is
    /// unknown.
    pub fn reset(&mut self) {
        *self = Self::default();
    }

    /// The number of blocks in the index, including those of output.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.nodes.len() - 1 - self.unused.len()
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

/// A hasher for keys that are already hashes.
#[derive(Clone, Copy, Debug, Default)]
struct IdentityHasher(u64);

impl Hasher for IdentityHasher {
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
