use std::collections::VecDeque;
use std::time::Duration;

use clap::Parser as _;
use proto::v1alpha1::{DispatchRange, Dispatches, Load};
use rand::RngExt as _;

use super::*;
use crate::app::App;
use crate::args::Args;
use crate::discovery::Found;
use crate::queue::RETRY_AFTER_MIN;

/// A router with so many replicas that have not said anything yet.
fn app(replicas: u16, arguments: &[&str]) -> (App, Vec<Arc<Replica>>) {
    let args = Args::try_parse_from(["router"].iter().chain(arguments)).unwrap();
    let app = App::new(args, None);
    let found: Vec<Found> = (1..=replicas)
        .map(|port| Found {
            http: ([127, 0, 0, 1], port).into(),
            grpc: None,
            name: format!("r{port}"),
            pod: None,
        })
        .collect();
    let (new, _) = app.dispatch().replicas.update(&found);
    for replica in &new {
        app.dispatch().health().add(replica.identity);
    }
    (app, new)
}

/// A report of a replica with room for so many sequences, of which some run.
fn report(number: u64, running: u32, sequences_max: u32) -> Load {
    Load {
        epoch: 1,
        report: number,
        state: State::Serving.into(),
        models: vec!["m".to_owned()],
        running,
        sequences_max,
        block_tokens: 16,
        blocks_total: 1000,
        ..Load::default()
    }
}

fn wanted() -> Wanted {
    let demand = Demand { prompt_tokens: 10, output_tokens: 10, sequences: 1, ..Demand::default() };
    Wanted { demand, ..Wanted::default() }
}

fn waiter() -> queue::Waiter {
    queue::Waiter { class: queue::Class::Standard, tokens: 10, arrived: Instant::now(), deadline: None }
}

#[tokio::test]
async fn who_finds_all_places_taken_waits_in_order_until_one_is_free() {
    let (app, replicas) = app(1, &[]);
    let dispatch = app.dispatch();
    dispatch.replicas.observe(&replicas[0], report(1, 0, 1), Instant::now());
    let fleet = dispatch.replicas.fleet("m").unwrap();
    let first = dispatch.place(&fleet, wanted(), waiter()).await.unwrap();
    let mut second = std::pin::pin!(dispatch.place(&fleet, wanted(), waiter()));
    let mut third = std::pin::pin!(dispatch.place(&fleet, wanted(), waiter()));
    assert!(futures_util::poll!(second.as_mut()).is_pending());
    assert!(futures_util::poll!(third.as_mut()).is_pending());
    assert_eq!(dispatch.waiters(), (2, 0));
    drop(first);
    assert!(futures_util::poll!(third.as_mut()).is_pending(), "the second is before it");
    let placed = second.await.unwrap();
    drop(placed);
    drop(third.await.unwrap());
    assert_eq!(
        (dispatch.waiters(), replicas[0].ledger.view(Instant::now(), Duration::MAX).booked.in_flight),
        ((0, 0), 0)
    );
}

#[tokio::test]
async fn a_waiter_that_leaves_makes_way_and_a_place_given_to_it_goes_on() {
    let (app, replicas) = app(1, &[]);
    let dispatch = app.dispatch();
    dispatch.replicas.observe(&replicas[0], report(1, 0, 1), Instant::now());
    let fleet = dispatch.replicas.fleet("m").unwrap();
    let first = dispatch.place(&fleet, wanted(), waiter()).await.unwrap();
    let mut second = Box::pin(dispatch.place(&fleet, wanted(), waiter()));
    let mut third = std::pin::pin!(dispatch.place(&fleet, wanted(), waiter()));
    assert!(futures_util::poll!(second.as_mut()).is_pending());
    assert!(futures_util::poll!(third.as_mut()).is_pending());
    // The place is the second's now, which leaves without having looked.
    drop(first);
    drop(second);
    drop(third.await.unwrap());
    assert_eq!(dispatch.waiters(), (0, 0));
}

