//! Which replicas are to be trusted, by how their answers end.
//!
//! A replica that fails several times in a row, or much more often than it answers, is ejected for a while;
//! then a few requests try it (half open), and if they go well it is taken back. No more than a part of the
//! replicas of a model is ejected at any time: if most of them fail, the fault is likely elsewhere. If so many of
//! them are ejected all the same (because healthy ones were removed), ejections are ignored for that model, as
//! Envoy does below its panic threshold. Beside it, how many requests may be sent a second time. No clock is
//! read here.

use std::collections::HashMap;
use std::time::{Duration, Instant};

/// When a replica is ejected and for how long.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HealthConfig {
    /// Failures in a row after which a replica is ejected.
    pub failures_in_row: u32,
    /// The part of the answers of the last while that failed, at which a replica is ejected,
    pub failure_part: f32,
    /// if there were at least this many.
    pub answers_min: u32,
    /// The time for which it is ejected at first; it doubles each time it fails again,
    pub ejection: Duration,
    /// up to this.
    pub ejection_max: Duration,
    /// The part of a model's replicas that may be ejected at a time. One may be wherever there are two.
    pub ejected_part_max: f32,
    /// The part of a model's replicas below which too few are trusted to carry the load of the others: all of them
    /// are used then, ejected or not.
    pub panic_threshold: f32,
    /// Requests that try a replica at a time after its ejection, and must go well for it to be taken back.
    pub probes: u32,
}

impl Default for HealthConfig {
    fn default() -> Self {
        Self {
            failures_in_row: 3,
            failure_part: 0.5,
            answers_min: 10,
            ejection: Duration::from_secs(2),
            ejection_max: Duration::from_secs(60),
            ejected_part_max: 0.5,
            panic_threshold: 0.5,
            probes: 3,
        }
    }
}

/// Whether a replica may be picked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HealthState {
    /// As any other.
    Trusted,
    /// It is being tried: one more request may go there.
    Probing,
    /// Not now.
    Ejected,
}

impl HealthState {
    /// The weight for the policy.
    #[must_use]
    pub fn weight(self) -> f32 {
        match self {
            Self::Trusted => 1.0,
            Self::Probing => 0.5,
            Self::Ejected => 0.0,
        }
    }
}

/// What the answers of all replicas have shown.
#[derive(Debug)]
pub struct Health {
    config: HealthConfig,
    replicas: HashMap<u64, Record>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Record {
    failures_in_row: u32,
    /// Of the last while: both are halved when they reach a bound.
    answers: u32,
    failures: u32,
    /// How often it was ejected without having been taken back for good in between.
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
        /// Probes under way,
        sent: u32,
        /// and those that went well.
        good: u32,
    },
}

/// A replica's answers are counted over about this many.
const ANSWERS_WINDOW: u32 = 200;
/// Answers in a row that went well after which former ejections are forgotten.
const FORGIVEN_AFTER: u32 = 50;

impl Health {
    /// Trusts everybody.
    #[must_use]
    pub fn new(config: HealthConfig) -> Self {
        Self { config, replicas: HashMap::new() }
    }

    /// Other rules from now on.
    pub fn configure(&mut self, config: HealthConfig) {
        self.config = config;
    }

    /// A replica is there. What is known of it stays.
    pub fn add(&mut self, replica: u64) {
        self.replicas.entry(replica).or_default();
    }

    /// A replica is gone for good.
    pub fn remove(&mut self, replica: u64) {
        self.replicas.remove(&replica);
    }

    /// A replica's process was replaced by another: it begins anew.
    pub fn reset(&mut self, replica: u64) {
        if let Some(record) = self.replicas.get_mut(&replica) {
            *record = Record::default();
        }
    }

    /// Whether the replica may be picked now. One that was never added may not.
    #[must_use]
    pub fn state(&self, replica: u64, now: Instant) -> HealthState {
        let Some(record) = self.replicas.get(&replica) else { return HealthState::Ejected };
        match record.state {
            Breaker::Closed => HealthState::Trusted,
            Breaker::Open { until } if now < until => HealthState::Ejected,
            Breaker::Open { .. } => HealthState::Probing,
            Breaker::HalfOpen { sent, good } if sent + good < self.config.probes.max(1) => {
                HealthState::Probing
            }
            Breaker::HalfOpen { .. } => HealthState::Ejected,
        }
    }

    /// Whether so few of a model's replicas may be picked that ejections are ignored. `replicas` are all of them.
    #[must_use]
    pub fn is_panicking(&self, replicas: impl IntoIterator<Item = u64>, now: Instant) -> bool {
        let (mut count, mut usable) = (0_u32, 0_u32);
        for replica in replicas {
            count += 1;
            usable += u32::from(self.state(replica, now) != HealthState::Ejected);
        }
        count > 0 && (usable as f32) < count as f32 * self.config.panic_threshold.clamp(0.0, 1.0)
    }

