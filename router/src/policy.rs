//! Decides which replica a request is sent to.
//!
//! All functions of this module depend only on their arguments: they read no clock, take no lock, and draw random
//! numbers only from the caller's generator. They do not book the pick; the caller books the picked replica
//! ([`crate::ledger::Ledger::book_if`]) before the request is sent.
//!
//! ```text
//! (Demand, Candidates) ─► capacity: now, later or never? ─► Policy::pick ─► a Candidate, and the Terms of each score
//! ```

use std::fmt;
use std::str::FromStr;

use rand::Rng;

mod candidate;
mod counts;
mod kv;
mod session;

pub use candidate::{Candidate, Capacity, Demand, Terms, capacity};
use counts::below;
pub use kv::KvConfig;
pub use session::mix;

/// The method by which a replica is picked for a request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Policy {
    /// Picks the replica with the lowest estimated time to the first token, based on its queued work, speed, free KV
    /// cache and cached prefix.
    Kv(KvConfig),
    /// Picks the replica with the fewest requests in flight, as counted by this router.
    LeastRequests,
    /// Picks two random replicas, and chooses the one with fewer requests in flight.
    PowerOfTwo,
    /// Picks the replicas in turn.
    RoundRobin,
    /// Picks the same replica for the same session as long as the set of eligible replicas does not change. Requests
    /// without a session are handled as by [`Self::Kv`].
    Session(KvConfig),
}

/// The reason why no replica was picked for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoReplica {
    /// No candidate accepts requests.
    #[error("no replica accepts requests")]
    Unavailable,
    /// Candidates accept requests, but each is too small for the request or reserved for another request.
    #[error(
        "every replica that accepts requests is too small for this request or reserved for another request"
    )]
    NeverFits,
}

/// The name is not the name of a policy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown policy {0:?}: use kv, least-requests, power-of-two, round-robin or session")]
pub struct UnknownPolicy(String);

impl Policy {
    /// Returns the index of the candidate to send the request to. `terms` is replaced by the terms of all candidates,
    /// in the order of the candidates. If several candidates have the lowest score, they are equally likely to be
    /// picked. A sleeping replica is not considered while one that is awake has room.
    ///
    /// # Errors
    /// No candidate accepts the request: each is unavailable, too small, or reserved for another request. If all
    /// candidates are merely full at the moment (see [`capacity`]), the best of them is picked.
    pub fn pick(
        &self,
        demand: &Demand,
        candidates: &[Candidate],
        terms: &mut Vec<Terms>,
        rng: &mut impl Rng,
    ) -> Result<usize, NoReplica> {
        terms.clear();
        let awake_has_room = candidates
            .iter()
            .any(|candidate| !candidate.is_sleeping() && candidate.capacity(demand) == Capacity::Now);
        let is_eligible = |candidate: &Candidate| {
            let stays_sleeping = awake_has_room && candidate.is_sleeping();
            !stays_sleeping && !candidate.is_reserved && candidate.capacity(demand) != Capacity::Never
        };
        match self {
            Self::Kv(config) => kv::score(config, demand, candidates, terms),
            Self::Session(config) => match demand.session {
                Some(session) => session::score(session, candidates, terms),
                None => kv::score(config, demand, candidates, terms),
            },
            Self::LeastRequests => counts::least_requests(candidates, terms),
            Self::PowerOfTwo => counts::power_of_two(candidates, is_eligible, terms, rng),
            Self::RoundRobin => counts::round_robin(candidates, terms),
        }
        for (candidate, terms) in candidates.iter().zip(terms.iter_mut()) {
            if !is_eligible(candidate) {
                terms.score = f64::INFINITY;
            }
        }
        lowest(terms, rng).ok_or_else(|| {
            if candidates.iter().any(Candidate::accepts_requests) {
                NoReplica::NeverFits
            } else {
                NoReplica::Unavailable
            }
        })
    }

    /// Whether the policy compares cached prefixes.
    #[must_use]
    pub fn uses_prefixes(&self) -> bool {
        matches!(self, Self::Kv(config) | Self::Session(config) if config.uses_prefixes)
    }

    /// The name of the policy, as in the configuration.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Kv(_) => "kv",
            Self::LeastRequests => "least-requests",
            Self::PowerOfTwo => "power-of-two",
            Self::RoundRobin => "round-robin",
            Self::Session(_) => "session",
        }
    }
}

impl Default for Policy {
    fn default() -> Self {
        Self::Kv(KvConfig::default())
    }
}

impl FromStr for Policy {
    type Err = UnknownPolicy;

    fn from_str(name: &str) -> Result<Self, UnknownPolicy> {
        Ok(match name {
            "kv" => Self::Kv(KvConfig::default()),
            "least-requests" => Self::LeastRequests,
            "power-of-two" => Self::PowerOfTwo,
            "round-robin" => Self::RoundRobin,
            "session" => Self::Session(KvConfig::default()),
            _ => return Err(UnknownPolicy(name.to_owned())),
        })
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

/// The index of a candidate with the lowest score, chosen at random if several have it.
fn lowest(terms: &[Terms], rng: &mut impl Rng) -> Option<usize> {
    let best = terms.iter().map(|terms| terms.score).min_by(f64::total_cmp)?;
    if best == f64::INFINITY {
        return None;
    }
    let equal = |terms: &&Terms| terms.score == best;
    let count = terms.iter().filter(|terms| equal(terms)).count();
    let chosen = below(count, rng);
    (0..).zip(terms).filter(|(_, terms)| equal(terms)).nth(chosen).map(|(index, _)| index)
}

#[cfg(test)]
mod tests;