#[tokio::test]
async fn one_that_was_tried_everywhere_does_not_hold_up_the_others() {
    let (app, replicas) = app(2, &[]);
    let dispatch = app.dispatch();
    for replica in &replicas {
        dispatch.replicas.observe(replica, report(1, 1, 1), Instant::now());
    }
    let fleet = dispatch.replicas.fleet("m").unwrap();
    let tried = Wanted { tried: vec![replicas[0].identity], ..wanted() };
    let mut first = std::pin::pin!(dispatch.place(&fleet, tried, waiter()));
    let mut second = std::pin::pin!(dispatch.place(&fleet, wanted(), waiter()));
    assert!(futures_util::poll!(first.as_mut()).is_pending());
    assert!(futures_util::poll!(second.as_mut()).is_pending());
    // The one that is left for the first goes away, and the other has room for both.
    dispatch.replicas.observe(&replicas[0], report(2, 0, 2), Instant::now());
    dispatch.replicas.update(&[replicas[0].found.clone()]);
    dispatch.pump_all();
    let (first, second) = (first.await.unwrap(), second.await.unwrap());
    assert_eq!(
        (first.replica.identity, second.replica.identity),
        (replicas[0].identity, replicas[0].identity)
    );
}

#[tokio::test(start_paused = true)]
async fn who_waits_too_long_is_told_when_to_come_again() {
    let (app, replicas) = app(1, &["--queue-timeout=2s", "--queue-requests=1", "--waiting-room-timeout=3s"]);
    let dispatch = app.dispatch();
    dispatch.replicas.observe(&replicas[0], report(1, 1, 1), Instant::now());
    let fleet = dispatch.replicas.fleet("m").unwrap();
    let mut first = std::pin::pin!(dispatch.place(&fleet, wanted(), waiter()));
    assert!(futures_util::poll!(first.as_mut()).is_pending());
    let full = dispatch.place(&fleet, wanted(), waiter()).await.unwrap_err();
    assert!(matches!(full, Refused::QueueFull { .. }));
    let expired = first.await.unwrap_err();
    assert!(matches!(expired, Refused::WaitedTooLong { retry_after } if retry_after >= RETRY_AFTER_MIN));
    dispatch.replicas.update(&[]);
    assert_eq!(dispatch.place(&fleet, wanted(), waiter()).await.unwrap_err(), Refused::NoReplica);
    assert_eq!(dispatch.waiters(), (0, 0));
}

/// A replica with room for many sequences, most of whose cache is held.
fn nearly_full(number: u64) -> Load {
    Load { blocks_active: 900, ..report(number, 1, 100) }
}

/// A request that needs a fifth of a replica's cache.
fn large() -> Wanted {
    let demand = Demand { prompt_tokens: 3200, ..wanted().demand };
    Wanted { demand, ..wanted() }
}

#[tokio::test]
async fn a_request_that_fits_nowhere_does_not_hold_up_those_behind_it() {
    let (app, replicas) = app(1, &[]);
    let dispatch = app.dispatch();
    dispatch.replicas.observe(&replicas[0], nearly_full(1), Instant::now());
    let fleet = dispatch.replicas.fleet("m").unwrap();
    let mut first = std::pin::pin!(dispatch.place(&fleet, large(), waiter()));
    assert!(futures_util::poll!(first.as_mut()).is_pending());
    let mut second = std::pin::pin!(dispatch.place(&fleet, wanted(), waiter()));
    let std::task::Poll::Ready(second) = futures_util::poll!(second.as_mut()) else { panic!("it waits") };
    drop(second.unwrap());
    dispatch.replicas.observe(&replicas[0], report(2, 0, 100), Instant::now());
    dispatch.pump_at(&replicas[0]);
    drop(first.await.unwrap());
}

