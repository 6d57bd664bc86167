//! The event loop in virtual time: a request arrives at the router, is sent to a replica, is computed there, and
//! appears in load reports.
//!
//! A simulated router receives the same information as a real one, at the same times: a replica sends a report 20 ms
//! after a change, and otherwise every second. Reports and requests take a random time to cross the network, so they
//! can overtake each other. Only the oracle sees the replicas themselves.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::ops::RangeInclusive;
use std::rc::Rc;

use proto::v1alpha1 as wire;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

use server_scheduler::Load;

use crate::engine::{Engine, EngineConfig, Nanos, Outcome, SECOND, Spec};
use crate::workload::{Arrival, Request};

/// The time for which the server collects changes before it reports them.
const COALESCE: Nanos = 20_000_000;
/// The longest time between two reports.
const HEARTBEAT: Nanos = SECOND;
/// The ID of the router in reports.
pub(crate) const ROUTER: u64 = 7;

/// Decides to which replica each request goes.
pub(crate) trait Router {
    /// Picks the replica for a request. Returns the replica and the number of the dispatch, or `None` if the request
    /// has to wait for a change.
    fn pick(&mut self, id: usize, request: &Request, world: &World) -> Option<(usize, u64)>;
    /// Called when the first token of a request arrives at the router.
    fn first_token(&mut self, _id: usize) {}
    /// Called when the last token of a request arrives at the router.
    fn finished(&mut self, _id: usize, _request: &Request) {}
    /// Called when a report of a replica arrives.
    fn report(&mut self, _replica: usize, _report: &wire::Load, _now: Nanos) {}
    /// The interval at which the router polls the load of all replicas, or `None` if it does not poll.
    fn poll_every(&self) -> Option<Nanos> {
        None
    }
    /// Called with the loads that a poll has returned.
    fn polled(&mut self, _loads: &[wire::Load], _now: Nanos) {}
}

/// The time and the replicas. Only the oracle uses the replicas.
pub(crate) struct World {
    pub(crate) now: Nanos,
    pub(crate) replicas: Vec<Replica>,
}

pub(crate) struct Replica {
    pub(crate) engine: Engine,
    /// The time at which the step in flight ends.
    pub(crate) busy_until: Option<Nanos>,
    /// The requests that were sent to the replica and have not arrived there yet.
    pub(crate) in_transit: Vec<RequestInTransit>,
    /// The dispatches that have arrived at the replica.
    arrived: Ranges,
    published: Load,
    /// The dispatches that the load in `published` includes.
    included: Ranges,
    /// The load in the latest report.
    reported: Load,
    reports: u64,
    is_report_due: bool,
    heartbeats: u64,
    pub(crate) picks: u64,
}

/// A request on its way to a replica.
#[derive(Clone, Debug)]
pub(crate) struct RequestInTransit {
    pub(crate) arrives: Nanos,
    pub(crate) request: usize,
    pub(crate) spec: Rc<Spec>,
}

/// The measurements of a run.
#[derive(Clone, Debug, Default)]
pub(crate) struct Outcomes {
    /// The time to the first token of each request, in seconds.
    pub(crate) first_token: Vec<f64>,
    /// The mean time between two tokens of each answer, in seconds.
    pub(crate) between_tokens: Vec<f64>,
    /// The number of requests of the busiest replica, divided by the mean over all replicas.
    pub(crate) hottest: f64,
    /// The fraction of prompt tokens that were cached.
    pub(crate) cached: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    StepEnds { replica: usize },
    Delivered { replica: usize, request: usize, number: u64 },
    First { request: usize },
    Finished { request: usize },
    ReportDue { replica: usize },
    Heartbeat { replica: usize, number: u64 },
    Reported { replica: usize, slot: usize },
    Poll,
    Arrives { request: usize },
}

/// A request that arrives some time after the answer to another request.
#[derive(Clone, Copy)]
struct Follower {
    request: usize,
    pause: Nanos,
}

struct Run<'a> {
    requests: &'a [Request],
    router: &'a mut dyn Router,
    world: World,
    events: BinaryHeap<Reverse<(Nanos, u64, Event)>>,
    order: u64,
    rng: StdRng,
    held: VecDeque<usize>,
    reports: Vec<Option<wire::Load>>,
    arrived: Vec<Nanos>,
    first: Vec<Option<Nanos>>,
    /// For each request, the request that follows its answer.
    followers: Vec<Option<Follower>>,
    unfinished: usize,
    outcomes: Outcomes,
}

