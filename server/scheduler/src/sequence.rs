//! A sequence and its state, which has three parts: the state that the sequence shares with the other sequences of its
//! request ([`SequenceGroup`]), the identity of its blocks in the prefix cache ([`PrefixChain`]), and its state in the
//! KV cache ([`Residency`]).

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use crate::batch::{Batch, ScheduledSequence};
use crate::block::{BlockHash, BlockId, BlockParent, TokenId};
use crate::block_pool::{BlockContent, BlockPool};
use crate::block_scores::BlockScores;
use crate::images::{ImageDigest, NeededImage, PromptImages, with_block_words};
use crate::request::{FinishReason, SequenceId, StopCriteria};

/// The order in which sequences are served, smallest first: by virtual start time, which makes the order fair between
/// tenants, then by arrival, and then by index within the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Priority {
    /// The request's virtual start time ([`FairQueue`](crate::fairness::FairQueue)).
    pub(crate) start: u64,
    pub(crate) arrival: u64,
    pub(crate) index: u32,
}

/// The state that the sequences of a request share.
#[derive(Clone, Debug)]
pub(crate) struct SequenceGroup {
    pub(crate) stop: StopCriteria,
    pub(crate) prompt_tokens: u32,
    /// Whether the sequences advance in lockstep.
    pub(crate) lockstep: bool,
    pub(crate) adapter: u32,
    pub(crate) tenant: u128,
    pub(crate) images: PromptImages,
    /// The distinct images of the prompt.
    pub(crate) distinct_images: Vec<NeededImage>,
    /// The words that identify the images of each block that has images, by the index of the block.
    pub(crate) block_words: BTreeMap<u32, Box<[u32]>>,
}

impl SequenceGroup {
    /// The words that identify the images of the block with this index, or an empty slice if it has none.
    pub(crate) fn words_of_block(&self, index: usize) -> &[u32] {
        self.block_words.get(&(index as u32)).map_or(&[][..], |words| &words[..])
    }

    /// The hash of the block with this index and these tokens, which follows the block with the hash `parent`.
    pub(crate) fn hash_block(
        &self,
        index: usize,
        parent: BlockHash,
        tokens: &[TokenId],
        block_hash: fn(BlockHash, &[TokenId]) -> BlockHash,
    ) -> BlockHash {
        with_block_words(tokens, self.words_of_block(index), |words| block_hash(parent, words))
    }
}

/// The identity of a sequence's full blocks in the prefix cache.
#[derive(Clone, Debug)]
pub(crate) struct PrefixChain {
    /// The prefix seed of the request.
    prefix_seed: BlockHash,
    adapter: u32,
    /// The hash from which the hash of the first block is derived: the request's seed, combined with the adapter.
    first_parent: BlockHash,
    /// The hashes of the leading full blocks. The hashes of the prompt's blocks are computed when the request is
    /// submitted, and those of later blocks when the blocks are registered.
    pub(crate) hashes: Vec<BlockHash>,
    /// Number of leading blocks that are registered in the prefix cache.
    pub(crate) registered: u32,
    /// The indices of the blocks that the sequence claims. Some of them may already have been claimed by another
    /// sequence.
    pub(crate) claims: Range<u32>,
}

impl PrefixChain {
    pub(crate) fn new(
        prefix_seed: BlockHash,
        adapter: u32,
        block_hash: fn(BlockHash, &[TokenId]) -> BlockHash,
    ) -> Self {
        // Combine the seed with the adapter, so that blocks of equal tokens have different hashes if their adapters
        // differ.
        let first_parent = if adapter == 0 { prefix_seed } else { block_hash(prefix_seed, &[adapter]) };
        Self { prefix_seed, adapter, first_parent, hashes: Vec::new(), registered: 0, claims: 0..0 }
    }

    /// The hash of the last block in `hashes`, from which the hash of the next block is derived.
    pub(crate) fn last_hash(&self) -> BlockHash {
        self.hashes.last().copied().unwrap_or(self.first_parent)
    }