#[tokio::test]
async fn a_replica_drains_for_a_request_that_was_overtaken_for_too_long() {
    let (app, replicas) = app(2, &[]);
    let dispatch = app.dispatch();
    for replica in &replicas {
        dispatch.replicas.observe(replica, nearly_full(1), Instant::now());
    }
    let fleet = dispatch.replicas.fleet("m").unwrap();
    let mut first = Box::pin(dispatch.place(&fleet, large(), waiter()));
    assert!(futures_util::poll!(first.as_mut()).is_pending());
    let reserved = || replicas.iter().filter(|replica| replica.is_reserved()).count();
    assert!(!dispatch.pump_once(&fleet, None, Instant::now()));
    assert_eq!(reserved(), 0, "it has not waited for long");
    assert!(!dispatch.pump_once(&fleet, None, Instant::now() + pump::RESERVE_AFTER));
    assert_eq!(reserved(), 1);
    let drains = usize::from(replicas[1].is_reserved());
    let mut held = Vec::new();
    for _ in 0..5 {
        held.push(dispatch.place(&fleet, wanted(), waiter()).await.unwrap());
    }
    assert!(held.iter().all(|placed| !Arc::ptr_eq(&placed.replica, &replicas[drains])));
    // What ran there has ended.
    dispatch.replicas.observe(&replicas[drains], report(2, 0, 100), Instant::now());
    dispatch.pump_at(&replicas[drains]);
    assert!(Arc::ptr_eq(&first.await.unwrap().replica, &replicas[drains]));
    assert_eq!(reserved(), 0);

    // A reservation ends with a request that leaves.
    dispatch.replicas.observe(&replicas[drains], nearly_full(3), Instant::now());
    let mut gone = Box::pin(dispatch.place(&fleet, large(), waiter()));
    assert!(futures_util::poll!(gone.as_mut()).is_pending());
    dispatch.pump_once(&fleet, None, Instant::now() + pump::RESERVE_AFTER);
    assert_eq!(reserved(), 1);
    drop(gone);
    assert_eq!((reserved(), dispatch.waiters()), (0, (0, 0)));
}

#[tokio::test(start_paused = true)]
async fn who_waited_for_a_replica_is_served_before_newcomers_and_waits_on_where_it_is_full() {
    let (app, replicas) = app(1, &["--waiting-room-timeout=10s", "--queue-timeout=30s"]);
    let dispatch = app.dispatch();
    let draining = Load { state: State::Draining.into(), ..report(1, 0, 1) };
    dispatch.replicas.observe(&replicas[0], draining, Instant::now());
    let fleet = dispatch.replicas.fleet("m").unwrap();
    let mut first = std::pin::pin!(dispatch.place(&fleet, wanted(), waiter()));
    assert!(futures_util::poll!(first.as_mut()).is_pending());
    assert_eq!(dispatch.waiters(), (0, 1));
    // It takes requests again, and is full.
    dispatch.replicas.observe(&replicas[0], report(2, 1, 1), Instant::now());
    dispatch.pump_at(&replicas[0]);
    let mut newcomer = std::pin::pin!(dispatch.place(&fleet, wanted(), waiter()));
    assert!(futures_util::poll!(newcomer.as_mut()).is_pending());
    // The time for a replica to appear is over, but one has appeared.
    tokio::time::advance(Duration::from_secs(11)).await;
    assert!(futures_util::poll!(first.as_mut()).is_pending());
    assert_eq!(dispatch.waiters(), (2, 0));
    dispatch.replicas.observe(&replicas[0], report(3, 0, 1), Instant::now());
    dispatch.pump_at(&replicas[0]);
    assert!(futures_util::poll!(newcomer.as_mut()).is_pending(), "the other one has waited for longer");
    drop(first.await.unwrap());
    drop(newcomer.await.unwrap());
    assert_eq!(dispatch.waiters(), (0, 0));
}