    /// A request goes to the replica. Exactly one of [`Self::succeeded`], [`Self::failed`] and
    /// [`Self::unknown`] follows for each.
    #[must_use]
    pub fn sent(&mut self, replica: u64, now: Instant) -> SentRequest {
        let Some(record) = self.replicas.get_mut(&replica) else { return SentRequest { is_probe: false } };
        match &mut record.state {
            Breaker::Open { until } if now >= *until => {
                record.state = Breaker::HalfOpen { sent: 1, good: 0 };
                SentRequest { is_probe: true }
            }
            Breaker::HalfOpen { sent, .. } => {
                *sent += 1;
                SentRequest { is_probe: true }
            }
            _ => SentRequest { is_probe: false },
        }
    }

    /// It was answered, with whatever is not the replica's fault.
    pub fn succeeded(&mut self, replica: u64, sent: SentRequest) {
        let probes = self.config.probes.max(1);
        let Some(record) = self.replicas.get_mut(&replica) else { return };
        record.count(false);
        record.failures_in_row = 0;
        if let (Breaker::HalfOpen { sent, good }, true) = (&mut record.state, sent.is_probe) {
            *sent = sent.saturating_sub(1);
            *good += 1;
            if *good >= probes {
                record.state = Breaker::Closed;
                (record.answers, record.failures) = (0, 0);
            }
        }
        if record.state == Breaker::Closed && record.failures == 0 && record.answers >= FORGIVEN_AFTER {
            record.ejections = 0;
        }
    }

    /// It failed: no connection, no answer in time, a 5xx other than one that says "busy", a stream cut off.
    /// Returns whether that ejected the replica. `fleet` is every replica of the request's model: the part of
    /// replicas that may be ejected is a part of these.
    pub fn failed(
        &mut self,
        replica: u64,
        sent: SentRequest,
        fleet: impl IntoIterator<Item = u64>,
        now: Instant,
    ) -> bool {
        let may_eject = self.may_eject(replica, fleet, now);
        let config = self.config;
        let Some(record) = self.replicas.get_mut(&replica) else { return false };
        record.count(true);
        record.failures_in_row += 1;
        let is_over = match record.state {
            Breaker::Closed => record.is_bad(&config) && may_eject,
            // It was tried and found wanting, and it is ejected already as far as the ceiling goes.
            Breaker::HalfOpen { .. } => sent.is_probe,
            Breaker::Open { .. } => false,
        };
        if is_over {
            let doubled = config.ejection.saturating_mul(1 << record.ejections.min(16));
            record.state = Breaker::Open { until: now + doubled.min(config.ejection_max) };
            record.ejections += 1;
            record.failures_in_row = 0;
            (record.answers, record.failures) = (0, 0);
        }
        is_over
    }

    /// It ended without telling anything of the replica, for example because the client left.
    pub fn unknown(&mut self, replica: u64, sent: SentRequest) {
        let Some(record) = self.replicas.get_mut(&replica) else { return };
        if let (Breaker::HalfOpen { sent, .. }, true) = (&mut record.state, sent.is_probe) {
            *sent = sent.saturating_sub(1);
        }
    }

    /// Whether `replica` may be ejected beside those of `fleet` that are.
    fn may_eject(&self, replica: u64, fleet: impl IntoIterator<Item = u64>, now: Instant) -> bool {
        let (mut others, mut ejected) = (0_usize, 0_usize);
        for other in fleet.into_iter().filter(|&other| other != replica) {
            others += 1;
            ejected += usize::from(self.state(other, now) != HealthState::Trusted);
        }
        let count = others + 1;
        let most = (count as f32 * self.config.ejected_part_max.clamp(0.0, 1.0)) as usize;
        let most = if count >= 2 { most.max(1) } else { most };
        ejected < most.min(others).max(usize::from(self.config.ejected_part_max >= 1.0))
    }
}

/// A request that was sent to a replica. [`Health`] gets it back when the request has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SentRequest {
    is_probe: bool,
}

impl Record {
    fn count(&mut self, failed: bool) {
        self.answers += 1;
        self.failures += u32::from(failed);
        if self.answers >= ANSWERS_WINDOW {
            self.answers /= 2;
            self.failures /= 2;
        }
    }

    fn is_bad(&self, config: &HealthConfig) -> bool {
        let part = self.failures as f32 / self.answers.max(1) as f32;
        self.failures_in_row >= config.failures_in_row.max(1)
            || (self.answers >= config.answers_min.max(1) && part >= config.failure_part)
    }
}

/// Limits the retries to a fraction of the requests, so that retries do not multiply the load of a fleet that fails.
#[derive(Clone, Copy, Debug)]
pub struct RetryBudget {
    retry_share: f64,
    saved_max: f64,
    saved: f64,
}

impl RetryBudget {
    /// A budget of `retry_share` retries per request. It saves up to `saved_max` unused retries, and starts with that many.
    #[must_use]
    pub fn new(retry_share: f32, saved_max: u32) -> Self {
        let saved_max = f64::from(saved_max);
        Self { retry_share: f64::from(retry_share).clamp(0.0, 1.0), saved_max, saved: saved_max }
    }

    /// Counts a request.
    pub fn earn(&mut self) {
        self.saved = (self.saved + self.retry_share).min(self.saved_max);
    }

    /// Whether a retry is permitted; if so, it is charged to the budget.
    pub fn spend(&mut self) -> bool {
        let is_permitted = self.saved >= 1.0;
        self.saved -= f64::from(u8::from(is_permitted));
        is_permitted
    }
}

#[cfg(test)]
mod tests;
