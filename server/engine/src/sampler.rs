//! Samples tokens from logits.
//!
//! ```text
//! logits ─► (bias, penalties, bans: on a copy, only if requested) ─► tokens that a guide allows
//!        ─► temperature, top_k, top_p, min_p
//!        ─► kept tokens in the order of their ids ─► inverse of their cumulative distribution at u
//! ```
//!
//! Every filter keeps a prefix of the same order: more probable tokens first, and lower ids first among equals. Each
//! filter is therefore a [`Cutoff`] in that order, the vocabulary is never sorted, and the cost is proportional to the
//! size of the vocabulary, regardless of the parameters. `u` is a hash of the seed, the index of the sequence and the
//! number of tokens generated so far. The draw accumulates the probabilities of the kept tokens in the order of their
//! ids, so that rounding differences between batches and kernels change the result as rarely as possible.

mod allowed;
mod candidates;
mod history;
mod lists;
mod scan;
mod select;

use server_scheduler::{StopCriteria, TokenId};

pub use history::History;

use crate::guide::TokenSet;
use crate::hash::mix;
use crate::logprobs::{ScoredToken, TokenLogprob, TokenLogprobs};
use crate::request::{Failure, Sampling};
use scan::{Blocks, Peak};
use select::{Candidate, Cutoff};

/// The inputs that, together with the logits, determine the sampled token.
#[derive(Clone, Copy, Debug)]
pub struct SamplingContext<'a> {
    /// The sampling parameters of the request.
    pub sampling: &'a Sampling,
    /// The stop criteria. Stop tokens are banned while the sequence has fewer than `min_tokens` generated tokens,
    /// unless `allowed` is set.
    pub stop: &'a StopCriteria,
    /// The tokens of the sequence so far.
    pub history: &'a History,
    /// The index of the sequence in its request, from 0.
    pub index: u32,
    /// The tokens that a guide allows. All other tokens are banned.
    pub allowed: Option<&'a TokenSet>,
}

/// The reason why no token could be sampled. Only the request of the sequence fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SampleError {
    /// The logits contain NaN or positive infinity. With a guide, only the logits of the allowed tokens are checked.
    #[error("the model returned NaN or +inf logits")]
    NotFinite,
    /// Biases, bans and the guide set the logit of every token to negative infinity.
    #[error(
        "every logit is -inf once the logit biases, the banned tokens and the form of the answer are applied"
    )]
    NoTokenLeft,
}

impl From<SampleError> for Failure {
    fn from(error: SampleError) -> Self {
        match error {
            SampleError::NotFinite => Self::Step(error.to_string()),
            SampleError::NoTokenLeft => Self::NoToken(error.to_string()),
        }
    }
}

/// Samples tokens. The sampler reuses its buffers, so sampling allocates memory only when a buffer must grow.
#[derive(Debug, Default)]
pub struct Sampler {
    adjusted: Vec<f32>,
    allowed: Vec<TokenId>,
    kept: Vec<f32>,
    /// The greatest logit of each block of the logits that were read last.
    maxima: Vec<f32>,
    candidates: Vec<Candidate>,
    order: Vec<Candidate>,
    sums: Vec<f64>,
}

impl Sampler {
    /// Creates a sampler without allocated memory.
    pub fn new() -> Self {
        Self::default()
    }

    /// Samples a token. The same logits and the same context always yield the same token. No value of a logit or of a
    /// parameter causes a panic.
    ///
    /// # Errors
    /// [`SampleError`] if the logits are invalid or all tokens are banned.
    pub fn sample(&mut self, logits: &[f32], context: &SamplingContext<'_>) -> Result<TokenId, SampleError> {
        if !adjusts(context) {
            return self.sample_adjusted(logits, context);
        }
        let mut adjusted = std::mem::take(&mut self.adjusted);
        adjusted.clear();
        adjusted.extend_from_slice(logits);
        let are_valid = adjust(&mut adjusted, context);
        let chosen = self.sample_adjusted(&adjusted, context);
        self.adjusted = adjusted;
        if are_valid || context.allowed.is_some() { chosen } else { Err(SampleError::NotFinite) }
    }

