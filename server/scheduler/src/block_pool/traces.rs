//! Measures the eviction order: the fraction of prompt blocks that are cached, compared with plain LRU, for synthetic
//! traces of requests.
//!
//! A token stands for a block. The pseudorandom numbers never change, so the figures are the same on every machine.
//! `docs/decisions/0042-eviction.md` lists most of them.

use std::collections::VecDeque;

use super::*;
use crate::block::block_hash;

#[path = "../../tests/random/random.rs"]
mod random;

use random::Random;

const START: BlockParent = BlockParent::Start { prefix_seed: BlockHash::NONE, adapter: 0 };
const BLOCKS: u32 = 1000;
/// Number of requests that hold their blocks at the same time.
const CONCURRENT_REQUESTS: usize = 4;

/// Returns a random number that is at least 0 and less than 1.
fn fraction(random: &mut Random) -> f64 {
    (random.next() >> 11) as f64 / (1u64 << 53) as f64
}

/// Returns a number in `0..count`, distributed approximately by Zipf's law.
fn zipf(random: &mut Random, count: u32) -> u32 {
    (f64::from(count).powf(fraction(random)) as u32).saturating_sub(1).min(count - 1)
}

/// Generates blocks that have never occurred before.
struct NewBlocks(u32);

impl NewBlocks {
    fn next(&mut self, count: u32) -> impl Iterator<Item = TokenId> + use<> {
        let first = self.0;
        self.0 += count;
        first..self.0
    }
}

/// A simulated request.
struct Request {
    prompt: Vec<TokenId>,
    /// Number of blocks of the answer.
    answer: u32,
    /// Whether the request is included in the measured fraction.
    is_measured: bool,
}

/// Serves several requests at a time with one pool.
struct Replay {
    pool: BlockPool,
    in_use: VecDeque<Vec<BlockId>>,
    prompt_blocks: u64,
    cached_blocks: u64,
    next_answer: TokenId,
}

impl Replay {
    fn new(retention: [u32; RETENTION.len()]) -> Self {
        let pool = BlockPool::with_retention(BLOCKS, 1, retention);
        Self { pool, in_use: VecDeque::new(), prompt_blocks: 0, cached_blocks: 0, next_answer: u32::MAX }
    }

    /// Answers a request, and returns the blocks of the prompt and the answer.
    fn serve(&mut self, request: Request) -> Vec<TokenId> {
        let Request { prompt: mut tokens, answer, is_measured } = request;
        if self.in_use.len() == CONCURRENT_REQUESTS {
            let oldest = self.in_use.pop_front().unwrap();
            oldest.into_iter().rev().for_each(|block| self.pool.release(block));
        }
        let (mut table, mut parent, mut hash) = (Vec::new(), START, BlockHash::NONE);
        let prompt_blocks = tokens.len();
        for _ in 0..answer {
            tokens.push(self.next_answer);
            self.next_answer -= 1;
        }
        let mut cached = 0;
        for token in &tokens {
            hash = block_hash(hash, &[*token]);
            let content = BlockContent { hash, parent, tokens: &[*token], images: &[] };
            let block = match self.pool.find(content) {
                Some(block) => {
                    self.pool.acquire(block);
                    cached += 1;
                    block
                }
                None => {
                    if cached == table.len() {
                        self.pool.record_hit(table.iter().copied());
                    }
                    let block = self.pool.allocate().unwrap();
                    assert_eq!(self.pool.register(block, content), RegisterResult::Cached);
                    block
                }
            };
            parent = BlockParent::Block(block);
            table.push(block);
        }
        if is_measured {
            self.cached_blocks += cached as u64;
            self.prompt_blocks += prompt_blocks as u64;
        }
        self.in_use.push_back(table);
        tokens
    }

    fn hit_rate(&self) -> f64 {
        self.cached_blocks as f64 / self.prompt_blocks as f64
    }
}

/// The conversations of several users at the same time.
#[derive(Clone, Copy)]
struct Conversations {
    users: u32,
    /// Number of turns of a conversation.
    turns: Turns,
}

impl Conversations {
    fn new(users: u32, turns: Turns) -> Self {
        Self { users, turns }
    }
}

#[derive(Clone, Copy)]
enum Turns {
    Exactly(u32),
    OnAverage(u32),
}

