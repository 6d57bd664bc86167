//! Sends each session to the same replica without a table (rendezvous hashing): a hash of the session and the replica
//! ranks all replicas for each session, and the available replica with the lowest hash gets the session. When a replica
//! is removed, only its sessions move.

use super::candidate::{Candidate, Terms};

pub(super) fn score(session: u64, candidates: &[Candidate], terms: &mut Vec<Terms>) {
    terms.extend(candidates.iter().map(|candidate| {
        // An `f64` represents integers of up to 53 bits exactly. If the ranks of two replicas are equal in these bits,
        // one of the two is chosen at random.
        let rank = mix(session ^ mix(candidate.identity)) >> 11;
        Terms { score: rank as f64, in_flight: candidate.snapshot.booked.in_flight, ..Terms::default() }
    }));
}

/// The finalizer of MurmurHash3: a bijection in which every bit of the result depends on every bit of `value`.
#[must_use]
pub fn mix(mut value: u64) -> u64 {
    value = (value ^ (value >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    value = (value ^ (value >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    value ^ (value >> 33)
}
