//! Tests individual rules of the ledger.

use std::time::{Duration, Instant};

use proto::v1alpha1::{DispatchRange, Dispatches, Load, State};
use router::ledger::{BookedLoad, Cost, Ledger, ReportOutcome, UNREPORTED_MAX};

const ROUTER: u64 = 0xab;
const TTL: Duration = Duration::from_secs(3);
const COST: Cost = Cost { uncached_tokens: 100, image_tokens: 60, blocks: 10, sequences: 1, tenant: 0 };

fn load(epoch: u64, report: u64, ranges: &[(u64, u64)]) -> Load {
    let ranges = ranges.iter().map(|&(first, last)| DispatchRange { first, last }).collect();
    let dispatches = Some(Dispatches { router: ROUTER, ranges });
    Load { epoch, report, state: State::Serving.into(), dispatches, ..Load::default() }
}

#[test]
fn a_report_that_includes_a_later_dispatch_does_not_include_the_earlier_one() {
    let (now, ledger) = (Instant::now(), Ledger::new(ROUTER));
    let _slow = ledger.book(COST, now);
    let _quick = ledger.book(COST, now);
    ledger.observe(&load(1, 1, &[(2, 2)]), now);
    let booked = ledger.snapshot(now, TTL).booked;
    assert_eq!((booked.in_flight, booked.unreported, booked.uncached_unreported), (2, 1, 100));
    assert_eq!(booked.image_tokens_unreported, 60);
}

#[test]
fn dispatches_of_another_router_are_ignored() {
    let (now, ledger) = (Instant::now(), Ledger::new(ROUTER));
    let _booking = ledger.book(COST, now);
    let mut report = load(1, 1, &[(1, 9)]);
    report.dispatches.as_mut().unwrap().router = 1;
    ledger.observe(&report, now);
    assert_eq!(ledger.snapshot(now, TTL).booked.unreported, 1);
}

#[test]
fn without_dispatch_numbers_a_report_includes_a_request_after_a_delay() {
    let (now, ledger) = (Instant::now(), Ledger::new(ROUTER));
    let _booking = ledger.book(COST, now);
    let without_dispatches = |report| Load { dispatches: None, ..load(1, report, &[]) };
    ledger.observe(&without_dispatches(1), now + Duration::from_millis(20));
    assert_eq!(ledger.snapshot(now, TTL).booked.unreported, 1);
    ledger.observe(&without_dispatches(2), now + Duration::from_millis(120));
    assert_eq!(ledger.snapshot(now, TTL).booked.unreported, 0);
    assert_eq!(ledger.snapshot(now, TTL).booked.in_flight, 1);
}

#[test]
fn an_outdated_report_is_ignored_and_a_stale_report_is_hidden() {
    let (now, ledger) = (Instant::now(), Ledger::new(ROUTER));
    let newer = Load { running: 7, ..load(1, 5, &[]) };
    assert_eq!(ledger.observe(&newer, now), ReportOutcome::Accepted);
    assert_eq!(ledger.observe(&load(1, 4, &[]), now), ReportOutcome::Outdated);
    assert_eq!(ledger.observe(&load(1, 5, &[]), now), ReportOutcome::Outdated);
    let snapshot = ledger.snapshot(now + TTL, TTL);
    assert_eq!((snapshot.reported.unwrap().running, snapshot.state), (7, Some(State::Serving)));
    let later = now + TTL + Duration::from_millis(1);
    let snapshot = ledger.snapshot(later, TTL);
    assert_eq!((snapshot.reported, snapshot.state, snapshot.report_age), (None, None, Some(later - now)));
}

#[test]
fn a_prompt_with_a_first_token_is_no_longer_ahead() {
    let (now, ledger) = (Instant::now(), Ledger::new(ROUTER));
    let [first, second, later] = [(); 3].map(|()| ledger.book(COST, now));
    // The reported number of uncomputed tokens is slightly below the estimate for the two requests in the report.
    let report = Load { uncomputed_tokens: 190, ..load(1, 1, &[(1, 2)]) };
    ledger.observe(&report, now);
    let ahead = || {
        let snapshot = ledger.snapshot(now, TTL);
        (snapshot.reported.unwrap().uncomputed_tokens, snapshot.booked.uncached_unreported)
    };
    assert_eq!(ahead(), (190, 100));
    later.record_first_token();
    assert_eq!(ahead(), (190, 0), "no report includes it");
    first.record_first_token();
    assert_eq!(ahead(), (100, 0), "at most the tokens of the second request");
    drop(second);
    assert_eq!(ahead(), (0, 0));
    let others = Load { uncomputed_tokens: 40, ..load(1, 2, &[(1, 3)]) };
    ledger.observe(&others, now);
    drop((first, later));
    assert_eq!(ahead(), (40, 0), "only reports include the prompts of other routers");
}

