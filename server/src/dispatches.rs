//! Tracks, for each router, which of the router's requests the load reports include. This lets the router count each
//! request exactly once: the router adds a request to the reported load until a report includes the request, and relies
//! on the report from then on.
//!
//! A request is included once the engine has accepted it. A rejected request is included immediately, because it does
//! not contribute to the figures of a report. For each router, the server remembers a limited number of ranges of
//! dispatch numbers, and forgets the lowest ranges first. The server remembers each subscribed router and a limited
//! number of disconnected ones, which may reconnect.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use axum::http::HeaderMap;
use proto::v1alpha1 as wire;

/// The header with the ID of a router and the number that this router has assigned to the request.
const HEADER: &str = "x-ovfleet-dispatch";
/// Number of disconnected routers whose dispatches the server remembers. The number of connected routers is limited
/// by the number of open streams.
///
/// If exceeded: the router that disconnected first is forgotten.
const DEPARTED_MAX: usize = 64;
/// Number of ranges of dispatch numbers that the server remembers for a router. It forgets the lowest ranges first.
const RANGES_MAX: usize = 256;
/// Maximum number of requests of one router that have been submitted to the engine but not accepted yet. If exceeded, a
/// new request counts as accepted immediately.
const PENDING_MAX: usize = 4096;

/// The router that sent a request, and the number that it assigned to the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Dispatch {
    router: u64,
    number: u64,
}

impl Dispatch {
    /// Parses the header; returns `None` if it is absent or malformed.
    pub(crate) fn of(headers: &HeaderMap) -> Option<Self> {
        let (router, number) = headers.get(HEADER)?.to_str().ok()?.split_once('/')?;
        let is_hex = router.len() == 16 && router.bytes().all(|byte| byte.is_ascii_hexdigit());
        let is_number = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
        if !(is_hex && is_number) {
            return None;
        }
        Some(Self { router: u64::from_str_radix(router, 16).ok()?, number: number.parse().ok()? })
    }
}

/// The dispatches of the subscribed routers and of those that disconnected most recently. Clones share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Dispatches(Arc<Mutex<Vec<RouterDispatches>>>);

/// A router's subscription to load reports. Dropping this value ends the subscription.
#[derive(Debug)]
#[must_use = "dropping a subscription ends it"]
pub(crate) struct Subscription {
    dispatches: Dispatches,
    router: u64,
}

#[derive(Debug, Default)]
struct RouterDispatches {
    router: u64,
    /// Number of open streams. After a broken connection, a router may have two streams for a while.
    streams: usize,
    /// The first and last number of each range. The ranges are ascending, disjoint and not adjacent.
    included: Vec<(u64, u64)>,
    /// For each submitted request that is not included yet: its number, and the number of submissions that the engine
    /// must have accepted before the request is included.
    pending: Vec<(u64, u64)>,
}

impl Dispatches {
    /// Subscribes a router. If `router` is 0, the router is unknown, and its dispatches are not recorded.
    pub(crate) fn subscribe(&self, router: u64) -> Subscription {
        if router != 0 {
            let mut routers = self.lock();
            match routers.iter_mut().find(|known| known.router == router) {
                Some(known) => known.streams += 1,
                None => routers.push(RouterDispatches { router, streams: 1, ..RouterDispatches::default() }),
            }
        }
        Subscription { dispatches: self.clone(), router }
    }

    fn unsubscribe(&self, router: u64) {
        let mut routers = self.lock();
        let Some(index) = routers.iter().position(|known| known.router == router) else { return };
        routers[index].streams -= 1;
        if routers[index].streams > 0 {
            return;
        }
        // Move the router to the end, so that departed routers are in the order of their departure.
        let departed = routers.remove(index);
        routers.push(departed);
        if routers.iter().filter(|known| known.streams == 0).count() > DEPARTED_MAX
            && let Some(first) = routers.iter().position(|known| known.streams == 0)
        {
            routers.remove(first);
        }
    }

    /// Records a request. If the request was submitted to the engine, `submissions` is the count of submissions
    /// including this one; if the request was rejected, `submissions` is `None`.
    pub(crate) fn record(&self, dispatch: Dispatch, submissions: Option<u64>) {
        let mut routers = self.lock();
        // An unknown router receives no reports, so its requests need no record.
        let Some(router) = routers.iter_mut().find(|router| router.router == dispatch.router) else { return };
        match submissions {
            Some(submissions) if router.pending.len() < PENDING_MAX => {
                router.pending.push((dispatch.number, submissions));
            }
            _ => router.include(dispatch.number),
        }
    }

    /// Marks the requests up to submission number `submissions` as included, because the engine has accepted them. Then
    /// calls `send`, which sends the report that includes them.
    pub(crate) fn include_accepted<T>(&self, submissions: u64, send: impl FnOnce() -> T) {
        let mut routers = self.lock();
        for router in routers.iter_mut() {
            let mut pending = std::mem::take(&mut router.pending);
            pending.retain(|&(number, needed)| {
                let is_accepted = needed <= submissions;
                if is_accepted {
                    router.include(number);
                }
                !is_accepted
            });
            router.pending = pending;
        }
        send();
    }

    /// Calls `report` with the dispatches of `router` that the last report includes. No new report is sent during the
    /// call.
    pub(crate) fn with_included<T>(
        &self,
        router: u64,
        report: impl FnOnce(Option<wire::Dispatches>) -> T,
    ) -> T {
        let routers = self.lock();
        let known = routers.iter().find(|known| known.router == router);
        let range = |&(first, last): &(u64, u64)| wire::DispatchRange { first, last };
        report(
            known
                .map(|known| wire::Dispatches { router, ranges: known.included.iter().map(range).collect() }),
        )
    }

