use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

use super::*;

const CONFIG: HealthConfig = HealthConfig {
    consecutive_failures: 3,
    failure_share: 0.5,
    requests_min: 10,
    ejection: Duration::from_secs(2),
    ejection_max: Duration::from_secs(7),
    ejected_share_max: 0.5,
    panic_threshold: 0.5,
    probes: 2,
};

fn health(replicas: u64) -> Health {
    let mut health = Health::new(CONFIG);
    (0..replicas).for_each(|replica| health.add(replica));
    health
}

/// Records a failure of a replica whose model is served by all known replicas.
fn fail(health: &mut Health, replica: u64, now: Instant) -> bool {
    let sent = health.sent(replica, now);
    let model_replicas: Vec<u64> = health.replicas.keys().copied().collect();
    health.failed(replica, sent, model_replicas, now)
}

fn succeed(health: &mut Health, replica: u64, now: Instant) {
    let sent = health.sent(replica, now);
    health.succeeded(replica, sent);
}

fn eject(health: &mut Health, replica: u64, now: Instant) {
    while !fail(health, replica, now) {}
}

#[test]
fn consecutive_failures_eject_and_single_failures_do_not() {
    let (mut health, now) = (health(4), Instant::now());
    for _ in 0..3 {
        assert!(!fail(&mut health, 0, now));
        assert!(!fail(&mut health, 0, now));
        (0..4).for_each(|_| succeed(&mut health, 0, now));
    }
    assert_eq!(health.state(0, now), HealthState::Trusted);
    let ejected: Vec<bool> = (0..3).map(|_| fail(&mut health, 0, now)).collect();
    assert_eq!(ejected, [false, false, true]);
    assert_eq!(health.state(0, now), HealthState::Ejected);
    assert_eq!(health.state(1, now), HealthState::Trusted);
    assert_eq!(health.state(99, now), HealthState::Ejected, "the replica is unknown");
}

#[test]
fn a_replica_that_fails_every_other_time_is_ejected() {
    let (mut health, now) = (health(4), Instant::now());
    let is_ejected = (0..20).any(|_| {
        succeed(&mut health, 0, now);
        fail(&mut health, 0, now)
    });
    assert!(is_ejected);
}

#[test]
fn successful_probes_end_an_ejection_and_a_failed_one_prolongs_it() {
    let (mut health, mut now) = (health(4), Instant::now());
    eject(&mut health, 0, now);
    let mut waits = Vec::new();
    for _ in 0..3 {
        let ejected = now;
        while health.state(0, now) == HealthState::Ejected {
            now += Duration::from_secs(1);
        }
        waits.push((now - ejected).as_secs());
        assert_eq!(health.state(0, now), HealthState::Probing);
        assert!(fail(&mut health, 0, now));
    }
    assert_eq!(waits, [2, 4, 7], "doubled, up to a limit");

    now += CONFIG.ejection_max;
    let probes = [health.sent(0, now), health.sent(0, now)];
    assert_eq!(health.state(0, now), HealthState::Ejected, "all permitted probes are in flight");
    for probe in probes {
        health.succeeded(0, probe);
    }
    assert_eq!(health.state(0, now), HealthState::Trusted);
}

#[test]
fn a_probe_whose_client_disconnected_has_no_result() {
    let (mut health, now) = (health(4), Instant::now());
    eject(&mut health, 0, now);
    let now = now + CONFIG.ejection;
    for _ in 0..5 {
        let sent = health.sent(0, now);
        health.unknown(0, sent);
    }
    assert_eq!(health.state(0, now), HealthState::Probing);
}

