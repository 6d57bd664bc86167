use std::time::Duration;

use proto::v1alpha1::State;
use rand::SeedableRng as _;
use rand::rngs::StdRng;

use super::*;
use crate::ledger::{BookedLoad, LoadSnapshot, ReportedLoad, TenantLoad};

const KV: Policy = Policy::Kv(KvConfig {
    uses_prefixes: true,
    bounded_load: 1.25,
    cache_pressure: 0.02,
    decode_interference: 0.5,
    step_tokens: 96.0,
    prefill_tokens_per_second: 1000.0,
    decode_tokens_per_second: 100.0,
    image_tokens_per_second: 300.0,
});

const REPORTED: ReportedLoad = ReportedLoad {
    blocks_total: 1000,
    blocks_active: 0,
    blocks_evictable: 0,
    block_tokens: 16,
    running: 0,
    waiting: 0,
    uncomputed_tokens: 0,
    sequences_max: 16,
    requests_max: 64,
    prefill_tokens_per_second: 1000.0,
    decode_tokens_per_second: 100.0,
    unencoded_image_tokens: 0,
    image_tokens_per_second: 0.0,
    is_sleeping: false,
};

const DEMAND: Demand = Demand {
    prompt_tokens: 1000,
    image_tokens: 0,
    images_start: 0,
    images_end: 0,
    output_tokens: 100,
    output_tokens_max: None,
    sequences: 1,
    session: None,
    tenant: 0,
};

/// A replica that has just reported `reported`.
fn reporting(identity: u64, reported: ReportedLoad) -> Candidate {
    let snapshot = LoadSnapshot {
        reported: Some(reported),
        report_age: Some(Duration::ZERO),
        speed_age: Some(Duration::ZERO),
        image_speed_age: Some(Duration::ZERO),
        state: Some(State::Serving),
        booked: BookedLoad::default(),
        version: 0,
    };
    candidate(identity, snapshot)
}

/// A replica that does not report its load and has `in_flight` requests in flight.
fn silent(identity: u64, in_flight: u32) -> Candidate {
    let booked = BookedLoad { in_flight, ..BookedLoad::default() };
    let snapshot = LoadSnapshot {
        reported: None,
        report_age: None,
        speed_age: None,
        image_speed_age: None,
        state: None,
        booked,
        version: 0,
    };
    candidate(identity, snapshot)
}

fn candidate(identity: u64, snapshot: LoadSnapshot) -> Candidate {
    Candidate {
        identity,
        snapshot,
        tenant_load: TenantLoad::default(),
        cached_tokens: 0,
        weight: 1.0,
        is_reserved: false,
        last_pick: 0,
    }
}

fn pick(policy: Policy, demand: &Demand, candidates: &[Candidate]) -> Result<usize, NoReplica> {
    pick_seeded(policy, demand, candidates, 1)
}

fn pick_seeded(
    policy: Policy,
    demand: &Demand,
    candidates: &[Candidate],
    seed: u64,
) -> Result<usize, NoReplica> {
    let mut terms = Vec::new();
    let picked = policy.pick(demand, candidates, &mut terms, &mut StdRng::seed_from_u64(seed));
    assert_eq!(terms.len(), candidates.len());
    picked
}

/// A request with images between two texts.
const WITH_IMAGES: Demand = Demand { image_tokens: 600, images_start: 100, images_end: 700, ..DEMAND };

const ALL: [&str; 5] = ["kv", "least-requests", "power-of-two", "round-robin", "session"];

#[test]
fn a_request_with_images_avoids_a_replica_that_is_encoding() {
    let idle = ReportedLoad { image_tokens_per_second: 500.0, ..REPORTED };
    let encoding = ReportedLoad { unencoded_image_tokens: 2000, ..idle };
    let candidates = [reporting(1, encoding), reporting(2, idle)];
    let mut terms = Vec::new();
    kv::score(&KvConfig::default(), &WITH_IMAGES, &candidates, &mut terms);
    let encoding_times = [terms[0].image_encoding, terms[1].image_encoding];
    assert_eq!(encoding_times, [(2000.0 + 600.0) / 500.0, 600.0 / 500.0]);
    assert!((terms[0].score - terms[1].score - 4.0).abs() < 1e-9);
}

