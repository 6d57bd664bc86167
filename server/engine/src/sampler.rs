//! Chooses tokens from logits. It decides nothing else: when a sequence ends is the scheduler's matter, what
//! a token says is nobody's matter here.
//!
//! ```text
//! logits ─► (bias, penalties, bans: on a copy, only if asked for) ─► what a guide allows
//!        ─► temperature, top_k, top_p, min_p
//!        ─► kept tokens in the order of their ids ─► inverse of their cumulative distribution at u
//! ```
//!
//! Every filter keeps a prefix of one order, "more probable first, lower id first among equals", so each is
//! a [`Cut`] in that order and the vocabulary is never sorted: the cost of a token is
//! proportional to the vocabulary whatever the parameters. `u` is a hash of `(seed, sequence, position)`.
//! The draw walks the kept tokens in the order of their ids, so logits that differ by rounding (another
//! batch, another kernel) change the outcome as rarely as they can.

mod allowed;
mod beams;
mod history;
mod lists;
mod scan;
mod select;

use server_scheduler::{StopCriteria, TokenId};

pub use history::History;

use crate::guide::TokenSet;
use crate::request::{Failure, Sampling, ScoredToken, TokenLogprob, TokenLogprobs};
use scan::Peak;
use select::{Candidate, Cut};

/// What a token is chosen by, besides the logits.
#[derive(Clone, Copy, Debug)]
pub struct Choice<'a> {
    /// How.
    pub sampling: &'a Sampling,
    /// Its stop tokens are banned while the sequence has fewer generated tokens than `tokens_min`, unless what is
    /// `allowed` says which may come.
    pub stop: &'a StopCriteria,
    /// What the sequence consists of so far.
    pub history: &'a History,
    /// Which sequence of its request it is, from 0.
    pub index: u32,
    /// All others are banned.
    pub allowed: Option<&'a TokenSet>,
}

/// Why no token could be chosen. The request fails, others are not concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unsampled {
    /// The model's logits, or those of the tokens that are allowed, hold a NaN or positive infinity.
    #[error("the model returned logits that are not numbers")]
    NotFinite,
    /// Every token has the logit negative infinity: the bias and the bans left none.
    #[error("biases, bans and the form of the answer exclude all")]
    NothingLeft,
}

impl From<Unsampled> for Failure {
    fn from(error: Unsampled) -> Self {
        match error {
            Unsampled::NotFinite => Self::Step(error.to_string()),
            Unsampled::NothingLeft => Self::NoToken(error.to_string()),
        }
    }
}

/// Chooses tokens. It keeps its scratch memory, so it allocates nothing once it has seen a request of each
/// kind.
#[derive(Debug, Default)]
pub struct Sampler {
    adjusted: Vec<f32>,
    allowed: Vec<TokenId>,
    kept: Vec<f32>,
    candidates: Vec<Candidate>,
    order: Vec<Candidate>,
    sums: Vec<f64>,
}

impl Sampler {
    /// A sampler without memory of anything.
    pub fn new() -> Self {
        Self::default()
    }

    /// Chooses a token. The same logits and the same choice give the same token.
    ///
    /// # Errors
    /// [`Unsampled`]. No value of a logit or a parameter makes it panic.
    pub fn sample(&mut self, logits: &[f32], choice: &Choice<'_>) -> Result<TokenId, Unsampled> {
        if !adjusts(choice) {
            return self.sample_adjusted(logits, choice);
        }
        // What no number is before may be one afterwards.
        if choice.allowed.is_none() {
            scan::peak(logits).ok_or(Unsampled::NotFinite)?;
        }
        let mut adjusted = std::mem::take(&mut self.adjusted);
        adjusted.clear();
        adjusted.extend_from_slice(logits);
        adjust(&mut adjusted, choice);
        let chosen = self.sample_adjusted(&adjusted, choice);
        self.adjusted = adjusted;
        chosen
    }

