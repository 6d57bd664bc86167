//! Partial selection of tokens: more probable ones first, and lower ids first among equals.

use std::cmp::Ordering;

use server_scheduler::TokenId;

/// A token that can be drawn.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate {
    pub(super) token: TokenId,
    pub(super) logit: f32,
    /// The weight is proportional to the probability, and 1 for the most probable token.
    pub(super) weight: f32,
}

impl Candidate {
    pub(super) fn new(token: TokenId, logit: f32) -> Self {
        Self { token, logit, weight: 0.0 }
    }
}

/// The order of the filters. The logits must not be NaN.
pub(super) fn more_probable(a: &Candidate, b: &Candidate) -> Ordering {
    b.logit.partial_cmp(&a.logit).unwrap_or(Ordering::Equal).then(a.token.cmp(&b.token))
}

/// The last token that a filter keeps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Cutoff {
    logit: f32,
    token: TokenId,
}

impl Cutoff {
    /// Keeps the tokens with at least this logit.
    pub(super) fn at_least(logit: f32) -> Self {
        Self { logit, token: TokenId::MAX }
    }

    fn after(last: &Candidate) -> Self {
        Self { logit: last.logit, token: last.token }
    }

    /// Whether the token is kept. A token with zero probability is never kept.
    pub(super) fn keeps(self, logit: f32, token: TokenId) -> bool {
        logit > self.logit || (logit == self.logit && token <= self.token && logit > f32::NEG_INFINITY)
    }

    /// The cut that keeps fewer tokens.
    pub(super) fn stricter(self, other: Self) -> Self {
        if self.keeps(other.logit, other.token) { other } else { self }
    }
}

/// Number of logits that are compared together. A block without a large enough logit is skipped.
const BLOCK: usize = 64;
/// The smallest capacity for candidates, so that a small `count` does not cause a selection every few tokens.
const ROOM_MIN: usize = 128;

/// Fills `top` with the `count` most probable tokens in any order, or fewer if fewer have a probability above zero.
/// Returns the cut that keeps exactly these tokens.
///
/// When `top` has twice as many tokens as requested, its worse half is removed. After that, only tokens better than the
/// worst remaining one are added. So the cost is proportional to the size of the vocabulary, whatever the order of the
/// logits.
pub(super) fn top(logits: &[f32], count: usize, top: &mut Vec<Candidate>) -> Cutoff {
    top.clear();
    if count == 0 {
        return Cutoff { logit: f32::INFINITY, token: 0 };
    }
    let room = count.saturating_mul(2).max(ROOM_MIN);
    let mut cut = Cutoff::at_least(f32::NEG_INFINITY);
    for (index, block) in logits.chunks(BLOCK).enumerate() {
        if !exceeds(block, cut.logit) {
            continue;
        }
        for (offset, &logit) in block.iter().enumerate() {
            // An equal logit would not be kept, because the id of its token is higher.
            if logit > cut.logit {
                top.push(Candidate::new((index * BLOCK + offset) as TokenId, logit));
                if top.len() == room {
                    cut = keep_best(top, count);
                }
            }
        }
    }
    if top.len() > count { keep_best(top, count) } else { cut }
}

fn keep_best(top: &mut Vec<Candidate>, count: usize) -> Cutoff {
    let (_, last, _) = top.select_nth_unstable_by(count - 1, more_probable);
    let cut = Cutoff::after(last);
    top.truncate(count);
    cut
}

/// Fills `kept` with the tokens that `cut` keeps, in the order of their ids.
pub(super) fn gather(logits: &[f32], cut: Cutoff, kept: &mut Vec<Candidate>) {
    kept.clear();
    for (index, block) in logits.chunks(BLOCK).enumerate() {
        if !reaches(block, cut.logit) {
            continue;
        }
        for (offset, &logit) in block.iter().enumerate() {
            let token = (index * BLOCK + offset) as TokenId;
            if cut.keeps(logit, token) {
                kept.push(Candidate::new(token, logit));
            }
        }
    }
}

/// Number of buckets into which a large number of candidates is divided by their logits.
const BUCKETS: usize = 1024;

/// The smallest prefix of `candidates` whose weights add up to `mass`. The order of `candidates` is undefined afterwards.
///
/// Many candidates are first divided into buckets by their logits, and only the bucket in which the sum crosses `mass`
/// is searched. The search partitions the candidates at the middle, and continues in the half in which the sum crosses
/// `mass`.
///
/// # Panics
/// If `candidates` is empty.
pub(super) fn nucleus(candidates: &mut Vec<Candidate>, mut mass: f64) -> Cutoff {
    if candidates.len() > BUCKETS {
        mass -= keep_bucket(candidates, mass);
    }
    let mut rest = &mut candidates[..];
    while rest.len() > 1 {
        let middle = rest.len() / 2;
        rest.select_nth_unstable_by(middle, more_probable);
        let (better, worse) = rest.split_at_mut(middle);
        let sum: f64 = better.iter().map(|candidate| f64::from(candidate.weight)).sum();
        if sum >= mass {
            rest = better;
        } else {
            mass -= sum;
            rest = worse;
        }
    }
    Cutoff::after(&rest[0])
}

/// Keeps the candidates of the bucket in which the sum of weights crosses `mass`, or those of the last bucket with a
/// weight above zero if rounding prevents that. Returns the weight of all more probable candidates.
fn keep_bucket(candidates: &mut Vec<Candidate>, mass: f64) -> f64 {
    let logits = || candidates.iter().map(|candidate| candidate.logit);
    let max = logits().fold(f32::NEG_INFINITY, f32::max);
    let min = logits().fold(f32::INFINITY, f32::min);
    // The scale is infinite or NaN if all logits are equal or too far apart. The cast saturates, and each step is monotonic, so no
    // bucket has a token that is more probable than one of the buckets before it.
    let scale = (BUCKETS - 1) as f32 / (max - min);
    let bucket = |candidate: &Candidate| (((max - candidate.logit) * scale) as usize).min(BUCKETS - 1);

    let mut sums = [0f64; BUCKETS];
    for candidate in &*candidates {
        sums[bucket(candidate)] += f64::from(candidate.weight);
    }
    let (mut before, mut sum, mut crossing) = (0.0, 0.0, 0);
    for (index, &weight) in sums.iter().enumerate().filter(|(_, weight)| **weight > 0.0) {
        before = sum;
        sum += weight;
        crossing = index;
        if sum >= mass {
            break;
        }
    }
    candidates.retain(|candidate| bucket(candidate) == crossing);
    before
}

// This loop has no early exit, so that the compiler vectorizes it.
fn exceeds(block: &[f32], threshold: f32) -> bool {
    block.iter().fold(false, |any, &logit| any | (logit > threshold))
}

fn reaches(block: &[f32], threshold: f32) -> bool {
    block.iter().fold(false, |any, &logit| any | (logit >= threshold))
}