/// Users in conversations. The prompt of each turn contains all earlier turns. A user whose conversation ends begins
/// another.
struct Users {
    random: Random,
    fresh: NewBlocks,
    turns: Turns,
    /// The blocks and the number of turns of each user's conversation.
    conversations: Vec<(Vec<TokenId>, u32)>,
}

impl Users {
    fn new(Conversations { users, turns }: Conversations) -> Self {
        let conversations = vec![(Self::system_prompt(), 0); users as usize];
        Self { random: Random(1), fresh: NewBlocks(1 << 20), turns, conversations }
    }

    fn system_prompt() -> Vec<TokenId> {
        (0..8).collect()
    }

    fn take_turn(&mut self, replay: &mut Replay, is_measured: bool) {
        let Self { random, fresh, turns, conversations } = self;
        let user = random.below(conversations.len() as u32);
        let (text, turn) = &mut conversations[user as usize];
        let has_ended = match *turns {
            Turns::Exactly(turns) => *turn >= turns,
            Turns::OnAverage(turns) => random.once_in(turns),
        };
        if has_ended {
            (*text, *turn) = (Self::system_prompt(), 0);
        }
        text.extend(fresh.next(1 + random.below(4)));
        let prompt = std::mem::take(text);
        *text = replay.serve(Request { prompt, answer: 2 + random.below(6), is_measured });
        *turn += 1;
    }
}

/// Replays conversations, interleaved with prompts that never recur. `one_off` is the probability of such a prompt
/// before each turn.
fn conversations(replay: &mut Replay, conversations: Conversations, one_off: f64) {
    let mut users = Users::new(conversations);
    for number in 0..12_000 {
        if fraction(&mut users.random) < one_off {
            let prompt = users.fresh.next(30 + users.random.below(40)).collect();
            replay.serve(Request { prompt, answer: 2, is_measured: false });
        }
        users.take_turn(replay, number > 2_000);
    }
}

/// Replays conversations, interleaved with questions about documents. All questions about a document precede those
/// about the next document.
fn conversations_and_documents(replay: &mut Replay, users: u32, questions: u32) {
    let mut users = Users::new(Conversations { users, turns: Turns::OnAverage(6) });
    let (mut random, mut fresh) = (Random(4), NewBlocks(1 << 28));
    let mut document: Vec<_> = Vec::new();
    for number in 0..12_000 {
        if number % 4 == 0 {
            if number / 4 % questions == 0 {
                document = fresh.next(40).collect();
            }
            let mut prompt = document.clone();
            prompt.extend(fresh.next(1 + random.below(3)));
            replay.serve(Request { prompt, answer: 3, is_measured: number > 2_000 });
        }
        users.take_turn(replay, number > 2_000);
    }
}

/// Replays conversations, interleaved with requests of applications that have fixed prompts.
fn conversations_and_applications(replay: &mut Replay, users: u32, applications: u32) {
    let mut users = Users::new(Conversations { users, turns: Turns::OnAverage(6) });
    let (mut random, mut fresh) = (Random(5), NewBlocks(1 << 28));
    for number in 0..12_000 {
        if number % 4 == 0 {
            let which = 1000 + 48 * zipf(&mut random, applications);
            let prompt = (which..which + 48).chain(fresh.next(1 + random.below(3)));
            replay.serve(Request { prompt: prompt.collect(), answer: 3, is_measured: number > 2_000 });
        }
        users.take_turn(replay, number > 2_000);
    }
}

/// Replays requests of applications, some of which are much more popular than others, interleaved with prompts that
/// never recur. Each application has a fixed prompt of 48 blocks. `one_off` is the fraction of prompts that never
/// recur. After every `period` requests, other applications become popular.
fn applications(replay: &mut Replay, count: u32, one_off: f64, period: u32) {
    let (mut random, mut fresh) = (Random(2), NewBlocks(1 << 20));
    for number in 0..20_000 {
        if fraction(&mut random) < one_off {
            let prompt = fresh.next(40 + random.below(60)).collect();
            replay.serve(Request { prompt, answer: 4, is_measured: false });
            continue;
        }
        let which = (zipf(&mut random, count) + number / period * 7) % count;
        let prompt = (which * 48..(which + 1) * 48).chain(fresh.next(1 + random.below(3)));
        replay.serve(Request { prompt: prompt.collect(), answer: 3, is_measured: number > 3_000 });
    }
}

