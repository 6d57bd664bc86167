//! Which replica a request goes to.
//!
//! Everything here is a function of what is passed in: no clock, no lock, no random number but the caller's.
//! It books nothing; the caller does that right after ([`crate::ledger::Ledger::book_if`]), before it sends.
//!
//! ```text
//! (Demand, Candidates) ─► capacity: now, later or never? ─► Policy::pick ─► a Candidate, and the terms why
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

/// How replicas are compared.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Policy {
    /// By the estimated time to the first token: work ahead, speed, room in the KV cache, cached prefix.
    Kv(KvConfig),
    /// By requests in flight, as this router counts them.
    LeastRequests,
    /// By requests in flight, between two at random.
    PowerOfTwo,
    /// In turn.
    RoundRobin,
    /// The same replica for the same session as long as it is there; without a session as [`Self::Kv`].
    Session(KvConfig),
}

/// Why there is no replica for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoReplica {
    /// There is none that takes requests.
    #[error("no replica takes requests")]
    Unavailable,
    /// There are some, but it fits none.
    #[error("the request fits no replica")]
    NeverFits,
}

/// The name is none of a policy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no policy has the name {0:?}: kv, least-requests, power-of-two, round-robin or session")]
pub struct UnknownPolicy(String);

impl Policy {
    /// The index of the replica to send to. `terms` is replaced by what each candidate was judged by, in
    /// their order. Equal candidates are equally likely. One that sleeps is not considered as long as one
    /// that is awake has room.
    ///
    /// # Errors
    /// No candidate can ever take the request. (That all are full at the moment is [`capacity`]'s to say: here
    /// the least bad is taken.)
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
            .any(|candidate| !candidate.is_asleep() && candidate.capacity(demand) == Capacity::Now);
        let able = |candidate: &Candidate| {
            let is_left_asleep = awake_has_room && candidate.is_asleep();
            !is_left_asleep && !candidate.is_reserved && candidate.capacity(demand) != Capacity::Never
        };
        match self {
            Self::Kv(config) => kv::score(config, demand, candidates, terms),
            Self::Session(config) => match demand.session {
                Some(session) => session::score(session, candidates, terms),
                None => kv::score(config, demand, candidates, terms),
            },
            Self::LeastRequests => counts::least_requests(candidates, terms),
            Self::PowerOfTwo => counts::power_of_two(candidates, able, terms, rng),
            Self::RoundRobin => counts::round_robin(candidates, terms),
        }
        for (candidate, terms) in candidates.iter().zip(terms.iter_mut()) {
            if !able(candidate) {
                terms.score = f64::INFINITY;
            }
        }
        least(terms, rng).ok_or_else(|| {
            if candidates.iter().any(Candidate::takes_requests) {
                NoReplica::NeverFits
            } else {
                NoReplica::Unavailable
            }
        })
    }

    /// Whether the policy looks at cached prefixes, so that they need not be looked up otherwise.
    #[must_use]
    pub fn uses_prefixes(&self) -> bool {
        matches!(self, Self::Kv(config) | Self::Session(config) if config.prefix)
    }

    /// The name, as in the configuration.
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

/// The index of one of the candidates with the least score, each of these as likely as the other.
fn least(terms: &[Terms], rng: &mut impl Rng) -> Option<usize> {
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
