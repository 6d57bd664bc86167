//! A sequence, as its submitter sees it and as the scheduler keeps it.

use std::ops::Range;
use std::sync::Arc;

use crate::block::{BlockHash, BlockId};
use crate::block_pool::{After, Content, Serial};
use crate::eviction::Attended;
use crate::{Batch, Row, TokenId};

/// Names a sequence for the life of the scheduler. The submitter chooses it and never uses it twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceId(pub u64);

/// A prompt and the sequences that continue it.
#[derive(Clone, Debug)]
pub struct NewRequest {
    /// The sequences, at least one, all of which continue the prompt. The first computes it, the others
    /// take over its blocks (copy on write) when it is done.
    pub sequences: Vec<SequenceId>,
    /// The prompt, at least one token.
    pub prompt: Vec<TokenId>,
    /// When each sequence ends.
    pub stop: StopRule,
    /// Whether the sequences go in step, as those of a search do: after the prompt each takes its next token in the same
    /// batch as the others, and may then go on from where another is ([`Sampled::from`]). They run or wait together.
    pub in_step: bool,
    /// Whether the logits of the prompt's tokens are wanted too, of all but the last. Then nothing of it is taken
    /// from the prefix cache.
    pub scores_prompt: bool,
    /// What the hash of the first block follows. What sequences of different roots have in common is not shared.
    pub root: BlockHash,
    /// What else than the model its tokens are computed with: a number that means nothing here but that what is
    /// computed with another is never shared. 0 for nothing.
    pub adapter: u32,
    /// Whose request it is. Tenants share the scheduler fairly: the requests of one do not wait behind a backlog of
    /// another's. Any number will do; requests without a tenant have the same one.
    pub tenant: u128,
}

impl NewRequest {
    /// A request without anything special about it.
    pub fn new(sequences: Vec<SequenceId>, prompt: Vec<TokenId>, stop: StopRule) -> Self {
        Self {
            sequences,
            prompt,
            stop,
            in_step: false,
            scores_prompt: false,
            root: BlockHash::ROOT,
            adapter: 0,
            tenant: 0,
        }
    }
}

/// What a sequence goes on with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sampled {
    /// Which.
    pub sequence: SequenceId,
    /// Whose tokens it takes over first: its own as a rule. Where the sequences of a request go in step, another's that
    /// goes on from its own in the same batch.
    pub from: SequenceId,
    /// How many of the row's drafts, from the first on, are what would have been sampled.
    pub accepted: u32,
    /// The token that follows these. `None` suspends the sequence: it keeps its place and its blocks, and takes part in
    /// no step until [`Scheduler::resume`](crate::Scheduler::resume) gives it a token.
    pub token: Option<TokenId>,
}

impl Sampled {
    /// A sequence goes on from its own tokens.
    pub fn new(sequence: SequenceId, token: TokenId) -> Self {
        Self { sequence, from: sequence, accepted: 0, token: Some(token) }
    }

    /// The next token of a sequence is not known yet.
    pub fn suspended(sequence: SequenceId) -> Self {
        Self { sequence, from: sequence, accepted: 0, token: None }
    }
}

/// When a sequence ends by its tokens. (Stop *strings* are found by whoever has the text, who aborts.)
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StopRule {
    /// Tokens that end a sequence: the model's end tokens unless they are to be ignored, and the request's.
    pub tokens: Vec<TokenId>,
    /// Generated tokens after which a sequence ends, a stop token among them. At least one is generated.
    pub tokens_max: u32,
    /// Generated tokens before which no stop token ends it: the earliest that does is the next one. (That
    /// none is sampled before is the sampler's work.)
    pub tokens_min: u32,
}

/// Why a sequence ended by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// It sampled a stop token.
    Stop,
    /// It has as many tokens as it may.
    Length,
}

/// What a step changed, besides the tokens sampled in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The request was in its first batch. Once for a request, under the first of its sequences that is left,
    /// before any of them finishes.
    Started {
        /// The sequence that computes the prompt.
        sequence: SequenceId,
        /// Tokens of the prompt that were taken from the prefix cache.
        cached_tokens: u32,
    },
    /// A sequence ended with the token it sampled in this step. It holds nothing any more.
    Finished {
        /// Which.
        sequence: SequenceId,
        /// Why.
        reason: FinishReason,
    },
}

/// Why a request was not taken. It was not queued and holds nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rejected {
    /// The prompt has no token.
    EmptyPrompt,
    /// Prompt and the tokens asked for can never fit, however long the request waited. Sequences in step all have to
    /// fit at once.
    TooLong {
        /// Tokens of the prompt.
        prompt_tokens: u32,
        /// The longest sequence this scheduler takes in such a request, prompt and generated tokens together.
        sequence_tokens_max: u32,
    },
    /// The sequences of the request can never run, or never wait, at once.
    TooManySequences {
        /// Sequences of the request.
        sequences: u32,
        /// The most this scheduler takes in a request.
        sequences_max: u32,
    },
    /// As many sequences wait as may.
    QueueFull,
}

