//! A random simulation of a replica, a network that delays, reorders and loses messages, and the ledger of a router.
//! After each step, the ledger is compared with an omniscient model.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use proto::v1alpha1::{DispatchRange, Dispatches, Load};
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use router::ledger::{BookedLoad, BookingGuard, Cost, Ledger, ReportOutcome};

const ROUTER: u64 = 3;
const TTL: Duration = Duration::from_secs(3);

struct World {
    rng: StdRng,
    now: Instant,
    ledger: std::sync::Arc<Ledger>,
    bookings: BTreeMap<u64, (BookingGuard, Cost, ReplicaKnowledge)>,
    /// The requests that were sent and have neither arrived nor been lost.
    in_transit: Vec<u64>,
    epoch: u64,
    reports: u64,
    arrived: BTreeSet<u64>,
    reports_in_transit: Vec<Load>,
    /// The epoch and the number of the last report that was accepted.
    last: Option<(u64, u64)>,
}

/// The router's information about a booking.
#[derive(Clone, Copy, Default)]
struct ReplicaKnowledge {
    reported: bool,
    first_token: bool,
}

impl World {
    fn below(&mut self, count: usize) -> usize {
        (self.rng.next_u64() % count as u64) as usize
    }

    fn step(&mut self) {
        self.now += Duration::from_millis(1);
        match self.below(16) {
            0..5 => self.book(),
            5..8 if !self.in_transit.is_empty() => {
                let at = self.below(self.in_transit.len());
                let number = self.in_transit.swap_remove(at);
                // One in eight requests never arrives. Its booking ends eventually, like that of any other request.
                if self.below(8) > 0 {
                    self.arrived.insert(number);
                }
            }
            8..10 => self.send_report(),
            10..12 if !self.reports_in_transit.is_empty() => {
                let at = self.below(self.reports_in_transit.len());
                let report = self.reports_in_transit.swap_remove(at);
                self.receive(&report);
            }
            12..15 if !self.bookings.is_empty() => {
                let number = self.any_booking();
                self.bookings.remove(&number);
            }
            15 if self.below(40) == 0 => {
                // Another process replaces the replica. Requests in transit may still reach the new process.
                self.epoch += 1;
                self.reports = 0;
                self.arrived.clear();
                self.reports_in_transit.clear();
            }
            _ if !self.bookings.is_empty() => {
                let number = self.any_booking();
                let (booking, _, progress) = self.bookings.get_mut(&number).unwrap();
                booking.record_first_token();
                progress.first_token = true;
            }
            _ => {}
        }
    }

    fn any_booking(&mut self) -> u64 {
        let at = self.below(self.bookings.len());
        *self.bookings.keys().nth(at).unwrap()
    }

    fn book(&mut self) {
        let cost = Cost {
            uncached_tokens: self.below(5000) as u32,
            image_tokens: self.below(5000) as u32,
            blocks: self.below(300) as u32,
            sequences: 1 + self.below(4) as u32,
            tenant: self.below(3) as u64,
        };
        let version = self.ledger.snapshot(self.now, TTL).version;
        let booking = self.ledger.book_if(version, cost, self.now).expect("the version has not changed");
        assert!(self.ledger.book_if(version, cost, self.now).is_none(), "the version has passed");
        self.in_transit.push(booking.number());
        self.bookings.insert(booking.number(), (booking, cost, ReplicaKnowledge::default()));
    }

    fn send_report(&mut self) {
        self.reports += 1;
        let mut ranges: Vec<DispatchRange> = Vec::new();
        for &number in &self.arrived {
            match ranges.last_mut() {
                Some(range) if range.last + 1 == number => range.last = number,
                _ => ranges.push(DispatchRange { first: number, last: number }),
            }
        }
        // Omit the lowest ranges of a long list, as a replica does.
        let ranges = ranges.split_off(ranges.len().saturating_sub(8));
        let dispatches = Some(Dispatches { router: ROUTER, ranges });
        let load = Load { epoch: self.epoch, report: self.reports, dispatches, ..Load::default() };
        self.reports_in_transit.push(load);
    }

    fn receive(&mut self, report: &Load) {
        let expected = match self.last {
            Some((epoch, number)) if epoch == report.epoch && number >= report.report => {
                ReportOutcome::Outdated
            }
            Some((epoch, _)) if epoch != report.epoch => ReportOutcome::NewEpoch,
            _ => ReportOutcome::Accepted,
        };
        assert_eq!(self.ledger.observe(report, self.now), expected);
        if expected == ReportOutcome::Outdated {
            return;
        }
        self.last = Some((report.epoch, report.report));
        for (number, (_, _, progress)) in &mut self.bookings {
            let ranges = &report.dispatches.as_ref().unwrap().ranges;
            progress.reported |= ranges.iter().any(|range| (range.first..=range.last).contains(number));
        }
    }

    fn expected(&self) -> BookedLoad {
        let mut booked = BookedLoad::default();
        for (_, cost, progress) in self.bookings.values() {
            let uncached = if progress.first_token { 0 } else { u64::from(cost.uncached_tokens) };
            let image_tokens = if progress.first_token { 0 } else { u64::from(cost.image_tokens) };
            booked.in_flight += 1;
            booked.blocks_without_token += if progress.first_token { 0 } else { u64::from(cost.blocks) };
            booked.uncached_in_flight += uncached;
            if !progress.reported {
                booked.unreported += 1;
                booked.sequences_unreported += u64::from(cost.sequences);
                booked.blocks_unreported += u64::from(cost.blocks);
                booked.uncached_unreported += uncached;
                booked.image_tokens_unreported += image_tokens;
            }
        }
        booked
    }
}

#[test]
fn booked_load_matches_a_model_for_random_orders_of_events() {
    for seed in 0..200 {
        let mut world = World {
            rng: StdRng::seed_from_u64(seed),
            now: Instant::now(),
            ledger: Ledger::new(ROUTER),
            bookings: BTreeMap::new(),
            in_transit: Vec::new(),
            epoch: 1,
            reports: 0,
            arrived: BTreeSet::new(),
            reports_in_transit: Vec::new(),
            last: None,
        };
        for step in 0..500 {
            world.step();
            let snapshot = world.ledger.snapshot(world.now, TTL);
            assert_eq!(snapshot.booked, world.expected(), "seed {seed}, step {step}");
        }
        world.bookings.clear();
        assert_eq!(world.ledger.snapshot(world.now, TTL).booked, BookedLoad::default(), "seed {seed}");
    }
}