    /// Chooses among the tokens that are allowed.
    fn sample_adjusted(&mut self, logits: &[f32], choice: &Choice<'_>) -> Result<TokenId, Unsampled> {
        let Some(set) = choice.allowed else {
            let peak = scan::peak(logits).ok_or(Unsampled::NotFinite)?;
            return self.choose(logits, &peak, choice);
        };
        if is_greedy(choice.sampling) {
            let peak = allowed::peak(logits, set).ok_or(Unsampled::NotFinite)?;
            return self.choose(logits, &peak, choice);
        }
        let (mut tokens, mut kept) = (std::mem::take(&mut self.allowed), std::mem::take(&mut self.kept));
        let sparse = allowed::is_sparse(set, logits);
        if sparse {
            allowed::gather(logits, set, &mut tokens, &mut kept);
        } else {
            kept.clear();
            kept.extend_from_slice(logits);
            allowed::ban_others(&mut kept, set);
        }
        let chosen = match scan::peak(&kept) {
            Some(peak) => self.choose(&kept, &peak, choice),
            None => Err(Unsampled::NotFinite),
        };
        // Taken out they are in the order of their ids, and every filter keeps that order.
        let chosen = if sparse { chosen.map(|place| tokens[place as usize]) } else { chosen };
        (self.allowed, self.kept) = (tokens, kept);
        chosen
    }

    /// The log probability of `chosen`, and those of the `count` most probable tokens (fewer if fewer have
    /// any probability), in the model's own distribution.
    ///
    /// # Panics
    /// If `chosen` is not in the vocabulary.
    pub fn logprobs(&mut self, logits: &[f32], chosen: TokenId, count: u32) -> TokenLogprobs {
        let log_sum = self.log_sum(logits);
        let logprob =
            |token: TokenId, logit: f32| TokenLogprob { token, logprob: (f64::from(logit) - log_sum) as f32 };
        select::top(logits, count as usize, &mut self.candidates);
        self.candidates.sort_unstable_by(select::more_probable);
        TokenLogprobs {
            chosen: logprob(chosen, logits[chosen as usize]),
            top: self.candidates.iter().map(|top| logprob(top.token, top.logit)).collect(),
        }
    }

    /// The logarithm of the sum of the exponentials.
    fn log_sum(&mut self, logits: &[f32]) -> f64 {
        let max = scan::peak(logits).map_or(0.0, |peak| peak.value);
        self.sums.clear();
        f64::from(max) + scan::sum_exp(logits, max, 1.0, &mut self.sums).ln()
    }

    /// As [`Self::logprobs`], with the token's rank.
    ///
    /// # Panics
    /// If `token` is not in the vocabulary.
    pub fn score(&mut self, logits: &[f32], token: TokenId, count: u32) -> ScoredToken {
        let logit = logits[token as usize];
        let before = logits.iter().filter(|&&other| other > logit).count();
        let equal = logits[..token as usize].iter().filter(|&&other| other == logit).count();
        ScoredToken { logprobs: self.logprobs(logits, token, count), rank: (before + equal) as u32 + 1 }
    }

    fn choose(&mut self, logits: &[f32], peak: &Peak, choice: &Choice<'_>) -> Result<TokenId, Unsampled> {
        if peak.value == f32::NEG_INFINITY {
            return Err(Unsampled::NothingLeft);
        }
        let sampling = choice.sampling;
        if is_greedy(sampling) {
            return Ok(peak.token);
        }
        // The smallest normal number keeps the reciprocal finite.
        let scale = sampling.temperature.max(f32::MIN_POSITIVE).recip();
        let u = uniform(sampling.seed, choice.index, choice.history.generated());
        if self.keep(logits, peak.value, scale, sampling) {
            Ok(draw_kept(&self.candidates, u))
        } else {
            Ok(self.draw_all(logits, peak.value, scale, u))
        }
    }

