//! Tracks the health of replicas by the outcomes of their requests.
//!
//! A replica that fails several times in a row, or for a large fraction of its requests, is ejected for a while. Then a
//! few requests probe it (the circuit breaker is half open), and the replica is trusted again if they succeed. A probe
//! succeeds when its answer begins, because a stream can take minutes; a later failure counts like a failure of any
//! other request. Only a fraction of the replicas of a model can be ejected at the same time: if most of them fail, the
//! cause is probably elsewhere. If too few replicas remain anyway (because healthy ones were removed), ejections are
//! ignored for that model, as in Envoy below its panic threshold. The module also manages the retry budget. It reads no
//! clock.

use std::collections::HashMap;
use std::time::{Duration, Instant};

/// The settings that determine when a replica is ejected, for how long, and when it is trusted again.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HealthConfig {
    /// The number of consecutive failures that ejects a replica.
    pub consecutive_failures: u32,
    /// The fraction of a replica's recent requests that must fail for the replica to be ejected.
    pub failure_share: f32,
    /// The smallest number of recent requests for which the fraction of failed requests is considered.
    pub requests_min: u32,
    /// The duration of the first ejection. It doubles with each further ejection.
    pub ejection: Duration,
    /// The longest duration of an ejection.
    pub ejection_max: Duration,
    /// The fraction of a model's replicas that can be ejected at the same time. If a model has several replicas, one of
    /// them can always be ejected.
    pub ejected_share_max: f32,
    /// The fraction of a model's replicas that must be available for ejections to take effect. If fewer replicas are
    /// available, all replicas are used, ejected or not, because the available ones could not handle the load of the
    /// others.
    pub panic_threshold: f32,
    /// The number of requests that probe a replica after its ejection, and must succeed before the replica is trusted
    /// again.
    pub probes: u32,
}

impl Default for HealthConfig {
    fn default() -> Self {
        Self {
            consecutive_failures: 3,
            failure_share: 0.5,
            requests_min: 10,
            ejection: Duration::from_secs(2),
            ejection_max: Duration::from_secs(60),
            ejected_share_max: 0.5,
            panic_threshold: 0.5,
            probes: 3,
        }
    }
}

/// Whether a replica may receive requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HealthState {
    /// The replica may receive requests.
    Trusted,
    /// The replica is being probed, and may receive one more request.
    Probing,
    /// The replica temporarily receives no requests.
    Ejected,
}

impl HealthState {
    /// The weight of the replica in the policy.
    #[must_use]
    pub fn weight(self) -> f32 {
        match self {
            Self::Trusted => 1.0,
            Self::Probing => 0.5,
            Self::Ejected => 0.0,
        }
    }
}

