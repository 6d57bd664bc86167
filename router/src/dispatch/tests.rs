use std::collections::VecDeque;
use std::time::Duration;

use clap::Parser as _;
use proto::v1alpha1::{DispatchRange, Dispatches, Load, State};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

use super::backfill::{BACKFILL_MAX, RESERVE_AFTER, RESERVE_AGAINST_ALL_AFTER};
use super::dispatcher::SAVED_RETRIES_MAX;
use super::picker::EXAMINED;
use super::*;
use crate::app::App;
use crate::args::Args;
use crate::discovery::DiscoveredReplica;
use crate::error::Error;
use crate::health::{HealthConfig, HealthState};
use crate::policy::Demand;
use crate::prefix::PrefixHashes;
use crate::queue::{NO_TENANT, PriorityClass, RETRY_AFTER_MIN};

/// The number of requests that wait for room, and the number that wait for a replica.
fn waiting(dispatcher: &Dispatcher) -> (usize, usize) {
    (dispatcher.queued(), dispatcher.requests_without_replica())
}

/// A router with `replicas` replicas that have not reported yet.
fn app(replicas: u16, arguments: &[&str]) -> (App, Vec<Arc<Replica>>) {
    let args = Args::try_parse_from(["router"].iter().chain(arguments)).unwrap();
    let app = App::new(args, None);
    let found: Vec<DiscoveredReplica> = (1..=replicas)
        .map(|port| DiscoveredReplica {
            http: ([127, 0, 0, 1], port).into(),
            grpc: None,
            name: format!("r{port}"),
            pod: None,
        })
        .collect();
    let new = app.dispatcher().replicas.update(&found).added;
    for replica in &new {
        app.dispatcher().health().add(replica.identity);
    }
    (app, new)
}

/// A report of a replica that runs `running` sequences and can run at most `sequences_max`.
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

/// A router with one replica that has sent this report. Returns the router, the replica and the model that it serves.
fn reporting_app(load: Load, arguments: &[&str]) -> (App, Arc<Replica>, Arc<ServedModel>) {
    let (app, mut replicas) = app(1, arguments);
    let (replica, known) = (replicas.remove(0), &app.dispatcher().replicas);
    known.observe(&replica, load, Instant::now());
    let served_model = known.served_model("m").unwrap();
    (app, replica, served_model)
}

fn request() -> PlacementRequest {
    let demand = Demand { prompt_tokens: 10, output_tokens: 10, sequences: 1, ..Demand::default() };
    PlacementRequest { demand, ..PlacementRequest::default() }
}

fn of_tenant(tenant: u64, request: PlacementRequest) -> PlacementRequest {
    PlacementRequest { demand: Demand { tenant, ..request.demand }, ..request }
}

fn queued() -> QueuedRequest {
    QueuedRequest {
        tenant: NO_TENANT,
        class: PriorityClass::Standard,
        tokens: 10,
        arrived: Instant::now(),
        deadline: None,
    }
}

#[tokio::test]
async fn requests_wait_in_order_while_all_replicas_are_full() {
    let (app, replica, served_model) = reporting_app(report(1, 0, 1), &[]);
    let dispatcher = app.dispatcher();
    let first = dispatcher.place(&served_model, request(), queued()).await.unwrap();
    let mut second = std::pin::pin!(dispatcher.place(&served_model, request(), queued()));
    let mut third = std::pin::pin!(dispatcher.place(&served_model, request(), queued()));
    assert!(futures_util::poll!(second.as_mut()).is_pending());
    assert!(futures_util::poll!(third.as_mut()).is_pending());
    assert_eq!(waiting(dispatcher), (2, 0));
    drop(first);
    assert!(futures_util::poll!(third.as_mut()).is_pending(), "the second request is served first");
    let placement = second.await.unwrap();
    drop(placement);
    drop(third.await.unwrap());
    assert_eq!(
        (waiting(dispatcher), replica.ledger.snapshot(Instant::now(), Duration::MAX).booked.in_flight),
        ((0, 0), 0)
    );
}

