//! Tests how tenants of the same scheduler affect each other, in simulated time.

use std::collections::BTreeMap;
use std::time::Duration;

use server_scheduler::{
    Batch, CacheSize, Event, NewRequest, SampledToken, Scheduler, SchedulerConfig, SequenceId, StopCriteria,
    TokenId,
};

use crate::script::config;

const VICTIM: u128 = 1;
const ATTACKER: u128 = 2;
/// Number of the victim's first requests that are not measured, because the scheduler does not yet know how long steps
/// take.
const WARM_UP: usize = 8;

/// A client that sends each request when its previous one is answered.
#[derive(Clone, Copy)]
struct Client {
    tenant: u128,
    prompt_tokens: u32,
    num_sequences: u32,
    max_tokens: u32,
}

/// Clients, a scheduler and a model whose steps take 5 ms, plus 1 ms for each token and 0.2 µs for each pair of a token
/// and a token of the same sequence from an earlier step.
struct Simulation {
    scheduler: Scheduler,
    clients: Vec<Client>,
    /// The client of each request, and the time at which the request was sent.
    requests: BTreeMap<u64, (usize, Duration)>,
    now: Duration,
}

impl Simulation {
    fn new(clients: Vec<Client>) -> Self {
        let config = SchedulerConfig {
            max_num_batched_tokens: 512,
            max_chunk_tokens: 128,
            max_num_seqs: 256,
            max_queue: 1024,
            max_model_len: 8192,
            ..config()
        };
        let cache = CacheSize { block_tokens: 16, blocks_total: 1024 };
        let scheduler = Scheduler::new(config, cache);
        let mut simulation = Self { scheduler, clients, requests: BTreeMap::new(), now: Duration::ZERO };
        (0..simulation.clients.len()).for_each(|client| simulation.send(client));
        simulation
    }

    fn send(&mut self, client: usize) {
        let id = self.requests.len() as u64;
        let Client { tenant, prompt_tokens, num_sequences, max_tokens } = self.clients[client];
        let prompt: Vec<TokenId> = (0..prompt_tokens).map(|position| id as u32 * 10_000 + position).collect();
        let stop = StopCriteria { max_tokens, ..StopCriteria::default() };
        let request = NewRequest { tenant, ..NewRequest::new(id, num_sequences, prompt, stop) };
        self.scheduler.submit(request).expect("the queue has room");
        self.requests.insert(id, (client, self.now));
    }

    /// Runs until `count` requests of the victim are answered, and returns the longest time that one of them took, not
    /// counting the first [`WARM_UP`] requests.
    fn run(mut self, count: usize) -> Duration {
        let (mut batch, mut events) = (Batch::default(), Vec::new());
        let (mut answered, mut longest) = (0, Duration::ZERO);
        let mut open: BTreeMap<u64, u32> = BTreeMap::new();
        while answered < count {
            self.scheduler.schedule(&mut batch);
            assert!(!batch.sequences.is_empty(), "there is always something to compute");
            let pairs: u64 = batch
                .sequences
                .iter()
                .map(|sequence| sequence.tokens.len() as u64 * u64::from(sequence.computed_tokens))
                .sum();
            let time = Duration::from_micros(5_000 + 1_000 * batch.tokens.len() as u64 + pairs / 5);
            self.now += time;
            let sampled: Vec<_> = batch.samples.iter().map(|&id| SampledToken::new(id, 7)).collect();
            events.clear();
            self.scheduler.commit(&batch, &sampled, &mut events);
            self.scheduler.record_step(&batch, time);
            self.scheduler.check_invariants();
            for event in &events {
                let Event::Finished { sequence, .. } = event else { continue };
                let (client, sent) = self.requests[&sequence.request];
                let open = open.entry(sequence.request).or_insert(self.clients[client].num_sequences);
                *open -= 1;
                if *open == 0 {
                    if self.clients[client].tenant == VICTIM {
                        answered += 1;
                        if answered > WARM_UP {
                            longest = longest.max(self.now - sent);
                        }
                    }
                    self.send(client);
                }
            }
        }
        longest
    }
}

/// The factor by which `attackers` prolong the victim's slowest request.
fn slowdown(attackers: Vec<Client>) -> f64 {
    let victim = Client { tenant: VICTIM, prompt_tokens: 40, num_sequences: 1, max_tokens: 16 };
    let alone = Simulation::new(vec![victim; 2]).run(40);
    let beside = Simulation::new([vec![victim; 2], attackers].concat()).run(40);
    beside.as_secs_f64() / alone.as_secs_f64()
}

