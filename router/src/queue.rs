//! The queue of requests that wait in the router for a replica with room. It decides which request is next, and when
//! a client should retry if the queue is full. The caller removes requests that have waited too long.
//!
//! Tenants are served fairly (`fair_order.rs`). The requests of a tenant are ordered by their arrival time plus a delay
//! that depends on the priority class. Higher classes are therefore preferred, but no request waits forever behind
//! requests that keep arriving. The queue is a state machine: time is a parameter, and the queue wakes no task.

use std::collections::BTreeMap;
use std::str::FromStr;
use std::time::{Duration, Instant};

use fair_order::{FairOrder, Position};
pub use ticket::Ticket;

mod fair_order;
mod ticket;

/// Number by which `--queue-requests` and `--queue-tokens` are divided to obtain the part of the queue that one tenant
/// must leave to the others.
///
/// If exceeded: further requests of the tenant are rejected as if the queue were full. Requests without a tenant may
/// fill the queue.
const TENANT_QUEUE_RESERVE: u64 = 8;

/// The limits of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueConfig {
    /// The largest number of requests in the queue.
    pub queue_requests: usize,
    /// The largest number of prompt tokens in the queue. A request that waits alone may have more.
    pub queue_tokens: u64,
    /// The longest time that a request waits.
    pub queue_timeout: Duration,
    /// The delay of a priority class relative to the class above it.
    pub class_delay: Duration,
}

impl Default for QueueConfig {
    fn default() -> Self {
        Self {
            queue_requests: 2000,
            queue_tokens: 4_000_000,
            queue_timeout: Duration::from_secs(60),
            class_delay: Duration::from_secs(10),
        }
    }
}

/// The priority class of a request, as set by the client.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PriorityClass {
    /// A person waits for the answer.
    Interactive,
    /// The default class of requests.
    #[default]
    Standard,
    /// The request is not urgent.
    Bulk,
}

/// The name is not the name of a priority class.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown priority class {0:?}: use interactive, standard or bulk")]
pub struct UnknownPriorityClass(String);

/// The value of [`QueuedRequest::tenant`] for requests that belong to no tenant.
pub const NO_TENANT: u64 = 0;

/// The properties of a request that determine its place in the queue.
#[derive(Clone, Copy, Debug)]
pub struct QueuedRequest {
    /// A digest of the tenant that sent the request, or [`NO_TENANT`].
    pub tenant: u64,
    /// The priority class of the request.
    pub class: PriorityClass,
    /// The estimated number of tokens of its prompt.
    pub tokens: u32,
    /// The time when the request arrived at the router. A request that returns to the queue keeps its position.
    pub arrived: Instant,
    /// The time at which the request stops waiting for a replica, if the client has set a timeout.
    pub deadline: Option<Instant>,
}

/// The queue has no room for another request, or for another request of the same tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueFull {
    /// The time after which the client should retry, estimated from the recent drain rate of the queue.
    pub retry_after: Duration,
}

/// A queue of requests.
#[derive(Debug)]
pub struct Queue {
    config: QueueConfig,
    next: u64,
    entries: BTreeMap<Ticket, Entry>,
    order: FairOrder,
    tokens: u64,
    drain_rate: DrainRate,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    request: QueuedRequest,
    since: Instant,
    position: Position,
}

impl Queue {
    /// Creates a queue without requests.
    #[must_use]
    pub fn new(config: QueueConfig) -> Self {
        Self {
            config,
            next: 0,
            entries: BTreeMap::new(),
            order: FairOrder::default(),
            tokens: 0,
            drain_rate: DrainRate::default(),
        }
    }

    /// Replaces the limits. Requests that are already waiting stay in the queue.
    pub fn configure(&mut self, config: QueueConfig) {
        self.config = config;
    }

    /// Adds a request to the queue.
    ///
    /// # Errors
    /// The queue has no room for the request.
    pub fn push(&mut self, request: QueuedRequest, now: Instant) -> Result<Ticket, QueueFull> {
        let QueueConfig { queue_requests, queue_tokens, class_delay, .. } = self.config;
        let is_too_much = !self.entries.is_empty() && self.tokens + u64::from(request.tokens) > queue_tokens;
        if self.entries.len() >= queue_requests || is_too_much || self.exceeds_tenant_share(&request) {
            return Err(QueueFull { retry_after: self.retry_after(now) });
        }
        self.drain_rate.advance(!self.entries.is_empty(), now);
        let ticket = Ticket(self.next);
        self.next += 1;
        let rank = request.arrived + class_delay * request.class as u32;
        let position = Position { rank, ticket };
        self.entries.insert(ticket, Entry { request, since: now, position });
        self.order.insert(request.tenant, position, request.tokens);
        self.tokens += u64::from(request.tokens);
        Ok(ticket)
    }

    /// The next request to serve. It remains in the queue until [`Self::dequeue`].
    #[must_use]
    pub fn head(&self) -> Option<Ticket> {
        self.order.upcoming(1).first().copied()
    }

    /// The first `count` requests in the order of service.
    #[must_use]
    pub fn upcoming(&self, count: usize) -> Vec<Ticket> {
        self.order.upcoming(count)
    }