#[test]
fn a_probe_succeeds_when_its_answer_begins_and_then_counts_like_any_other_request() {
    let (mut health, now) = (health(4), Instant::now());
    eject(&mut health, 0, now);
    let now = now + CONFIG.ejection;
    let mut probes = [health.sent(0, now), health.sent(0, now)];
    assert_eq!(health.state(0, now), HealthState::Ejected, "no answer has begun");
    for probe in &mut probes {
        health.answer_began(0, probe);
    }
    assert_eq!(health.state(0, now), HealthState::Trusted, "both answers have begun");
    let [broken, abandoned] = probes;
    assert!(!health.failed(0, broken, 0..4, now), "a single failure does not eject a trusted replica");
    health.unknown(0, abandoned);
    assert_eq!(health.state(0, now), HealthState::Trusted);
    let failures = (1..).take_while(|_| !fail(&mut health, 0, now)).count();
    assert_eq!(failures + 2, CONFIG.consecutive_failures as usize, "the broken answer was the first failure");
}

#[test]
fn a_request_sent_before_the_ejection_is_not_a_probe() {
    let (mut health, now) = (health(4), Instant::now());
    let old = health.sent(0, now);
    eject(&mut health, 0, now);
    let later = now + CONFIG.ejection;
    let _probe = health.sent(0, later);
    assert!(!health.failed(0, old, 0..4, later), "the request was sent before the ejection");
    assert_eq!(health.state(0, later), HealthState::Probing);
}

#[test]
fn a_probe_that_an_ejection_has_overtaken_does_not_count_in_the_next_round() {
    // Returns a replica in its second round of probes, the first probe of that round, and an unanswered probe of the
    // first round.
    let second_round = || {
        let (mut health, now) = (health(4), Instant::now());
        eject(&mut health, 0, now);
        let now = now + CONFIG.ejection;
        let (failing, late) = (health.sent(0, now), health.sent(0, now));
        assert!(health.failed(0, failing, 0..4, now));
        let now = now + CONFIG.ejection_max;
        let probe = health.sent(0, now);
        (health, now, probe, late)
    };
    let (mut health, now, probe, late) = second_round();
    health.succeeded(0, late);
    health.succeeded(0, probe);
    assert_eq!(health.state(0, now), HealthState::Probing, "one of the two probes has succeeded");
    let (mut health, now, _, late) = second_round();
    assert!(!health.failed(0, late, 0..4, now));
    assert_eq!(health.state(0, now), HealthState::Probing);
    let (mut health, now, _, late) = second_round();
    let _probe = health.sent(0, now);
    health.unknown(0, late);
    assert_eq!(health.state(0, now), HealthState::Ejected, "both probes are still without an answer");
}

#[test]
fn only_a_fraction_of_failing_replicas_is_ejected() {
    for (count, ejected_max) in [(1, 0), (2, 1), (3, 1), (4, 2), (9, 4)] {
        let (mut health, now) = (health(count), Instant::now());
        for _ in 0..50 {
            for replica in 0..count {
                fail(&mut health, replica, now);
            }
        }
        let ejected = (0..count).filter(|&replica| health.state(replica, now) == HealthState::Ejected);
        assert_eq!(ejected.count(), ejected_max, "of {count}");
    }
}

#[test]
fn the_limit_of_ejections_counts_only_the_replicas_of_one_model() {
    let (mut health, now) = (health(12), Instant::now());
    let fail_in = |health: &mut Health, replica: u64, model_replicas: std::ops::Range<u64>| {
        let sent = health.sent(replica, now);
        health.failed(replica, sent, model_replicas, now)
    };
    // Two replicas of one model fail while ten of another are healthy: only one of the two is ejected.
    for _ in 0..20 {
        fail_in(&mut health, 0, 0..2);
        fail_in(&mut health, 1, 0..2);
    }
    let states = [0, 1].map(|replica| health.state(replica, now));
    assert_eq!(states, [HealthState::Ejected, HealthState::Trusted]);
    // The ejected replica of that model does not count toward the limit of the other model.
    for _ in 0..20 {
        (2..12).for_each(|replica| _ = fail_in(&mut health, replica, 2..12));
    }
    let ejected = (2..12).filter(|&replica| health.state(replica, now) == HealthState::Ejected).count();
    assert_eq!(ejected, 5);
}