#[tokio::test]
async fn the_work_of_a_report_does_not_grow_with_the_number_of_replicas() {
    let (app, replicas) = app(60, &[]);
    let dispatch = app.dispatch();
    for replica in &replicas {
        dispatch.replicas.observe(replica, report(1, 1, 1), Instant::now());
    }
    let fleet = dispatch.replicas.fleet("m").unwrap();
    let mut waiting: Vec<_> =
        (0..100).map(|_| Box::pin(dispatch.place(&fleet, wanted(), waiter()))).collect();
    for place in &mut waiting {
        assert!(futures_util::poll!(place.as_mut()).is_pending());
    }
    GATHERED.set(0);
    dispatch.pump_at(&replicas[0]);
    let looked_at = GATHERED.get();
    assert!((1..=pump::BACKFILL_MAX).contains(&looked_at), "{looked_at}");
    // Who comes now queues behind many others, and is not compared with anything.
    GATHERED.set(0);
    let mut last = Box::pin(dispatch.place(&fleet, wanted(), waiter()));
    assert!(futures_util::poll!(last.as_mut()).is_pending());
    assert_eq!(GATHERED.get(), 0);
}

#[tokio::test]
async fn a_time_out_ejects_only_a_replica_that_makes_no_progress() {
    let (app, replicas) = app(2, &["--policy=round-robin"]);
    let dispatch = app.dispatch();
    let fleet_of = |number, uncomputed_tokens, at| {
        for replica in &replicas {
            let load = Load { uncomputed_tokens, ..report(number, 0, 100) };
            dispatch.replicas.observe(replica, load, at);
        }
    };
    fleet_of(1, 100_000, Instant::now());
    let fleet = dispatch.replicas.fleet("m").unwrap();
    let standing = |replica: &Arc<Replica>| dispatch.health().standing(replica.identity, Instant::now());
    let time_out = || async {
        let mut placed = dispatch.place(&fleet, wanted(), waiter()).await.unwrap();
        placed.end(Outcome::TimedOut);
        placed
    };
    for number in 2..12 {
        let placed = time_out().await;
        // A long prompt is being computed.
        fleet_of(number, 100_000 - number, Instant::now() + Duration::from_secs(number));
        drop(placed);
    }
    assert!(replicas.iter().all(|replica| standing(replica) == Standing::Trusted));
    let (app, replicas) = app2(&["--policy=round-robin"]);
    let dispatch = app.dispatch();
    let fleet = dispatch.replicas.fleet("m").unwrap();
    for _ in 0..10 {
        let mut placed = dispatch.place(&fleet, wanted(), waiter()).await.unwrap();
        placed.end(Outcome::TimedOut);
    }
    let ejected = |replica: &&Arc<Replica>| {
        dispatch.health().standing(replica.identity, Instant::now()) == Standing::Ejected
    };
    assert_eq!(replicas.iter().filter(ejected).count(), 1, "its engine stands still");
}

/// Two replicas that have reported once.
fn app2(arguments: &[&str]) -> (App, Vec<Arc<Replica>>) {
    let (app, replicas) = app(2, arguments);
    for replica in &replicas {
        app.dispatch().replicas.observe(replica, report(1, 0, 100), Instant::now());
    }
    (app, replicas)
}

#[tokio::test]
async fn ejected_replicas_are_used_when_the_healthy_ones_have_gone() {
    let (app, replicas) = app2(&["--waiting-room-timeout=0s"]);
    let dispatch = app.dispatch();
    let fleet = dispatch.replicas.fleet("m").unwrap();
    let identities: Vec<u64> = replicas.iter().map(|replica| replica.identity).collect();
    for _ in 0..3 {
        let sent = dispatch.health().sent(identities[0], Instant::now());
        dispatch.health().failed(identities[0], sent, identities.iter().copied(), Instant::now());
    }
    let placed = dispatch.place(&fleet, wanted(), waiter()).await.unwrap();
    assert!(Arc::ptr_eq(&placed.replica, &replicas[1]));
    drop(placed);
    dispatch.replicas.update(&[replicas[0].found.clone()]);
    assert!(dispatch.is_able(&fleet));
    let placed = dispatch.place(&fleet, wanted(), waiter()).await.unwrap();
    assert!(Arc::ptr_eq(&placed.replica, &replicas[0]));
}