    /// Samples a token from logits to which bias, penalties and bans, but not the guide, have been applied.
    fn sample_adjusted(
        &mut self,
        logits: &[f32],
        context: &SamplingContext<'_>,
    ) -> Result<TokenId, SampleError> {
        let Some(set) = context.allowed else {
            let peak = scan::peak(logits, &mut self.maxima).ok_or(SampleError::NotFinite)?;
            return self.choose(logits, &peak, context);
        };
        if is_greedy(context.sampling) {
            let peak = allowed::peak(logits, set).ok_or(SampleError::NotFinite)?;
            return self.choose(logits, &peak, context);
        }
        let (mut tokens, mut kept) = (std::mem::take(&mut self.allowed), std::mem::take(&mut self.kept));
        let sparse = allowed::is_sparse(set, logits);
        if sparse {
            allowed::gather(logits, set, &mut tokens, &mut kept);
        } else {
            allowed::mask(logits, set, &mut kept);
        }
        let chosen = match scan::peak(&kept, &mut self.maxima) {
            Some(peak) => self.choose(&kept, &peak, context),
            None => Err(SampleError::NotFinite),
        };
        // If the logits were gathered, the result is an index into `tokens`, which are sorted by ID.
        let chosen = if sparse { chosen.map(|index| tokens[index as usize]) } else { chosen };
        (self.allowed, self.kept) = (tokens, kept);
        chosen
    }

    /// Returns the log probability of `chosen` and those of the `count` most probable tokens, in the model's own
    /// distribution. Returns fewer than `count` if fewer tokens have a probability above zero.
    ///
    /// # Panics
    /// Panics if `chosen` is not in the vocabulary.
    pub fn logprobs(&mut self, logits: &[f32], chosen: TokenId, count: u32) -> TokenLogprobs {
        scan::peak(logits, &mut self.maxima);
        let log_sum = self.log_sum(logits);
        let logprob =
            |token: TokenId, logit: f32| TokenLogprob { token, logprob: (f64::from(logit) - log_sum) as f32 };
        let blocks = Blocks { logits, maxima: &self.maxima };
        select::top(blocks, count as usize, &mut self.candidates);
        self.candidates.sort_unstable_by(select::more_probable);
        TokenLogprobs {
            chosen: logprob(chosen, logits[chosen as usize]),
            top: self.candidates.iter().map(|top| logprob(top.token, top.logit)).collect(),
        }
    }

    /// The logarithm of the sum of the exponentials of `logits`. `self.maxima` must contain the greatest logit of each
    /// block.
    fn log_sum(&mut self, logits: &[f32]) -> f64 {
        let max = self.maxima.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let blocks = Blocks { logits, maxima: &self.maxima };
        f64::from(max) + scan::sum_exp(blocks, max, 1.0, &mut self.sums).ln()
    }

    /// Returns the log probabilities of [`Self::logprobs`] and the rank of the token.
    ///
    /// # Panics
    /// Panics if `token` is not in the vocabulary.
    pub fn score(&mut self, logits: &[f32], token: TokenId, count: u32) -> ScoredToken {
        let logit = logits[token as usize];
        let before = logits.iter().filter(|&&other| other > logit).count();
        let equal = logits[..token as usize].iter().filter(|&&other| other == logit).count();
        ScoredToken { logprobs: self.logprobs(logits, token, count), rank: (before + equal) as u32 + 1 }
    }