#[test]
fn a_request_without_images_does_not_wait_for_the_encoder() {
    let encoding = ReportedLoad { unencoded_image_tokens: 2000, image_tokens_per_second: 500.0, ..REPORTED };
    // Computing the prompt takes a second.
    assert_eq!(image_encoding(&DEMAND, reporting(1, encoding)), 1.0);
    let almost_done = ReportedLoad { unencoded_image_tokens: 100, ..encoding };
    assert_eq!(image_encoding(&DEMAND, reporting(1, almost_done)), 0.2);
}

/// The time to encode images that `candidate` is expected to need for a request.
fn image_encoding(demand: &Demand, candidate: Candidate) -> f64 {
    let mut terms = Vec::new();
    kv::score(&KvConfig::default(), demand, &[candidate], &mut terms);
    terms[0].image_encoding
}

#[test]
fn images_in_the_cached_prefix_are_not_encoded() {
    let idle = ReportedLoad { image_tokens_per_second: 500.0, ..REPORTED };
    let encoded = |demand: &Demand, cached_tokens| {
        image_encoding(demand, Candidate { cached_tokens, ..reporting(1, idle) }) * 500.0
    };
    assert_eq!(encoded(&WITH_IMAGES, 0), 600.0);
    assert_eq!(encoded(&WITH_IMAGES, 100), 600.0, "only the text before the images is cached");
    assert_eq!(encoded(&WITH_IMAGES, 400), 300.0);
    assert_eq!(encoded(&WITH_IMAGES, 700), 0.0, "the text after the images is not cached");
    assert_eq!(encoded(&WITH_IMAGES, 1000), 0.0);
    // The text between the images takes as many tokens as the images.
    let spread = Demand { image_tokens: 300, ..WITH_IMAGES };
    assert_eq!(encoded(&spread, 400), 150.0);
    // A client may declare images that are larger than the prompt.
    let declared = Demand { image_tokens: 9000, ..WITH_IMAGES };
    assert_eq!(encoded(&declared, 0), 1000.0);
}

#[test]
fn images_of_requests_since_the_report_count() {
    let idle = ReportedLoad { image_tokens_per_second: 500.0, ..REPORTED };
    let mut sent_to = reporting(1, idle);
    let cost = sent_to.cost(&WITH_IMAGES);
    assert_eq!((cost.uncached_tokens, cost.image_tokens), (1000, 600));
    sent_to.snapshot.booked.image_tokens_unreported = u64::from(cost.image_tokens);
    assert_eq!(image_encoding(&WITH_IMAGES, sent_to), 1200.0 / 500.0);
    assert_eq!(pick(KV, &WITH_IMAGES, &[sent_to, reporting(2, idle)]), Ok(1));
}

#[test]
fn a_replica_that_has_encoded_no_image_is_assumed_to_have_a_typical_encoder() {
    let default = f64::from(KvConfig::default().image_tokens_per_second);
    assert_eq!(image_encoding(&WITH_IMAGES, reporting(1, REPORTED)), 600.0 / default);
    let at = |speed: f32| ReportedLoad { image_tokens_per_second: speed, ..REPORTED };
    let times = |candidates: &[Candidate]| -> Vec<f64> {
        let mut terms = Vec::new();
        kv::score(&KvConfig::default(), &WITH_IMAGES, candidates, &mut terms);
        terms.iter().map(|terms| terms.image_encoding).collect()
    };
    assert_eq!(times(&[reporting(1, at(0.0)), reporting(2, at(200.0))]), [3.0, 3.0]);
    // The measured speed counts if it is recent and clearly differs from the mean.
    let (mut slow, fast) = (reporting(1, at(20.0)), reporting(2, at(180.0)));
    assert_eq!(times(&[slow, fast]), [30.0, 6.0]);
    slow.snapshot.image_speed_age = Some(Duration::from_secs(60));
    assert_eq!(times(&[slow, fast]), [600.0 / 180.0, 600.0 / 180.0]);
}

#[test]
fn policies_have_names() {
    for name in ALL {
        assert_eq!(name.parse::<Policy>().unwrap().to_string(), name);
    }
    let unknown = "random".parse::<Policy>().unwrap_err().to_string();
    assert!(unknown.contains("\"random\"") && ALL.iter().all(|name| unknown.contains(name)), "{unknown}");
}

