//! What goes into the engine and what comes out of it.

use std::sync::Arc;

use server_scheduler::{FinishReason, StopCriteria, TokenId};

use crate::guide::Guide;
use crate::lookup::PromptLookup;
use crate::search::Beams;

/// A request, resolved: nothing in it is optional in the sense of "to be looked up elsewhere".
#[derive(Clone, Debug)]
pub struct Request {
    /// The prompt.
    pub prompt: Vec<TokenId>,
    /// How many sequences continue the prompt, at least 1. Events carry which of them they are of.
    pub sequences: u32,
    /// Whether and how these search for the most probable texts together, instead of each drawing its tokens: then events
    /// are of the results, and come at the end. Of `sampling` only bias, penalties, bans and log probabilities matter.
    pub beams: Option<Beams>,
    /// Whether and how what comes next is guessed, so that several tokens can be taken in a step. It changes the time and
    /// nothing else. Sequences that search are not guessed.
    pub lookup: Option<PromptLookup>,
    /// Whether and how the engine's draft model guesses, if it has one: instead, or where lookup has no better guess.
    pub draft: Option<DraftRule>,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// When sequences end. With a guide also when nothing can follow, and by stop tokens only where they may.
    pub stop: StopCriteria,
    /// What each sequence is held to.
    pub guide: Option<Arc<dyn Guide>>,
    /// What is cached of the prompt is shared with requests of the same salt only.
    pub salt: u64,
    /// The adapter it is computed with, from 1; 0 for the model as it is. What is cached is shared with requests of
    /// the same adapter only.
    pub adapter: u32,
    /// Whose request it is, so that waiting requests of several tenants take turns. Any number will do.
    pub tenant: u128,
}

impl Request {
    /// How many texts come of it.
    pub fn results(&self) -> u32 {
        self.beams.as_ref().map_or(self.sequences, |beams| beams.results)
    }
}

/// How tokens are chosen from logits. In order: `bias`, then the penalties, then bans (`stop.stop_token_ids` before
/// `stop.min_tokens`, and what a guide does not allow), then `temperature`, `top_k`, `top_p`, `min_p`, then the draw.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// 0 is greedy: the most probable token, the lowest id among equals. Above it logits are divided by it.
    pub temperature: f32,
    /// Keep the most probable tokens whose probabilities add up to this; 1 keeps all.
    pub top_p: f32,
    /// Keep this many of the most probable tokens; 0 keeps all.
    pub top_k: u32,
    /// Keep tokens at least this times as probable as the most probable one; 0 keeps all.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens seen in prompt or output; 1 does nothing.
    pub repetition_penalty: f32,
    /// Subtracted from a token's logit for each time it was generated; 0 does nothing.
    pub frequency_penalty: f32,
    /// Subtracted from the logit of every token that was generated; 0 does nothing.
    pub presence_penalty: f32,
    /// Added to logits, by token. Negative infinity bans.
    pub bias: Vec<(TokenId, f32)>,
    /// All other tokens are banned. Ascending.
    pub allowed: Option<Arc<[TokenId]>>,
    /// Runs of tokens, none empty, whose last is banned where the others are the end of the output.
    pub bad: Arc<[Vec<TokenId>]>,
    /// The draw of the i-th token of the k-th sequence depends on `(seed, k, i)` and the logits alone.
    pub seed: u64,
    /// `Some(k)`: report the log probability of each generated token and of the `k` most probable ones,
    /// of the model's own distribution (before bias, penalties and temperature).
    pub logprobs: Option<u32>,
    /// The same of the prompt's tokens, from the second on: [`Event::Scored`].
    pub prompt_logprobs: Option<u32>,
}

impl Sampling {
    /// The most probable token, unchanged by anything.
    pub fn greedy() -> Self {
        Self {
            temperature: 0.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            bias: Vec::new(),
            allowed: None,
            bad: Arc::new([]),
            seed: 0,
            logprobs: None,
            prompt_logprobs: None,
        }
    }