/// The health of all replicas.
#[derive(Debug)]
pub struct Health {
    config: HealthConfig,
    replicas: HashMap<u64, Record>,
    /// The number of rounds of probes that have begun, over all replicas.
    rounds: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Record {
    consecutive_failures: u32,
    /// The number of recent requests. It is halved together with `failures` when it reaches [`REQUESTS_WINDOW`].
    requests: u32,
    failures: u32,
    /// The number of ejections since the replica was last healthy for a long time.
    ejections: u32,
    state: Breaker,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
enum Breaker {
    #[default]
    Closed,
    Open {
        until: Instant,
    },
    HalfOpen {
        /// The number of the round. A probe counts only in the round in which it was sent.
        round: u64,
        /// The number of probes whose answers have not begun.
        sent: u32,
        /// The number of probes that have succeeded.
        succeeded: u32,
    },
}

/// The value at which the number of counted requests is halved, together with the number of failures, so that older
/// requests count less.
const REQUESTS_WINDOW: u32 = 200;
/// The number of recent requests without a failure after which the number of ejections is reset.
const FORGIVEN_AFTER: u32 = 50;

impl Health {
    /// Creates a health check without replicas.
    #[must_use]
    pub fn new(config: HealthConfig) -> Self {
        Self { config, replicas: HashMap::new(), rounds: 0 }
    }

    /// Adds a replica, unless it is known already.
    pub fn add(&mut self, replica: u64) {
        self.replicas.entry(replica).or_default();
    }

    /// Removes a replica and its history.
    pub fn remove(&mut self, replica: u64) {
        self.replicas.remove(&replica);
    }

    /// Clears the history of a replica whose process has been replaced.
    pub fn reset(&mut self, replica: u64) {
        if let Some(record) = self.replicas.get_mut(&replica) {
            *record = Record::default();
        }
    }

    /// Whether the replica may receive requests now. A replica that was not added, or was removed, may not.
    #[must_use]
    pub fn state(&self, replica: u64, now: Instant) -> HealthState {
        let Some(record) = self.replicas.get(&replica) else { return HealthState::Ejected };
        match record.state {
            Breaker::Closed => HealthState::Trusted,
            Breaker::Open { until } if now < until => HealthState::Ejected,
            Breaker::Open { .. } => HealthState::Probing,
            Breaker::HalfOpen { sent, succeeded, .. } if sent + succeeded < self.config.probes.max(1) => {
                HealthState::Probing
            }
            Breaker::HalfOpen { .. } => HealthState::Ejected,
        }
    }

    /// Whether ejections are ignored because too few replicas of a model are available. `replicas` are all replicas of
    /// the model.
    #[must_use]
    pub fn is_panicking(&self, replicas: impl IntoIterator<Item = u64>, now: Instant) -> bool {
        let (mut count, mut available) = (0_u32, 0_u32);
        for replica in replicas {
            count += 1;
            available += u32::from(self.state(replica, now) != HealthState::Ejected);
        }
        count > 0 && (available as f32) < count as f32 * self.config.panic_threshold.clamp(0.0, 1.0)
    }

    /// Records that a request is sent to the replica. Exactly one call of [`Self::succeeded`], [`Self::failed`] or
    /// [`Self::unknown`] must follow. [`Self::answer_began`] may be called before that.
    #[must_use]
    pub fn sent(&mut self, replica: u64, now: Instant) -> SentRequest {
        let Some(record) = self.replicas.get_mut(&replica) else { return SentRequest { probe_round: None } };
        let probe_round = match &mut record.state {
            Breaker::Open { until } if now >= *until => {
                self.rounds += 1;
                record.state = Breaker::HalfOpen { round: self.rounds, sent: 1, succeeded: 0 };
                Some(self.rounds)
            }
            Breaker::HalfOpen { round, sent, .. } => {
                *sent += 1;
                Some(*round)
            }
            _ => None,
        };
        SentRequest { probe_round }
    }

    /// Records that the answer has begun. If the request is a probe, the probe has succeeded, and a later failure
    /// counts like a failure of any other request.
    pub fn answer_began(&mut self, replica: u64, request: &mut SentRequest) {
        let probes = self.config.probes.max(1);
        let probe_round = request.probe_round.take();
        let Some(record) = self.replicas.get_mut(&replica) else { return };
        if let Breaker::HalfOpen { round, sent, succeeded } = &mut record.state
            && probe_round == Some(*round)
        {
            *sent = sent.saturating_sub(1);
            *succeeded += 1;
            if *succeeded >= probes {
                record.state = Breaker::Closed;
                (record.consecutive_failures, record.requests, record.failures) = (0, 0, 0);
            }
        }
    }

    /// Records that the replica returned a complete answer, which can be an error that the client caused.
    pub fn succeeded(&mut self, replica: u64, mut sent: SentRequest) {
        self.answer_began(replica, &mut sent);
        let Some(record) = self.replicas.get_mut(&replica) else { return };
        record.count(false);
        record.consecutive_failures = 0;
        if record.state == Breaker::Closed && record.failures == 0 && record.requests >= FORGIVEN_AFTER {
            record.ejections = 0;
        }
    }

    /// Records that the request failed. Failures are: no connection, a broken connection, no answer in time, a rejected
    /// replica token, and a 5xx status other than 503. A broken connection is not a failure if the replica may merely
    /// have closed it because it was idle. Returns whether the failure ejected the replica. `model_replicas` lists all
    /// replicas of the request's model; their number limits how many can be ejected.
    pub fn failed(
        &mut self,
        replica: u64,
        sent: SentRequest,
        model_replicas: impl IntoIterator<Item = u64>,
        now: Instant,
    ) -> bool {
        let may_eject = self.may_eject(replica, model_replicas, now);
        let config = self.config;
        let Some(record) = self.replicas.get_mut(&replica) else { return false };
        record.count(true);
        record.consecutive_failures += 1;
        let is_ejected = match record.state {
            Breaker::Closed => record.exceeds_failure_limits(&config) && may_eject,
            // A probe failed. The replica still counts as ejected, so the limit permits ejecting it again.
            Breaker::HalfOpen { round, .. } => sent.probe_round == Some(round),
            Breaker::Open { .. } => false,
        };
        if is_ejected {
            let doubled = config.ejection.saturating_mul(1 << record.ejections.min(16));
            record.state = Breaker::Open { until: now + doubled.min(config.ejection_max) };
            record.ejections += 1;
            record.consecutive_failures = 0;
            (record.requests, record.failures) = (0, 0);
        }
        is_ejected
    }

    /// Records that the request ended without information about the health of the replica, for example because the
    /// client disconnected.
    pub fn unknown(&mut self, replica: u64, request: SentRequest) {
        let Some(record) = self.replicas.get_mut(&replica) else { return };
        if let Breaker::HalfOpen { round, sent, .. } = &mut record.state
            && request.probe_round == Some(*round)
        {
            *sent = sent.saturating_sub(1);
        }
    }

    /// Whether `replica` may be ejected in addition to those of `model_replicas` that are ejected or being probed.
    fn may_eject(&self, replica: u64, model_replicas: impl IntoIterator<Item = u64>, now: Instant) -> bool {
        let (mut others, mut ejected) = (0_usize, 0_usize);
        for other in model_replicas.into_iter().filter(|&other| other != replica) {
            others += 1;
            ejected += usize::from(self.state(other, now) != HealthState::Trusted);
        }
        let count = others + 1;
        let limit = (count as f32 * self.config.ejected_share_max.clamp(0.0, 1.0)) as usize;
        let limit = if count >= 2 { limit.max(1) } else { limit };
        ejected < limit.min(others).max(usize::from(self.config.ejected_share_max >= 1.0))
    }
}

/// A request that was sent to a replica. The caller returns it to [`Health`] when the request has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SentRequest {
    /// The round of probes that the request belongs to. `None` if the request is not a probe or its answer has begun.
    probe_round: Option<u64>,
}

impl Record {
    fn count(&mut self, failed: bool) {
        self.requests += 1;
        self.failures += u32::from(failed);
        if self.requests >= REQUESTS_WINDOW {
            self.requests /= 2;
            self.failures /= 2;
        }
    }

