//! How much a key may ask for: requests and tokens per minute, each in a bucket that fills up steadily.
//!
//! Tokens are taken by an estimate when a request comes and settled by the true number when it ends: whoever
//! used more than estimated waits the longer for the next one. No clock is read here.

use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Most keys with a bucket; beyond it those that are full again are forgotten, which changes nothing for them.
pub const KEYS_MAX: usize = 1 << 16;

/// What a key may use. `None`: as much as it likes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rates {
    /// Requests a minute, and at once after a pause.
    pub key_requests: Option<u32>,
    /// Tokens a minute, of prompts and answers together, and at once after a pause.
    pub key_tokens: Option<u32>,
}

/// Which limit a request is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OverRate {
    /// What there is too much of.
    pub kind: RateKind,
    /// The time after which it is within the limit if nothing else comes; `None` if it never is.
    pub retry_after: Option<Duration>,
}

/// What a rate counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RateKind {
    /// Requests.
    Requests,
    /// Tokens.
    Tokens,
}

/// The buckets of all keys.
#[derive(Debug, Default)]
pub struct RateLimits {
    buckets: HashMap<u64, Buckets>,
}

#[derive(Debug)]
struct Buckets {
    requests: Bucket,
    tokens: Bucket,
}

impl RateLimits {
    /// Takes a request of about `tokens` tokens of the key that goes by this number, or nothing.
    ///
    /// # Errors
    /// [`OverRate`]; nothing was taken.
    pub fn charge(&mut self, key: u64, rates: Rates, tokens: u32, now: Instant) -> Result<(), OverRate> {
        if rates == Rates::default() {
            return Ok(());
        }
        if self.buckets.len() >= KEYS_MAX && !self.buckets.contains_key(&key) {
            self.buckets.retain(|_, buckets| !buckets.is_full(now));
        }
        let buckets = self.buckets.entry(key).or_insert_with(|| Buckets {
            requests: Bucket::full(rates.key_requests, now),
            tokens: Bucket::full(rates.key_tokens, now),
        });
        let Buckets { requests, tokens: token_bucket } = buckets;
        requests.refill(rates.key_requests, now);
        token_bucket.refill(rates.key_tokens, now);
        let over = |kind, retry_after| OverRate { kind, retry_after };
        requests.check(1.0).map_err(|after| over(RateKind::Requests, after))?;
        token_bucket.check(f64::from(tokens)).map_err(|after| over(RateKind::Tokens, after))?;
        requests.level -= 1.0;
        token_bucket.level -= f64::from(tokens);
        Ok(())
    }

    /// Corrects what was taken for a request that used `used` tokens instead of the `taken` ones.
    pub fn settle(&mut self, key: u64, taken: u32, used: u32) {
        if let Some(Buckets { tokens, .. }) = self.buckets.get_mut(&key) {
            // Into debt if need be: the next request waits until that is paid.
            tokens.level = (tokens.level + f64::from(taken) - f64::from(used)).min(tokens.size);
        }
    }
}

impl Buckets {
    fn is_full(&mut self, now: Instant) -> bool {
        [&mut self.requests, &mut self.tokens].into_iter().all(|bucket| {
            bucket.flow(now);
            bucket.level >= bucket.size
        })
    }
}

/// What may be used now, and how it grows.
#[derive(Debug)]
struct Bucket {
    /// Infinite without a limit.
    size: f64,
    level: f64,
    at: Instant,
}

impl Bucket {
    fn full(per_minute: Option<u32>, now: Instant) -> Self {
        let size = per_minute.map_or(f64::INFINITY, f64::from);
        Self { size, level: size, at: now }
    }

    fn refill(&mut self, per_minute: Option<u32>, now: Instant) {
        self.flow(now);
        let size = per_minute.map_or(f64::INFINITY, f64::from);
        if size != self.size {
            // The configuration changed. What was used stays used.
            self.level = if self.size.is_finite() { size - (self.size - self.level) } else { size };
            self.size = size;
        }
    }

    fn flow(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(self.at);
        self.at = self.at.max(now);
        if self.size.is_finite() {
            self.level =
                (self.level + self.size * passed.as_secs_f64() / MINUTE.as_secs_f64()).min(self.size);
        }
    }

    fn check(&self, amount: f64) -> Result<(), Option<Duration>> {
        if self.level >= amount {
            return Ok(());
        }
        if amount > self.size {
            return Err(None);
        }
        let missing = (amount - self.level) / self.size;
        Err(Some(MINUTE.mul_f64(missing.min(60.0))))
    }
}

const MINUTE: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests;