#[tokio::test]
async fn a_replica_booked_for_a_request_that_left_goes_to_the_next_request() {
    let (app, _, served_model) = reporting_app(report(1, 0, 1), &[]);
    let dispatcher = app.dispatcher();
    let first = dispatcher.place(&served_model, request(), queued()).await.unwrap();
    let mut second = Box::pin(dispatcher.place(&served_model, request(), queued()));
    let mut third = std::pin::pin!(dispatcher.place(&served_model, request(), queued()));
    assert!(futures_util::poll!(second.as_mut()).is_pending());
    assert!(futures_util::poll!(third.as_mut()).is_pending());
    // The replica is booked for the second request, which is canceled before its task is polled again.
    drop(first);
    drop(second);
    drop(third.await.unwrap());
    assert_eq!(waiting(dispatcher), (0, 0));
}

#[tokio::test]
async fn a_request_that_failed_everywhere_does_not_block_the_others() {
    let (app, replicas) = app(2, &[]);
    let dispatcher = app.dispatcher();
    for replica in &replicas {
        dispatcher.replicas.observe(replica, report(1, 1, 1), Instant::now());
    }
    let served_model = dispatcher.replicas.served_model("m").unwrap();
    let after_failure = PlacementRequest { failed_replicas: vec![replicas[0].identity], ..request() };
    let mut first = std::pin::pin!(dispatcher.place(&served_model, after_failure, queued()));
    let mut second = std::pin::pin!(dispatcher.place(&served_model, request(), queued()));
    assert!(futures_util::poll!(first.as_mut()).is_pending());
    assert!(futures_util::poll!(second.as_mut()).is_pending());
    // The replica that was reserved for the first request is removed, and the other replica has room for both requests.
    dispatcher.replicas.observe(&replicas[0], report(2, 0, 2), Instant::now());
    dispatcher.replicas.update(&[replicas[0].discovered.clone()]);
    dispatcher.place_all_waiting();
    let (first, second) = (first.await.unwrap(), second.await.unwrap());
    assert_eq!(
        (first.replica.identity, second.replica.identity),
        (replicas[0].identity, replicas[0].identity)
    );
}

