//! Requests to the engine, and the events with which it answers them.

use std::sync::Arc;

use server_scheduler::{FinishReason, StopCriteria, TokenId};

use crate::guide::Guide;
use crate::images::RequestImages;
use crate::logprobs::{ScoredToken, TokenLogprobs};
use crate::lookup::PromptLookup;
use crate::search::BeamSearch;

/// A request with all parameters resolved: no field refers to a default that is defined elsewhere.
#[derive(Clone, Debug)]
pub struct Request {
    /// The tokens of the prompt.
    pub prompt: Vec<TokenId>,
    /// The images of the prompt. The draft model accepts no images, so it proposes no drafts for requests with images.
    /// Prompts with images cannot be scored.
    pub images: Option<Arc<RequestImages>>,
    /// The number of sequences that continue the prompt, at least 1. Each event of a sequence contains the index of the
    /// sequence.
    pub num_sequences: u32,
    /// The parameters of a beam search, in which the sequences search for the most probable texts together. If they are
    /// set, the `Token` and `Finished` events refer to the results of the search and are sent when the search has
    /// ended. Of `sampling`, only the bias, penalties, bans and log probabilities apply.
    pub beam_search: Option<BeamSearch>,
    /// The parameters of prompt lookup, which proposes draft tokens. Drafts change only the time that a request takes.
    /// Beam search uses no drafts.
    pub lookup: Option<PromptLookup>,
    /// The parameters of the engine's draft model, which have no effect if the engine has none. The draft model
    /// proposes drafts if they are worth their cost and prompt lookup has no better ones.
    pub draft: Option<DraftModelParams>,
    /// The parameters of sampling.
    pub sampling: Sampling,
    /// The criteria by which sequences end. With a guide, sequences also end when no token can follow, and stop tokens
    /// end them only where the guide allows it.
    pub stop: StopCriteria,
    /// The guide that restricts each sequence to a form.
    pub guide: Option<Arc<dyn Guide>>,
    /// A number that separates prefix caches: only requests with the same salt share cached blocks.
    pub cache_salt: u64,
    /// The number of the adapter, from 1, or 0 for the base model. Only requests with the same adapter share cached
    /// blocks.
    pub adapter: u32,
    /// The number of the tenant to which the request belongs. The scheduler uses it to serve all tenants fairly. It has
    /// no other meaning.
    pub tenant: u128,
}

impl Request {
    /// A request for one sequence with the base model, without images, drafts or a guide.
    pub fn new(prompt: Vec<TokenId>, sampling: Sampling, stop: StopCriteria) -> Self {
        Self {
            prompt,
            images: None,
            num_sequences: 1,
            beam_search: None,
            lookup: None,
            draft: None,
            sampling,
            stop,
            guide: None,
            cache_salt: 0,
            adapter: 0,
            tenant: 0,
        }
    }

    /// The number of texts that the client receives.
    pub fn num_results(&self) -> u32 {
        self.beam_search.as_ref().map_or(self.num_sequences, |search| search.num_results)
    }
}

/// The parameters for sampling tokens from logits. They are applied in this order: `logit_bias`, the penalties, the
/// bans, `temperature`, `top_k`, `top_p` and `min_p`. A token is then drawn. The bans apply to stop tokens (until
/// `min_tokens` tokens are generated), `bad_words`, tokens outside `allowed_token_ids`, and tokens that a guide does
/// not allow.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// The number by which logits are divided. 0 selects greedy sampling: the most probable token, or the one with the
    /// lowest id among equals.
    pub temperature: f32,
    /// Keeps the smallest set of most probable tokens whose probabilities add up to at least this value; 1 keeps all.
    pub top_p: f32,
    /// The number of most probable tokens to keep; 0 keeps all.
    pub top_k: u32,
    /// Keeps tokens whose probability is at least this fraction of the highest probability; 0 keeps all.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens in the prompt or the output; 1 has no effect.
    pub repetition_penalty: f32,
    /// The value subtracted from a token's logit for each time that the token was generated; 0 has no effect.
    pub frequency_penalty: f32,
    /// The value subtracted once from the logit of each token that was generated; 0 has no effect.
    pub presence_penalty: f32,
    /// Values that are added to the logits of tokens. Negative infinity bans a token.
    pub logit_bias: Vec<(TokenId, f32)>,
    /// The only tokens that may be generated, in ascending order. `None` allows all tokens.
    pub allowed_token_ids: Option<Arc<[TokenId]>>,
    /// Sequences of tokens that must not be generated, none of them empty. The last token of such a sequence is banned
    /// if the output ends with the tokens before it.
    pub bad_words: Arc<[Vec<TokenId>]>,
    /// The seed of the random numbers. The number that selects the i-th token of the k-th sequence depends only on
    /// `(seed, k, i)`.
    pub seed: u64,
    /// `Some(k)` reports the log probabilities of each generated token and of the `k` most probable tokens at its
    /// position, in the model's own distribution (before bias, penalties and temperature).
    pub logprobs: Option<u32>,
    /// `Some(k)` reports the same for the prompt's tokens except the first, in [`Event::Scored`].
    pub prompt_logprobs: Option<u32>,
}