#[test]
fn the_least_queued_work_in_seconds_wins() {
    let many_short = ReportedLoad { waiting: 8, uncomputed_tokens: 800, ..REPORTED };
    let one_long = ReportedLoad { waiting: 1, uncomputed_tokens: 8000, ..REPORTED };
    let candidates = [reporting(1, one_long), reporting(2, many_short)];
    assert_eq!(pick(KV, &DEMAND, &candidates), Ok(1));
    let fast = ReportedLoad { prefill_tokens_per_second: 20_000.0, ..one_long };
    assert_eq!(pick(KV, &DEMAND, &[reporting(1, fast), reporting(2, many_short)]), Ok(0));
}

#[test]
fn requests_since_the_report_count() {
    let mut sent_to = reporting(1, REPORTED);
    sent_to.snapshot.booked =
        BookedLoad { uncached_unreported: 3000, unreported: 1, ..BookedLoad::default() };
    let busy = ReportedLoad { running: 1, uncomputed_tokens: 2000, ..REPORTED };
    assert_eq!(pick(KV, &DEMAND, &[sent_to, reporting(2, busy)]), Ok(1));
}

#[test]
fn a_replica_has_made_progress_since_its_report() {
    let mut earlier = reporting(1, ReportedLoad { running: 1, uncomputed_tokens: 3000, ..REPORTED });
    earlier.snapshot.report_age = Some(Duration::from_secs(2));
    let now = reporting(2, ReportedLoad { running: 1, uncomputed_tokens: 2000, ..REPORTED });
    assert_eq!(pick(KV, &DEMAND, &[now, earlier]), Ok(1));
}

/// The number of requests out of a hundred that go to the first candidate.
fn share_of_first(candidates: &[Candidate]) -> usize {
    (0..100).filter(|&seed| pick_seeded(KV, &DEMAND, candidates, seed) == Ok(0)).count()
}

#[test]
fn idle_replicas_are_equal_unless_one_is_known_to_be_much_slower() {
    let at = |speed: f32| ReportedLoad { prefill_tokens_per_second: speed, ..REPORTED };
    // Speeds measured with short prompts are noisy.
    let share = share_of_first(&[reporting(1, at(300.0)), reporting(2, at(500.0))]);
    assert!((30..=70).contains(&share), "{share}");
    let (slow, fast) = (reporting(1, at(50.0)), reporting(2, at(500.0)));
    assert_eq!(share_of_first(&[slow, fast]), 0);
    // The replica may have been slow only because it was cold, so an old measurement is ignored.
    let mut unused = slow;
    unused.snapshot.speed_age = Some(Duration::from_secs(60));
    let share = share_of_first(&[unused, fast]);
    assert!((30..=70).contains(&share), "{share}");
    // An old fast measurement is ignored too, but queued work still counts.
    let mut rested = fast;
    rested.snapshot.speed_age = Some(Duration::from_secs(60));
    rested.snapshot.reported = Some(ReportedLoad { running: 1, uncomputed_tokens: 1000, ..at(500.0) });
    assert_eq!(share_of_first(&[rested, reporting(2, at(400.0))]), 0);
}

#[test]
fn a_cached_prefix_saves_the_time_of_its_tokens() {
    let mut cached = reporting(1, ReportedLoad { running: 1, uncomputed_tokens: 500, ..REPORTED });
    cached.cached_tokens = 900;
    assert_eq!(pick(KV, &DEMAND, &[reporting(2, REPORTED), cached]), Ok(1));
    cached.snapshot.booked.uncached_unreported = 500;
    assert_eq!(pick(KV, &DEMAND, &[reporting(2, REPORTED), cached]), Ok(0));
}

#[test]
fn decoding_sequences_delay_a_prompt() {
    let busy = reporting(1, ReportedLoad { running: 10, ..REPORTED });
    assert_eq!(pick(KV, &DEMAND, &[busy, reporting(2, REPORTED)]), Ok(1));
}

#[test]
fn a_full_replica_has_a_higher_score() {
    let full = ReportedLoad { running: 16, uncomputed_tokens: 16, ..REPORTED };
    let busy = ReportedLoad { running: 8, uncomputed_tokens: 500, ..REPORTED };
    assert_eq!(pick(KV, &DEMAND, &[reporting(1, full), reporting(2, busy)]), Ok(1));
    let out_of_blocks = ReportedLoad { running: 4, blocks_active: 990, ..REPORTED };
    assert_eq!(pick(KV, &DEMAND, &[reporting(1, out_of_blocks), reporting(2, busy)]), Ok(1));
    let warm = ReportedLoad { blocks_evictable: 990, ..REPORTED };
    assert_eq!(
        pick(KV, &DEMAND, &[reporting(1, warm), reporting(2, busy)]),
        Ok(0),
        "evictable blocks are available"
    );
}