/// Replays requests for documents that are all equally popular.
fn uniform(replay: &mut Replay, count: u32) {
    let (mut random, mut fresh) = (Random(3), NewBlocks(1 << 20));
    for number in 0..20_000 {
        let which = random.below(count);
        let prompt = (which * 20..(which + 1) * 20).chain(fresh.next(2));
        replay.serve(Request { prompt: prompt.collect(), answer: 2, is_measured: number > 3_000 });
    }
}

/// Replays requests for all documents in turn, repeatedly: the worst case for LRU.
fn cyclic(replay: &mut Replay, count: u32) {
    let mut fresh = NewBlocks(1 << 20);
    for number in 0..10_000 {
        let which = number % count;
        let prompt = (which * 20..(which + 1) * 20).chain(fresh.next(2));
        replay.serve(Request { prompt: prompt.collect(), answer: 2, is_measured: number > 2_000 });
    }
}

fn measure(trace: impl Fn(&mut Replay), retention: [u32; RETENTION.len()]) -> f64 {
    let mut replay = Replay::new(retention);
    trace(&mut replay);
    replay.pool.check_invariants(replay.in_use.iter().flatten().copied());
    replay.hit_rate()
}

struct Trace {
    name: &'static str,
    run: Box<dyn Fn(&mut Replay)>,
    /// The smallest accepted value of the hit rate with retention minus the hit rate of plain LRU.
    gain_min: f64,
}

fn traces() -> Vec<Trace> {
    fn trace(name: &'static str, run: impl Fn(&mut Replay) + 'static, gain_min: f64) -> Trace {
        Trace { name, run: Box::new(run), gain_min }
    }
    vec![
        trace(
            "30 users, 5 turns",
            |replay| conversations(replay, Conversations::new(30, Turns::Exactly(5)), 0.0),
            -0.01,
        ),
        trace(
            "40 users, about 5 turns",
            |replay| conversations(replay, Conversations::new(40, Turns::OnAverage(5)), 0.0),
            -0.01,
        ),
        trace(
            "80 users, about 10 turns",
            |replay| conversations(replay, Conversations::new(80, Turns::OnAverage(10)), 0.0),
            -0.01,
        ),
        trace(
            "20 users, one-off prompts",
            |replay| conversations(replay, Conversations::new(20, Turns::OnAverage(8)), 0.3),
            -0.01,
        ),
        trace(
            "30 users, documents with 3 questions",
            |replay| conversations_and_documents(replay, 30, 3),
            -0.01,
        ),
        trace(
            "30 users, documents with 9 questions",
            |replay| conversations_and_documents(replay, 30, 9),
            -0.02,
        ),
        trace("30 users, 10 applications", |replay| conversations_and_applications(replay, 30, 10), 0.0),
        trace("30 users, 60 applications", |replay| conversations_and_applications(replay, 30, 60), -0.01),
        trace("12 applications", |replay| applications(replay, 12, 0.0, u32::MAX), -0.01),
        trace("12 applications, one-off prompts", |replay| applications(replay, 12, 0.5, u32::MAX), 0.1),
        trace("60 applications, one-off prompts", |replay| applications(replay, 60, 0.3, u32::MAX), 0.05),
        trace(
            "60 applications, a new ranking every 500 requests",
            |replay| applications(replay, 60, 0.3, 500),
            0.03,
        ),
        trace("100 documents, uniform", |replay| uniform(replay, 100), -0.01),
        trace("60 documents, in turn", |replay| cyclic(replay, 60), -0.01),
    ]
}

#[test]
fn the_retention_of_reused_blocks_improves_the_hit_rate() {
    for Trace { name, run, gain_min } in traces() {
        let (lru, retained) = (measure(&run, [0; RETENTION.len()]), measure(&run, RETENTION));
        println!("{name:45} LRU {:5.1} %, with retention {:5.1} %", 100.0 * lru, 100.0 * retained);
        assert!(
            retained - lru >= gain_min,
            "{name}: the hit rate is {retained} with retention and {lru} with LRU"
        );
    }
}