    fn exceeds_failure_limits(&self, config: &HealthConfig) -> bool {
        let failure_share = self.failures as f32 / self.requests.max(1) as f32;
        self.consecutive_failures >= config.consecutive_failures.max(1)
            || (self.requests >= config.requests_min.max(1) && failure_share >= config.failure_share)
    }
}

/// Limits the retries to a percentage of the requests, so that retries do not multiply the load on a failing fleet.
#[derive(Clone, Copy, Debug)]
pub struct RetryBudget {
    retries_per_request: f64,
    saved_max: f64,
    saved: f64,
}

impl RetryBudget {
    /// Creates a budget of `retry_budget_percent` retries per 100 requests. It saves up to `saved_max` unused retries,
    /// and starts with that number. A budget of 0 permits no retries.
    #[must_use]
    pub fn new(retry_budget_percent: u32, saved_max: u32) -> Self {
        let saved_max = f64::from(saved_max);
        let mut budget = Self { retries_per_request: 0.0, saved_max, saved: saved_max };
        budget.configure(retry_budget_percent);
        budget
    }

    /// Changes the number of retries per 100 requests. Saved retries remain, but no retry is permitted while
    /// `retry_budget_percent` is 0.
    pub fn configure(&mut self, retry_budget_percent: u32) {
        self.retries_per_request = f64::from(retry_budget_percent) / 100.0;
    }

    /// Counts a request toward the budget.
    pub fn deposit(&mut self) {
        self.saved = (self.saved + self.retries_per_request).min(self.saved_max);
    }

    /// Whether a retry is permitted; if so, it is charged to the budget.
    pub fn withdraw(&mut self) -> bool {
        let is_permitted = self.retries_per_request > 0.0 && self.saved >= 1.0;
        self.saved -= f64::from(u8::from(is_permitted));
        is_permitted
    }
}

#[cfg(test)]
mod tests;
