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
        .map(|port| Found { http: ([127, 0, 0, 1], port).into(), grpc: None, name: format!("r{port}") })
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
    queue::Waiter { class: queue::Class::Standard, tokens: 10, deadline: None }
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