/// Serves `requests` with `router` and `count` replicas.
///
/// # Panics
/// Panics if a request is never answered.
pub(crate) fn run(
    requests: &[Request],
    count: usize,
    config: EngineConfig,
    router: &mut dyn Router,
) -> Outcomes {
    let replicas = (0..count).map(|_| Replica::new(config)).collect();
    let mut run = Run {
        requests,
        router,
        world: World { now: 0, replicas },
        events: BinaryHeap::new(),
        order: 0,
        rng: StdRng::seed_from_u64(99),
        held: VecDeque::new(),
        reports: Vec::new(),
        arrived: vec![0; requests.len()],
        first: vec![None; requests.len()],
        followers: vec![None; requests.len()],
        unfinished: requests.len(),
        outcomes: Outcomes::default(),
    };
    run.start();
    while run.unfinished > 0 {
        let Reverse((now, _, event)) = run.events.pop().expect("every request is answered");
        run.world.now = now;
        run.handle(event);
    }
    let most = run.world.replicas.iter().map(|replica| replica.picks).max().unwrap_or(0);
    let sum = |count: fn(&Engine) -> u64| {
        run.world.replicas.iter().map(|replica| count(&replica.engine)).sum::<u64>()
    };
    Outcomes {
        hottest: most as f64 * count as f64 / requests.len() as f64,
        cached: sum(|engine| engine.cached_tokens) as f64 / sum(|engine| engine.prompt_tokens) as f64,
        ..run.outcomes
    }
}

impl Run<'_> {
    fn start(&mut self) {
        for (request, Request { arrival, .. }) in self.requests.iter().enumerate() {
            match *arrival {
                Arrival::At(at) => self.at(at, Event::Arrives { request }),
                Arrival::After { request: before, pause } => {
                    self.followers[before] = Some(Follower { request, pause })
                }
            }
        }
        for replica in 0..self.world.replicas.len() {
            self.report(replica);
        }
        if self.router.poll_every().is_some() {
            self.at(0, Event::Poll);
        }
    }

    fn at(&mut self, at: Nanos, event: Event) {
        self.order += 1;
        self.events.push(Reverse((at, self.order, event)));
    }

    /// The arrival time of a message that is sent now: 0.2 to 2 ms later.
    fn arrival(&mut self) -> Nanos {
        self.world.now + 200_000 + self.rng.next_u64() % 1_800_000
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Arrives { request } => {
                self.arrived[request] = self.world.now;
                self.held.push_back(request);
                self.dispatch();
            }
            Event::Delivered { replica, request, number } => {
                let target = &mut self.world.replicas[replica];
                target.in_transit.retain(|sent| sent.request != request);
                target.arrived.insert(number);
                target.engine.submit(request, Rc::clone(&self.requests[request].spec));
                if target.busy_until.is_none() {
                    self.step(replica);
                }
            }
            Event::StepEnds { replica } => self.step_ends(replica),
            Event::First { request } => {
                self.first[request] = Some(self.world.now);
                let waited = self.world.now - self.arrived[request];
                self.outcomes.first_token.push(waited as f64 / SECOND as f64);
                self.router.first_token(request);
            }
            Event::Finished { request } => self.finished(request),
            Event::ReportDue { replica } => self.report(replica),
            Event::Heartbeat { replica, number } => {
                if self.world.replicas[replica].heartbeats == number {
                    self.report(replica);
                }
            }
            Event::Reported { replica, slot } => {
                let report = self.reports[slot].take().expect("a report arrives once");
                self.router.report(replica, &report, self.world.now);
                self.dispatch();
            }
            Event::Poll => {
                let loads: Vec<_> = self.world.replicas.iter().map(Replica::to_report).collect();
                self.router.polled(&loads, self.world.now);
                let interval = self.router.poll_every().expect("a poll was scheduled");
                self.at(self.world.now + interval, Event::Poll);
            }
        }
    }

    /// Sends the requests that wait in the router, in order, until the router picks no replica for one of them.
    fn dispatch(&mut self) {
        while let Some(&request) = self.held.front() {
            let Some((replica, number)) = self.router.pick(request, &self.requests[request], &self.world)
            else {
                return;
            };
            self.held.pop_front();
            let arrives = self.arrival();
            let target = &mut self.world.replicas[replica];
            target.picks += 1;
            let spec = Rc::clone(&self.requests[request].spec);
            target.in_transit.push(RequestInTransit { arrives, request, spec });
            self.at(arrives, Event::Delivered { replica, request, number });
        }
    }

    fn finished(&mut self, request: usize) {
        self.unfinished -= 1;
        let began = self.first[request].unwrap_or(self.world.now);
        let intervals = f64::from(self.requests[request].spec.output_tokens() - 1).max(1.0);
        let seconds = self.world.now.saturating_sub(began) as f64 / SECOND as f64;
        self.outcomes.between_tokens.push(seconds / intervals);
        self.router.finished(request, &self.requests[request]);
        if let Some(Follower { request, pause }) = self.followers[request] {
            self.at(self.world.now + pause, Event::Arrives { request });
        }
        self.dispatch();
    }

    fn step(&mut self, replica: usize) {
        let now = self.world.now;
        let computing = &mut self.world.replicas[replica];
        if computing.engine.is_idle() {
            computing.busy_until = None;
        } else {
            let ends = now + computing.engine.begin_step();
            computing.busy_until = Some(ends);
            self.at(ends, Event::StepEnds { replica });
        }
        self.publish(replica);
    }

    fn step_ends(&mut self, replica: usize) {
        let mut outcomes = Vec::new();
        self.world.replicas[replica].engine.end_step(&mut outcomes);
        for outcome in outcomes {
            let at = self.arrival();
            match outcome {
                Outcome::First { request } => self.at(at, Event::First { request }),
                // The last token arrives after the first, even if the same step completes both.
                Outcome::Finished { request } => {
                    self.at(at.max(self.world.now + 2_000_000), Event::Finished { request })
                }
            }
        }
        self.step(replica);
    }

    /// Publishes the load of the engine, at the beginning of a step and when the engine becomes idle.
    fn publish(&mut self, replica: usize) {
        let at = self.world.now + COALESCE;
        let reporting = &mut self.world.replicas[replica];
        reporting.published = reporting.engine.load();
        reporting.included = reporting.arrived.clone();
        if !reporting.is_report_due && differs(&reporting.reported, &reporting.published) {
            reporting.is_report_due = true;
            self.at(at, Event::ReportDue { replica });
        }
    }

    fn report(&mut self, replica: usize) {
        let arrives = self.arrival();
        let reporting = &mut self.world.replicas[replica];
        reporting.is_report_due = false;
        reporting.reported = reporting.published;
        reporting.reports += 1;
        reporting.heartbeats += 1;
        let (report, number) = (reporting.to_report(), reporting.heartbeats);
        self.reports.push(Some(report));
        self.at(arrives, Event::Reported { replica, slot: self.reports.len() - 1 });
        self.at(self.world.now + HEARTBEAT, Event::Heartbeat { replica, number });
    }
}

