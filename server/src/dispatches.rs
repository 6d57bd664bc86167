//! Which of a router's requests the load reports take into account, so that the router counts each of them
//! once: until a report includes it by itself, and from then on by the report.
//!
//! A request is included once the engine has taken it; one that was refused on the way is included at once,
//! as there is nothing of it in any figure. What is remembered is bounded; what is forgotten first is what is
//! told already. A router is remembered for as long as it listens, and for some time after, in case that it
//! reconnects.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use axum::http::HeaderMap;
use proto::v1alpha1::{DispatchRange, Dispatches as Told};

/// The header by which a router numbers a request.
const HEADER: &str = "x-ovfleet-dispatch";
/// Number of disconnected routers whose dispatches the server remembers. The number of connected routers is limited
/// by the number of open streams.
///
/// Beyond it: the router that disconnected first is forgotten.
const DEPARTED_MAX: usize = 64;
/// Ranges remembered of a router, the highest ones.
const RANGES_MAX: usize = 256;
/// Requests that the engine is about to take, of one router; of more, the first count as taken.
const PENDING_MAX: usize = 4096;

/// A request as its router names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Dispatch {
    router: u64,
    number: u64,
}

impl Dispatch {
    /// What the header says, if there is one that makes sense.
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

/// The dispatches of all routers that listen. Clones are of the same.
#[derive(Clone, Debug, Default)]
pub(crate) struct Dispatches(Arc<Mutex<Vec<Router>>>);

/// A router listens for as long as this lives.
#[derive(Debug)]
#[must_use = "a router that does not listen any more is forgotten in time"]
pub(crate) struct Listening {
    dispatches: Dispatches,
    router: u64,
}

/// Those of one router.
#[derive(Debug, Default)]
struct Router {
    router: u64,
    /// Streams that it has open: after a broken connection there may be two for a while.
    streams: usize,
    /// First and last; ascending, disjoint, not adjacent.
    included: Vec<(u64, u64)>,
    /// Numbers with the count of submissions by which the engine has taken each.
    pending: Vec<(u64, u64)>,
}

impl Dispatches {
    /// A router listens from now on. Zero is none.
    pub(crate) fn listen(&self, router: u64) -> Listening {
        if router != 0 {
            let mut routers = self.lock();
            match routers.iter_mut().find(|known| known.router == router) {
                Some(known) => known.streams += 1,
                None => routers.push(Router { router, streams: 1, ..Router::default() }),
            }
        }
        Listening { dispatches: self.clone(), router }
    }

    fn leave(&self, router: u64) {
        let mut routers = self.lock();
        let Some(index) = routers.iter().position(|known| known.router == router) else { return };
        routers[index].streams -= 1;
        if routers[index].streams > 0 {
            return;
        }
        // Those that have left are in the order in which they did.
        let departed = routers.remove(index);
        routers.push(departed);
        if routers.iter().filter(|known| known.streams == 0).count() > DEPARTED_MAX
            && let Some(first) = routers.iter().position(|known| known.streams == 0)
        {
            routers.remove(first);
        }
    }

    /// A request was handed to the engine, the last one by which the count of submissions became
    /// `submissions`; or was refused.
    pub(crate) fn arrived(&self, dispatch: Dispatch, submissions: Option<u64>) {
        let mut routers = self.lock();
        // Who does not listen is told nothing.
        let Some(router) = routers.iter_mut().find(|router| router.router == dispatch.router) else { return };
        match submissions {
            Some(submissions) if router.pending.len() < PENDING_MAX => {
                router.pending.push((dispatch.number, submissions));
            }
            _ => router.include(dispatch.number),
        }
    }

    /// Includes what the engine had taken when it had taken this many, and sends the report that says so.
    pub(crate) fn settle<T>(&self, submissions: u64, send: impl FnOnce() -> T) {
        let mut routers = self.lock();
        for router in routers.iter_mut() {
            let mut pending = std::mem::take(&mut router.pending);
            pending.retain(|&(number, needed)| {
                let is_taken = needed <= submissions;
                if is_taken {
                    router.include(number);
                }
                !is_taken
            });
            router.pending = pending;
        }
        send();
    }

