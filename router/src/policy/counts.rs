//! The policies that count requests or picks, and do not use the figures of load reports in their scores. They are
//! meant for fleets whose replicas do not report their load, and for comparison.

use rand::Rng;

use super::candidate::{Candidate, Terms};

/// Scores by requests in flight, relative to the weight of the replica.
pub(super) fn least_requests(candidates: &[Candidate], terms: &mut Vec<Terms>) {
    terms.extend(candidates.iter().map(|candidate| {
        let in_flight = candidate.snapshot.booked.in_flight;
        Terms { score: weighted(candidate), in_flight, ..Terms::default() }
    }));
}

/// Scores two random eligible candidates as [`least_requests`] does, and no others.
pub(super) fn power_of_two(
    candidates: &[Candidate],
    is_eligible: impl Fn(&Candidate) -> bool,
    terms: &mut Vec<Terms>,
    rng: &mut impl Rng,
) {
    least_requests(candidates, terms);
    let is_eligible = |index: &usize| is_eligible(&candidates[*index]);
    let count = (0..candidates.len()).filter(is_eligible).count();
    if count <= 2 {
        return;
    }
    let first = below(count, rng);
    let second = (first + 1 + below(count - 1, rng)) % count;
    for (position, index) in (0..candidates.len()).filter(is_eligible).enumerate() {
        if position != first && position != second {
            terms[index].score = f64::INFINITY;
        }
    }
}

/// Scores by the sequence number of the last pick of the candidate, so that the candidate that was picked longest ago
/// is picked next.
pub(super) fn round_robin(candidates: &[Candidate], terms: &mut Vec<Terms>) {
    terms.extend(candidates.iter().map(|candidate| {
        let in_flight = candidate.snapshot.booked.in_flight;
        Terms { score: candidate.last_pick as f64, in_flight, ..Terms::default() }
    }));
}

/// The number of requests in flight including the new one, relative to the weight of the replica.
pub(super) fn weighted(candidate: &Candidate) -> f64 {
    (f64::from(candidate.snapshot.booked.in_flight) + 1.0)
        / f64::from(candidate.weight.max(f32::MIN_POSITIVE))
}

/// A random number below `count`, which must not be 0. The bias is negligible for any realistic number of replicas.
pub(super) fn below(count: usize, rng: &mut impl Rng) -> usize {
    ((u128::from(rng.next_u64()) * count as u128) >> 64) as usize
}
