//! Rate limits per API key: requests and tokens per minute, each in a token bucket.
//!
//! A request is charged for an estimated number of tokens when it arrives, and the charge is corrected to the actual
//! number when the request ends. A client that used more tokens than estimated must wait longer before its next request
//! is accepted. The module reads no clock.

use std::collections::HashMap;
use std::time::{Duration, Instant};

/// The rate limits of a key. `None` means unlimited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rates {
    /// The number of requests per minute, which is also the largest burst.
    pub requests_per_minute: Option<u32>,
    /// The number of prompt and completion tokens per minute, which is also the largest burst.
    pub tokens_per_minute: Option<u32>,
}

/// The rate limit that a request exceeds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RateExceeded {
    /// The quantity that exceeds its limit.
    pub kind: RateKind,
    /// The time after which the request is within the limit, or `None` if the request alone exceeds it.
    pub retry_after: Option<Duration>,
}

/// The quantity that a rate limit counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RateKind {
    /// The number of requests.
    Requests,
    /// The number of tokens.
    Tokens,
}

/// The token buckets of all keys that have been charged. The caller limits their number: it charges only valid keys,
/// and removes the buckets of keys that are no longer valid.
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
    /// Charges a request of about `tokens` tokens to a key.
    ///
    /// # Errors
    /// The request exceeds a limit. In this case, nothing is charged.
    pub fn charge(&mut self, key: u64, rates: Rates, tokens: u32, now: Instant) -> Result<(), RateExceeded> {
        if rates == Rates::default() {
            return Ok(());
        }
        let buckets = self.buckets.entry(key).or_insert_with(|| Buckets {
            requests: Bucket::full(rates.requests_per_minute, now),
            tokens: Bucket::full(rates.tokens_per_minute, now),
        });
        let Buckets { requests, tokens: token_bucket } = buckets;
        requests.refill(rates.requests_per_minute, now);
        token_bucket.refill(rates.tokens_per_minute, now);
        let exceeded = |kind, retry_after| RateExceeded { kind, retry_after };
        requests.check(1.0).map_err(|after| exceeded(RateKind::Requests, after))?;
        token_bucket.check(f64::from(tokens)).map_err(|after| exceeded(RateKind::Tokens, after))?;
        requests.level -= 1.0;
        token_bucket.level -= f64::from(tokens);
        Ok(())
    }

    /// Corrects the charge of a request that used `used` tokens instead of `charged`.
    pub fn settle(&mut self, key: u64, charged: u32, used: u32) {
        if let Some(Buckets { tokens, .. }) = self.buckets.get_mut(&key) {
            // The level can become negative. Further requests that need tokens are then rejected until the bucket
            // contains enough of them.
            tokens.level = (tokens.level + f64::from(charged) - f64::from(used)).min(tokens.size);
        }
    }

    /// Removes the buckets of the keys that are not valid.
    pub fn retain_keys(&mut self, is_valid: impl Fn(u64) -> bool) {
        self.buckets.retain(|key, _| is_valid(*key));
    }
}

/// A token bucket: `level` is the amount that can be used now.
#[derive(Debug)]
struct Bucket {
    /// The capacity, which is infinite without a limit.
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
            // The limit was reconfigured. The amount that was used remains charged.
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
        // After large answers, the level can be negative. Requests that need no tokens, such as those that cancel a
        // response, are still allowed.
        if amount == 0.0 || self.level >= amount {
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