    /// What `report` makes of the dispatches of `router` that the last report includes.
    pub(crate) fn told<T>(&self, router: u64, report: impl FnOnce(Option<Told>) -> T) -> T {
        let routers = self.lock();
        let known = routers.iter().find(|known| known.router == router);
        report(known.map(|known| Told {
            router,
            ranges: known.included.iter().map(|&(first, last)| DispatchRange { first, last }).collect(),
        }))
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Router>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        self.dispatches.leave(self.router);
    }
}

impl Router {
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

    use super::*;

    fn read(value: &'static str) -> Option<Dispatch> {
        Dispatch::of(&HeaderMap::from_iter([(HEADER.parse().unwrap(), HeaderValue::from_static(value))]))
    }

    fn ranges(dispatches: &Dispatches) -> Vec<(u64, u64)> {
        let told = dispatches.told(7, |told| told.unwrap());
        told.ranges.iter().map(|range| (range.first, range.last)).collect()
    }

    #[test]
    fn a_header_is_a_router_and_a_number_or_nothing() {
        assert_eq!(read("00000000000000ff/12"), Some(Dispatch { router: 255, number: 12 }));
        for wrong in
            ["", "ff/1", "00000000000000fg/1", "00000000000000ff/", "00000000000000ff/+1", "00000000000000ff"]
        {
            assert_eq!(read(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn what_the_engine_has_not_taken_is_not_told() {
        let dispatches = Dispatches::default();
        let _listening = dispatches.listen(7);
        let dispatch = |number| Dispatch { router: 7, number };
        dispatches.arrived(dispatch(1), Some(1));
        dispatches.arrived(dispatch(2), Some(2));
        dispatches.arrived(dispatch(3), None);
        dispatches.arrived(Dispatch { router: 8, number: 1 }, None);
        assert_eq!(ranges(&dispatches), [(3, 3)]);
        dispatches.settle(1, || ());
        assert_eq!(ranges(&dispatches), [(1, 1), (3, 3)]);
        dispatches.settle(2, || ());
        assert_eq!(ranges(&dispatches), [(1, 3)]);
        assert!(dispatches.told(8, |told| told.is_none()), "it does not listen");
    }

    #[test]
    fn in_whatever_order_numbers_come_the_ranges_are_those_numbers() {
        let seed = 3_u64;
        println!("seed {seed}");
        let mut state = seed;
        let mut router = Router::default();
        let mut numbers = BTreeSet::new();
        for _ in 0..400 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let number = (state >> 33) % 300;
            router.include(number);
            numbers.insert(number);
            let told: BTreeSet<u64> =
                router.included.iter().flat_map(|&(first, last)| first..=last).collect();
            assert_eq!(told, numbers);
            assert!(
                router.included.windows(2).all(|pair| pair[0].1 + 1 < pair[1].0),
                "{:?}",
                router.included
            );
        }
    }

    #[test]
    fn a_router_that_listens_is_never_forgotten_and_one_that_has_left_may_come_back() {
        let dispatches = Dispatches::default();
        let first = dispatches.listen(1);
        let _again = dispatches.listen(1);
        dispatches.arrived(Dispatch { router: 1, number: 5 }, None);
        let others: Vec<Listening> = (2..200).map(|router| dispatches.listen(router)).collect();
        drop(first);
        let knows = |router: u64| dispatches.told(router, |told| told.is_some());
        assert!((1..200).all(knows), "they all listen");
        drop(others);
        for router in 1000..1010 {
            drop(dispatches.listen(router));
        }
        assert!(knows(1) && knows(1009) && knows(199) && !knows(2));
        let told = dispatches.told(1, |told| told.unwrap().ranges[0].first);
        assert_eq!(told, 5);
        assert!(!dispatches.told(0, |told| told.is_some()), "zero is no router");
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let dispatches = Dispatches::default();
        for router in 1..=1000 {
            drop(dispatches.listen(router));
        }
        assert_eq!(dispatches.lock().len(), DEPARTED_MAX);
        let dispatch = |number| Dispatch { router: 1000, number };
        for number in 0..10_000 {
            dispatches.arrived(dispatch(2 * number), Some(u64::MAX));
        }
        let routers = dispatches.lock();
        let router = routers.last().unwrap();
        assert_eq!((router.pending.len(), router.included.len()), (PENDING_MAX, RANGES_MAX));
        assert_eq!(router.included.last(), Some(&(19_998, 19_998)));
    }
}