    fn choose(
        &mut self,
        logits: &[f32],
        peak: &Peak,
        context: &SamplingContext<'_>,
    ) -> Result<TokenId, SampleError> {
        if peak.value == f32::NEG_INFINITY {
            return Err(SampleError::NoTokenLeft);
        }
        let sampling = context.sampling;
        if is_greedy(sampling) {
            return Ok(peak.token);
        }
        // Limit the temperature to normal numbers, so that the reciprocal is finite.
        let scale = sampling.temperature.max(f32::MIN_POSITIVE).recip();
        let u = uniform(sampling.seed, context.index, context.history.generated());
        let maxima = std::mem::take(&mut self.maxima);
        let blocks = Blocks { logits, maxima: &maxima };
        let chosen = if self.filter(blocks, peak.value, scale, sampling) {
            draw(&self.candidates, u)
        } else {
            self.draw_all(blocks, peak.value, scale, u)
        };
        self.maxima = maxima;
        Ok(chosen)
    }

    /// Fills `candidates` with the tokens that `top_k`, `top_p` and `min_p` keep, in the order of their ids. Returns
    /// false if none of the filters is active.
    fn filter(&mut self, blocks: Blocks<'_>, max: f32, scale: f32, sampling: &Sampling) -> bool {
        let vocabulary = blocks.logits.len();
        let top_k = sampling.top_k as usize;
        let top_k = (top_k > 0 && top_k < vocabulary).then_some(top_k);
        let top_p = (sampling.top_p < 1.0).then_some(f64::from(sampling.top_p.max(0.0)));
        let floor = (sampling.min_p > 0.0).then(|| {
            let log = f64::from(sampling.min_p.min(1.0)).ln();
            Cutoff::at_least((f64::from(max) + log / f64::from(scale)) as f32)
        });

        let mut total = 0.0;
        if let Some(top_k) = top_k {
            let cut = select::top(blocks, top_k, &mut self.candidates);
            select::gather(blocks, cut, &mut self.candidates);
        } else if let Some(top_p) = top_p {
            total = scan::sum_exp(blocks, max, scale, &mut self.sums);
            // The tokens with logits below this cutoff have a total probability of less than `1 - top_p`, so none of
            // them is in the nucleus.
            let tail = ((1.0 - top_p) * total / vocabulary as f64).ln() - NUCLEUS_MARGIN;
            let cut = Cutoff::at_least((f64::from(max) + tail / f64::from(scale)) as f32);
            select::gather(blocks, floor.map_or(cut, |floor| floor.stricter(cut)), &mut self.candidates);
        } else if let Some(floor) = floor {
            select::gather(blocks, floor, &mut self.candidates);
        } else {
            return false;
        }

        select::weigh(&mut self.candidates, max, scale);
        if let Some(top_p) = top_p {
            if top_k.is_some() {
                total = self.candidates.iter().map(|kept| f64::from(kept.weight)).sum();
            }
            self.order.clear();
            self.order.extend_from_slice(&self.candidates);
            let cut = select::nucleus(&mut self.order, top_p * total);
            self.candidates.retain(|kept| cut.keeps(kept.logit, kept.token));
        }
        if let Some(floor) = floor {
            self.candidates.retain(|kept| floor.keeps(kept.logit, kept.token));
        }
        true
    }

    /// Draws from the whole vocabulary: finds the block by the sums of the blocks, and then the token in that block.
    fn draw_all(&mut self, blocks: Blocks<'_>, max: f32, scale: f32, u: f64) -> TokenId {
        let mut rest = u * scan::sum_exp(blocks, max, scale, &mut self.sums);
        let mut block = 0;
        for (index, &sum) in self.sums.iter().enumerate() {
            if sum > 0.0 {
                block = index;
                if rest < sum {
                    break;
                }
                rest -= sum;
            }
        }
        let logits = (block * scan::BLOCK..).zip(blocks.logits.iter().skip(block * scan::BLOCK));
        self.candidates.clear();
        self.candidates
            .extend(logits.take(scan::BLOCK).map(|(token, &logit)| Candidate::new(token as TokenId, logit)));
        select::weigh(&mut self.candidates, max, scale);
        walk(&self.candidates, rest)
    }
}