/// The order in which sequences are served: requests fairly between tenants and then as they came, siblings as they
/// were listed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Rank {
    /// The request's virtual start ([`FairQueue`](crate::fairness::FairQueue)).
    pub(crate) start: u64,
    pub(crate) arrival: u64,
    pub(crate) index: u32,
}

/// Whether a sequence waits for blocks that are read back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wish {
    /// It has not been admitted yet, and may.
    Open,
    /// It does.
    Granted,
    /// Not any more.
    Over,
}

/// A sequence that waits or runs, or a request whose sequences are one until their prompt is computed.
#[derive(Debug)]
pub(crate) struct Sequence {
    pub(crate) id: SequenceId,
    pub(crate) rank: Rank,
    /// The others of the request, as long as they have everything in common with this one.
    pub(crate) siblings: Vec<SequenceId>,
    pub(crate) stop: Arc<StopRule>,
    /// Whether the sequences of its request go in step.
    pub(crate) in_step: bool,
    pub(crate) prompt_tokens: u32,
    pub(crate) tokens: Vec<TokenId>,
    /// Leading tokens whose keys and values are in the cache. Between steps fewer than `tokens`, unless it is suspended.
    pub(crate) computed: u32,
    /// The blocks it holds: none while it waits.
    pub(crate) table: Vec<BlockId>,
    /// Computed tokens whose blocks it has left, whole blocks of them.
    pub(crate) left: u32,
    /// What its tokens attended to, if that is told.
    pub(crate) attended: Attended,
    /// Tokens of the prompt whose logits are wanted and not computed yet.
    pub(crate) unscored: Range<u32>,
    /// What the first block follows.
    pub(crate) root: BlockHash,
    pub(crate) adapter: u32,
    pub(crate) tenant: u128,
    /// What the first block's key is made from, besides the adapter.
    pub(crate) salt: BlockHash,
    /// Hashes of leading full blocks, as far as they were needed.
    pub(crate) hashes: Vec<BlockHash>,
    /// Leading blocks that are in the prefix cache.
    pub(crate) registered: u32,
    /// Blocks whose computation it has announced.
    pub(crate) claims: Range<u32>,
    /// Tokens of the prompt that were in the prefix cache when it ran first; `None` before.
    pub(crate) cached_tokens: Option<u32>,
    pub(crate) started: bool,
    /// Its row in the batch in flight.
    pub(crate) row: Option<u32>,
    /// Drafts that its next row is to have.
    pub(crate) drafts: u32,
    pub(crate) wish: Wish,
    /// Whether its last tokens were computed and no token was sampled after them yet.
    pub(crate) is_suspended: bool,
}

impl Sequence {
    /// The sequences this stands for.
    pub(crate) fn group(&self) -> u32 {
        1 + self.siblings.len() as u32
    }

    pub(crate) fn tokens_len(&self) -> u32 {
        self.tokens.len() as u32
    }

    pub(crate) fn generated(&self) -> u32 {
        self.tokens_len() - self.prompt_tokens
    }

    pub(crate) fn uncomputed(&self) -> u32 {
        self.tokens_len() - self.computed
    }

    /// Computed tokens that are in the cache: the place of the next one in its blocks.
    pub(crate) fn cached(&self) -> u32 {
        self.computed - self.left
    }

    /// Whether it goes in step with others that are sequences of their own by now.
    pub(crate) fn awaits_others(&self) -> bool {
        self.in_step && self.siblings.is_empty()
    }

    /// Leading tokens that may be taken from the prefix cache: those whose logits are not wanted. In step there is
    /// none to copy the block of the last token from, since it may be evicted for another of them.
    pub(crate) fn cacheable(&self) -> u32 {
        let unwanted = if self.unscored.is_empty() { u32::MAX } else { self.unscored.start };
        if self.awaits_others() { unwanted.min(self.tokens_len() - 1) } else { unwanted }
    }

    /// The next tokens of which no more than `scores` have logits that are wanted.
    pub(crate) fn next_tokens(&self, scores: u32) -> u32 {
        let Range { start, end } = self.unscored;
        if end.saturating_sub(start) <= scores {
            return self.uncomputed();
        }
        start.max(self.computed) - self.computed + scores
    }

    /// Those of the next tokens that it may compute whatever others do.
    pub(crate) fn chunk_tokens(&self, scores: u32) -> u32 {
        let next = self.next_tokens(scores);
        if self.awaits_others() { next.min(self.uncomputed().saturating_sub(1)) } else { next }
    }