    /// The parent of the block after `blocks`, the cached blocks at the start of the sequence.
    pub(crate) fn parent(&self, blocks: &[BlockId]) -> BlockParent {
        let start = BlockParent::Start { prefix_seed: self.prefix_seed, adapter: self.adapter };
        blocks.last().map_or(start, |&last| BlockParent::Block(last))
    }

    /// A copy with the same capacity, so that it does not allocate when it grows.
    fn fork(&self) -> Self {
        Self { hashes: clone_with_capacity(&self.hashes), claims: 0..0, ..*self }
    }
}

/// The state of a sequence in the KV cache.
#[derive(Clone, Debug, Default)]
pub(crate) struct Residency {
    /// The blocks of the sequence, except for evicted ones. The table is empty while the sequence waits.
    pub(crate) block_table: Vec<BlockId>,
    /// Number of leading tokens whose keys and values were computed. Between steps it is less than the number of
    /// tokens, unless the sequence is suspended.
    pub(crate) computed_tokens: u32,
    /// Number of computed tokens whose blocks were evicted, a multiple of the block size.
    pub(crate) evicted_tokens: u32,
    /// The attention scores of the blocks.
    pub(crate) scores: BlockScores,
}

impl Residency {
    /// Number of computed tokens that are in the cache: the offset of the next token in the blocks.
    pub(crate) fn resident_tokens(&self) -> u32 {
        self.computed_tokens - self.evicted_tokens
    }

    fn fork(&self) -> Self {
        let Self { computed_tokens, evicted_tokens, .. } = *self;
        let block_table = clone_with_capacity(&self.block_table);
        Self { block_table, computed_tokens, evicted_tokens, scores: self.scores.clone() }
    }
}

/// Whether a sequence waits for blocks that are restored from storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RestoreState {
    /// A restore may begin for the sequence when it is about to be admitted.
    Eligible,
    /// The sequence waits for its restore.
    Restoring,
    /// The restore has ended, or the sequence cannot have one.
    Finished,
}

/// A sequence that waits or runs. Until their prompt is computed, all sequences of a request are represented by the
/// first one.
#[derive(Clone, Debug)]
pub(crate) struct Sequence {
    pub(crate) id: SequenceId,
    pub(crate) priority: Priority,
    pub(crate) group: Arc<SequenceGroup>,
    /// The other sequences of the request that this one represents.
    pub(crate) siblings: Vec<SequenceId>,
    pub(crate) tokens: Vec<TokenId>,
    pub(crate) prefix: PrefixChain,
    pub(crate) residency: Residency,
    pub(crate) restore: RestoreState,
    /// The images whose encoder output the sequence holds or waits for.
    pub(crate) held_images: Vec<ImageDigest>,
    /// Whether the image cache counts the images of the prompt as *expected* images, because the sequence waits and
    /// holds none of them.
    pub(crate) expects_images: bool,
    /// Whether the sequence has ever reserved images.
    pub(crate) has_reserved_images: bool,
    /// The positions of the prompt tokens whose logits are needed and not computed yet.
    pub(crate) unscored: Range<u32>,
    /// Number of prompt tokens that were in the prefix cache when the sequence was first admitted. `None` before its
    /// admission.
    pub(crate) cached_tokens: Option<u32>,
    /// Whether [`Event::Started`](crate::Event::Started) was reported.
    pub(crate) is_started: bool,
    /// The index of the sequence in the batch in flight.
    pub(crate) batch_index: Option<u32>,
    /// Number of draft tokens that the caller has for the next step.
    pub(crate) num_draft_tokens: u32,
    /// Whether the sequence is suspended because its next token is not known yet. All of its tokens have been computed,
    /// although a preemption may have released their blocks since then.
    pub(crate) is_suspended: bool,
}

impl Sequence {
    /// The number of sequences of the request that this one represents, including itself.
    pub(crate) fn num_sequences(&self) -> u32 {
        1 + self.siblings.len() as u32
    }

    pub(crate) fn num_tokens(&self) -> u32 {
        self.tokens.len() as u32
    }

    pub(crate) fn generated_tokens(&self) -> u32 {
        self.num_tokens() - self.group.prompt_tokens
    }