#[test]
fn ejections_are_ignored_while_too_few_replicas_are_left() {
    let (mut health, now) = (health(4), Instant::now());
    eject(&mut health, 0, now);
    eject(&mut health, 1, now);
    assert!(!health.is_panicking(0..4, now), "half of them are left");
    assert!(health.is_panicking(0..3, now), "one of three is left");
    assert!(health.is_panicking(0..2, now), "none is left");
    assert!(!health.is_panicking(2..4, now) && !health.is_panicking([], now));
    assert!(!health.is_panicking(0..2, now + CONFIG.ejection), "the ejections have ended");
}

#[test]
fn a_new_process_starts_with_a_clean_history() {
    let (mut health, now) = (health(2), Instant::now());
    eject(&mut health, 0, now);
    health.reset(0);
    assert_eq!(health.state(0, now), HealthState::Trusted);
    health.remove(0);
    assert_eq!(health.state(0, now), HealthState::Ejected);
    health.reset(0);
    let sent = health.sent(0, now);
    assert!(!health.failed(0, sent, [0, 1], now));
}

#[test]
fn retries_are_a_fraction_of_requests() {
    let mut budget = RetryBudget::new(10, 5);
    assert_eq!((0..9).filter(|_| budget.withdraw()).count(), 5, "the budget starts with saved retries");
    let mut retries = 0;
    for _ in 0..1000 {
        budget.deposit();
        retries += u32::from(budget.withdraw());
    }
    assert!((99..=100).contains(&retries), "{retries}");
}

#[test]
fn a_changed_percentage_does_not_refill_the_retry_budget() {
    let mut budget = RetryBudget::new(10, 5);
    while budget.withdraw() {}
    budget.configure(50);
    assert!(!budget.withdraw());
    budget.deposit();
    budget.deposit();
    assert!(budget.withdraw() && !budget.withdraw(), "one retry for two requests");
}

#[test]
fn a_retry_budget_of_zero_permits_no_retries() {
    let mut budget = RetryBudget::new(0, 5);
    budget.deposit();
    assert!(!budget.withdraw());
    budget.configure(10);
    assert!(budget.withdraw(), "a budget above 0 permits the saved retries");
    budget.configure(0);
    assert!(!budget.withdraw());
}

#[test]
fn the_limit_of_ejections_holds_and_replicas_recover_at_random() {
    for seed in 0..50 {
        let mut rng = StdRng::seed_from_u64(seed);
        let count = 1 + rng.next_u64() % 10;
        let (mut health, mut now) = (health(count), Instant::now());
        let mut sent: Vec<(u64, SentRequest)> = Vec::new();
        for _ in 0..2000 {
            now += Duration::from_millis(rng.next_u64() % 300);
            let replica = rng.next_u64() % count;
            if health.state(replica, now) != HealthState::Ejected {
                sent.push((replica, health.sent(replica, now)));
            }
            if !sent.is_empty() && rng.next_u64() % 4 > 0 {
                let (replica, mut record) = sent.swap_remove((rng.next_u64() % sent.len() as u64) as usize);
                if rng.next_u64().is_multiple_of(2) {
                    health.answer_began(replica, &mut record);
                }
                match rng.next_u64() % 8 {
                    0 => health.unknown(replica, record),
                    1..5 => {
                        health.failed(replica, record, 0..count, now);
                    }
                    _ => health.succeeded(replica, record),
                }
            }
            let untrusted = (0..count).filter(|&it| health.state(it, now) != HealthState::Trusted).count();
            assert!(untrusted as u64 <= (count / 2).max(u64::from(count > 1)), "seed {seed}: {untrusted}");
        }
        for (replica, record) in sent {
            health.succeeded(replica, record);
        }
        for _ in 0..100 {
            now += CONFIG.ejection_max;
            for replica in 0..count {
                if health.state(replica, now) != HealthState::Ejected {
                    succeed(&mut health, replica, now);
                }
            }
        }
        assert!((0..count).all(|replica| health.state(replica, now) == HealthState::Trusted), "seed {seed}");
    }
}