#[test]
fn capacity_is_now_later_or_never() {
    let capacity = |reported: ReportedLoad| reporting(1, reported).capacity(&DEMAND);
    assert_eq!(capacity(REPORTED), Capacity::Now);
    assert_eq!(capacity(ReportedLoad { running: 16, ..REPORTED }), Capacity::Later);
    assert_eq!(capacity(ReportedLoad { requests_max: 4, waiting: 4, ..REPORTED }), Capacity::Later);
    assert_eq!(capacity(ReportedLoad { running: 1, blocks_active: 950, ..REPORTED }), Capacity::Later);
    assert_eq!(capacity(ReportedLoad { blocks_total: 62, ..REPORTED }), Capacity::Never);
    assert_eq!(capacity(ReportedLoad { blocks_total: 63, ..REPORTED }), Capacity::Now);
    // A replica whose report contains no limits is not limited.
    let unlimited =
        ReportedLoad { sequences_max: 0, requests_max: 0, blocks_total: 0, running: 99, ..REPORTED };
    assert_eq!(capacity(unlimited), Capacity::Now);
    assert_eq!(silent(1, 1000).capacity(&DEMAND), Capacity::Now);

    let choices = Demand { sequences: 17, ..DEMAND };
    assert_eq!(reporting(1, REPORTED).capacity(&choices), Capacity::Never);
    let long = Demand { output_tokens_max: Some(16_000), ..DEMAND };
    assert_eq!(reporting(1, REPORTED).capacity(&long), Capacity::Never);

    for reserved in [reporting(1, REPORTED), silent(1, 0)] {
        let reserved = Candidate { is_reserved: true, ..reserved };
        assert_eq!(reserved.capacity(&DEMAND), Capacity::Later);
        assert_eq!(pick(KV, &DEMAND, &[reserved, reporting(2, REPORTED)]), Ok(1));
        assert!(pick(KV, &DEMAND, &[reserved]).is_err(), "it is reserved for another request");
    }

    let full = reporting(1, ReportedLoad { running: 16, ..REPORTED });
    let small = reporting(2, ReportedLoad { blocks_total: 10, ..REPORTED });
    assert_eq!(super::capacity(&DEMAND, &[small, full]), Capacity::Later);
    assert_eq!(super::capacity(&DEMAND, &[]), Capacity::Never);
}

#[test]
fn requests_since_the_report_need_room() {
    let mut candidate = reporting(1, ReportedLoad { running: 15, ..REPORTED });
    assert_eq!(candidate.capacity(&DEMAND), Capacity::Now);
    candidate.snapshot.booked.sequences_unreported = 1;
    assert_eq!(candidate.capacity(&DEMAND), Capacity::Later);
}

#[test]
fn no_policy_picks_a_replica_that_is_unavailable_or_too_small() {
    let draining = |identity| {
        let mut candidate = reporting(identity, REPORTED);
        candidate.snapshot.state = Some(State::Draining);
        candidate
    };
    let mut ejected = silent(1, 0);
    ejected.weight = 0.0;
    let small = reporting(2, ReportedLoad { blocks_total: 10, ..REPORTED });
    for name in ALL {
        for session in [None, Some(1), Some(2)] {
            let policy: Policy = name.parse().unwrap();
            let demand = Demand { session, ..DEMAND };
            for seed in 0..20 {
                let able = reporting(5, ReportedLoad { running: 15, uncomputed_tokens: 9000, ..REPORTED });
                let candidates = [draining(3), ejected, small, able];
                assert_eq!(pick_seeded(policy, &demand, &candidates, seed), Ok(3), "{name}");
            }
            let unavailable = [draining(3), ejected];
            assert_eq!(pick(policy, &demand, &unavailable), Err(NoReplica::Unavailable), "{name}");
            assert_eq!(pick(policy, &demand, &[small]), Err(NoReplica::NeverFits), "{name}");
            assert_eq!(pick(policy, &demand, &[]), Err(NoReplica::Unavailable), "{name}");
        }
    }
}

#[test]
fn without_reports_requests_in_flight_are_compared() {
    let mut busy = reporting(1, REPORTED);
    busy.snapshot.booked.in_flight = 4;
    assert_eq!(pick(KV, &DEMAND, &[busy, silent(2, 3)]), Ok(1));
    assert_eq!(pick(KV, &DEMAND, &[busy, silent(2, 5)]), Ok(0));
    assert_eq!(pick(KV, &DEMAND, &[silent(1, 5), silent(2, 4)]), Ok(1));
}