fn attackers(count: usize, prompt_tokens: u32, num_sequences: u32, max_tokens: u32) -> Vec<Client> {
    vec![Client { tenant: ATTACKER, prompt_tokens, num_sequences, max_tokens }; count]
}

#[test]
fn requests_of_another_tenant_delay_little() {
    for (name, attackers) in [
        ("long prompts", attackers(32, 4000, 1, 4)),
        ("a single long prompt", attackers(1, 7900, 1, 1)),
        ("many short prompts", attackers(64, 40, 1, 1)),
        ("many sequences", attackers(4, 100, 128, 100)),
        ("many long sequences", attackers(2, 3200, 128, 2)),
        ("requests that fill the cache", attackers(8, 7900, 1, 200)),
    ] {
        let slowdown = slowdown(attackers);
        assert!(slowdown < 3.0, "{name}: the victim's slowest request takes {slowdown} times as long");
    }
}

#[test]
fn a_long_queue_of_another_tenant_does_not_hide_a_request() {
    const OTHER: u128 = ATTACKER;
    let config = SchedulerConfig { max_queue: 256, max_model_len: 512, ..config() };
    let mut scheduler = Scheduler::new(config, CacheSize { block_tokens: 4, blocks_total: 1024 });
    let (mut batch, mut ids) = (Batch::default(), 0..);
    let mut submit = |scheduler: &mut Scheduler, tenant, prompt_tokens, max_tokens| {
        let id = ids.next().expect("the range is infinite");
        let stop = StopCriteria { max_tokens, ..StopCriteria::default() };
        let request = NewRequest::new(id, 1, vec![7; prompt_tokens], stop);
        scheduler.submit(NewRequest { tenant, ..request }).expect("the queue has room");
        id
    };
    let mut step = |scheduler: &mut Scheduler| {
        scheduler.schedule(&mut batch);
        let sampled: Vec<_> = batch.samples.iter().map(|&id| SampledToken::new(id, 7)).collect();
        scheduler.commit(&batch, &sampled, &mut Vec::new());
        scheduler.check_invariants();
        batch.sequences.iter().map(|sequence| sequence.id.request).collect::<Vec<_>>()
    };
    // After this request, the next request of the victim starts at a later virtual time than the queued requests of the
    // other tenant.
    submit(&mut scheduler, VICTIM, 400, 1);
    while !scheduler.is_idle() {
        step(&mut scheduler);
    }
    for _ in 0..207 {
        submit(&mut scheduler, OTHER, 1, 100);
    }
    step(&mut scheduler);
    assert_eq!((scheduler.load().running, scheduler.load().waiting), (7, 200));
    let request = submit(&mut scheduler, VICTIM, 1, 1);
    assert!(step(&mut scheduler).contains(&request));
}

#[test]
fn requests_that_were_aborted_in_the_queue_do_not_delay_later_ones() {
    let config = SchedulerConfig { max_num_seqs: 1, max_queue: 256, max_model_len: 512, ..config() };
    let mut scheduler = Scheduler::new(config, CacheSize { block_tokens: 4, blocks_total: 1024 });
    let submit = |scheduler: &mut Scheduler, id, tenant| {
        let stop = StopCriteria { max_tokens: 1, ..StopCriteria::default() };
        let request = NewRequest { tenant, ..NewRequest::new(id, 1, vec![7; 400], stop) };
        scheduler.submit(request).expect("the queue has room");
    };
    let mut batch = Batch::default();
    submit(&mut scheduler, 0, VICTIM);
    for id in 1..100 {
        submit(&mut scheduler, id, VICTIM);
        scheduler.abort(SequenceId::new(id, 0));
    }
    for (id, tenant) in [(100, VICTIM), (101, ATTACKER), (102, ATTACKER)] {
        submit(&mut scheduler, id, tenant);
    }
    let mut events = Vec::new();
    while !scheduler.is_idle() {
        scheduler.schedule(&mut batch);
        let sampled: Vec<_> = batch.samples.iter().map(|&id| SampledToken::new(id, 7)).collect();
        scheduler.commit(&batch, &sampled, &mut events);
        scheduler.check_invariants();
    }
    let answered = events.iter().filter_map(|event| match event {
        Event::Finished { sequence, .. } => Some(sequence.request),
        _ => None,
    });
    assert_eq!(answered.collect::<Vec<_>>(), [0, 101, 100, 102]);
}
