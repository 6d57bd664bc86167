//! The event loop: requests arrive at a router, travel, are computed, are reported; all in virtual time.
//!
//! What a router learns and when is as it is in the product: reports follow a change after 20 ms, and every
//! second, and travel; requests travel too, by different times, so that they overtake each other. Nobody but
//! the oracle sees the replicas themselves.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::rc::Rc;

use proto::v1alpha1 as wire;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

use crate::engine::{Engine, EngineConfig, Load, Nanos, Outcome, SECOND, Spec};
use crate::workload::{Arrival, Request};

/// The server gathers changes for so long before it reports.
const COALESCE: Nanos = 20_000_000;
/// The longest that it does not report.
const HEARTBEAT: Nanos = SECOND;
/// Who the router is in reports.
pub(crate) const ROUTER: u64 = 7;

/// Something that decides where requests go.
pub(crate) trait Router {
    /// Where a request goes, and the number of the dispatch; `None`: it waits until something changes.
    fn pick(&mut self, id: usize, request: &Request, world: &World) -> Option<(usize, u64)>;
    /// Its first token arrived at the router.
    fn first_token(&mut self, _id: usize) {}
    /// Its last token did.
    fn finished(&mut self, _id: usize, _request: &Request) {}
    /// A report arrived.
    fn report(&mut self, _replica: usize, _report: &wire::Load, _now: Nanos) {}
    /// How often it asks all replicas for their present load, if it does.
    fn poll_every(&self) -> Option<Nanos> {
        None
    }
    /// The answers to that.
    fn polled(&mut self, _loads: &[wire::Load], _now: Nanos) {}
}

/// The replicas themselves. For the oracle; a router that is none uses `now` only.
pub(crate) struct World {
    pub(crate) now: Nanos,
    pub(crate) replicas: Vec<Replica>,
}

pub(crate) struct Replica {
    pub(crate) engine: Engine,
    /// When the step under way ends.
    pub(crate) busy_until: Option<Nanos>,
    /// What was sent there and has not arrived: when it will.
    pub(crate) in_transit: Vec<(Nanos, usize, Rc<Spec>)>,
    /// Dispatches that the engine has.
    seen: Ranges,
    published: Load,
    published_seen: Ranges,
    told: Load,
    reports: u64,
    is_report_due: bool,
    heartbeats: u64,
    pub(crate) picks: u64,
}

/// What came of a run.
#[derive(Clone, Debug, Default)]
pub(crate) struct Outcomes {
    /// Seconds to the first token, for each request.
    pub(crate) first_token: Vec<f64>,
    /// Seconds between two tokens, averaged over each answer.
    pub(crate) between_tokens: Vec<f64>,
    /// Requests that the replica with most had, in shares of its fair part.
    pub(crate) hottest: f64,
    /// The part of prompt tokens that was in a cache.
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
    /// Requests that come when another one is finished.
    followers: Vec<Option<(usize, Nanos)>>,
    left: usize,
    outcomes: Outcomes,
}

