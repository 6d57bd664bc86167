//! Requests that wait in the router for a replica with room: which is next, which has waited too long, and
//! what to tell those who come when it is full.
//!
//! A request is served as if it had come later by what its class yields to the others: so that a class goes
//! before those below it, but nothing waits for ever behind those that keep coming. The room for requests that
//! no replica exists for is a second queue of this kind with limits of its own. It is a state machine: time is
//! a parameter, nobody is woken here.

use std::collections::{BTreeMap, BTreeSet};
use std::str::FromStr;
use std::time::{Duration, Instant};

/// Limits of a queue. None is zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueConfig {
    /// Most requests that wait.
    pub queue_requests: usize,
    /// Most tokens of prompts that wait. One request is taken however long it is.
    pub queue_tokens: u64,
    /// The longest that a request waits.
    pub queue_timeout: Duration,
    /// By how much a class yields to the one above it.
    pub class_step: Duration,
}

impl Default for QueueConfig {
    fn default() -> Self {
        Self {
            queue_requests: 2000,
            queue_tokens: 4_000_000,
            queue_timeout: Duration::from_secs(60),
            class_step: Duration::from_secs(10),
        }
    }
}

/// How urgent a request is, by the client's word.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Class {
    /// Somebody waits for it.
    Interactive,
    /// Nothing was said.
    #[default]
    Standard,
    /// It has time.
    Bulk,
}

/// The name is none of a class.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no class has the name {0:?}: interactive, standard or bulk")]
pub struct UnknownClass(String);

/// A place in the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(u64);

/// A request that is to wait.
#[derive(Clone, Copy, Debug)]
pub struct QueuedRequest {
    /// Its class.
    pub class: Class,
    /// Tokens of its prompt, as estimated.
    pub tokens: u32,
    /// When it arrived at the router: a request that comes back to the queue has its former place.
    pub arrived: Instant,
    /// When its client has no more use for an answer, if it said.
    pub deadline: Option<Instant>,
}

/// The queue is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueFull {
    /// When there should be room, going by how fast the queue has emptied lately.
    pub retry_after: Duration,
}

/// The queue.
#[derive(Debug)]
pub struct Queue {
    config: QueueConfig,
    next: u64,
    entries: BTreeMap<Ticket, Entry>,
    /// In the order of service.
    order: BTreeSet<(Instant, Ticket)>,
    deadlines: BTreeSet<(Instant, Ticket)>,
    tokens: u64,
    drain: Drain,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    request: QueuedRequest,
    since: Instant,
    rank: Instant,
    deadline: Instant,
}

impl Queue {
    /// An empty queue.
    #[must_use]
    pub fn new(config: QueueConfig) -> Self {
        Self {
            config,
            next: 0,
            entries: BTreeMap::new(),
            order: BTreeSet::new(),
            deadlines: BTreeSet::new(),
            tokens: 0,
            drain: Drain::default(),
        }
    }

    /// Other limits from now on. Who waits already goes on waiting by the former ones.
    pub fn configure(&mut self, config: QueueConfig) {
        self.config = config;
    }

    /// Lets a request wait.
    ///
    /// # Errors
    /// [`QueueFull`].
    pub fn push(&mut self, request: QueuedRequest, now: Instant) -> Result<Ticket, QueueFull> {
        let QueueConfig { queue_requests, queue_tokens, queue_timeout, class_step } = self.config;
        let is_too_much = !self.entries.is_empty() && self.tokens + u64::from(request.tokens) > queue_tokens;
        if self.entries.len() >= queue_requests || is_too_much {
            return Err(QueueFull { retry_after: self.retry_after(now) });
        }
        self.drain.flow(!self.entries.is_empty(), now);
        let ticket = Ticket(self.next);
        self.next += 1;
        let deadline = now + queue_timeout;
        let deadline = request.deadline.map_or(deadline, |wanted| wanted.min(deadline));
        let rank = request.arrived + class_step * request.class as u32;
        self.entries.insert(ticket, Entry { request, since: now, rank, deadline });
        self.order.insert((rank, ticket));
        self.deadlines.insert((deadline, ticket));
        self.tokens += u64::from(request.tokens);
        Ok(ticket)
    }

    /// Who is next. It stays in the queue until [`Self::dequeue`].
    #[must_use]
    pub fn head(&self) -> Option<Ticket> {
        self.order.first().map(|&(_, ticket)| ticket)
    }

    /// The first `count` requests in the order of service.
    pub fn upcoming(&self, count: usize) -> impl Iterator<Item = Ticket> {
        self.order.iter().take(count).map(|&(_, ticket)| ticket)
    }

    /// Whether a request is among the first `count`.
    #[must_use]
    pub fn is_upcoming(&self, ticket: Ticket, count: usize) -> bool {
        self.upcoming(count).any(|upcoming| upcoming == ticket)
    }

