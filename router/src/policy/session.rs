//! The same replica for the same session, without any table: each session ranks all replicas by a hash, and
//! the first that is there has it. When one goes, only its sessions move.

use super::candidate::{Candidate, Terms};

pub(super) fn score(session: u64, candidates: &[Candidate], terms: &mut Vec<Terms>) {
    terms.extend(candidates.iter().map(|candidate| {
        // The score is exact for 53 bits; two replicas that agree in these share the sessions at random.
        let rank = mix(session ^ mix(candidate.identity)) >> 11;
        Terms { score: rank as f64, in_flight: candidate.view.booked.in_flight, ..Terms::default() }
    }));
}

/// A bijection in which each bit depends on each (the finaliser of MurmurHash3).
fn mix(mut value: u64) -> u64 {
    value = (value ^ (value >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    value = (value ^ (value >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    value ^ (value >> 33)
}