/// Serves `requests` with `router` and `count` replicas.
///
/// # Panics
/// If a request is never answered.
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
        left: requests.len(),
        outcomes: Outcomes::default(),
    };
    run.start();
    while run.left > 0 {
        let Reverse((now, _, event)) = run.events.pop().expect("every request is answered");
        run.world.now = now;
        run.handle(event);
    }
    let most = run.world.replicas.iter().map(|replica| replica.picks).max().unwrap_or(0);
    let sum = |of: fn(&Engine) -> u64| run.world.replicas.iter().map(|it| of(&it.engine)).sum::<u64>();
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
                Arrival::After { request: before, pause } => self.followers[before] = Some((request, pause)),
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

    /// The time something takes through the network: 0.2 to 2 ms.
    fn travel(&mut self) -> Nanos {
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
                let it = &mut self.world.replicas[replica];
                it.in_transit.retain(|sent| sent.1 != request);
                it.seen.insert(number);
                it.engine.submit(request, Rc::clone(&self.requests[request].spec));
                if it.busy_until.is_none() {
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
                let loads: Vec<_> = self.world.replicas.iter().map(Replica::wire).collect();
                self.router.polled(&loads, self.world.now);
                let every = self.router.poll_every().expect("it polled");
                self.at(self.world.now + every, Event::Poll);
            }
        }
    }

    /// Sends what waits in the router, the first first, as far as it has a place.
    fn dispatch(&mut self) {
        while let Some(&request) = self.held.front() {
            let Some((replica, number)) = self.router.pick(request, &self.requests[request], &self.world)
            else {
                return;
            };
            self.held.pop_front();
            let arrives = self.travel();
            let it = &mut self.world.replicas[replica];
            it.picks += 1;
            it.in_transit.push((arrives, request, Rc::clone(&self.requests[request].spec)));
            self.at(arrives, Event::Delivered { replica, request, number });
        }
    }

    fn finished(&mut self, request: usize) {
        self.left -= 1;
        let began = self.first[request].unwrap_or(self.world.now);
        let tokens = f64::from(self.requests[request].spec.output_tokens - 1).max(1.0);
        let took = self.world.now.saturating_sub(began) as f64 / SECOND as f64;
        self.outcomes.between_tokens.push(took / tokens);
        self.router.finished(request, &self.requests[request]);
        if let Some((next, pause)) = self.followers[request] {
            self.at(self.world.now + pause, Event::Arrives { request: next });
        }
        self.dispatch();
    }

    fn step(&mut self, replica: usize) {
        let now = self.world.now;
        let it = &mut self.world.replicas[replica];
        if it.engine.is_idle() {
            it.busy_until = None;
        } else {
            let ends = now + it.engine.begin_step();
            it.busy_until = Some(ends);
            self.at(ends, Event::StepEnds { replica });
        }
        self.publish(replica);
    }

    fn step_ends(&mut self, replica: usize) {
        let mut outcomes = Vec::new();
        self.world.replicas[replica].engine.end_step(&mut outcomes);
        for outcome in outcomes {
            let at = self.travel();
            match outcome {
                Outcome::First { request } => self.at(at, Event::First { request }),
                // After the first one, also if both come of one step.
                Outcome::Finished { request } => {
                    self.at(at.max(self.world.now + 2_000_000), Event::Finished { request })
                }
            }
        }
        self.step(replica);
    }

    /// What the engine says of itself at the beginning of a step and when it is idle.
    fn publish(&mut self, replica: usize) {
        let at = self.world.now + COALESCE;
        let it = &mut self.world.replicas[replica];
        it.published = it.engine.load();
        it.published_seen = it.seen.clone();
        if !it.is_report_due && differs(&it.told, &it.published, it.engine.config.blocks_total) {
            it.is_report_due = true;
            self.at(at, Event::ReportDue { replica });
        }
    }

    fn report(&mut self, replica: usize) {
        let arrives = self.travel();
        let it = &mut self.world.replicas[replica];
        it.is_report_due = false;
        it.told = it.published;
        it.reports += 1;
        it.heartbeats += 1;
        let (report, number) = (it.wire(), it.heartbeats);
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
            seen: Ranges::default(),
            published: Load::default(),
            published_seen: Ranges::default(),
            told: Load::default(),
            reports: 0,
            is_report_due: false,
            heartbeats: 0,
            picks: 0,
        }
    }

    /// The report as it goes over the wire.
    fn wire(&self) -> wire::Load {
        let EngineConfig { block_tokens, blocks_total, sequences_max, .. } = self.engine.config;
        let Load { active, evictable, running, waiting, uncomputed, preemptions } = self.published;
        let (prefill, decode) = self.engine.speeds();
        wire::Load {
            epoch: 1,
            report: self.reports,
            state: wire::State::Serving.into(),
            models: Vec::new(),
            blocks_total,
            blocks_active: active,
            blocks_evictable: evictable,
            blocks_free: blocks_total - active - evictable,
            block_tokens,
            running,
            waiting,
            uncomputed_tokens: uncomputed,
            sequences_max,
            requests_max: 4096,
            prefill_tokens_per_second: prefill,
            decode_tokens_per_second: decode,
            preemptions_total: preemptions,
            dispatches: Some(wire::Dispatches { router: ROUTER, ranges: self.published_seen.wire() }),
            store_id: 0,
            asleep: false,
        }
    }
}

/// As the server judges it.
fn differs(told: &Load, present: &Load, blocks_total: u32) -> bool {
    let far = |before: u32, after: u32| before.abs_diff(after) > blocks_total / 50;
    (told.running, told.waiting) != (present.running, present.waiting)
        || far(told.active, present.active)
        || far(told.evictable, present.evictable)
}

/// Numbers, most of them adjacent.
#[derive(Clone, Debug, Default)]
struct Ranges(Vec<(u64, u64)>);

impl Ranges {
    fn insert(&mut self, number: u64) {
        let at = self.0.partition_point(|range| range.1 + 1 < number);
        match self.0.get_mut(at) {
            Some(range) if range.1 + 1 == number => {
                range.1 = number;
                let last = *range;
                if let Some(next) = self.0.get_mut(at + 1).filter(|next| next.0 == number + 1) {
                    next.0 = last.0;
                    self.0.remove(at);
                }
            }
            Some(range) if number + 1 == range.0 => range.0 = number,
            Some(range) if range.0 <= number => {}
            _ => self.0.insert(at, (number, number)),
        }
    }

    fn wire(&self) -> Vec<wire::DispatchRange> {
        self.0.iter().map(|&(first, last)| wire::DispatchRange { first, last }).collect()
    }
}