#[test]
fn the_speed_of_the_image_encoder_has_an_age_of_its_own() {
    let (now, ledger) = (Instant::now(), Ledger::new(ROUTER));
    let second = Duration::from_secs(1);
    let speeds = |report, prefill_tokens_per_second, image_tokens_per_second| Load {
        prefill_tokens_per_second,
        image_tokens_per_second,
        ..load(1, report, &[])
    };
    let ages = |at: Instant| {
        let snapshot = ledger.snapshot(at, TTL);
        (snapshot.speed_age, snapshot.image_speed_age)
    };
    assert_eq!(ages(now), (None, None));
    ledger.observe(&speeds(1, 500.0, 0.0), now);
    ledger.observe(&speeds(2, 600.0, 0.0), now + second);
    assert_eq!(ages(now + second), (Some(Duration::ZERO), Some(second)), "no image was encoded");
    ledger.observe(&speeds(3, 600.0, 40.0), now + 2 * second);
    assert_eq!(ages(now + 2 * second), (Some(second), Some(Duration::ZERO)), "an image was encoded");
}

#[test]
fn a_new_process_starts_without_the_state_of_the_previous_one() {
    let (now, ledger) = (Instant::now(), Ledger::new(ROUTER));
    let _had = ledger.book(COST, now);
    let _on_its_way = ledger.book(COST, now);
    ledger.observe(&load(1, 90, &[(1, 1)]), now);
    assert_eq!(ledger.observe(&load(2, 1, &[]), now), ReportOutcome::NewEpoch);
    // The first request was lost with the old process. The second request may still reach the new process.
    let booked = ledger.snapshot(now, TTL).booked;
    assert_eq!((booked.in_flight, booked.unreported), (2, 1));
    assert_eq!(ledger.observe(&load(2, 2, &[(2, 2)]), now), ReportOutcome::Accepted);
    assert_eq!(ledger.snapshot(now, TTL).booked.unreported, 0);
}

#[test]
fn a_dispatch_that_is_never_reported_stops_counting_as_load() {
    let (now, ledger) = (Instant::now(), Ledger::new(ROUTER));
    let booking = ledger.book(COST, now);
    assert_eq!(ledger.expire(now + UNREPORTED_MAX / 2), 0);
    assert_eq!(ledger.expire(now + UNREPORTED_MAX), 1);
    assert_eq!(ledger.expire(now + UNREPORTED_MAX), 0);
    let booked = ledger.snapshot(now, TTL).booked;
    assert_eq!((booked.in_flight, booked.unreported, booked.blocks_unreported), (1, 0, 0));
    drop(booking);
    assert_eq!(ledger.snapshot(now, TTL).booked, BookedLoad::default());
}

#[test]
fn the_header_names_router_and_number() {
    let ledger = Ledger::new(ROUTER);
    let first = ledger.book(COST, Instant::now());
    let second = ledger.book(COST, Instant::now());
    assert_eq!(first.header(), "00000000000000ab/1");
    assert_eq!(second.header(), "00000000000000ab/2");
}

#[test]
fn invalid_values_in_a_report_are_replaced() {
    let (now, ledger) = (Instant::now(), Ledger::new(ROUTER));
    let report = Load {
        prefill_tokens_per_second: f32::NAN,
        decode_tokens_per_second: -1.0,
        blocks_total: 5,
        blocks_active: 9,
        state: 77,
        ..load(1, 1, &[(9, 2), (0, u64::MAX)])
    };
    let _booking = ledger.book(COST, now);
    ledger.observe(&report, now);
    let snapshot = ledger.snapshot(now, TTL);
    let reported = snapshot.reported.unwrap();
    assert_eq!((reported.prefill_tokens_per_second, reported.decode_tokens_per_second), (0.0, 0.0));
    assert_eq!((reported.blocks_active, snapshot.state), (5, Some(State::Unspecified)));
    assert_eq!(snapshot.booked.unreported, 0);
}
