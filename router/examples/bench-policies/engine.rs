//! A replica in virtual time: what the server's scheduler does, in the little that matters for time.
//!
//! Steps are put together as `server-scheduler` does it: decodes first, then chunks of prompts of a bounded
//! size, then whoever finds blocks; full blocks are kept for prompts that begin alike, the least recently used
//! is evicted, the youngest is preempted. A test runs both side by side. Unlike the real one it can be cloned,
//! for an oracle that tries out where a request would be served first.

use std::collections::{HashMap, VecDeque};
use std::rc::Rc;

/// Virtual time since the start, in nanoseconds.
pub(crate) type Nanos = u64;

/// A second.
pub(crate) const SECOND: Nanos = 1_000_000_000;

/// For each so many prompts that are not computed, a step with decodes may be as large as a chunk once more.
const PROMPTS_PER_CHUNK: u32 = 8;

/// As there.
const PROMPTS_FOR_TWO: u32 = 8;
const DECODES_FOR_TWO: u32 = 16;

/// What a request is made of; the router is told only a part of it.
#[derive(Debug)]
pub(crate) struct Spec {
    /// Hashes of the full blocks of prompt and output, each of all that goes before it.
    pub(crate) blocks: Vec<u64>,
    pub(crate) prompt_tokens: u32,
    pub(crate) output_tokens: u32,
}

/// Sizes and speeds of a replica.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EngineConfig {
    pub(crate) block_tokens: u32,
    pub(crate) blocks_total: u32,
    pub(crate) batch_tokens_max: u32,
    pub(crate) chunk_tokens_max: u32,
    pub(crate) sequences_max: u32,
    /// What a step costs, whatever it computes,
    pub(crate) step: Nanos,
    /// each token in a row of several,
    pub(crate) prefill_token: Nanos,
    /// and each row of one token.
    pub(crate) decode_row: Nanos,
}

#[derive(Clone, Debug)]
struct Sequence {
    request: usize,
    spec: Rc<Spec>,
    /// Position in the order of arrival.
    rank: u64,
    /// Tokens it has, those of the prompt and the generated ones.
    tokens: u32,
    computed: u32,
    table: Vec<u32>,
    registered: u32,
    /// Leading blocks that it knows the hashes of: those of its prompt, and those it has registered.
    hashed: u32,
    /// Up to which block it has announced to compute.
    claimed: u32,
    /// Tokens it computes in the step under way.
    row: u32,
}

#[derive(Clone, Copy, Debug, Default)]
struct Block {
    hash: Option<u64>,
    holders: u32,
    /// When it was given back last: which entry of `evictable` is about it.
    stamp: u64,
}

/// A request's first token or its last, at the end of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// The prompt is computed; so many of its tokens were cached.
    First { request: usize },
    /// All tokens are generated.
    Finished { request: usize },
}

/// How busy it is: `server_scheduler::Load`, in the fields that are reported.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Load {
    pub(crate) active: u32,
    pub(crate) evictable: u32,
    pub(crate) running: u32,
    pub(crate) waiting: u32,
    pub(crate) uncomputed: u64,
    pub(crate) preemptions: u64,
}

#[derive(Clone, Debug)]
pub(crate) struct Engine {
    pub(crate) config: EngineConfig,
    blocks: Vec<Block>,
    cached: HashMap<u64, u32, std::hash::BuildHasherDefault<Plain>>,
    free: Vec<u32>,
    /// In the order in which they were given back. An entry whose stamp is not the block's is void.
    evictable: VecDeque<(u64, u32)>,
    evictable_count: u32,
    stamps: u64,
    running: Vec<Sequence>,
    waiting: VecDeque<Sequence>,
    arrivals: u64,
    preemptions: u64,
    /// Prompt tokens that were found in the cache, and all.
    pub(crate) cached_tokens: u64,
    pub(crate) prompt_tokens: u64,
    /// Observed speeds, as the server averages them.
    prefill: Rate,
    decode: Rate,
}

/// `Rate` of the server's engine.
#[derive(Clone, Copy, Debug, Default)]
struct Rate {
    tokens: f64,
    seconds: f64,
}

impl Rate {
    fn add(&mut self, tokens: u32, time: f64) {
        if tokens > 0 {
            let kept = (-time / 5.0).exp();
            self.tokens = self.tokens * kept + f64::from(tokens);
            self.seconds = self.seconds * kept + time;
        }
    }

    fn per_second(self) -> f32 {
        if self.seconds > 0.0 { (self.tokens / self.seconds) as f32 } else { 0.0 }
    }
}

/// Keys that are hashes already.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Plain(u64);

impl std::hash::Hasher for Plain {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, _: &[u8]) {
        unreachable!("keys are numbers");
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = value;
    }
}

impl Engine {
    pub(crate) fn new(config: EngineConfig) -> Self {
        Self {
            config,
            blocks: vec![Block::default(); config.blocks_total as usize],
            cached: HashMap::default(),
            free: (0..config.blocks_total).rev().collect(),
            evictable: VecDeque::new(),
            evictable_count: 0,
            stamps: 0,
            running: Vec::new(),
            waiting: VecDeque::new(),
            arrivals: 0,
            preemptions: 0,
            cached_tokens: 0,
            prompt_tokens: 0,
            prefill: Rate::default(),
            decode: Rate::default(),
        }
    }