#[test]
fn a_score_is_a_time_only_if_a_replica_reports_its_load() {
    let (reports, no_reports) = ([reporting(1, REPORTED), silent(2, 0)], [silent(1, 0), silent(2, 0)]);
    for (candidates, is_time) in [(reports, true), (no_reports, false)] {
        let mut terms = Vec::new();
        kv::score(&KvConfig::default(), &DEMAND, &candidates, &mut terms);
        assert!(terms.iter().all(|terms| terms.is_score_time == is_time), "{terms:?}");
    }
}

#[test]
fn one_replica_without_a_report_does_not_affect_the_others() {
    let long = ReportedLoad { running: 1, uncomputed_tokens: 9000, ..REPORTED };
    let short = ReportedLoad { running: 1, uncomputed_tokens: 90, ..REPORTED };
    let mut candidates = [reporting(1, long), reporting(2, short), silent(3, 2)];
    candidates[0].snapshot.booked.in_flight = 1;
    candidates[1].snapshot.booked.in_flight = 2;
    assert_eq!(
        pick(KV, &DEMAND, &candidates),
        Ok(1),
        "the estimated time counts, although more requests are in flight"
    );
    candidates[1].snapshot.reported = Some(long);
    candidates[2].snapshot.booked.in_flight = 0;
    assert_eq!(pick(KV, &DEMAND, &candidates), Ok(2), "an idle replica without a report is picked");
}

#[test]
fn without_reports_a_prefix_attracts_only_a_bounded_load() {
    let mut cached = silent(1, 0);
    cached.cached_tokens = 900;
    let mut counts = [0, 0, 0, 0];
    for _ in 0..100 {
        let mut candidates = [cached, silent(2, counts[1]), silent(3, counts[2]), silent(4, counts[3])];
        candidates[0].snapshot.booked.in_flight = counts[0];
        counts[pick(KV, &DEMAND, &candidates).unwrap()] += 1;
    }
    assert!((30..=33).contains(&counts[0]), "{counts:?}: about 1.25 times a quarter");
}

#[test]
fn equal_replicas_are_equally_likely() {
    for policy in [KV, Policy::LeastRequests, Policy::PowerOfTwo] {
        let candidates = [1, 2, 3, 4].map(|identity| silent(identity, 0));
        let mut counts = [0; 4];
        for seed in 0..4000 {
            counts[pick_seeded(policy, &DEMAND, &candidates, seed).unwrap()] += 1;
        }
        assert!(counts.iter().all(|count| (850..1150).contains(count)), "{policy}: {counts:?}");
    }
}

#[test]
fn round_robin_takes_turns() {
    let mut candidates = [1, 2, 3].map(|identity| silent(identity, 0));
    let mut turns = Vec::new();
    for turn in 1..=9 {
        let picked = pick_seeded(Policy::RoundRobin, &DEMAND, &candidates, turn).unwrap();
        candidates[picked].last_pick = turn;
        turns.push(picked);
    }
    assert_eq!(turns[..3], turns[3..6]);
    assert_eq!(turns[..3], turns[6..]);
    turns.truncate(3);
    turns.sort_unstable();
    assert_eq!(turns, [0, 1, 2]);
}

#[test]
fn power_of_two_never_picks_the_busiest_of_three() {
    let candidates = [silent(1, 9), silent(2, 1), silent(3, 2)];
    for seed in 0..200 {
        assert_ne!(pick_seeded(Policy::PowerOfTwo, &DEMAND, &candidates, seed), Ok(0));
    }
}

#[test]
fn a_probed_replica_gets_fewer_requests() {
    let mut candidates = [silent(1, 2), silent(2, 3)];
    candidates[0].weight = 0.5;
    for policy in [KV, Policy::LeastRequests] {
        assert_eq!(pick(policy, &DEMAND, &candidates), Ok(1));
    }
}

#[test]
fn only_the_sessions_of_a_removed_replica_move() {
    let policy: Policy = "session".parse().unwrap();
    let candidates = [1, 2, 3, 4].map(|identity| silent(identity, identity as u32));
    let of = |session: u64, candidates: &[Candidate]| {
        let demand = Demand { session: Some(session), ..DEMAND };
        let picked = pick_seeded(policy, &demand, candidates, session).unwrap();
        candidates[picked].identity
    };
    let before: Vec<u64> = (0..400).map(|session| of(session, &candidates)).collect();
    for identity in 1..=4 {
        let count = before.iter().filter(|&&it| it == identity).count();
        assert!((70..130).contains(&count), "{count} of 400 for one in four");
    }
    for (session, &identity) in (0..).zip(&before) {
        let after = of(session, &candidates[1..]);
        assert!(identity == 1 || after == identity);
    }
}

