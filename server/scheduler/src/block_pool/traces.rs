//! What the order of eviction is worth: the share of prompts that is found, by traces of requests, beside plain age.
//!
//! A token stands for a block. The traces are made of numbers that never change, so the figures are the same
//! everywhere; they stand in `docs/decisions/0042-eviction.md`.

use std::collections::VecDeque;

use super::*;
use crate::block::block_hash;

const ROOT: After = After::Root(BlockHash::ROOT, 0);
const BLOCKS: u32 = 1000;
/// Requests that hold their blocks at once.
const AT_ONCE: usize = 4;

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, end: u32) -> u32 {
        (self.next() % u64::from(end)) as u32
    }

    fn share(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// One of `0..count`, the first ones most often: by Zipf's law, near enough.
    fn zipf(&mut self, count: u32) -> u32 {
        (f64::from(count).powf(self.share()) as u32).saturating_sub(1).min(count - 1)
    }
}

/// Blocks that were never before.
struct Fresh(u32);

impl Fresh {
    fn blocks(&mut self, count: u32) -> impl Iterator<Item = TokenId> + use<> {
        let first = self.0;
        self.0 += count;
        first..self.0
    }
}

/// A request: blocks of its prompt, and of its answer.
type Asked = (Vec<TokenId>, u32);

/// Serves requests with a pool, some at once.
struct Replay {
    pool: BlockPool,
    in_use: VecDeque<Vec<BlockId>>,
    asked: u64,
    found: u64,
    answers: u32,
}

impl Replay {
    fn new(stays: [u32; STAYS.len()]) -> Self {
        let pool = BlockPool::staying(BLOCKS, 1, stays);
        Self { pool, in_use: VecDeque::new(), asked: 0, found: 0, answers: u32::MAX }
    }

    /// Answers a request; gives the blocks of prompt and answer.
    fn serve(&mut self, (mut tokens, answer): Asked, counts: bool) -> Vec<TokenId> {
        if self.in_use.len() == AT_ONCE {
            let oldest = self.in_use.pop_front().unwrap();
            oldest.into_iter().rev().for_each(|block| self.pool.release(block));
        }
        let (mut table, mut parent, mut hash) = (Vec::new(), Serial::root(0), BlockHash::ROOT);
        let prompt = tokens.len();
        for _ in 0..answer {
            tokens.push(self.answers);
            self.answers -= 1;
        }
        let mut known = 0;
        for token in &tokens {
            hash = block_hash(hash, &[*token]);
            let content = Content { hash, parent, tokens: &[*token] };
            let block = match self.pool.find(content) {
                Some(block) => {
                    self.pool.share(block);
                    known += 1;
                    block
                }
                None => {
                    if known == table.len() {
                        self.pool.found(table.iter().copied());
                    }
                    let block = self.pool.allocate().unwrap();
                    let after = table.last().map_or(ROOT, |&last| After::Block(last));
                    assert_eq!(self.pool.register(block, after, content), Registered::New);
                    block
                }
            };
            parent = self.pool.serial(block).unwrap();
            table.push(block);
        }
        self.found += if counts { known as u64 } else { 0 };
        self.asked += if counts { prompt as u64 } else { 0 };
        self.in_use.push_back(table);
        tokens
    }

    fn share_found(&self) -> f64 {
        self.found as f64 / self.asked as f64
    }
}

/// People who talk, each turn with all that was said before, `turns` of them, then about something else.
struct Talks {
    random: Random,
    fresh: Fresh,
    turns: u32,
    /// Whether each has just so many turns; else that is the average.
    fixed: bool,
    talks: Vec<(Vec<TokenId>, u32)>,
}

impl Talks {
    fn new((people, turns, fixed): (u32, u32, bool)) -> Self {
        let talks = vec![(Self::system(), 0); people as usize];
        Self { random: Random(1), fresh: Fresh(1 << 20), turns, fixed, talks }
    }

    fn system() -> Vec<TokenId> {
        (0..8).collect()
    }

    fn turn(&mut self, replay: &mut Replay, counts: bool) {
        let Self { random, fresh, turns, fixed, talks } = self;
        let who = random.below(talks.len() as u32);
        let (said, turn) = &mut talks[who as usize];
        if if *fixed { *turn >= *turns } else { random.below(*turns) == 0 } {
            (*said, *turn) = (Self::system(), 0);
        }
        said.extend(fresh.blocks(1 + random.below(4)));
        *said = replay.serve((std::mem::take(said), 2 + random.below(6)), counts);
        *turn += 1;
    }
}

fn conversations(replay: &mut Replay, talks: (u32, u32, bool), one_off: f64) {
    let mut talks = Talks::new(talks);
    for number in 0..12_000 {
        if talks.random.share() < one_off {
            let prompt: Vec<_> = talks.fresh.blocks(30 + talks.random.below(40)).collect();
            replay.serve((prompt, 2), false);
        }
        talks.turn(replay, number > 2_000);
    }
}

