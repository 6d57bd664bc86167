//! The competitors: ovfleet's router with each of its policies except `session`, the published formulas of other
//! projects, and an oracle.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::time::{Duration, Instant};

use proto::v1alpha1::Load;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use router::estimate::Estimates;
use router::ledger::{BookingGuard, Ledger, ReportOutcome, TenantLoad};
use router::policy::{Candidate, Capacity, Demand, Policy, capacity};
use router::prefix::PrefixIndex;
use router::queue::NO_TENANT;

use crate::engine::{Nanos, Outcome, SECOND};
use crate::fleet::{ROUTER, Replica, RequestInTransit, Router, World};
use crate::workload::Request;

/// The age above which a report is ignored.
const REPORT_TTL: Duration = Duration::from_secs(3);

/// ovfleet's router: its ledgers, prefix indexes and policy, combined in the same way as in the real router.
pub(crate) struct Ovfleet {
    policy: Policy,
    beginning: Instant,
    replicas: Vec<KnownReplica>,
    bookings: HashMap<usize, BookingGuard>,
    estimates: Estimates,
    picks: u64,
    rng: StdRng,
    /// Whether a request waits in the router while all replicas are full.
    holds: bool,
}

struct KnownReplica {
    ledger: std::sync::Arc<Ledger>,
    index: PrefixIndex,
    last_pick: u64,
}

impl Ovfleet {
    pub(crate) fn new(policy: Policy, replicas: usize, seed: u64) -> Self {
        let known =
            |_| KnownReplica { ledger: Ledger::new(ROUTER), index: PrefixIndex::default(), last_pick: 0 };
        Self {
            policy,
            beginning: Instant::now(),
            replicas: (0..replicas).map(known).collect(),
            bookings: HashMap::new(),
            estimates: Estimates::default(),
            picks: 0,
            rng: StdRng::seed_from_u64(seed),
            holds: matches!(policy, Policy::Kv(_)),
        }
    }

    fn instant(&self, now: Nanos) -> Instant {
        self.beginning + Duration::from_nanos(now)
    }
}

impl Router for Ovfleet {
    fn pick(&mut self, id: usize, request: &Request, world: &World) -> Option<(usize, u64)> {
        let now = self.instant(world.now);
        let demand = Demand {
            prompt_tokens: request.estimated_prompt_tokens,
            image_tokens: 0,
            images_start: 0,
            images_end: 0,
            output_tokens: self.estimates.output_tokens(None),
            output_tokens_max: None,
            sequences: 1,
            session: None,
            tenant: NO_TENANT,
        };
        let candidate = |(identity, known): (u64, &KnownReplica)| {
            let cached = match self.policy.uses_prefixes() {
                true => known.index.cached_blocks(&request.prefix_hashes),
                false => 0,
            };
            Candidate {
                identity,
                snapshot: known.ledger.snapshot(now, REPORT_TTL),
                tenant_load: TenantLoad::default(),
                cached_tokens: request.prefix_hashes.tokens_of(cached, 4.0),
                weight: 1.0,
                is_reserved: false,
                last_pick: known.last_pick,
            }
        };
        let candidates: Vec<_> = (0..).zip(&self.replicas).map(candidate).collect();
        if self.holds && capacity(&demand, &candidates) == Capacity::Later {
            return None;
        }
        let mut terms = Vec::new();
        let picked = self.policy.pick(&demand, &candidates, &mut terms, &mut self.rng);
        let picked = picked.expect("each replica can take each request");
        self.picks += 1;
        let cost = candidates[picked].cost(&demand);
        let known = &mut self.replicas[picked];
        known.last_pick = self.picks;
        known.index.record(&request.prefix_hashes, demand.output_tokens as usize / 16);
        let booking = known.ledger.book(cost, now);
        let number = booking.number();
        self.bookings.insert(id, booking);
        Some((picked, number))
    }

    fn first_token(&mut self, id: usize) {
        self.bookings[&id].record_first_token();
    }

    fn finished(&mut self, id: usize, request: &Request) {
        self.bookings.remove(&id);
        self.estimates.observe_output(request.spec.output_tokens());
    }

    fn report(&mut self, replica: usize, report: &Load, now: Nanos) {
        let now = self.instant(now);
        let known = &mut self.replicas[replica];
        if known.ledger.observe(report, now) == ReportOutcome::Accepted {
            let expected = known.ledger.snapshot(now, REPORT_TTL).booked.blocks_without_token;
            let blocks = u64::from(report.blocks_active) + u64::from(report.blocks_evictable) + expected;
            known.index.set_capacity(report.blocks_total as usize);
            known.index.trim(blocks as usize);
        }
    }
}

/// The scorers of llm-d's endpoint picker with their default weights: 2 each for the queue and the KV cache, and 3 for
/// the prefix, if prefixes are scored. The highest sum wins; ties are broken at random. The picker polls the replicas
/// every 50 ms.
pub(crate) struct LlmD {
    loads: Vec<Load>,
    /// The approximate prefix index of each replica, if the competitor uses one.
    indexes: Option<Vec<PrefixIndex>>,
    rng: StdRng,
}

impl LlmD {
    pub(crate) fn new(replicas: usize, with_prefix: bool, seed: u64) -> Self {
        let indexes = with_prefix.then(|| (0..replicas).map(|_| PrefixIndex::default()).collect());
        Self { loads: vec![Load::default(); replicas], indexes, rng: StdRng::seed_from_u64(seed) }
    }
}