#[test]
fn one_sleeping_replica_is_woken_when_the_others_are_full() {
    let sleeping = |identity| reporting(identity, ReportedLoad { is_sleeping: true, ..REPORTED });
    let busy = |running| reporting(1, ReportedLoad { running, uncomputed_tokens: 50_000, ..REPORTED });
    for name in ALL {
        let policy: Policy = name.parse().unwrap();
        for seed in 0..20 {
            let demand = Demand { session: Some(seed), ..DEMAND };
            let pick = |candidates: &[Candidate]| pick_seeded(policy, &demand, candidates, seed);
            assert_eq!(pick(&[sleeping(2), busy(15), sleeping(3)]), Ok(1), "{name}: replica 1 has room");
            assert!(pick(&[sleeping(2), sleeping(3)]).is_ok(), "{name}: a sleeping replica is picked");
            // A request to the replica is in flight already.
            let mut waking = sleeping(2);
            waking.snapshot.booked.in_flight = 1;
            assert_eq!(pick(&[waking, sleeping(3)]), Ok(0), "{name}");
        }
    }
    let full = ReportedLoad { running: 16, ..REPORTED };
    assert_eq!(pick(KV, &DEMAND, &[reporting(1, full), sleeping(2)]), Ok(1));
}

/// Checks with random figures that the picked candidate can accept the request, and that the pick depends only on the
/// arguments.
#[test]
fn random_picks_are_valid_and_repeatable() {
    use rand::Rng as _;
    for seed in 0..3000 {
        let mut rng = StdRng::seed_from_u64(seed);
        let extremes = [0, 1, 7, 500, 100_000, u32::MAX];
        let mut any = || extremes[(rng.next_u64() % extremes.len() as u64) as usize];
        let candidates: Vec<Candidate> = (0..any() % 6)
            .map(|identity| {
                let speeds = [0.0, 1.0, 1e9, f32::MAX];
                let reported = ReportedLoad {
                    blocks_total: any(),
                    blocks_active: any(),
                    blocks_evictable: any(),
                    block_tokens: any(),
                    running: any(),
                    waiting: any(),
                    uncomputed_tokens: u64::from(any()) * 4,
                    sequences_max: any(),
                    requests_max: any(),
                    prefill_tokens_per_second: speeds[any() as usize % 4],
                    decode_tokens_per_second: speeds[any() as usize % 4],
                    unencoded_image_tokens: u64::from(any()),
                    image_tokens_per_second: any() as f32,
                    is_sleeping: any() < 100,
                };
                let mut candidate = reporting(u64::from(identity), reported);
                candidate.cached_tokens = any();
                candidate.weight = if any() == 0 { 0.0 } else { 1.0 };
                if any() == 1 {
                    candidate.snapshot.reported = None;
                }
                candidate.snapshot.booked = BookedLoad {
                    in_flight: any(),
                    blocks_unreported: u64::from(any()) * 4,
                    sequences_unreported: u64::from(any()) * 4,
                    uncached_unreported: u64::from(any()) * 4,
                    image_tokens_unreported: u64::from(any()) * 4,
                    ..BookedLoad::default()
                };
                candidate
            })
            .collect();
        let demand = Demand {
            prompt_tokens: any(),
            image_tokens: any(),
            images_start: any(),
            images_end: any(),
            output_tokens: any(),
            output_tokens_max: Some(any()),
            sequences: any(),
            session: Some(u64::from(any())),
            tenant: u64::from(any()) % 2,
        };
        let able = |index: usize| candidates[index].capacity(&demand) != Capacity::Never;
        for name in ALL {
            let policy: Policy = name.parse().unwrap();
            let picked = pick_seeded(policy, &demand, &candidates, seed);
            assert_eq!(picked, pick_seeded(policy, &demand, &candidates, seed));
            match picked {
                Ok(index) => assert!(able(index), "{name}, seed {seed}"),
                Err(_) => assert!(!(0..candidates.len()).any(able), "{name}, seed {seed}"),
            }
        }
    }
}