impl Replica {
    fn new(config: EngineConfig) -> Self {
        Self {
            engine: Engine::new(config),
            busy_until: None,
            in_transit: Vec::new(),
            arrived: Ranges::default(),
            published: Load::default(),
            included: Ranges::default(),
            reported: Load::default(),
            reports: 0,
            is_report_due: false,
            heartbeats: 0,
            picks: 0,
        }
    }

    /// The load report, in the form in which the server sends it.
    fn to_report(&self) -> wire::Load {
        let EngineConfig { block_tokens, max_num_seqs, .. } = self.engine.config;
        let load = self.published;
        wire::Load {
            epoch: 1,
            report: self.reports,
            state: wire::State::Serving.into(),
            blocks_total: load.blocks_total,
            blocks_active: load.blocks_active,
            blocks_evictable: load.blocks_evictable,
            blocks_free: load.blocks_free,
            block_tokens,
            running: load.running,
            waiting: load.waiting,
            uncomputed_tokens: load.uncomputed_tokens,
            sequences_max: max_num_seqs,
            requests_max: 4096,
            prefill_tokens_per_second: self.engine.prefill_tokens_per_second(),
            decode_tokens_per_second: self.engine.decode_tokens_per_second(),
            preemptions_total: load.preemptions_total,
            dispatches: Some(wire::Dispatches { router: ROUTER, ranges: self.included.to_message() }),
            ..wire::Load::default()
        }
    }
}

/// Whether the server would report a change: the number of running or waiting sequences differs, or the use of the
/// cache differs by more than 2% of its blocks.
fn differs(reported: &Load, current: &Load) -> bool {
    let differ = |before: u32, after: u32| before.abs_diff(after) > current.blocks_total / 50;
    (reported.running, reported.waiting) != (current.running, current.waiting)
        || differ(reported.blocks_active, current.blocks_active)
        || differ(reported.blocks_evictable, current.blocks_evictable)
}

/// A set of numbers, most of which are adjacent.
#[derive(Clone, Debug, Default)]
struct Ranges(Vec<RangeInclusive<u64>>);

impl Ranges {
    fn insert(&mut self, number: u64) {
        let at = self.0.partition_point(|range| range.end() + 1 < number);
        match self.0.get(at).cloned() {
            Some(range) if range.contains(&number) => {}
            Some(range) if range.end() + 1 == number => match self.0.get(at + 1).cloned() {
                Some(next) if *next.start() == number + 1 => {
                    self.0[at] = *range.start()..=*next.end();
                    self.0.remove(at + 1);
                }
                _ => self.0[at] = *range.start()..=number,
            },
            Some(range) if number + 1 == *range.start() => self.0[at] = number..=*range.end(),
            _ => self.0.insert(at, number..=number),
        }
    }

    fn to_message(&self) -> Vec<wire::DispatchRange> {
        let message =
            |range: &RangeInclusive<u64>| wire::DispatchRange { first: *range.start(), last: *range.end() };
        self.0.iter().map(message).collect()
    }
}