impl Sampling {
    /// Greedy sampling without any bias, penalties or bans.
    pub fn greedy() -> Self {
        Self {
            temperature: 0.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            logit_bias: Vec::new(),
            allowed_token_ids: None,
            bad_words: Arc::new([]),
            seed: 0,
            logprobs: None,
            prompt_logprobs: None,
        }
    }

    /// Whether any penalty has an effect.
    pub(crate) fn has_penalties(&self) -> bool {
        self.repetition_penalty != 1.0 || self.frequency_penalty != 0.0 || self.presence_penalty != 0.0
    }

    /// The name of the first invalid parameter, if there is one.
    pub(crate) fn invalid_parameter(&self) -> Option<&'static str> {
        let valid = [
            ("temperature", self.temperature >= 0.0 && self.temperature.is_finite()),
            ("top_p", (0.0..=1.0).contains(&self.top_p)),
            ("min_p", (0.0..=1.0).contains(&self.min_p)),
            ("repetition_penalty", self.repetition_penalty > 0.0 && self.repetition_penalty.is_finite()),
            ("frequency_penalty", self.frequency_penalty.is_finite()),
            ("presence_penalty", self.presence_penalty.is_finite()),
            ("logit_bias", !self.logit_bias.iter().any(|(_, bias)| bias.is_nan())),
            ("allowed_token_ids", self.allowed_token_ids.as_ref().is_none_or(|tokens| tokens.is_sorted())),
            ("bad_words", self.bad_words.iter().all(|word| !word.is_empty())),
        ];
        valid.into_iter().find(|(_, valid)| !valid).map(|(name, _)| name)
    }
}

/// The events of a request, in order: `Started` once, `Scored` once if requested, then `Token`s and one `Finished` for
/// each sequence that is not aborted. `Failed` can occur at any time and is then the last event.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// A step has computed tokens of the request for the first time.
    Started {
        /// Number of prompt tokens that were in the prefix cache.
        cached_tokens: u32,
    },
    /// All prompt tokens are scored.
    Scored {
        /// The scores of the prompt's tokens except the first.
        tokens: Vec<ScoredToken>,
    },
    /// A sequence has a new token. A stop token is also reported, before `Finished`.
    Token {
        /// The index of the sequence, or of the result of a beam search, from 0.
        index: u32,
        /// The generated token id.
        token: TokenId,
        /// The log probabilities, if they were requested.
        logprobs: Option<Box<TokenLogprobs>>,
        /// The number of draft tokens that have been computed for the sequence so far.
        drafts: DraftCounts,
    },
    /// A sequence has ended.
    Finished {
        /// The index of the sequence, or of the result of a beam search, from 0.
        index: u32,
        /// The reason why it ended.
        reason: FinishReason,
        /// The number of draft tokens that were computed for the sequence.
        drafts: DraftCounts,
    },
    /// The request failed. The events before this one may contain tokens.
    Failed(Failure),
}

/// The parameters of the draft model for a request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DraftModelParams {
    /// The maximum number of draft tokens per sequence in a step.
    pub num_draft_tokens: u32,
    /// A token whose probability in the draft model's own distribution is below this value is not proposed and ends the
    /// draft; 0 accepts any token.
    pub confidence_threshold: f32,
}

/// The number of computed draft tokens, by their outcome.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DraftCounts {
    /// Number of drafts that equal the sampled token.
    pub accepted: u32,
    /// Number of drafts that differ from the sampled token, follow such a draft, or were computed but not verified.
    pub rejected: u32,
}

/// The reason why an accepted request could not be finished.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// A step, the sampling or the guide of the request failed. The engine continues.
    #[error("failed to compute a step: {0}")]
    Step(String),
    /// The parameters of the request exclude every next token.
    #[error("no next token is allowed: {0}")]
    NoToken(String),
    /// The guide of the request needs more time or memory than a limit allows.
    #[error("{0}")]
    TooComplex(String),
    /// An image of the request could not be encoded. The engine continues.
    #[error("failed to encode an image: {0}")]
    Image(String),
    /// The engine was asleep and could not be woken. The engine tries again for the next request.
    #[error("failed to wake the engine: {0}")]
    Wake(String),
    /// The engine has ended.
    #[error("the engine has stopped")]
    Stopped,
}

impl Failure {
    /// Whether the engine, the model or the encoder caused the failure. Otherwise, the parameters of the request caused
    /// it.
    pub(crate) fn is_fault(&self) -> bool {
        !matches!(self, Self::NoToken(_) | Self::TooComplex(_))
    }
}