impl Router for LlmD {
    fn pick(&mut self, _: usize, request: &Request, _: &World) -> Option<(usize, u64)> {
        let waiting = || self.loads.iter().map(|load| f64::from(load.waiting));
        let (least, most) = waiting()
            .fold((f64::MAX, 0.0f64), |(least, most), waiting| (least.min(waiting), most.max(waiting)));
        let blocks = request.prefix_hashes.blocks().max(1) as f64;
        let mut best = (f64::MIN, 0);
        let mut ties = 0;
        for (replica, load) in self.loads.iter().enumerate() {
            let queue = match most > least {
                true => (most - f64::from(load.waiting)) / (most - least),
                false => 1.0,
            };
            let kv = 1.0 - f64::from(load.blocks_active) / f64::from(load.blocks_total.max(1));
            let prefix = match &self.indexes {
                Some(indexes) => indexes[replica].cached_blocks(&request.prefix_hashes) as f64 / blocks,
                None => 0.0,
            };
            let score = 2.0 * queue + 2.0 * kv + 3.0 * prefix;
            if score > best.0 {
                (best, ties) = ((score, replica), 1);
            } else if score == best.0 {
                ties += 1;
                if self.rng.next_u64().is_multiple_of(ties) {
                    best.1 = replica;
                }
            }
        }
        if let Some(indexes) = &mut self.indexes {
            indexes[best.1].record(&request.prefix_hashes, 0);
        }
        Some((best.1, 0))
    }

    fn poll_every(&self) -> Option<Nanos> {
        Some(SECOND / 20)
    }

    fn polled(&mut self, loads: &[Load], _: Nanos) {
        self.loads = loads.to_vec();
    }
}

/// The least-load formula of the Shepherd Model Gateway: the queued tokens and those sent since the last poll, divided
/// by the throughput, plus a penalty that grows with the usage of the KV cache. The first of several equal replicas
/// wins. The gateway polls once a second, which is ten times as often as its default.
pub(crate) struct LeastLoad {
    loads: Vec<Load>,
    sent: Vec<f64>,
}

impl LeastLoad {
    pub(crate) fn new(replicas: usize) -> Self {
        Self { loads: vec![Load::default(); replicas], sent: vec![0.0; replicas] }
    }
}

impl Router for LeastLoad {
    fn pick(&mut self, _: usize, request: &Request, _: &World) -> Option<(usize, u64)> {
        const LAMBDA: f64 = 0.15;
        let score = |replica: usize| {
            let load = &self.loads[replica];
            let speed = f64::from(load.prefill_tokens_per_second);
            let throughput = if speed > 0.0 { speed } else { 1000.0 };
            let filled = f64::from(load.blocks_active) / f64::from(load.blocks_total.max(1));
            let filled = filled.clamp(0.0, 0.999);
            let tokens = load.uncomputed_tokens as f64 + self.sent[replica];
            tokens / throughput + LAMBDA * filled / (1.0 - filled)
        };
        let best = (0..self.loads.len()).min_by(|&a, &b| score(a).total_cmp(&score(b)))?;
        self.sent[best] += f64::from(request.estimated_prompt_tokens);
        Some((best, 0))
    }

    fn poll_every(&self) -> Option<Nanos> {
        Some(SECOND)
    }

    fn polled(&mut self, loads: &[Load], _: Nanos) {
        self.loads = loads.to_vec();
        self.sent.fill(0.0);
    }
}

/// Knows the present state of each replica, including its cache, the requests on their way and the length of every
/// answer, and picks the replica that would generate the first token of the request earliest. The oracle does not know
/// later requests, never lets a request wait in the router, and never moves a request after sending it.
pub(crate) struct Oracle;

impl Router for Oracle {
    fn pick(&mut self, id: usize, request: &Request, world: &World) -> Option<(usize, u64)> {
        let first = |replica: &Replica| (first_token(id, request, world.now, replica), backlog(replica));
        (0..world.replicas.len()).min_by_key(|&index| first(&world.replicas[index])).map(|index| (index, 0))
    }
}

/// The time at which a replica would generate the first token of a request.
fn first_token(id: usize, request: &Request, now: Nanos, replica: &Replica) -> Nanos {
    let mut engine = replica.engine.clone();
    let mut coming = replica.in_transit.clone();
    coming.push(RequestInTransit { arrives: now + 1_100_000, request: id, spec: request.spec.clone() });
    coming.sort_by_key(|sent| Reverse(sent.arrives));
    let mut outcomes = Vec::new();
    let mut at = replica.busy_until.unwrap_or(now);
    let mut is_busy = replica.busy_until.is_some();
    loop {
        if is_busy {
            engine.end_step(&mut outcomes);
            if outcomes.drain(..).any(|outcome| outcome == Outcome::First { request: id }) {
                return at;
            }
        }
        while let Some(sent) = coming.pop_if(|sent| sent.arrives <= at) {
            engine.submit(sent.request, sent.spec);
        }
        is_busy = !engine.is_idle();
        if is_busy {
            at += engine.begin_step();
        } else {
            at = coming.last().expect("the request is on its way").arrives;
        }
    }
}

/// The number of requests at a replica, which breaks ties between replicas that would answer at the same time.
fn backlog(replica: &Replica) -> u64 {
    let load = replica.engine.load();
    u64::from(load.running) + u64::from(load.waiting) + replica.in_transit.len() as u64
}