    /// Removes a request that is served. Returns the time that the request has waited, or `None` if it is not in the
    /// queue.
    pub fn dequeue(&mut self, ticket: Ticket, now: Instant) -> Option<Duration> {
        let &Entry { request, .. } = self.entries.get(&ticket)?;
        self.drain_rate.advance(true, now);
        self.drain_rate.add(request.tokens);
        self.order.charge(request.tenant, request.tokens);
        self.remove(ticket).map(|entry| now.saturating_duration_since(entry.since))
    }

    /// Removes a request that will not be served, if it is still in the queue.
    pub fn cancel(&mut self, ticket: Ticket, now: Instant) {
        self.drain_rate.advance(!self.entries.is_empty(), now);
        self.remove(ticket);
    }

    /// The time until all requests in the queue are served, estimated from the recent drain rate. The result is limited
    /// to the range from [`RETRY_AFTER_MIN`] to [`RETRY_AFTER_MAX`]; it is [`RETRY_AFTER_MIN`] while the rate is
    /// unknown.
    #[must_use]
    pub fn retry_after(&self, now: Instant) -> Duration {
        self.drain_rate.time_for(self.entries.len(), self.tokens, now).clamp(RETRY_AFTER_MIN, RETRY_AFTER_MAX)
    }

    /// The number of requests in the queue.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether the queue has no requests.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The number of prompt tokens in the queue.
    #[must_use]
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// The longest time that a request in the queue has waited.
    #[must_use]
    pub fn age(&self, now: Instant) -> Option<Duration> {
        // Tickets are numbered in the order of arrival.
        self.entries.first_key_value().map(|(_, entry)| now.saturating_duration_since(entry.since))
    }

    /// Whether a request would use the part of the queue that its tenant must leave to other tenants.
    fn exceeds_tenant_share(&self, request: &QueuedRequest) -> bool {
        let queued = self.order.of_tenant(request.tenant).filter(|_| request.tenant != NO_TENANT);
        queued.is_some_and(|queued| {
            let limit = |total: u64| total - total / TENANT_QUEUE_RESERVE;
            queued.len() as u64 >= limit(self.config.queue_requests as u64)
                || (queued.len() > 0
                    && queued.tokens() + u64::from(request.tokens) > limit(self.config.queue_tokens))
        })
    }

    fn remove(&mut self, ticket: Ticket) -> Option<Entry> {
        let entry = self.entries.remove(&ticket)?;
        self.order.remove(entry.request.tenant, entry.position);
        self.tokens -= u64::from(entry.request.tokens);
        Some(entry)
    }
}

/// The smallest `Retry-After` of any answer.
pub const RETRY_AFTER_MIN: Duration = Duration::from_secs(1);
/// Maximum `Retry-After` of the answer to a request that is rejected because the queue is full or because the request
/// timed out in the queue.
///
/// If exceeded: the header has this value even if the expected wait is longer.
pub const RETRY_AFTER_MAX: Duration = Duration::from_secs(120);

/// The rate at which requests are served, over the time in which the queue was not empty.
#[derive(Clone, Copy, Debug, Default)]
struct DrainRate {
    at: Option<Instant>,
    /// Seconds, requests and tokens. They decay with the same time constant, so that their ratios are rates.
    seconds: f64,
    requests: f64,
    tokens: f64,
}

/// The time constant of the drain rate, in seconds.
const DRAIN_WINDOW: f64 = 30.0;

impl DrainRate {
    /// Advances the time. The elapsed time counts only if the queue was not empty.
    fn advance(&mut self, was_waiting: bool, now: Instant) {
        let passed = self.at.map_or(0.0, |at| now.saturating_duration_since(at).as_secs_f64());
        self.at = Some(now);
        if was_waiting {
            let decay = (-passed / DRAIN_WINDOW).exp();
            self.seconds = self.seconds * decay + passed;
            // Do not let a positive amount decay to 0, because 0 means that the rate is unknown.
            let decayed =
                |amount: f64| if amount > 0.0 { (amount * decay).max(f64::MIN_POSITIVE) } else { 0.0 };
            (self.requests, self.tokens) = (decayed(self.requests), decayed(self.tokens));
        }
    }

    fn add(&mut self, tokens: u32) {
        self.requests += 1.0;
        self.tokens += f64::from(tokens);
    }

    /// The expected time to serve this number of requests or this number of tokens, whichever takes longer.
    fn time_for(mut self, requests: usize, tokens: u64, now: Instant) -> Duration {
        self.advance(requests > 0, now);
        let time =
            |amount: f64, served: f64| if served > 0.0 { amount / served * self.seconds } else { f64::NAN };
        // NaN means that no request has been served yet, so the rate is unknown.
        let seconds = time(requests as f64, self.requests).max(time(tokens as f64, self.tokens));
        if seconds.is_nan() {
            return RETRY_AFTER_MIN;
        }
        // If nothing has been served for a long time, the expected time can exceed the largest `Duration`.
        Duration::try_from_secs_f64(seconds).unwrap_or(RETRY_AFTER_MAX)
    }
}

impl PriorityClass {
    /// The name of the class, as in the header.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Interactive => "interactive",
            Self::Standard => "standard",
            Self::Bulk => "bulk",
        }
    }
}

impl FromStr for PriorityClass {
    type Err = UnknownPriorityClass;

    fn from_str(name: &str) -> Result<Self, UnknownPriorityClass> {
        [Self::Interactive, Self::Standard, Self::Bulk]
            .into_iter()
            .find(|class| class.name() == name)
            .ok_or_else(|| UnknownPriorityClass(name.to_owned()))
    }
}

#[cfg(test)]
mod tests;