    pub(crate) fn submit(&mut self, request: usize, spec: Rc<Spec>) {
        self.waiting.push_back(Sequence {
            request,
            rank: self.arrivals,
            tokens: spec.prompt_tokens,
            computed: 0,
            table: Vec::new(),
            registered: 0,
            hashed: spec.prompt_tokens / self.config.block_tokens,
            claimed: 0,
            row: 0,
            spec,
        });
        self.arrivals += 1;
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty()
    }

    /// Prompt and generated tokens per second as reported, 0 until observed.
    pub(crate) fn speeds(&self) -> (f32, f32) {
        (self.prefill.per_second(), self.decode.per_second())
    }

    pub(crate) fn load(&self) -> Load {
        let sequences = self.running.iter().chain(&self.waiting);
        Load {
            active: self.config.blocks_total - self.free.len() as u32 - self.evictable_count,
            evictable: self.evictable_count,
            running: self.running.len() as u32,
            waiting: self.waiting.len() as u32,
            uncomputed: sequences.map(|sequence| u64::from(sequence.tokens - sequence.computed)).sum(),
            preemptions: self.preemptions,
        }
    }

    /// Puts the next step together and returns the time it takes. Something has to be there to compute.
    pub(crate) fn begin_step(&mut self) -> Nanos {
        let EngineConfig { batch_tokens_max, chunk_tokens_max, step, prefill_token, decode_row, .. } =
            self.config;
        let mut budget = batch_tokens_max;
        let mut position = 0;
        while position < self.running.len() && budget > 0 {
            let sequence = &self.running[position];
            if sequence.tokens - sequence.computed == 1 && self.make_room(position) {
                self.running[position].row = 1;
                budget -= 1;
            }
            position += 1;
        }
        let decodes = batch_tokens_max - budget;
        if decodes > 0 {
            let prompts = (self.running.len() + self.waiting.len()) as u32 - decodes;
            let is_two = prompts >= if decodes < DECODES_FOR_TWO { PROMPTS_FOR_TWO } else { 2 };
            let times = (prompts / decodes).max(prompts / PROMPTS_PER_CHUNK).max(1 + u32::from(is_two));
            let most = chunk_tokens_max.saturating_mul(times);
            budget = budget.min(most.saturating_sub(decodes).max(most.div_ceil(4)));
        }
        for sequence in self.running.iter_mut().filter(|sequence| sequence.row == 0) {
            sequence.row = budget.min(sequence.tokens - sequence.computed);
            budget -= sequence.row;
        }
        self.admit(&mut budget);
        let cost = |row: u32| match row {
            0 => 0,
            1 => decode_row,
            count => Nanos::from(count) * prefill_token,
        };
        let time = step + self.running.iter().map(|sequence| cost(sequence.row)).sum::<Nanos>();
        self.count(time);
        time
    }

    fn count(&mut self, time: Nanos) {
        let (mut prompt, mut generated) = (0, 0);
        for sequence in &self.running {
            if sequence.row > 1 || sequence.computed < sequence.spec.prompt_tokens {
                prompt += sequence.row;
            }
            generated += u32::from(sequence.row > 0 && sequence.computed + sequence.row == sequence.tokens);
        }
        let seconds = time as f64 / SECOND as f64;
        self.prefill.add(prompt, seconds);
        self.decode.add(generated, seconds);
    }

    /// Takes in what the step computed.
    pub(crate) fn end_step(&mut self, outcomes: &mut Vec<Outcome>) {
        let mut position = 0;
        while position < self.running.len() {
            let count = std::mem::take(&mut self.running[position].row);
            self.running[position].computed += count;
            self.register(position);
            let sequence = &mut self.running[position];
            if count > 0 && sequence.computed == sequence.tokens {
                sequence.tokens += 1;
                let request = sequence.request;
                if sequence.tokens == sequence.spec.prompt_tokens + 1 {
                    outcomes.push(Outcome::First { request });
                }
                if sequence.tokens == sequence.spec.prompt_tokens + sequence.spec.output_tokens {
                    outcomes.push(Outcome::Finished { request });
                    let sequence = self.running.remove(position);
                    self.release(&sequence.table);
                    continue;
                }
            }
            position += 1;
        }
    }

    fn make_room(&mut self, position: usize) -> bool {
        loop {
            let sequence = &self.running[position];
            if (sequence.computed / self.config.block_tokens) < sequence.table.len() as u32 {
                return true;
            }
            if let Some(block) = self.allocate() {
                self.running[position].table.push(block);
                return true;
            }
            let mut youngest = self.running.pop().expect("who needs room runs");
            self.preemptions += 1;
            self.release(&youngest.table);
            youngest.table.clear();
            (youngest.computed, youngest.registered) = (0, 0);
            let at = self.waiting.partition_point(|other| other.rank < youngest.rank);
            self.waiting.insert(at, youngest);
            if self.running.len() == position {
                return false;
            }
        }
    }

