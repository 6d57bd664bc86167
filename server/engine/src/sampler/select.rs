//! Partial selection of tokens: more probable ones first, and lower ids first among equals.

use std::cmp::Ordering;

use server_scheduler::TokenId;

use super::scan::{self, BLOCK, Blocks, LANES};

/// A token that can be drawn.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate {
    pub(super) token: TokenId,
    pub(super) logit: f32,
    /// The weight that [`weigh`] sets: it is proportional to the probability, and 1 for the most probable token.
    pub(super) weight: f32,
}

impl Candidate {
    pub(super) fn new(token: TokenId, logit: f32) -> Self {
        Self { token, logit, weight: 0.0 }
    }
}

/// The order in which filters prefer tokens. The logits must not be NaN.
pub(super) fn more_probable(a: &Candidate, b: &Candidate) -> Ordering {
    b.logit.partial_cmp(&a.logit).unwrap_or(Ordering::Equal).then(a.token.cmp(&b.token))
}

/// The bound of a filter, which keeps the tokens up to this one in the order of [`more_probable`].
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

    /// The cutoff that keeps fewer tokens.
    pub(super) fn stricter(self, other: Self) -> Self {
        if self.keeps(other.logit, other.token) { other } else { self }
    }
}

/// The smallest capacity for candidates, so that a small `count` does not cause a selection every few tokens.
const ROOM_MIN: usize = 128;

/// Fills `top` with the `count` most probable tokens in any order, or fewer if fewer have a probability above zero.
/// Returns the cutoff that keeps exactly these tokens.
///
/// If `count` blocks have a logit of at least `x`, no logit below `x` is among the `count` greatest, so blocks without
/// a logit of at least `x` are not read. `top` has room for at least twice the requested number of tokens; when it is
/// full, all but the `count` best are removed. After that, only tokens better than the worst remaining one are added.
/// The cost is therefore at most proportional to the size of the vocabulary, regardless of the order of the logits.
pub(super) fn top(blocks: Blocks<'_>, count: usize, top: &mut Vec<Candidate>) -> Cutoff {
    top.clear();
    if count == 0 {
        return Cutoff { logit: f32::INFINITY, token: 0 };
    }
    let room = count.saturating_mul(2).max(ROOM_MIN);
    // At first, `exceeded` is just below the `count`-th greatest maximum, so logits equal to this maximum are added.
    // After `keep_best`, a logit equal to the worst remaining one is not added, because its token has a higher ID.
    let mut exceeded = nth_greatest(blocks.maxima, count, top).next_down();
    for (start, (block, greatest)) in (0..).step_by(BLOCK).zip(blocks.iter()) {
        if greatest <= exceeded {
            continue;
        }
        for (start, values) in (start..).step_by(LANES).zip(block.chunks(LANES)) {
            if !exceeds(values, exceeded) {
                continue;
            }
            for (offset, &logit) in values.iter().enumerate() {
                if logit > exceeded {
                    top.push(Candidate::new(start + offset as TokenId, logit));
                    if top.len() == room {
                        exceeded = keep_best(top, count).logit;
                    }
                }
            }
        }
    }
    if top.len() >= count { keep_best(top, count) } else { Cutoff::at_least(f32::NEG_INFINITY) }
}

/// The `count`-th greatest of `maxima`, or negative infinity if there are fewer. `buffer` is empty before and after.
fn nth_greatest(maxima: &[f32], count: usize, buffer: &mut Vec<Candidate>) -> f32 {
    if count > maxima.len() {
        return f32::NEG_INFINITY;
    }
    buffer.extend(maxima.iter().map(|&greatest| Candidate::new(0, greatest)));
    let nth = keep_best(buffer, count).logit;
    buffer.clear();
    nth
}

fn keep_best(top: &mut Vec<Candidate>, count: usize) -> Cutoff {
    let (_, last, _) = top.select_nth_unstable_by(count - 1, more_probable);
    let cut = Cutoff::after(last);
    top.truncate(count);
    cut
}

