//! Concurrency tests of the ledger, which loom runs with every interleaving of threads. This module compiles the source
//! of the ledger a second time, with loom's lock.

use std::sync::Arc;
use std::time::{Duration, Instant};

use proto::v1alpha1::{DispatchRange, Dispatches, Load};

use self::ledger::{BookedLoad, BookingGuard, Cost, Ledger};

#[path = "../../src/ledger.rs"]
#[expect(dead_code, unreachable_pub, reason = "the ledger's public items are private here, and few are used")]
mod ledger;

const ROUTER: u64 = 3;
const TTL: Duration = Duration::from_secs(3);
const COST: Cost = Cost { uncached_tokens: 100, image_tokens: 60, blocks: 10, sequences: 1, tenant: 0 };

fn report(number: u64, last: u64) -> Load {
    let ranges = vec![DispatchRange { first: 1, last }];
    let dispatches = Some(Dispatches { router: ROUTER, ranges });
    Load { epoch: 1, report: number, dispatches, ..Load::default() }
}

/// Books the replica with fewer requests in flight. Examines both again if the picked one has changed since.
fn pick(ledgers: &[Arc<Ledger>; 2], now: Instant) -> BookingGuard {
    loop {
        let snapshots = ledgers.each_ref().map(|ledger| ledger.snapshot(now, TTL));
        let emptier = usize::from(snapshots[1].booked.in_flight < snapshots[0].booked.in_flight);
        if let Some(booking) = ledgers[emptier].book_if(snapshots[emptier].version, COST, now) {
            return booking;
        }
    }
}

#[test]
fn two_concurrent_picks_book_different_replicas() {
    let now = Instant::now();
    loom::model(move || {
        let ledgers = [Ledger::new(ROUTER), Ledger::new(ROUTER)];
        let theirs = ledgers.clone();
        let other = loom::thread::spawn(move || pick(&theirs, now));
        let mine = pick(&ledgers, now);
        let other = other.join().unwrap();
        let in_flight = || ledgers.each_ref().map(|ledger| ledger.snapshot(now, TTL).booked.in_flight);
        assert_eq!(in_flight(), [1, 1]);
        drop((mine, other));
        assert_eq!(in_flight(), [0, 0]);
    });
}

#[test]
fn bookings_reports_and_ends_leave_nothing_behind_in_any_order() {
    let now = Instant::now();
    loom::model(move || {
        let ledger = Ledger::new(ROUTER);
        let first = ledger.book(COST, now);
        let (at_booking, at_report) = (Arc::clone(&ledger), Arc::clone(&ledger));
        let booker = loom::thread::spawn(move || {
            let second = at_booking.book(COST, now);
            second.record_first_token();
            second
        });
        let reporter = loom::thread::spawn(move || at_report.observe(&report(1, 1), now));
        first.record_first_token();
        drop(first);
        reporter.join().unwrap();
        let second = booker.join().unwrap();
        let booked = ledger.snapshot(now, TTL).booked;
        // The report lists only the first dispatch, so the second remains unreported, whenever the report arrives.
        assert_eq!((booked.in_flight, booked.unreported, booked.blocks_unreported), (1, 1, 10));
        assert_eq!((booked.uncached_unreported, booked.uncached_in_flight), (0, 0));
        assert_eq!(booked.image_tokens_unreported, 0);
        drop(second);
        assert_eq!(ledger.snapshot(now, TTL).booked, BookedLoad::default());
    });
}

#[test]
fn a_snapshot_never_contains_a_report_without_its_dispatches() {
    let now = Instant::now();
    loom::model(move || {
        let ledger = Ledger::new(ROUTER);
        let booking = ledger.book(COST, now);
        let theirs = Arc::clone(&ledger);
        let reporter = loom::thread::spawn(move || {
            let load = Load { uncomputed_tokens: 100, ..report(1, 1) };
            theirs.observe(&load, now);
        });
        let snapshot = ledger.snapshot(now, TTL);
        let reported = snapshot.reported.map_or(0, |reported| reported.uncomputed_tokens);
        // The dispatch is counted exactly once.
        assert_eq!(reported + snapshot.booked.uncached_unreported, 100);
        reporter.join().unwrap();
        drop(booking);
    });
}