    pub(crate) fn uncomputed_tokens(&self) -> u32 {
        self.num_tokens() - self.residency.computed_tokens
    }

    /// Whether the sequence advances in lockstep with others that have been forked from the prompt.
    pub(crate) fn is_lockstep_member(&self) -> bool {
        self.group.lockstep && self.siblings.is_empty()
    }

    /// Number of leading tokens that may be taken from the prefix cache: those before the first token whose logits are
    /// still needed for prompt log probabilities, if there is one. A member of a lockstep group does not reuse a cached
    /// block that ends with its last token: the block would have to be copied, but might be evicted before that to make
    /// room for another member.
    pub(crate) fn cacheable_tokens(&self) -> u32 {
        let unneeded = if self.unscored.is_empty() { u32::MAX } else { self.unscored.start };
        if self.is_lockstep_member() { unneeded.min(self.num_tokens() - 1) } else { unneeded }
    }

    /// Number of next tokens that the sequence may compute so that at most `scored_tokens` of them need logits for
    /// prompt log probabilities.
    pub(crate) fn next_tokens(&self, scored_tokens: u32) -> u32 {
        let Range { start, end } = self.unscored;
        if end.saturating_sub(start) <= scored_tokens {
            return self.uncomputed_tokens();
        }
        let computed = self.residency.computed_tokens;
        start.max(computed) - computed + scored_tokens
    }

    /// Number of next tokens that the sequence may compute without the other members of its lockstep group.
    pub(crate) fn chunk_tokens(&self, scored_tokens: u32) -> u32 {
        let next = self.next_tokens(scored_tokens);
        if self.is_lockstep_member() { next.min(self.uncomputed_tokens().saturating_sub(1)) } else { next }
    }

    /// The number of next tokens to compute if at most `num_tokens` are allowed. The number can be smaller than
    /// `num_tokens`, because a step must not end within a span whose tokens attend to each other. `None` if the next
    /// token begins a span that must be computed as a whole and has more than `num_tokens` tokens.
    pub(crate) fn whole_spans(&self, num_tokens: u32) -> Option<u32> {
        let computed = self.residency.computed_tokens;
        match self.group.images.indivisible_at(computed + num_tokens) {
            None => Some(num_tokens),
            Some(span) if span.start > computed => Some(span.start - computed),
            Some(_) => None,
        }
    }

    /// The number of next tokens up to the end of the first span that is not computed.
    pub(crate) fn tokens_of_first_span(&self) -> u32 {
        let computed = self.residency.computed_tokens;
        let span = self.group.images.spans.iter().find(|span| span.end() > computed);
        span.map_or(0, |span| span.end() - computed)
    }

    /// The largest number of leading blocks, at most `blocks`, after which the computation may begin. It must not begin
    /// within a span whose tokens attend to each other, because a step computes such a span as a whole.
    pub(crate) fn reusable_blocks(&self, blocks: usize, block_tokens: u32) -> usize {
        let mut blocks = blocks;
        while let Some(span) = self.group.images.indivisible_at(blocks as u32 * block_tokens) {
            blocks = (span.start / block_tokens) as usize;
        }
        blocks
    }