/// Fills `kept` with the tokens that `cut` keeps, in the order of their ids.
pub(super) fn gather(blocks: Blocks<'_>, cut: Cutoff, kept: &mut Vec<Candidate>) {
    kept.clear();
    for (start, (block, greatest)) in (0..).step_by(BLOCK).zip(blocks.iter()) {
        if greatest < cut.logit {
            continue;
        }
        for (start, values) in (start..).step_by(LANES).zip(block.chunks(LANES)) {
            if !reaches(values, cut.logit) {
                continue;
            }
            for (offset, &logit) in values.iter().enumerate() {
                let token = start + offset as TokenId;
                if cut.keeps(logit, token) {
                    kept.push(Candidate::new(token, logit));
                }
            }
        }
    }
}

/// Sets the weights of `candidates` to `exp((logit - max) * scale)`.
pub(super) fn weigh(candidates: &mut [Candidate], max: f32, scale: f32) {
    for candidate in candidates {
        candidate.weight = scan::exp((candidate.logit - max) * scale);
    }
}

/// Number of buckets into which a large number of candidates is divided by their logits.
const BUCKETS: usize = 1024;

/// The cutoff that keeps the fewest most probable `candidates` whose weights add up to at least `mass`. The order of
/// `candidates` is undefined afterward.
///
/// If there are more than [`BUCKETS`] candidates, they are first divided into buckets by their logits, and only the
/// bucket in which the sum crosses `mass` is searched. The search partitions the candidates at the middle, and
/// continues in the half in which the sum crosses `mass`.
///
/// # Panics
/// Panics if `candidates` is empty.
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
/// weight above zero if rounding prevents that. Returns the total weight of the candidates in earlier buckets.
fn keep_bucket(candidates: &mut Vec<Candidate>, mass: f64) -> f64 {
    let logits = || candidates.iter().map(|candidate| candidate.logit);
    let max = logits().fold(f32::NEG_INFINITY, f32::max);
    let min = logits().fold(f32::INFINITY, f32::min);
    // The scale is infinite if all logits are equal, and zero if `max - min` is infinite. The cast saturates and turns
    // NaN into zero, and each step is monotonic, so no token is more probable than a token in an earlier bucket.
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

#[cfg(test)]
mod tests {
    use rand::rngs::StdRng;
    use rand::{RngExt, SeedableRng};

    use super::*;

    #[test]
    fn the_top_tokens_are_those_of_a_sort_with_ties_in_the_order_of_ids() {
        let mut rng = StdRng::seed_from_u64(4);
        let (mut maxima, mut kept) = (Vec::new(), Vec::new());
        for round in 0..600 {
            let length = [1, 15, 300, 5000][round % 4];
            let spread = [1f32, 3.0, 1000.0][rng.random_range(0..3)];
            let mut logits: Vec<f32> =
                (0..length).map(|_| rng.random_range(-spread..spread).round()).collect();
            match rng.random_range(0..3) {
                0 => logits.sort_unstable_by(f32::total_cmp),
                1 => logits.iter_mut().step_by(2).for_each(|logit| *logit = f32::NEG_INFINITY),
                _ => {}
            }
            let count = [1, 2, 5, 19, 20, 21, 100, length - 1, length, length + 3][rng.random_range(0..10)];
            let mut expected: Vec<TokenId> = (0..length as TokenId).collect();
            expected.retain(|&token| logits[token as usize] > f32::NEG_INFINITY);
            expected.sort_by(|&a, &b| {
                logits[b as usize].partial_cmp(&logits[a as usize]).unwrap().then(a.cmp(&b))
            });
            expected.truncate(count);

            scan::peak(&logits, &mut maxima);
            let blocks = Blocks { logits: &logits, maxima: &maxima };
            let cut = top(blocks, count, &mut kept);
            kept.sort_unstable_by(more_probable);
            assert!(kept.iter().map(|kept| kept.token).eq(expected.iter().copied()), "round {round}");
            gather(blocks, cut, &mut kept);
            expected.sort_unstable();
            assert!(kept.iter().map(|kept| kept.token).eq(expected), "round {round}");
        }
    }
}