    /// Takes a request out to be sent, and returns how long it waited; `None` if it is not there any more.
    pub fn dequeue(&mut self, ticket: Ticket, now: Instant) -> Option<Duration> {
        let tokens = self.entries.get(&ticket)?.request.tokens;
        self.drain.flow(true, now);
        self.drain.add(tokens);
        self.remove(ticket).map(|entry| now.saturating_duration_since(entry.since))
    }

    /// Takes a request out whose client has gone. It may have left already.
    pub fn cancel(&mut self, ticket: Ticket, now: Instant) {
        self.drain.flow(!self.entries.is_empty(), now);
        self.remove(ticket);
    }

    /// Takes out one of those that have waited too long, until there is none.
    pub fn expire(&mut self, now: Instant) -> Option<Ticket> {
        let &(deadline, ticket) = self.deadlines.first()?;
        if deadline > now {
            return None;
        }
        self.drain.flow(true, now);
        self.remove(ticket).map(|_| ticket)
    }

    /// When [`Self::expire`] has something to do.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Instant> {
        self.deadlines.first().map(|&(deadline, _)| deadline)
    }

    /// When what waits now will have been sent, going by the last while; at least a second, which is also the
    /// answer while nothing is known, and at most [`RETRY_AFTER_MAX`].
    #[must_use]
    pub fn retry_after(&self, now: Instant) -> Duration {
        self.drain.time_for(self.entries.len(), self.tokens, now).clamp(RETRY_AFTER_MIN, RETRY_AFTER_MAX)
    }

    /// Requests that wait.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether none waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Tokens of the prompts that wait.
    #[must_use]
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// How long the one that has waited longest has.
    #[must_use]
    pub fn age(&self, now: Instant) -> Option<Duration> {
        // Tickets are in the order of arrival.
        self.entries.first_key_value().map(|(_, entry)| now.saturating_duration_since(entry.since))
    }

    fn remove(&mut self, ticket: Ticket) -> Option<Entry> {
        let entry = self.entries.remove(&ticket)?;
        self.order.remove(&(entry.rank, ticket));
        self.deadlines.remove(&(entry.deadline, ticket));
        self.tokens -= u64::from(entry.request.tokens);
        Some(entry)
    }
}

/// The least `Retry-After` that a client is given.
pub const RETRY_AFTER_MIN: Duration = Duration::from_secs(1);
/// Greatest `Retry-After` of a request that finds the queue full or waits too long in it.
///
/// Beyond it: the header has this value even if the wait may be longer.
pub const RETRY_AFTER_MAX: Duration = Duration::from_secs(120);

/// How fast the queue empties, over the time in which there was something in it.
#[derive(Clone, Copy, Debug, Default)]
struct Drain {
    at: Option<Instant>,
    /// Seconds, requests and tokens, all fading with the same time constant: their ratios are rates.
    seconds: f64,
    requests: f64,
    tokens: f64,
}

/// The time constant of the drain rate, in seconds.
const DRAIN_WINDOW: f64 = 30.0;

impl Drain {
    /// Time has passed, in which there was something in the queue or not.
    fn flow(&mut self, counts: bool, now: Instant) {
        let passed = self.at.map_or(0.0, |at| now.saturating_duration_since(at).as_secs_f64());
        self.at = Some(now);
        if counts {
            let kept = (-passed / DRAIN_WINDOW).exp();
            self.seconds = self.seconds * kept + passed;
            self.requests *= kept;
            self.tokens *= kept;
        }
    }

    fn add(&mut self, tokens: u32) {
        self.requests += 1.0;
        self.tokens += f64::from(tokens);
    }

    /// The time in which so much leaves: by requests or by tokens, whichever takes longer.
    fn time_for(mut self, requests: usize, tokens: u64, now: Instant) -> Duration {
        self.flow(requests > 0, now);
        let time = |amount: f64, left: f64| if left > 0.0 { amount / left * self.seconds } else { f64::NAN };
        // NaN: nothing has left so far, so there is nothing to go by.
        let seconds = time(requests as f64, self.requests).max(time(tokens as f64, self.tokens));
        Duration::try_from_secs_f64(seconds).unwrap_or(RETRY_AFTER_MIN)
    }
}

impl Class {
    /// The name, as in the header.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Interactive => "interactive",
            Self::Standard => "standard",
            Self::Bulk => "bulk",
        }
    }
}

impl FromStr for Class {
    type Err = UnknownClass;

    fn from_str(name: &str) -> Result<Self, UnknownClass> {
        [Self::Interactive, Self::Standard, Self::Bulk]
            .into_iter()
            .find(|class| class.name() == name)
            .ok_or_else(|| UnknownClass(name.to_owned()))
    }
}

#[cfg(test)]
mod tests;