    /// The content of the block after the cached blocks `blocks`. The hash of this block must be known.
    pub(crate) fn next_content(&self, blocks: &[BlockId], pool: &BlockPool) -> BlockContent<'_> {
        let index = blocks.len();
        let tokens = &self.tokens[index * pool.block_tokens()..][..pool.block_tokens()];
        let parent = self.prefix.parent(blocks);
        let images = self.group.words_of_block(index);
        BlockContent { hash: self.prefix.hashes[index], parent, tokens, images }
    }

    /// Reserves memory for the longest possible sequence, so that its growth does not allocate.
    pub(crate) fn reserve(&mut self, block_tokens: u32) {
        let Self { group, tokens, prefix: PrefixChain { hashes, .. }, residency, .. } = self;
        let tokens_max = (group.prompt_tokens + group.stop.max_tokens.max(1)) as usize;
        let blocks_max = tokens_max.div_ceil(block_tokens as usize);
        tokens.reserve_exact(tokens_max - tokens.len());
        residency.block_table.reserve_exact(blocks_max - residency.block_table.len());
        hashes.reserve_exact(blocks_max - hashes.len());
    }

    /// Appends a token. If this token ends the sequence, returns the reason.
    pub(crate) fn append(&mut self, token: TokenId) -> Option<FinishReason> {
        let before = self.generated_tokens();
        self.tokens.push(token);
        let stop = &self.group.stop;
        if before >= stop.min_tokens && stop.stop_token_ids.contains(&token) {
            return Some(FinishReason::Stop);
        }
        (before + 1 >= stop.max_tokens).then_some(FinishReason::Length)
    }

    /// Replaces the tokens and blocks with those of another member of the lockstep group. The caller updates the
    /// reference counts of the blocks.
    pub(crate) fn reassign(&mut self, parent: &Self) {
        self.tokens.clone_from(&parent.tokens);
        self.residency.block_table.clone_from(&parent.residency.block_table);
        self.prefix.hashes.clone_from(&parent.prefix.hashes);
        self.prefix.registered = parent.prefix.registered;
    }

    /// Creates the sequence of a sibling, which continues the computed prompt. The caller updates the reference counts
    /// of the blocks.
    pub(crate) fn fork(&self, id: SequenceId) -> Self {
        Self {
            id,
            priority: Priority { index: id.index, ..self.priority },
            group: Arc::clone(&self.group),
            siblings: Vec::new(),
            tokens: clone_with_capacity(&self.tokens),
            prefix: self.prefix.fork(),
            residency: self.residency.fork(),
            restore: RestoreState::Finished,
            held_images: Vec::new(),
            expects_images: false,
            has_reserved_images: self.has_reserved_images,
            unscored: 0..0,
            cached_tokens: self.cached_tokens,
            is_started: true,
            batch_index: None,
            num_draft_tokens: 0,
            is_suspended: false,
        }
    }

    /// The largest number of draft tokens that can all be accepted and followed by another token without exceeding
    /// `max_tokens`.
    pub(crate) fn max_draft_tokens(&self) -> u32 {
        self.group.stop.max_tokens.saturating_sub(self.generated_tokens() + 1)
    }

    /// Adds the next `num_tokens` uncomputed tokens to `batch`, followed by room for draft tokens.
    pub(crate) fn add_to_batch(
        &self,
        num_tokens: u32,
        num_draft_tokens: u32,
        block_tokens: u32,
        batch: &mut Batch,
    ) {
        let Residency { computed_tokens, evicted_tokens, .. } = self.residency;
        let end = computed_tokens + num_tokens;
        let (tokens, blocks) = (batch.tokens.len() as u32, batch.blocks.len() as u32);
        let samples = batch.samples.len() as u32;
        batch.tokens.extend_from_slice(&self.tokens[computed_tokens as usize..end as usize]);
        batch.tokens.resize(batch.tokens.len() + num_draft_tokens as usize, 0);
        let num_blocks = (end + num_draft_tokens - evicted_tokens).div_ceil(block_tokens) as usize;
        batch.blocks.extend_from_slice(&self.residency.block_table[..num_blocks]);
        if end == self.num_tokens() {
            batch.samples.push(self.id);
            batch.samples.extend_from_slice(&self.siblings);
        }
        let index_of = |position: u32| tokens + position.clamp(computed_tokens, end) - computed_tokens;
        batch.sequences.push(ScheduledSequence {
            id: self.id,
            computed_tokens,
            evicted_tokens,
            tokens: tokens..batch.tokens.len() as u32,
            blocks: blocks..batch.blocks.len() as u32,
            samples: samples..batch.samples.len() as u32,
            scored_tokens: index_of(self.unscored.start)..index_of(self.unscored.end),
            num_draft_tokens,
            adapter: self.group.adapter,
        });
    }
}

fn clone_with_capacity<T: Copy>(values: &Vec<T>) -> Vec<T> {
    let mut clone = Vec::with_capacity(values.capacity());
    clone.extend_from_slice(values);
    clone
}