    /// What its first block comes after.
    pub(crate) fn origin(&self) -> After {
        After::Root(self.salt, self.adapter)
    }

    /// The content of its block `index`, which is hashed, after the block of this registration.
    pub(crate) fn content(&self, index: usize, block_tokens: u32, parent: Serial) -> Content<'_> {
        let tokens = &self.tokens[index * block_tokens as usize..][..block_tokens as usize];
        Content { hash: self.hashes[index], parent, tokens }
    }

    /// Makes room for all it may ever hold, so that its growth does not allocate.
    pub(crate) fn reserve(&mut self, block_tokens: u32) {
        let tokens = (self.prompt_tokens + self.stop.tokens_max.max(1)) as usize;
        let blocks = tokens.div_ceil(block_tokens as usize);
        self.tokens.reserve_exact(tokens - self.tokens.len());
        self.table.reserve_exact(blocks - self.table.len());
        self.hashes.reserve_exact(blocks - self.hashes.len());
    }

    /// Takes `token` and tells whether it is the last.
    pub(crate) fn append(&mut self, token: TokenId) -> Option<FinishReason> {
        let before = self.generated();
        self.tokens.push(token);
        if before >= self.stop.tokens_min && self.stop.tokens.contains(&token) {
            return Some(FinishReason::Stop);
        }
        (before + 1 >= self.stop.tokens_max).then_some(FinishReason::Length)
    }

    /// Takes over the tokens of one that goes in step with it. The caller has counted the blocks.
    pub(crate) fn take_over(&mut self, from: &Self) {
        self.tokens.clone_from(&from.tokens);
        self.table.clone_from(&from.table);
        self.hashes.clone_from(&from.hashes);
        self.registered = from.registered;
    }

    /// A sibling that goes on from the computed prompt by itself. The caller counts its blocks.
    pub(crate) fn fork(&self, id: SequenceId, index: u32) -> Self {
        // What the clone will hold is known: it never grows again.
        let mut tokens = Vec::with_capacity(self.tokens.capacity());
        tokens.extend_from_slice(&self.tokens);
        let mut table = Vec::with_capacity(self.table.capacity());
        table.extend_from_slice(&self.table);
        let mut hashes = Vec::with_capacity(self.hashes.capacity());
        hashes.extend_from_slice(&self.hashes);
        Self {
            id,
            rank: Rank { index, ..self.rank },
            siblings: Vec::new(),
            stop: Arc::clone(&self.stop),
            in_step: self.in_step,
            prompt_tokens: self.prompt_tokens,
            tokens,
            computed: self.computed,
            table,
            left: self.left,
            attended: self.attended.clone(),
            unscored: 0..0,
            root: self.root,
            adapter: self.adapter,
            tenant: self.tenant,
            salt: self.salt,
            hashes,
            registered: self.registered,
            claims: 0..0,
            cached_tokens: self.cached_tokens,
            started: true,
            row: None,
            drafts: 0,
            wish: Wish::Over,
            is_suspended: false,
        }
    }

    /// Drafts that it may have: it could take them all, and one token more.
    pub(crate) fn drafts_max(&self) -> u32 {
        self.stop.tokens_max.saturating_sub(self.generated() + 1)
    }

    /// Adds the next `count` uncomputed tokens to `batch`, and room for `drafts`.
    pub(crate) fn push_row(&self, count: u32, drafts: u32, block_tokens: u32, batch: &mut Batch) {
        let end = self.computed + count;
        let (tokens, blocks) = (batch.tokens.len(), batch.blocks.len());
        let samples = batch.samples.len();
        batch.tokens.extend_from_slice(&self.tokens[self.computed as usize..end as usize]);
        batch.tokens.resize(batch.tokens.len() + drafts as usize, 0);
        let held = (end + drafts - self.left).div_ceil(block_tokens) as usize;
        batch.blocks.extend_from_slice(&self.table[..held]);
        if end == self.tokens_len() {
            batch.samples.push(self.id);
            batch.samples.extend_from_slice(&self.siblings);
        }
        let tokens = tokens as u32..batch.tokens.len() as u32;
        // By their places in the batch: the row begins with the first token that is not computed.
        let place = |position: u32| tokens.start + position.clamp(self.computed, end) - self.computed;
        batch.rows.push(Row {
            sequence: self.id,
            past: self.computed,
            left: self.left,
            scored: place(self.unscored.start)..place(self.unscored.end),
            tokens,
            blocks: blocks as u32..batch.blocks.len() as u32,
            samples: samples as u32..batch.samples.len() as u32,
            drafts,
            adapter: self.adapter,
        });
    }
}