/// People who talk, beside documents that several questions are asked about soon after each other, and none later.
fn talks_and_documents(replay: &mut Replay, people: u32, questions: u32) {
    let mut talks = Talks::new((people, 6, false));
    let (mut random, mut fresh) = (Random(4), Fresh(1 << 28));
    let mut document: Vec<_> = Vec::new();
    for number in 0..12_000 {
        if number % 4 == 0 {
            if number / 4 % questions == 0 {
                document = fresh.blocks(40).collect();
            }
            let mut prompt = document.clone();
            prompt.extend(fresh.blocks(1 + random.below(3)));
            replay.serve((prompt, 3), number > 2_000);
        }
        talks.turn(replay, number > 2_000);
    }
}

/// People who talk, beside applications.
fn talks_and_applications(replay: &mut Replay, people: u32, applications: u32) {
    let mut talks = Talks::new((people, 6, false));
    let (mut random, mut fresh) = (Random(5), Fresh(1 << 28));
    for number in 0..12_000 {
        if number % 4 == 0 {
            let which = 1000 + 48 * random.zipf(applications);
            let prompt = (which..which + 48).chain(fresh.blocks(1 + random.below(3)));
            replay.serve((prompt.collect(), 3), number > 2_000);
        }
        talks.turn(replay, number > 2_000);
    }
}

/// Prompts of applications, of 48 blocks, some of them used much oftener, between prompts that never come again.
/// `changes`: after how many requests others are the popular ones.
fn applications(replay: &mut Replay, (count, one_off): (u32, f64), changes: u32) {
    let (mut random, mut fresh) = (Random(2), Fresh(1 << 20));
    for number in 0..20_000 {
        if random.share() < one_off {
            let prompt: Vec<_> = fresh.blocks(40 + random.below(60)).collect();
            replay.serve((prompt, 4), false);
            continue;
        }
        let which = (random.zipf(count) + number / changes * 7) % count;
        let prompt = (which * 48..(which + 1) * 48).chain(fresh.blocks(1 + random.below(3)));
        replay.serve((prompt.collect(), 3), number > 3_000);
    }
}

/// Documents, each as often as any other.
fn uniform(replay: &mut Replay, count: u32) {
    let (mut random, mut fresh) = (Random(3), Fresh(1 << 20));
    for number in 0..20_000 {
        let which = random.below(count);
        let prompt = (which * 20..(which + 1) * 20).chain(fresh.blocks(2));
        replay.serve((prompt.collect(), 2), number > 3_000);
    }
}

/// All documents, one after the other, again and again: what age is worst at.
fn round(replay: &mut Replay, count: u32) {
    let mut fresh = Fresh(1 << 20);
    for number in 0..10_000 {
        let which = number % count;
        let prompt = (which * 20..(which + 1) * 20).chain(fresh.blocks(2));
        replay.serve((prompt.collect(), 2), number > 2_000);
    }
}

fn measure(trace: impl Fn(&mut Replay), stays: [u32; STAYS.len()]) -> f64 {
    let mut replay = Replay::new(stays);
    trace(&mut replay);
    replay.pool.check_invariants(replay.in_use.iter().flatten().copied());
    replay.share_found()
}

/// Its name, the trace, and the least by which the share that is found is to differ from that by plain age.
type Trace = (&'static str, Box<dyn Fn(&mut Replay)>, f64);

fn traces() -> Vec<Trace> {
    fn trace(name: &'static str, run: impl Fn(&mut Replay) + 'static, least: f64) -> Trace {
        (name, Box::new(run), least)
    }
    vec![
        trace("30 people, 5 turns each", |replay| conversations(replay, (30, 5, true), 0.0), -0.01),
        trace("40 people, some 5 turns", |replay| conversations(replay, (40, 5, false), 0.0), -0.01),
        trace("80 people, some 10 turns", |replay| conversations(replay, (80, 10, false), 0.0), -0.01),
        trace("20 people, one-off prompts", |replay| conversations(replay, (20, 8, false), 0.3), -0.01),
        trace("30 people, documents of 3 questions", |replay| talks_and_documents(replay, 30, 3), -0.01),
        trace("30 people, documents of 9 questions", |replay| talks_and_documents(replay, 30, 9), -0.02),
        trace("30 people, 10 applications", |replay| talks_and_applications(replay, 30, 10), 0.0),
        trace("30 people, 60 applications", |replay| talks_and_applications(replay, 30, 60), -0.01),
        trace("12 applications", |replay| applications(replay, (12, 0.0), u32::MAX), -0.01),
        trace("12 applications, one-off prompts", |replay| applications(replay, (12, 0.5), u32::MAX), 0.1),
        trace("60 applications, one-off prompts", |replay| applications(replay, (60, 0.3), u32::MAX), 0.05),
        trace(
            "60 applications, others each 500 requests",
            |replay| applications(replay, (60, 0.3), 500),
            0.03,
        ),
        trace("100 documents, uniform", |replay| uniform(replay, 100), -0.01),
        trace("60 documents, one after the other", |replay| round(replay, 60), -0.01),
    ]
}

#[test]
fn what_is_found_again_stays_longer_and_that_is_worth_it() {
    for (name, trace, least) in traces() {
        let (age, reuse) = (measure(&trace, [0; STAYS.len()]), measure(&trace, STAYS));
        println!("{name:45} by age {:5.1} %, by reuse {:5.1} %", 100.0 * age, 100.0 * reuse);
        assert!(reuse - age >= least, "{name}: {reuse} instead of {age}");
    }
}