#[tokio::test]
async fn whatever_reports_say_places_are_booked_and_given_back() {
    let seed = 5;
    println!("seed {seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    for policy in ["kv", "session", "power-of-two", "round-robin", "least-requests"] {
        let (app, replicas) =
            app(5, &["--queue-timeout=0s", "--waiting-room-timeout=0s", "--policy", policy]);
        let dispatch = app.dispatch();
        let mut held: VecDeque<Placed> = VecDeque::new();
        for _ in 0..3000 {
            let replica = &replicas[rng.random_range(0..replicas.len())];
            dispatch.replicas.observe(replica, odd(&mut rng, dispatch.replicas.router()), Instant::now());
            if let Some(fleet) = dispatch.replicas.fleet("m") {
                let wanted = Wanted { demand: odd_demand(&mut rng), ..Wanted::default() };
                if let Ok(placed) = dispatch.place(&fleet, wanted, waiter()).await {
                    held.push_back(placed);
                }
            }
            let ends = held.len() > 40 || rng.random_bool(0.3);
            if let Some(mut placed) = ends.then(|| held.pop_front()).flatten() {
                placed.first_token();
                placed.end([Outcome::Answered, Outcome::Failed, Outcome::Unknown][rng.random_range(0..3)]);
            }
        }
        held.clear();
        assert_eq!(dispatch.waiters(), (0, 0));
        for replica in &replicas {
            let booked = replica.ledger.view(Instant::now(), Duration::MAX).booked;
            assert_eq!(booked, crate::ledger::Booked::default());
        }
        app.metrics().scrape(&app);
    }
}

/// Nothing, all, or anything between.
fn any(rng: &mut StdRng) -> u32 {
    [0, 1, rng.random_range(0..100), rng.random(), u32::MAX][rng.random_range(0..5)]
}

fn odd(rng: &mut StdRng, router: u64) -> Load {
    let speeds = [0.0, -1.0, 1e-30, 500.0, f32::INFINITY, f32::NAN];
    let mut speed = || speeds[rng.random_range(0..speeds.len())];
    let (prefill_tokens_per_second, decode_tokens_per_second) = (speed(), speed());
    let ranges = (0..rng.random_range(0..4))
        .map(|_| DispatchRange {
            first: u64::from(any(rng)),
            last: [u64::MAX, u64::from(any(rng))][rng.random_range(0..2)],
        })
        .collect();
    Load {
        epoch: rng.random_range(0..3),
        report: rng.random(),
        state: rng.random_range(-1..6),
        models: ["m", "m", "m", ""][..rng.random_range(0..5)].iter().map(|&name| name.to_owned()).collect(),
        blocks_total: any(rng),
        blocks_active: any(rng),
        blocks_evictable: any(rng),
        blocks_free: any(rng),
        block_tokens: any(rng),
        running: any(rng),
        waiting: any(rng),
        uncomputed_tokens: [0, u64::MAX, u64::from(any(rng))][rng.random_range(0..3)],
        sequences_max: any(rng),
        requests_max: any(rng),
        prefill_tokens_per_second,
        decode_tokens_per_second,
        preemptions_total: rng.random(),
        dispatches: rng
            .random_bool(0.7)
            .then_some(Dispatches { router: [router, 1][rng.random_range(0..2)], ranges }),
        keeper: rng.random(),
        asleep: rng.random(),
    }
}

fn odd_demand(rng: &mut StdRng) -> Demand {
    Demand {
        prompt_tokens: any(rng),
        output_tokens: any(rng),
        output_tokens_max: rng.random_bool(0.5).then_some(any(rng)),
        sequences: any(rng),
        session: rng.random_bool(0.5).then_some(rng.random()),
    }
}