    fn admit(&mut self, budget: &mut u32) {
        let mut position = 0;
        while *budget > 0 && position < self.waiting.len() {
            if self.running.len() as u32 == self.config.sequences_max {
                return;
            }
            let sequence = &self.waiting[position];
            let full = sequence.hashed as usize;
            let chain = &sequence.spec.blocks[..full];
            let cached = chain.partition_point(|hash| self.cached.contains_key(hash));
            if cached < full && self.is_being_computed(chain, cached) {
                position += 1;
                continue;
            }
            let kept = cached.min((sequence.tokens as usize - 1) / self.config.block_tokens as usize);
            let lacking = sequence.tokens.div_ceil(self.config.block_tokens) - kept as u32;
            let of_nobody = |hash: &&u64| self.blocks[self.cached[*hash] as usize].holders == 0;
            let evictable = chain[..kept].iter().filter(of_nobody).count() as u32;
            let growth = 1 + self.config.blocks_total / 100;
            let available = self.free.len() as u32 + self.evictable_count;
            if !self.running.is_empty() && lacking + evictable + growth > available {
                return;
            }
            let mut sequence = self.waiting.remove(position).expect("it is there");
            self.take_blocks(&mut sequence, cached, kept);
            sequence.row = (*budget).min(sequence.tokens - sequence.computed);
            *budget -= sequence.row;
            let at = self.running.partition_point(|other| other.rank < sequence.rank);
            self.running.insert(at, sequence);
        }
    }

    /// Whether a running sequence is about to compute the block at `index` of `chain`.
    fn is_being_computed(&self, chain: &[u64], index: usize) -> bool {
        self.running.iter().any(|sequence| {
            (sequence.registered as usize..sequence.claimed as usize).contains(&index)
                && sequence.spec.blocks[index] == chain[index]
        })
    }

    /// `cached` leading blocks are there, of which `kept` are taken; a prompt that is cached whole still
    /// computes its last token, into a block of its own.
    fn take_blocks(&mut self, sequence: &mut Sequence, cached: usize, kept: usize) {
        for index in 0..kept {
            let block = self.cached[&sequence.spec.blocks[index]];
            self.share(block);
            sequence.table.push(block);
        }
        sequence.computed = (cached as u32 * self.config.block_tokens).min(sequence.tokens - 1);
        sequence.registered = kept as u32;
        sequence.claimed = sequence.hashed;
        if sequence.tokens == sequence.spec.prompt_tokens {
            self.cached_tokens += u64::from(sequence.computed);
            self.prompt_tokens += u64::from(sequence.tokens);
        }
        while sequence.table.len() < sequence.tokens.div_ceil(self.config.block_tokens) as usize {
            sequence.table.push(self.allocate().expect("there is room"));
        }
    }

    fn register(&mut self, position: usize) {
        let full = self.running[position].computed / self.config.block_tokens;
        while self.running[position].registered < full {
            let sequence = &mut self.running[position];
            let index = sequence.registered as usize;
            sequence.registered += 1;
            sequence.hashed = sequence.hashed.max(sequence.registered);
            let hash = sequence.spec.blocks[index];
            let block = sequence.table[index];
            match self.cached.get(&hash).copied() {
                None => {
                    self.cached.insert(hash, block);
                    self.blocks[block as usize].hash = Some(hash);
                }
                Some(present) if present != block => {
                    self.share(present);
                    self.release(&[block]);
                    self.running[position].table[index] = present;
                }
                Some(_) => {}
            }
        }
    }

    fn allocate(&mut self) -> Option<u32> {
        if let Some(block) = self.free.pop() {
            self.blocks[block as usize].holders = 1;
            return Some(block);
        }
        while let Some((stamp, block)) = self.evictable.pop_front() {
            let found = &mut self.blocks[block as usize];
            if found.holders == 0 && found.stamp == stamp {
                self.evictable_count -= 1;
                found.holders = 1;
                let hash = found.hash.take().expect("what is evictable is cached");
                self.cached.remove(&hash);
                return Some(block);
            }
        }
        None
    }

    fn share(&mut self, block: u32) {
        let found = &mut self.blocks[block as usize];
        if found.holders == 0 {
            self.evictable_count -= 1;
        }
        found.holders += 1;
    }

    /// Gives blocks back, the last one first, so that ends are evicted before beginnings.
    fn release(&mut self, table: &[u32]) {
        for &block in table.iter().rev() {
            let found = &mut self.blocks[block as usize];
            found.holders -= 1;
            if found.holders > 0 {
                continue;
            }
            if found.hash.is_some() {
                self.stamps += 1;
                found.stamp = self.stamps;
                self.evictable.push_back((self.stamps, block));
                self.evictable_count += 1;
            } else {
                self.free.push(block);
            }
        }
        if self.evictable.len() > 4 * self.blocks.len() {
            let blocks = &self.blocks;
            self.evictable.retain(|&(stamp, block)| {
                blocks[block as usize].holders == 0 && blocks[block as usize].stamp == stamp
            });
        }
    }
}
