//! The policies that count requests and know nothing else: for fleets that do not report, and to compare with.

use rand::Rng;

use super::candidate::{Candidate, Terms};

/// By requests in flight, a replica on probation counting for as much less as its weight says.
pub(super) fn least_requests(candidates: &[Candidate], terms: &mut Vec<Terms>) {
    terms.extend(candidates.iter().map(|candidate| {
        let in_flight = candidate.view.booked.in_flight;
        Terms { score: weighted(candidate), in_flight, ..Terms::default() }
    }));
}

/// As [`least_requests`], between two at random of the candidates that are `able`.
pub(super) fn power_of_two(
    candidates: &[Candidate],
    able: impl Fn(&Candidate) -> bool,
    terms: &mut Vec<Terms>,
    rng: &mut impl Rng,
) {
    least_requests(candidates, terms);
    let able = |index: &usize| able(&candidates[*index]);
    let count = (0..candidates.len()).filter(able).count();
    if count <= 2 {
        return;
    }
    let first = below(count, rng);
    let second = (first + 1 + below(count - 1, rng)) % count;
    for (position, index) in (0..candidates.len()).filter(able).enumerate() {
        if position != first && position != second {
            terms[index].score = f64::INFINITY;
        }
    }
}

/// The one whose last turn was longest ago.
pub(super) fn round_robin(candidates: &[Candidate], terms: &mut Vec<Terms>) {
    terms.extend(candidates.iter().map(|candidate| {
        let in_flight = candidate.view.booked.in_flight;
        Terms { score: candidate.last_pick as f64, in_flight, ..Terms::default() }
    }));
}

/// Requests in flight with one more, by weight.
pub(super) fn weighted(candidate: &Candidate) -> f64 {
    (f64::from(candidate.view.booked.in_flight) + 1.0) / f64::from(candidate.weight.max(f32::MIN_POSITIVE))
}

/// A number below `count`, which is not 0; each as likely as the other, as far as counts of replicas go.
pub(super) fn below(count: usize, rng: &mut impl Rng) -> usize {
    ((u128::from(rng.next_u64()) * count as u128) >> 64) as usize
}