    /// Whether any penalty does anything.
    pub(crate) fn penalises(&self) -> bool {
        self.repetition_penalty != 1.0 || self.frequency_penalty != 0.0 || self.presence_penalty != 0.0
    }

    /// The name of the first parameter that has no meaning, if there is one.
    pub(crate) fn invalid(&self) -> Option<&'static str> {
        let valid = [
            ("temperature", self.temperature >= 0.0 && self.temperature.is_finite()),
            ("top_p", (0.0..=1.0).contains(&self.top_p)),
            ("min_p", (0.0..=1.0).contains(&self.min_p)),
            ("repetition_penalty", self.repetition_penalty > 0.0 && self.repetition_penalty.is_finite()),
            ("frequency_penalty", self.frequency_penalty.is_finite()),
            ("presence_penalty", self.presence_penalty.is_finite()),
            ("bias", !self.bias.iter().any(|(_, bias)| bias.is_nan())),
            ("allowed", self.allowed.as_ref().is_none_or(|tokens| tokens.is_sorted())),
            ("bad", self.bad.iter().all(|run| !run.is_empty())),
        ];
        valid.into_iter().find(|(_, valid)| !valid).map(|(name, _)| name)
    }
}

/// What happens to a request, in order: `Started` once, `Scored` once if asked for, then `Token`s and one `Finished` for each of its
/// sequences; or `Failed`, after which nothing comes.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The request is in its first batch.
    Started {
        /// Tokens of the prompt that were taken from the prefix cache.
        cached_tokens: u32,
    },
    /// The prompt is scored.
    Scored {
        /// Its tokens from the second on.
        tokens: Vec<ScoredToken>,
    },
    /// A sequence has a new token. A stop token is reported too, before `Finished`.
    Token {
        /// Which sequence of the request, from 0.
        index: u32,
        /// The token.
        token: TokenId,
        /// Its log probabilities, if asked for.
        logprobs: Option<Box<TokenLogprobs>>,
    },
    /// A sequence ended.
    Finished {
        /// Which sequence of the request, from 0.
        index: u32,
        /// Why.
        reason: FinishReason,
        /// The guesses of its tokens that were computed.
        drafts: DraftCounts,
    },
    /// The request ended without a result.
    Failed(Failure),
}

/// How a draft model guesses.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DraftRule {
    /// Most tokens that are guessed at a time.
    pub tokens_max: u32,
    /// It guesses no further once its guess is less probable than this, by its own distribution; 0 is any.
    pub probability_min: f32,
}

/// How many guessed tokens were computed, and which way they went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DraftCounts {
    /// Were what is sampled.
    pub accepted: u32,
    /// Were not, or came after one that was not.
    pub rejected: u32,
}

/// Why a request that was taken could not be finished.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// The step it was in failed. The engine goes on.
    #[error("failed to compute a step: {0}")]
    Step(String),
    /// What the request asks for leaves no token that may come next.
    #[error("what is asked for leaves no token that may come next: {0}")]
    NoToken(String),
    /// To follow the form of the answer takes more than a limit allows.
    #[error("{0}")]
    TooComplex(String),
    /// The engine slept and could not be woken. The next request tries again.
    #[error("failed to wake the model: {0}")]
    Wake(String),
    /// The engine ended.
    #[error("the engine has stopped")]
    Stopped,
}

/// Log probabilities at one position.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprobs {
    /// Of the generated token.
    pub chosen: TokenLogprob,
    /// Of the most probable tokens, most probable first, as many as were asked for.
    pub top: Vec<TokenLogprob>,
}

/// A token of a prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct ScoredToken {
    /// Its log probability and the most probable ones.
    pub logprobs: TokenLogprobs,
    /// Its place among all tokens by their probabilities, from 1.
    pub rank: u32,
}

/// A token and the natural logarithm of its probability.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenLogprob {
    /// The token.
    pub token: TokenId,
    /// `ln p`.
    pub logprob: f32,
}