#[tokio::test(start_paused = true)]
async fn a_request_that_waits_too_long_gets_a_retry_after() {
    let (app, _, served_model) = reporting_app(
        report(1, 1, 1),
        &["--queue-timeout=2s", "--queue-requests=1", "--replica-wait-timeout=3s"],
    );
    let dispatcher = app.dispatcher();
    let mut first = std::pin::pin!(dispatcher.place(&served_model, request(), queued()));
    assert!(futures_util::poll!(first.as_mut()).is_pending());
    let full = dispatcher.place(&served_model, request(), queued()).await.unwrap_err();
    assert!(matches!(full, PlacementError::QueueFull { .. }));
    let expired = first.await.unwrap_err();
    assert!(
        matches!(expired, PlacementError::QueueTimeout { retry_after } if retry_after >= RETRY_AFTER_MIN)
    );
    dispatcher.replicas.update(&[]);
    assert_eq!(
        dispatcher.place(&served_model, request(), queued()).await.unwrap_err(),
        PlacementError::NoReplica
    );
    assert_eq!(waiting(dispatcher), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_request_waits_no_longer_than_its_client() {
    let (app, _, served_model) = reporting_app(report(1, 1, 1), &["--queue-timeout=1h"]);
    let queued = QueuedRequest { deadline: Some(Instant::now() + Duration::from_secs(2)), ..queued() };
    let started = tokio::time::Instant::now();
    let expired = app.dispatcher().place(&served_model, request(), queued).await.unwrap_err();
    assert!(matches!(expired, PlacementError::QueueTimeout { .. }));
    assert!(started.elapsed() < Duration::from_secs(60), "the time is virtual");
    assert_eq!(waiting(app.dispatcher()), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_request_without_a_replica_says_whose_timeout_has_expired() {
    let draining = Load { state: State::Draining.into(), ..report(1, 0, 1) };
    let (app, _, served_model) = reporting_app(draining, &["--replica-wait-timeout=5s"]);
    let place = |timeout: Option<u64>| {
        let deadline = timeout.map(|seconds| Instant::now() + Duration::from_secs(seconds));
        app.dispatcher().place(&served_model, request(), QueuedRequest { deadline, ..queued() })
    };
    let expired = place(Some(2)).await.unwrap_err();
    assert_eq!(expired, PlacementError::ClientTimeout(WaitTarget::Model));
    assert_eq!(
        Error::from(expired).to_string(),
        "no replica of the model became available within the time in the x-ovfleet-timeout header"
    );
    let expired = PlacementError::ClientTimeout(WaitTarget::StoredObject);
    assert_eq!(
        Error::from(expired).to_string(),
        "no replica with the stored object became available within the time in the x-ovfleet-timeout header"
    );
    for timeout in [None, Some(3600)] {
        let expired = place(timeout).await.unwrap_err();
        assert_eq!(expired, PlacementError::NoReplica);
        assert_eq!(Error::from(expired).to_string(), "no replica that can answer the request is available");
    }
    assert_eq!(waiting(app.dispatcher()), (0, 0));
}

#[test]
fn a_reload_of_the_configuration_does_not_refill_the_retry_budget() {
    let (app, _) = app(1, &[]);
    let dispatcher = app.dispatcher();
    assert_eq!((0..1000).filter(|_| dispatcher.withdraw_retry()).count(), SAVED_RETRIES_MAX as usize);
    let settings = Args::clone(&app.settings());
    app.set_settings(settings);
    assert!(!dispatcher.withdraw_retry());
}

/// A report of a replica that can run many sequences, but whose cache is nearly full.
fn nearly_full(number: u64) -> Load {
    Load { blocks_active: 900, ..report(number, 1, 100) }
}

/// A request that needs a fifth of a replica's cache.
fn large() -> PlacementRequest {
    let demand = Demand { prompt_tokens: 3200, ..request().demand };
    PlacementRequest { demand, ..request() }
}

#[tokio::test]
async fn a_request_that_fits_nowhere_does_not_block_the_requests_behind_it() {
    let (app, replica, served_model) = reporting_app(nearly_full(1), &[]);
    let dispatcher = app.dispatcher();
    let mut first = std::pin::pin!(dispatcher.place(&served_model, large(), queued()));
    assert!(futures_util::poll!(first.as_mut()).is_pending());
    let mut second = std::pin::pin!(dispatcher.place(&served_model, request(), queued()));
    let std::task::Poll::Ready(second) = futures_util::poll!(second.as_mut()) else { panic!("still waits") };
    drop(second.unwrap());
    dispatcher.replicas.observe(&replica, report(2, 0, 100), Instant::now());
    dispatcher.place_waiting_at(&replica);
    drop(first.await.unwrap());
}

#[tokio::test]
async fn a_request_that_the_replica_will_reject_takes_no_room_from_others() {
    let (app, _, served_model) = reporting_app(report(1, 0, 16), &[]);
    let dispatcher = app.dispatcher();
    let demand = Demand { sequences: u32::MAX, ..request().demand };
    let _rejected =
        dispatcher.place(&served_model, PlacementRequest { demand, ..request() }, queued()).await.unwrap();
    let mut other = std::pin::pin!(dispatcher.place(&served_model, request(), queued()));
    assert!(futures_util::poll!(other.as_mut()).is_ready());
}

#[tokio::test]
async fn the_first_prompts_of_a_replica_are_expected_in_its_cache_before_its_next_report() {
    let (app, replica, served_model) = reporting_app(report(1, 0, 16), &[]);
    let dispatcher = app.dispatcher();
    let prefix_hashes = Arc::new(PrefixHashes::of_text(&[b'x'; 256], 64, 7));
    let cached_blocks = || replica.prefixes.lock().unwrap().cached_blocks(&prefix_hashes);
    let demand = Demand { prompt_tokens: 64, ..request().demand };
    let request = PlacementRequest { demand, prefix_hashes: Arc::clone(&prefix_hashes), ..request() };
    let placement = dispatcher.place(&served_model, request, queued()).await.unwrap();
    assert_eq!(cached_blocks(), 4);
    // The replica has not received the request yet.
    dispatcher.replicas.observe(&replica, report(2, 0, 16), Instant::now());
    assert_eq!(cached_blocks(), 4);
    // The request has ended, and the replica has evicted a part of its prompt.
    placement.record_first_token();
    drop(placement);
    dispatcher.replicas.observe(&replica, Load { blocks_evictable: 3, ..report(3, 0, 16) }, Instant::now());
    assert_eq!(cached_blocks(), 3);
}

#[tokio::test(start_paused = true)]
async fn a_replica_that_never_reports_does_not_hide_that_a_model_is_unknown() {
    let (app, replicas) = app(2, &[]);
    let dispatcher = app.dispatcher();
    assert!(dispatcher.await_model(Some("x"), queued()).await.is_err(), "no replica has reported");
    dispatcher.replicas.observe(&replicas[0], report(1, 0, 16), Instant::now());
    assert!(dispatcher.await_model(Some("x"), queued()).await.unwrap().is_none());
}

#[tokio::test(start_paused = true)]
async fn a_request_waits_for_an_unknown_model_or_store_no_longer_than_its_client() {
    let (app, replicas) = app(2, &["--replica-wait-timeout=1h"]);
    let dispatcher = app.dispatcher();
    dispatcher.replicas.observe(&replicas[0], report(1, 0, 16), Instant::now());
    let queued = QueuedRequest { deadline: Some(Instant::now() + Duration::from_secs(2)), ..queued() };
    let started = tokio::time::Instant::now();
    // The other replica may serve the model.
    let expired = dispatcher.await_model(Some("x"), queued).await.unwrap_err();
    assert_eq!(expired, PlacementError::ClientTimeout(WaitTarget::Model));
    let expired = dispatcher.await_store(7, queued).await.unwrap_err();
    assert_eq!(expired, PlacementError::ClientTimeout(WaitTarget::StoredObject));
    assert!(started.elapsed() < Duration::from_secs(60), "the time is virtual");
    assert_eq!(waiting(dispatcher), (0, 0));
}

#[tokio::test]
async fn a_replica_is_reserved_for_a_request_that_was_overtaken_for_too_long() {
    let (app, replicas) = app(2, &[]);
    let dispatcher = app.dispatcher();
    for replica in &replicas {
        dispatcher.replicas.observe(replica, nearly_full(1), Instant::now());
    }
    let served_model = dispatcher.replicas.served_model("m").unwrap();
    let mut first = Box::pin(dispatcher.place(&served_model, large(), queued()));
    assert!(futures_util::poll!(first.as_mut()).is_pending());
    let reserved = || replicas.iter().filter(|replica| replica.is_reserved_against(0)).count();
    assert!(!dispatcher.place_next_waiting(&served_model, None, Instant::now()));
    assert_eq!(reserved(), 0, "the request has not waited for long enough");
    assert!(!dispatcher.place_next_waiting(&served_model, None, Instant::now() + RESERVE_AFTER));
    assert_eq!(reserved(), 1);
    let drains = usize::from(replicas[1].is_reserved_against(0));
    let mut placements = Vec::new();
    for _ in 0..5 {
        placements.push(dispatcher.place(&served_model, request(), queued()).await.unwrap());
    }
    assert!(placements.iter().all(|placement| !Arc::ptr_eq(&placement.replica, &replicas[drains])));
    // The sequences that ran on the replica have ended.
    dispatcher.replicas.observe(&replicas[drains], report(2, 0, 100), Instant::now());
    dispatcher.place_waiting_at(&replicas[drains]);
    assert!(Arc::ptr_eq(&first.await.unwrap().replica, &replicas[drains]));
    assert_eq!(reserved(), 0);

    // A reservation ends when its request leaves the queue.
    dispatcher.replicas.observe(&replicas[drains], nearly_full(3), Instant::now());
    let mut gone = Box::pin(dispatcher.place(&served_model, large(), queued()));
    assert!(futures_util::poll!(gone.as_mut()).is_pending());
    dispatcher.place_next_waiting(&served_model, None, Instant::now() + RESERVE_AFTER);
    assert_eq!(reserved(), 1);
    drop(gone);
    assert_eq!((reserved(), waiting(dispatcher)), (0, (0, 0)));
}

#[tokio::test]
async fn a_reservation_excludes_other_tenants_only_after_a_long_time() {
    let (app, replica, served_model) = reporting_app(nearly_full(1), &[]);
    let dispatcher = app.dispatcher();
    let mut first = Box::pin(dispatcher.place(&served_model, of_tenant(1, large()), queued()));
    assert!(futures_util::poll!(first.as_mut()).is_pending());
    dispatcher.place_next_waiting(&served_model, None, Instant::now() + RESERVE_AFTER);
    let place = |tenant| dispatcher.place(&served_model, of_tenant(tenant, request()), queued());
    let mut same = Box::pin(place(1));
    assert!(futures_util::poll!(same.as_mut()).is_pending());
    drop(place(2).await.unwrap());
    let later = Instant::now() + RESERVE_AGAINST_ALL_AFTER;
    dispatcher.replicas.observe(&replica, nearly_full(2), later);
    dispatcher.place_next_waiting(&served_model, None, later);
    let mut other = Box::pin(place(2));
    assert!(futures_util::poll!(other.as_mut()).is_pending());
    assert!(futures_util::poll!(first.as_mut()).is_pending());
}

#[tokio::test]
async fn a_tenant_that_uses_little_of_a_replica_overtakes_the_backlog_of_another() {
    let (app, _, served_model) = reporting_app(report(1, 16, 16), &[]);
    let dispatcher = app.dispatcher();
    let place = |tenant| {
        let queued = QueuedRequest { tenant, ..queued() };
        Box::pin(dispatcher.place(&served_model, of_tenant(tenant, request()), queued))
    };
    // The replica is full of requests that this router did not send. Each tenant may nevertheless use an eighth of the
    // 16 sequences, so the first two requests of each tenant are placed.
    let mut backlog: Vec<_> = (0..2 * BACKFILL_MAX).map(|_| place(1)).collect();
    let mut placed = Vec::new();
    for request in &mut backlog {
        if let std::task::Poll::Ready(placement) = futures_util::poll!(request.as_mut()) {
            placed.push(placement.unwrap());
        }
    }
    assert_eq!((placed.len(), waiting(dispatcher)), (2, (2 * BACKFILL_MAX - 2, 0)));
    let own = [place(2).await.unwrap(), place(2).await.unwrap()];
    let mut third = place(2);
    assert!(
        futures_util::poll!(third.as_mut()).is_pending(),
        "it exceeds the part that is reserved for its tenant"
    );
    let mut without_tenant = place(NO_TENANT);
    assert!(futures_util::poll!(without_tenant.as_mut()).is_pending());
    drop(own);
    drop(third.await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn a_request_that_waited_for_a_replica_is_served_before_newcomers() {
    let (app, replicas) = app(1, &["--replica-wait-timeout=10s", "--queue-timeout=30s"]);
    let dispatcher = app.dispatcher();
    let draining = Load { state: State::Draining.into(), ..report(1, 0, 1) };
    dispatcher.replicas.observe(&replicas[0], draining, Instant::now());
    let served_model = dispatcher.replicas.served_model("m").unwrap();
    let mut first = std::pin::pin!(dispatcher.place(&served_model, request(), queued()));
    assert!(futures_util::poll!(first.as_mut()).is_pending());
    assert_eq!(waiting(dispatcher), (0, 1));
    // The replica accepts requests again, but is full.
    dispatcher.replicas.observe(&replicas[0], report(2, 1, 1), Instant::now());
    dispatcher.place_waiting_at(&replicas[0]);
    let mut newcomer = std::pin::pin!(dispatcher.place(&served_model, request(), queued()));
    assert!(futures_util::poll!(newcomer.as_mut()).is_pending());
    // `--replica-wait-timeout` has passed, but a replica has appeared.
    tokio::time::advance(Duration::from_secs(11)).await;
    assert!(futures_util::poll!(first.as_mut()).is_pending());
    assert_eq!(waiting(dispatcher), (2, 0));
    dispatcher.replicas.observe(&replicas[0], report(3, 0, 1), Instant::now());
    dispatcher.place_waiting_at(&replicas[0]);
    assert!(futures_util::poll!(newcomer.as_mut()).is_pending(), "the other request has waited for longer");
    drop(first.await.unwrap());
    drop(newcomer.await.unwrap());
    assert_eq!(waiting(dispatcher), (0, 0));
}

#[tokio::test]
async fn the_limits_of_the_queue_do_not_apply_to_requests_that_wait_for_a_replica() {
    let (app, replica, served_model) = reporting_app(
        Load { state: State::Draining.into(), ..report(1, 0, 1) },
        &["--queue-requests=1", "--queue-tokens=10", "--replica-wait-requests=3"],
    );
    let dispatcher = app.dispatcher();
    let place = || {
        let queued = QueuedRequest { tenant: 1, ..queued() };
        Box::pin(dispatcher.place(&served_model, of_tenant(1, request()), queued))
    };
    let mut requests = [place(), place(), place()];
    for request in &mut requests {
        assert!(futures_util::poll!(request.as_mut()).is_pending());
    }
    assert_eq!(place().await.unwrap_err(), PlacementError::NoReplica, "too many requests wait for a replica");
    // The replica accepts requests again, but has no room for all of them.
    dispatcher.replicas.observe(&replica, report(2, 0, 1), Instant::now());
    dispatcher.place_waiting_at(&replica);
    for request in requests {
        drop(request.await.unwrap());
    }
    assert_eq!(waiting(dispatcher), (0, 0));
}

#[tokio::test]
async fn the_work_of_a_report_does_not_grow_with_the_number_of_replicas() {
    let (app, replicas) = app(60, &[]);
    let dispatcher = app.dispatcher();
    for replica in &replicas {
        dispatcher.replicas.observe(replica, report(1, 1, 1), Instant::now());
    }
    let served_model = dispatcher.replicas.served_model("m").unwrap();
    let mut requests: Vec<_> =
        (0..100).map(|_| Box::pin(dispatcher.place(&served_model, request(), queued()))).collect();
    for place in &mut requests {
        assert!(futures_util::poll!(place.as_mut()).is_pending());
    }
    EXAMINED.set(0);
    dispatcher.place_waiting_at(&replicas[0]);
    let examined = EXAMINED.get();
    assert!((1..=BACKFILL_MAX).contains(&examined), "{examined}");
    // The dispatcher queues a new request behind the others without examining any replica.
    EXAMINED.set(0);
    let mut last = Box::pin(dispatcher.place(&served_model, request(), queued()));
    assert!(futures_util::poll!(last.as_mut()).is_pending());
    assert_eq!(EXAMINED.get(), 0);
}

#[tokio::test]
async fn a_timeout_ejects_only_a_replica_that_makes_no_progress() {
    let (app, replicas) = app(2, &["--policy=round-robin"]);
    let dispatcher = app.dispatcher();
    let report_progress = |number, uncomputed_tokens, at| {
        for replica in &replicas {
            let load = Load { uncomputed_tokens, ..report(number, 0, 100) };
            dispatcher.replicas.observe(replica, load, at);
        }
    };
    report_progress(1, 100_000, Instant::now());
    let served_model = dispatcher.replicas.served_model("m").unwrap();
    let state = |replica: &Arc<Replica>| dispatcher.health().state(replica.identity, Instant::now());
    let timed_out = || async {
        let mut placement = dispatcher.place(&served_model, request(), queued()).await.unwrap();
        placement.set_outcome(Outcome::TimedOut);
        placement
    };
    for number in 2..12 {
        let placement = timed_out().await;
        // A long prompt is being computed.
        report_progress(number, 100_000 - number, Instant::now() + Duration::from_secs(number));
        drop(placement);
    }
    assert!(replicas.iter().all(|replica| state(replica) == HealthState::Trusted));
    let (app, replicas) = app2(&["--policy=round-robin"]);
    let dispatcher = app.dispatcher();
    let served_model = dispatcher.replicas.served_model("m").unwrap();
    for _ in 0..10 {
        let mut placement = dispatcher.place(&served_model, request(), queued()).await.unwrap();
        placement.set_outcome(Outcome::TimedOut);
    }
    let ejected = |replica: &&Arc<Replica>| {
        dispatcher.health().state(replica.identity, Instant::now()) == HealthState::Ejected
    };
    assert_eq!(replicas.iter().filter(ejected).count(), 1, "at most one of two replicas is ejected");
}

/// A router with two replicas, each of which has sent one report.
fn app2(arguments: &[&str]) -> (App, Vec<Arc<Replica>>) {
    let (app, replicas) = app(2, arguments);
    for replica in &replicas {
        app.dispatcher().replicas.observe(replica, report(1, 0, 100), Instant::now());
    }
    (app, replicas)
}

#[tokio::test]
async fn ejected_replicas_are_used_after_the_healthy_ones_were_removed() {
    let (app, replicas) = app2(&["--replica-wait-timeout=0s"]);
    let dispatcher = app.dispatcher();
    let served_model = dispatcher.replicas.served_model("m").unwrap();
    let identities: Vec<u64> = replicas.iter().map(|replica| replica.identity).collect();
    for _ in 0..3 {
        let sent = dispatcher.health().sent(identities[0], Instant::now());
        dispatcher.health().failed(identities[0], sent, identities.iter().copied(), Instant::now());
    }
    let placement = dispatcher.place(&served_model, request(), queued()).await.unwrap();
    assert!(Arc::ptr_eq(&placement.replica, &replicas[1]));
    drop(placement);
    dispatcher.replicas.update(&[replicas[0].discovered.clone()]);
    assert!(dispatcher.is_available(&served_model));
    let placement = dispatcher.place(&served_model, request(), queued()).await.unwrap();
    assert!(Arc::ptr_eq(&placement.replica, &replicas[0]));
}

#[tokio::test]
async fn every_booking_ends_whatever_replicas_report() {
    let seed = 5;
    println!("seed {seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    for policy in ["kv", "session", "power-of-two", "round-robin", "least-requests"] {
        let (app, replicas) =
            app(5, &["--queue-timeout=0s", "--replica-wait-timeout=0s", "--policy", policy]);
        let dispatcher = app.dispatcher();
        let mut placements: VecDeque<Placement> = VecDeque::new();
        for _ in 0..3000 {
            let replica = &replicas[rng.random_range(0..replicas.len())];
            dispatcher.replicas.observe(
                replica,
                arbitrary_load(&mut rng, dispatcher.replicas.router()),
                Instant::now(),
            );
            if let Some(served_model) = dispatcher.replicas.served_model("m") {
                let request =
                    PlacementRequest { demand: arbitrary_demand(&mut rng), ..PlacementRequest::default() };
                if let Ok(placement) = dispatcher.place(&served_model, request, queued()).await {
                    placements.push_back(placement);
                }
            }
            let ends = placements.len() > 40 || rng.random_bool(0.3);
            if let Some(mut placement) = ends.then(|| placements.pop_front()).flatten() {
                placement.record_first_token();
                placement.set_outcome(
                    [Outcome::Answered, Outcome::Failed, Outcome::Unknown][rng.random_range(0..3)],
                );
            }
        }
        placements.clear();
        assert_eq!(waiting(dispatcher), (0, 0));
        for replica in &replicas {
            let booked = replica.ledger.snapshot(Instant::now(), Duration::MAX).booked;
            assert_eq!(booked, crate::ledger::BookedLoad::default());
        }
        app.scrape();
    }
}

/// Returns an arbitrary number, often an extreme one.
fn arbitrary(rng: &mut StdRng) -> u32 {
    [0, 1, rng.random_range(0..100), rng.random(), u32::MAX][rng.random_range(0..5)]
}

fn arbitrary_load(rng: &mut StdRng, router: u64) -> Load {
    let speeds = [0.0, -1.0, 1e-30, 500.0, f32::INFINITY, f32::NAN];
    let mut speed = || speeds[rng.random_range(0..speeds.len())];
    let (prefill_tokens_per_second, decode_tokens_per_second) = (speed(), speed());
    let ranges = (0..rng.random_range(0..4))
        .map(|_| DispatchRange {
            first: u64::from(arbitrary(rng)),
            last: [u64::MAX, u64::from(arbitrary(rng))][rng.random_range(0..2)],
        })
        .collect();
    Load {
        epoch: rng.random_range(0..3),
        report: rng.random(),
        state: rng.random_range(-1..6),
        models: ["m", "m", "m", ""][..rng.random_range(0..5)].iter().map(|&name| name.to_owned()).collect(),
        blocks_total: arbitrary(rng),
        blocks_active: arbitrary(rng),
        blocks_evictable: arbitrary(rng),
        blocks_free: arbitrary(rng),
        block_tokens: arbitrary(rng),
        running: arbitrary(rng),
        waiting: arbitrary(rng),
        uncomputed_tokens: [0, u64::MAX, u64::from(arbitrary(rng))][rng.random_range(0..3)],
        sequences_max: arbitrary(rng),
        requests_max: arbitrary(rng),
        prefill_tokens_per_second,
        decode_tokens_per_second,
        preemptions_total: rng.random(),
        dispatches: rng
            .random_bool(0.7)
            .then_some(Dispatches { router: [router, 1][rng.random_range(0..2)], ranges }),
        unencoded_image_tokens: [0, u64::MAX, u64::from(arbitrary(rng))][rng.random_range(0..3)],
        image_tokens_per_second: [0.0, f32::NAN, -1.0, 5e3][rng.random_range(0..4)],
        store_id: rng.random(),
        sleeping: rng.random(),
    }
}

fn arbitrary_demand(rng: &mut StdRng) -> Demand {
    Demand {
        prompt_tokens: arbitrary(rng),
        image_tokens: arbitrary(rng),
        images_start: arbitrary(rng),
        images_end: arbitrary(rng),
        output_tokens: arbitrary(rng),
        output_tokens_max: rng.random_bool(0.5).then_some(arbitrary(rng)),
        sequences: arbitrary(rng),
        session: rng.random_bool(0.5).then_some(rng.random()),
        tenant: rng.random_range(0..3),
    }
}

#[tokio::test]
async fn an_ejected_replica_is_trusted_again_when_answers_to_requests_have_begun() {
    let (app, replicas) = app(3, &[]);
    let (identities, replica) = (replicas.iter().map(|replica| replica.identity), replicas[0].identity);
    let is_trusted = || app.scrape().contains("ovfleet_router_replica_ejected{replica=\"r1\"} 0");
    assert!(is_trusted());
    let past = Instant::now().checked_sub(Duration::from_secs(10)).expect("the clock began earlier");
    for _ in 0..HealthConfig::default().consecutive_failures {
        let mut health = app.dispatcher().health();
        let sent = health.sent(replica, past);
        health.failed(replica, sent, identities.clone(), past);
    }
    assert_eq!(app.dispatcher().health().state(replica, Instant::now()), HealthState::Probing);
    assert!(!is_trusted());
    let dispatcher = app.dispatcher();
    dispatcher.replicas.observe(&replicas[0], report(1, 0, 100), Instant::now());
    let served_model = dispatcher.replicas.served_model("m").unwrap();
    let mut streams = Vec::new();
    for _ in 0..HealthConfig::default().probes {
        streams.push(dispatcher.place(&served_model, request(), queued()).await.unwrap());
    }
    assert!(!is_trusted());
    streams.iter_mut().for_each(Placement::record_answer_began);
    assert!(is_trusted(), "none of the answers has ended");
}
