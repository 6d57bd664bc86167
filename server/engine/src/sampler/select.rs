//! Partial selection in the order "more probable first, lower id first among equals".

use std::cmp::Ordering;

use server_scheduler::TokenId;

/// A token that may be drawn.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate {
    pub(super) token: TokenId,
    pub(super) logit: f32,
    /// In proportion to its probability; 1 for the most probable token.
    pub(super) weight: f32,
}

impl Candidate {
    pub(super) fn new(token: TokenId, logit: f32) -> Self {
        Self { token, logit, weight: 0.0 }
    }
}

/// The order in which filters keep tokens. Logits here are never NaN.
pub(super) fn more_probable(a: &Candidate, b: &Candidate) -> Ordering {
    b.logit.partial_cmp(&a.logit).unwrap_or(Ordering::Equal).then(a.token.cmp(&b.token))
}

/// The last token, in that order, that a filter keeps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Cut {
    logit: f32,
    token: TokenId,
}

impl Cut {
    /// Keeps every token with this logit or a greater one.
    pub(super) fn at_least(logit: f32) -> Self {
        Self { logit, token: TokenId::MAX }
    }

    fn after(last: &Candidate) -> Self {
        Self { logit: last.logit, token: last.token }
    }

    /// Whether the token is kept. One that has no probability at all never is.
    pub(super) fn keeps(self, logit: f32, token: TokenId) -> bool {
        logit > self.logit || (logit == self.logit && token <= self.token && logit > f32::NEG_INFINITY)
    }

    /// The one of two that keeps fewer tokens.
    pub(super) fn stricter(self, other: Self) -> Self {
        if self.keeps(other.logit, other.token) { other } else { self }
    }
}

/// Logits looked at together: a block whose greatest is too small is passed over.
const BLOCK: usize = 64;
/// Least room for candidates, so that a small `count` is not selected anew every few tokens.
const ROOM_MIN: usize = 128;

/// Leaves in `top` the `count` most probable tokens, in no order (fewer if fewer have any probability), and
/// returns the cut that keeps just these.
///
/// `top` fills to twice the count, then loses its worse half; from then on only what is better than the
/// worst of the rest comes in. That is proportional to the vocabulary whatever the order of the logits.
pub(super) fn top(logits: &[f32], count: usize, top: &mut Vec<Candidate>) -> Cut {
    top.clear();
    if count == 0 {
        return Cut { logit: f32::INFINITY, token: 0 };
    }
    let room = count.saturating_mul(2).max(ROOM_MIN);
    let mut cut = Cut::at_least(f32::NEG_INFINITY);
    for (index, block) in logits.chunks(BLOCK).enumerate() {
        if !exceeds(block, cut.logit) {
            continue;
        }
        for (offset, &logit) in block.iter().enumerate() {
            // An equal one comes later, so its id is higher: it would not be kept.
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

fn keep_best(top: &mut Vec<Candidate>, count: usize) -> Cut {
    let (_, last, _) = top.select_nth_unstable_by(count - 1, more_probable);
    let cut = Cut::after(last);
    top.truncate(count);
    cut
}

/// Fills `kept` with the tokens that `cut` keeps, in the order of their ids.
pub(super) fn gather(logits: &[f32], cut: Cut, kept: &mut Vec<Candidate>) {
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

/// Buckets that a large number of candidates is put into, by their logits.
const BUCKETS: usize = 1024;

/// The smallest prefix of `candidates` whose weights add up to `mass`. Leaves rubbish in `candidates`.
///
/// Many are first put into buckets by their logits, of which only that in which the sum crosses `mass` is
/// looked into. There it goes by halving: a selection at the middle, then the half in which the sum crosses.
///
/// # Panics
/// If there are none.
pub(super) fn nucleus(candidates: &mut Vec<Candidate>, mut mass: f64) -> Cut {
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
    Cut::after(&rest[0])
}

/// Keeps the candidates of the bucket in which the sum of weights crosses `mass`, the last that has any if
/// rounding leaves none, and returns the weight of all more probable ones.
fn keep_bucket(candidates: &mut Vec<Candidate>, mass: f64) -> f64 {
    let logits = || candidates.iter().map(|candidate| candidate.logit);
    let max = logits().fold(f32::NEG_INFINITY, f32::max);
    let min = logits().fold(f32::INFINITY, f32::min);
    // Infinite or not a number where all are equal or too far apart: the cast makes that a bucket as well,
    // and each step is monotonous, so no bucket holds a token more probable than one of those before it.
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

// No short cut within a block: without one the compiler compares several at a time.
fn exceeds(block: &[f32], threshold: f32) -> bool {
    block.iter().fold(false, |found, &logit| found | (logit > threshold))
}

fn reaches(block: &[f32], threshold: f32) -> bool {
    block.iter().fold(false, |found, &logit| found | (logit >= threshold))
}