/// The value by which the logit bound of the nucleus is lowered. It is far above the rounding error of `exp`.
const NUCLEUS_MARGIN: f64 = 1e-3;

fn is_greedy(sampling: &Sampling) -> bool {
    sampling.temperature.is_nan() || sampling.temperature <= 0.0 || sampling.top_k == 1
}

/// Whether [`adjust`] may change any logit.
fn adjusts(context: &SamplingContext<'_>) -> bool {
    let Sampling { logit_bias, allowed_token_ids, bad_words, .. } = context.sampling;
    !logit_bias.is_empty()
        || allowed_token_ids.is_some()
        || !bad_words.is_empty()
        || context.sampling.has_penalties()
        || bans_stop_tokens(context)
}

fn bans_stop_tokens(context: &SamplingContext<'_>) -> bool {
    let early = context.history.generated() < context.stop.min_tokens;
    early && context.allowed.is_none() && !context.stop.stop_token_ids.is_empty()
}

/// Applies bias, penalties and bans. Tokens outside the vocabulary are ignored. No logit becomes NaN or positive
/// infinity. Returns whether all logits that it replaced were valid.
fn adjust(logits: &mut [f32], context: &SamplingContext<'_>) -> bool {
    let mut are_valid = true;
    let mut change = |token: TokenId, change: &dyn Fn(f32) -> f32| {
        if let Some(logit) = logits.get_mut(token as usize) {
            are_valid &= *logit <= f32::MAX;
            let changed = change(*logit);
            *logit = if changed.is_nan() { f32::NEG_INFINITY } else { changed.min(f32::MAX) };
        }
    };
    let sampling = context.sampling;
    for &(token, bias) in &sampling.logit_bias {
        change(token, &|logit| logit + bias);
    }
    let repetition = sampling.repetition_penalty;
    if repetition != 1.0 {
        for token in context.history.seen() {
            change(token, &|logit| if logit > 0.0 { logit / repetition } else { logit * repetition });
        }
    }
    if sampling.frequency_penalty != 0.0 || sampling.presence_penalty != 0.0 {
        for &(token, count) in context.history.counts() {
            let penalty = sampling.frequency_penalty * count as f32 + sampling.presence_penalty;
            change(token, &|logit| logit - penalty);
        }
    }
    if bans_stop_tokens(context) {
        for &token in &context.stop.stop_token_ids {
            change(token, &|_| f32::NEG_INFINITY);
        }
    }
    for token in lists::completing(&sampling.bad_words, context.history.recent()) {
        change(token, &|_| f32::NEG_INFINITY);
    }
    if let Some(allowed) = &sampling.allowed_token_ids {
        are_valid &= logits.iter().fold(true, |all, &logit| all & (logit <= f32::MAX));
        lists::ban_others(logits, allowed);
    }
    are_valid
}

fn draw(candidates: &[Candidate], u: f64) -> TokenId {
    let total: f64 = candidates.iter().map(|candidate| f64::from(candidate.weight)).sum();
    walk(candidates, u * total)
}

/// Returns the first token at which the weights add up to more than `rest`. If rounding prevents that, returns the last
/// token with a weight above zero.
fn walk(candidates: &[Candidate], mut rest: f64) -> TokenId {
    let mut chosen = candidates.first().map_or(0, |first| first.token);
    for candidate in candidates.iter().filter(|candidate| candidate.weight > 0.0) {
        chosen = candidate.token;
        let weight = f64::from(candidate.weight);
        if rest < weight {
            break;
        }
        rest -= weight;
    }
    chosen
}

/// A number in `[0, 1)` that depends only on the arguments (three rounds of [`mix`]).
fn uniform(seed: u64, sequence: u32, position: u32) -> f64 {
    let hash = mix(mix(mix(seed.wrapping_add(1)) ^ u64::from(sequence)) ^ u64::from(position));
    (hash >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests;