    fn lock(&self) -> MutexGuard<'_, Vec<RouterDispatches>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        self.dispatches.unsubscribe(self.router);
    }
}

impl RouterDispatches {
    fn include(&mut self, number: u64) {
        let included = &mut self.included;
        let after = included.partition_point(|&(first, _)| first <= number);
        if after > 0 && included[after - 1].1 >= number {
            return;
        }
        let joins_before = after > 0 && number.checked_sub(1) == Some(included[after - 1].1);
        let joins_after = included.get(after).is_some_and(|&(first, _)| number.checked_add(1) == Some(first));
        match (joins_before, joins_after) {
            (true, true) => {
                included[after - 1].1 = included[after].1;
                included.remove(after);
            }
            (true, false) => included[after - 1].1 = number,
            (false, true) => included[after].0 = number,
            (false, false) => included.insert(after, (number, number)),
        }
        if included.len() > RANGES_MAX {
            included.remove(0);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use axum::http::HeaderValue;
    use rand::rngs::StdRng;
    use rand::{RngExt as _, SeedableRng as _};

    use super::*;

    fn read(value: &'static str) -> Option<Dispatch> {
        Dispatch::of(&HeaderMap::from_iter([(HEADER.parse().unwrap(), HeaderValue::from_static(value))]))
    }

    fn ranges(dispatches: &Dispatches) -> Vec<(u64, u64)> {
        let included = dispatches.with_included(7, |dispatches| dispatches.unwrap());
        included.ranges.iter().map(|range| (range.first, range.last)).collect()
    }

    #[test]
    fn a_header_without_a_router_and_a_number_is_ignored() {
        assert_eq!(read("00000000000000ff/12"), Some(Dispatch { router: 255, number: 12 }));
        for wrong in
            ["", "ff/1", "00000000000000fg/1", "00000000000000ff/", "00000000000000ff/+1", "00000000000000ff"]
        {
            assert_eq!(read(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn requests_that_the_engine_has_not_accepted_are_not_included() {
        let dispatches = Dispatches::default();
        let _subscription = dispatches.subscribe(7);
        let dispatch = |number| Dispatch { router: 7, number };
        dispatches.record(dispatch(1), Some(1));
        dispatches.record(dispatch(2), Some(2));
        dispatches.record(dispatch(3), None);
        dispatches.record(Dispatch { router: 8, number: 1 }, None);
        assert_eq!(ranges(&dispatches), [(3, 3)]);
        dispatches.include_accepted(1, || ());
        assert_eq!(ranges(&dispatches), [(1, 1), (3, 3)]);
        dispatches.include_accepted(2, || ());
        assert_eq!(ranges(&dispatches), [(1, 3)]);
        assert!(dispatches.with_included(8, |dispatches| dispatches.is_none()), "router 8 is not subscribed");
    }

    #[test]
    fn the_ranges_contain_exactly_the_numbers_in_any_order() {
        let seed = 3_u64;
        println!("seed {seed}");
        let mut random = StdRng::seed_from_u64(seed);
        let mut router = RouterDispatches::default();
        let mut numbers = BTreeSet::new();
        for _ in 0..400 {
            let number = random.random_range(0..300);
            router.include(number);
            numbers.insert(number);
            let included: BTreeSet<u64> =
                router.included.iter().flat_map(|&(first, last)| first..=last).collect();
            assert_eq!(included, numbers);
            assert!(
                router.included.windows(2).all(|pair| pair[0].1 + 1 < pair[1].0),
                "{:?}",
                router.included
            );
        }
    }

    #[test]
    fn a_subscribed_router_is_never_forgotten_and_a_departed_one_may_return() {
        let dispatches = Dispatches::default();
        let first = dispatches.subscribe(1);
        let _again = dispatches.subscribe(1);
        dispatches.record(Dispatch { router: 1, number: 5 }, None);
        let others: Vec<Subscription> = (2..200).map(|router| dispatches.subscribe(router)).collect();
        drop(first);
        let knows = |router: u64| dispatches.with_included(router, |dispatches| dispatches.is_some());
        assert!((1..200).all(knows), "all routers are subscribed");
        drop(others);
        for router in 1000..1010 {
            drop(dispatches.subscribe(router));
        }
        assert!(knows(1) && knows(1009) && knows(199) && !knows(2));
        let included = dispatches.with_included(1, |dispatches| dispatches.unwrap().ranges[0].first);
        assert_eq!(included, 5);
        assert!(
            !dispatches.with_included(0, |dispatches| dispatches.is_some()),
            "0 is not the ID of a router"
        );
    }

    #[test]
    fn the_memory_of_dispatches_is_bounded() {
        let dispatches = Dispatches::default();
        for router in 1..=1000 {
            drop(dispatches.subscribe(router));
        }
        assert_eq!(dispatches.lock().len(), DEPARTED_MAX);
        let dispatch = |number| Dispatch { router: 1000, number };
        for number in 0..10_000 {
            dispatches.record(dispatch(2 * number), Some(u64::MAX));
        }
        let routers = dispatches.lock();
        let router = routers.last().unwrap();
        assert_eq!((router.pending.len(), router.included.len()), (PENDING_MAX, RANGES_MAX));
        assert_eq!(router.included.last(), Some(&(19_998, 19_998)));
    }
}