    /// Fills `candidates`, in the order of their ids, with what top_k, top_p and min_p keep. False if none
    /// of them is asked for.
    fn keep(&mut self, logits: &[f32], max: f32, scale: f32, sampling: &Sampling) -> bool {
        let top_k = sampling.top_k as usize;
        let top_k = (top_k > 0 && top_k < logits.len()).then_some(top_k);
        let top_p = (sampling.top_p < 1.0).then_some(f64::from(sampling.top_p.max(0.0)));
        let floor = (sampling.min_p > 0.0).then(|| {
            let log = f64::from(sampling.min_p.min(1.0)).ln();
            Cut::at_least((f64::from(max) + log / f64::from(scale)) as f32)
        });

        let mut total = 0.0;
        if let Some(top_k) = top_k {
            let cut = select::top(logits, top_k, &mut self.candidates);
            select::gather(logits, cut, &mut self.candidates);
        } else if let Some(top_p) = top_p {
            self.sums.clear();
            total = scan::sum_exp(logits, max, scale, &mut self.sums);
            // Tokens below this add up to less than `1 - top_p` even if all were: none is in the nucleus.
            let tail = ((1.0 - top_p) * total / logits.len() as f64).ln() - NUCLEUS_MARGIN;
            let cut = Cut::at_least((f64::from(max) + tail / f64::from(scale)) as f32);
            select::gather(logits, floor.map_or(cut, |floor| floor.stricter(cut)), &mut self.candidates);
        } else if let Some(floor) = floor {
            select::gather(logits, floor, &mut self.candidates);
        } else {
            return false;
        }

        scan::weigh(&mut self.candidates, max, scale);
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

    /// Draws from the whole vocabulary: finds the block by the blocks' sums, then the token in it.
    fn draw_all(&mut self, logits: &[f32], max: f32, scale: f32, u: f64) -> TokenId {
        self.sums.clear();
        let mut rest = u * scan::sum_exp(logits, max, scale, &mut self.sums);
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
        let start = block * scan::BLOCK;
        let end = logits.len().min(start + scan::BLOCK);
        self.candidates.clear();
        self.candidates.extend((start..end).map(|token| Candidate::new(token as TokenId, logits[token])));
        scan::weigh(&mut self.candidates, max, scale);
        walk(&self.candidates, rest)
    }
}

/// Natural logarithm by which the bound on the nucleus' tail is lowered, far above the rounding of `exp`.
const NUCLEUS_MARGIN: f64 = 1e-3;

fn is_greedy(sampling: &Sampling) -> bool {
    sampling.temperature.is_nan() || sampling.temperature <= 0.0 || sampling.top_k == 1
}

/// Whether `choice` changes any logit.
fn adjusts(choice: &Choice<'_>) -> bool {
    let Sampling { bias, allowed, bad, .. } = choice.sampling;
    !bias.is_empty() || allowed.is_some() || !bad.is_empty() || choice.sampling.penalises() || bans(choice)
}

fn bans(choice: &Choice<'_>) -> bool {
    let early = choice.history.generated() < choice.stop.min_tokens;
    early && choice.allowed.is_none() && !choice.stop.stop_token_ids.is_empty()
}

/// Applies bias, penalties and bans. Only the tokens concerned are touched; tokens outside of the vocabulary
/// are passed over. Nothing becomes NaN or positive infinity.
fn adjust(logits: &mut [f32], choice: &Choice<'_>) {
    let mut change = |token: TokenId, change: &dyn Fn(f32) -> f32| {
        if let Some(logit) = logits.get_mut(token as usize) {
            let changed = change(*logit);
            *logit = if changed.is_nan() { f32::NEG_INFINITY } else { changed.min(f32::MAX) };
        }
    };
    let sampling = choice.sampling;
    for &(token, bias) in &sampling.bias {
        change(token, &|logit| logit + bias);
    }
    let repetition = sampling.repetition_penalty;
    if repetition != 1.0 {
        for token in choice.history.seen() {
            change(token, &|logit| if logit > 0.0 { logit / repetition } else { logit * repetition });
        }
    }
    if sampling.frequency_penalty != 0.0 || sampling.presence_penalty != 0.0 {
        for &(token, count) in choice.history.counts() {
            let penalty = sampling.frequency_penalty * count as f32 + sampling.presence_penalty;
            change(token, &|logit| logit - penalty);
        }
    }
    if bans(choice) {
        for &token in &choice.stop.stop_token_ids {
            change(token, &|_| f32::NEG_INFINITY);
        }
    }
    for token in lists::completing(&sampling.bad, choice.history.recent()) {
        change(token, &|_| f32::NEG_INFINITY);
    }
    if let Some(allowed) = &sampling.allowed {
        lists::ban_others(logits, allowed);
    }
}

fn draw_kept(kept: &[Candidate], u: f64) -> TokenId {
    let total: f64 = kept.iter().map(|kept| f64::from(kept.weight)).sum();
    walk(kept, u * total)
}

/// The first token at which the weights add up to more than `rest`; where rounding leaves none, the last
/// that has any weight.
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

/// A number in `[0, 1)` that depends on its arguments alone (three rounds of the SplitMix64 finaliser).
fn uniform(seed: u64, sequence: u32, position: u32) -> f64 {
    let hash = mix(mix(mix(seed.wrapping_add(1)) ^ u64::from(sequence)) ^ u64::from(position));
    (hash >> 11) as f64 / (1u64 << 53) as f64
}

/// The SplitMix64 finaliser of `value` plus the golden ratio.
pub(crate) fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

#[cfg(test)]
mod tests;
