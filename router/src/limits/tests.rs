use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

use super::*;

const RATES: Rates = Rates { requests_per_minute: Some(60), tokens_per_minute: Some(6000) };

#[test]
fn without_limits_no_bucket_is_created() {
    let mut limits = RateLimits::default();
    assert_eq!(limits.charge(1, Rates::default(), u32::MAX, Instant::now()), Ok(()));
    assert!(limits.buckets.is_empty());
}

#[test]
fn requests_are_rejected_until_the_bucket_has_refilled() {
    let (mut limits, now) = (RateLimits::default(), Instant::now());
    for _ in 0..60 {
        assert_eq!(limits.charge(1, RATES, 10, now), Ok(()));
    }
    let after = Duration::from_secs(1);
    let over = RateExceeded { kind: RateKind::Requests, retry_after: Some(after) };
    assert_eq!(limits.charge(1, RATES, 10, now), Err(over));
    assert_eq!(limits.charge(2, RATES, 10, now), Ok(()), "each key has its own limit");
    assert_eq!(limits.charge(1, RATES, 10, now + after), Ok(()));
}

#[test]
fn tokens_are_rejected_until_there_are_enough() {
    let (mut limits, now) = (RateLimits::default(), Instant::now());
    assert_eq!(limits.charge(1, RATES, 5900, now), Ok(()));
    let over = |retry_after| Err(RateExceeded { kind: RateKind::Tokens, retry_after });
    assert_eq!(limits.charge(1, RATES, 300, now), over(Some(Duration::from_secs(2))));
    assert_eq!(limits.charge(1, RATES, 300, now + Duration::from_secs(2)), Ok(()));
    assert_eq!(limits.charge(1, RATES, 6001, now), over(None), "never");
}

#[test]
fn a_client_that_used_more_than_estimated_waits_longer() {
    let (mut limits, now) = (RateLimits::default(), Instant::now());
    assert_eq!(limits.charge(1, RATES, 100, now), Ok(()));
    limits.settle(1, 100, 6100);
    let over = RateExceeded { kind: RateKind::Tokens, retry_after: Some(Duration::from_secs(2)) };
    assert_eq!(limits.charge(1, RATES, 100, now), Err(over));
    limits.settle(1, 6100, 0);
    assert_eq!(limits.charge(1, RATES, 6000, now), Ok(()));
    limits.settle(99, 1, 2);
}

#[test]
fn a_request_without_tokens_is_admitted_when_the_token_limit_is_exceeded() {
    let (mut limits, now) = (RateLimits::default(), Instant::now());
    assert_eq!(limits.charge(1, RATES, 100, now), Ok(()));
    limits.settle(1, 100, 10_000);
    assert!(limits.charge(1, RATES, 1, now).is_err());
    assert_eq!(limits.charge(1, RATES, 0, now), Ok(()));
}

#[test]
fn a_changed_limit_counts_the_usage_under_the_previous_one() {
    let (mut limits, now) = (RateLimits::default(), Instant::now());
    assert_eq!(limits.charge(1, RATES, 5000, now), Ok(()));
    let more = Rates { tokens_per_minute: Some(12_000), ..RATES };
    assert_eq!(limits.charge(1, more, 7000, now), Ok(()));
    assert!(limits.charge(1, more, 1, now).is_err());
    assert_eq!(limits.charge(1, Rates { tokens_per_minute: None, ..RATES }, u32::MAX, now), Ok(()));
}

#[test]
fn buckets_of_invalid_keys_are_removed_and_those_of_valid_keys_keep_their_levels() {
    let (mut limits, now) = (RateLimits::default(), Instant::now());
    for key in 0..100 {
        limits.charge(key, RATES, 6000, now).unwrap();
    }
    limits.retain_keys(|key| key == 7);
    assert_eq!(limits.buckets.len(), 1);
    assert!(limits.charge(7, RATES, 1, now).is_err());
    // A request may end after its key was removed.
    limits.settle(8, 6000, 0);
    assert_eq!(limits.buckets.len(), 1);
}

#[test]
fn no_key_exceeds_its_rate_and_burst_at_random() {
    for seed in 0..50 {
        let mut rng = StdRng::seed_from_u64(seed);
        let (mut limits, start) = (RateLimits::default(), Instant::now());
        let mut now = start;
        let (mut requests, mut tokens) = (0.0, 0.0);
        for _ in 0..2000 {
            now += Duration::from_millis(rng.next_u64() % 1000);
            let tokens_wanted = (rng.next_u64() % 400) as u32;
            match limits.charge(1, RATES, tokens_wanted, now) {
                Ok(()) => {
                    requests += 1.0;
                    tokens += f64::from(tokens_wanted);
                }
                Err(RateExceeded { retry_after, .. }) => {
                    // The request is permitted after exactly the reported time.
                    let after = retry_after.expect("the request is below the limit");
                    let early = now + after.mul_f64(0.99);
                    assert!(after.is_zero() || limits.charge(1, RATES, tokens_wanted, early).is_err());
                    now += after + Duration::from_micros(1);
                    assert_eq!(limits.charge(1, RATES, tokens_wanted, now), Ok(()), "seed {seed}");
                    requests += 1.0;
                    tokens += f64::from(tokens_wanted);
                }
            }
            let minutes = (now - start).as_secs_f64() / 60.0;
            assert!(requests <= 60.0 * (1.0 + minutes) + 1e-6, "seed {seed}");
            assert!(tokens <= 6000.0 * (1.0 + minutes) + 1e-6, "seed {seed}");
        }
    }
}
