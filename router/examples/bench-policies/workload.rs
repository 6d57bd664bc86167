//! What is asked of the fleet: six kinds of traffic, each a function of a seed.
//!
//! How much arrives is a part of what the fleet could do at its best, so that the kinds are about equally hard
//! and stay so when the replicas' speeds change.

use std::rc::Rc;

use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use router::prefix::Chain;

use crate::engine::{EngineConfig, Nanos, SECOND, Spec};

/// A kind of traffic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// All alike, at random times.
    Uniform,
    /// One in five is long, the others are short.
    Bimodal,
    /// Sizes vary, and requests come in clumps of sixteen at almost the same time.
    Bursty,
    /// Half of the prompts begin with the same 2,048 tokens.
    OneHotPrefix,
    /// Conversations: each prompt is the one before, its answer and something new.
    MultiTurn,
    /// As traces of services look: sizes spread over two orders of magnitude, arrivals in clumps, some
    /// beginnings more popular than others.
    TraceLike,
}

pub(crate) const KINDS: [Kind; 6] =
    [Kind::Uniform, Kind::Bimodal, Kind::Bursty, Kind::OneHotPrefix, Kind::MultiTurn, Kind::TraceLike];

impl Kind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Uniform => "uniform",
            Self::Bimodal => "bimodal",
            Self::Bursty => "bursty",
            Self::OneHotPrefix => "one hot prefix",
            Self::MultiTurn => "multi-turn",
            Self::TraceLike => "trace-like",
        }
    }

    /// How much arrives, as a part of what can be done.
    fn load(self) -> f64 {
        match self {
            Self::Uniform | Self::Bimodal | Self::OneHotPrefix | Self::MultiTurn => 0.8,
            Self::TraceLike => 0.75,
            Self::Bursty => 0.6,
        }
    }
}

/// When a request comes.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Arrival {
    At(Nanos),
    /// So long after another one was answered in full.
    After {
        request: usize,
        pause: Nanos,
    },
}

/// A request, and what the router learns of it.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) arrival: Arrival,
    pub(crate) spec: Rc<Spec>,
    pub(crate) chain: Chain,
    /// Tokens of the prompt as estimated from its bytes: off by up to 15 %.
    pub(crate) told_prompt_tokens: u32,
}

/// Makes requests of segments of text.
struct Maker {
    rng: StdRng,
    config: EngineConfig,
    requests: Vec<Request>,
}

/// A piece of text: which, and how many tokens of it.
type Segment = (u64, u32);

/// `count` requests for `replicas` of `config`.
pub(crate) fn workload(
    kind: Kind,
    replicas: usize,
    config: EngineConfig,
    count: usize,
    seed: u64,
) -> Vec<Request> {
    let mut maker =
        Maker { rng: StdRng::seed_from_u64(seed ^ (kind as u64) << 32), config, requests: Vec::new() };
    match kind {
        Kind::MultiTurn => maker.conversations(count, replicas),
        _ => maker.independent(kind, count, replicas),
    }
    maker.requests
}

impl Maker {
    fn independent(&mut self, kind: Kind, count: usize, replicas: usize) {
        let mut cost = 0.0;
        for number in 0..count {
            let (segments, output) = self.sizes(kind, number as u64 + 1000);
            let shared: u32 = segments[..segments.len() - 1].iter().map(|segment| segment.1).sum();
            cost += self.cost(segments[segments.len() - 1].1 + shared / 10, output);
            self.push(Arrival::At(0), &segments, output);
        }
        let rate = kind.load() * replicas as f64 / (cost / count as f64);
        let mut at = 0.0;
        for (number, request) in self.requests.iter_mut().enumerate() {
            at += gap(kind, number, &mut self.rng) / rate;
            request.arrival = Arrival::At((at * SECOND as f64) as Nanos);
        }
    }

    /// Segments of the prompt, the last one its own, and tokens of the output.
    fn sizes(&mut self, kind: Kind, own: u64) -> (Vec<Segment>, u32) {
        match kind {
            Kind::Uniform | Kind::MultiTurn => (vec![(own, 512)], 128),
            Kind::Bimodal if self.unit() < 0.2 => {
                (vec![(own, self.between(2000, 3000))], self.between(64, 256))
            }
            Kind::Bimodal => (vec![(own, self.between(64, 256))], self.between(32, 128)),
            Kind::Bursty => (vec![(own, self.lognormal(300.0, 1.2, 4000))], self.lognormal(80.0, 0.6, 400)),
            Kind::OneHotPrefix if self.unit() < 0.5 => {
                (vec![(1, 2048), (own, self.between(64, 256))], self.between(64, 192))
            }
            Kind::OneHotPrefix => (vec![(own, self.between(256, 1024))], self.between(64, 192)),
            Kind::TraceLike => {
                let size = self.lognormal(600.0, 1.1, 8000);
                let output = self.lognormal(100.0, 0.9, 800);
                if self.unit() >= 0.4 {
                    return (vec![(own, size)], output);
                }
                // Popularity falls with the square root of the rank.
                let rank = (self.unit().powi(2) * 20.0) as u64;
                (vec![(rank + 1, 256 + rank as u32 * 64), (own, size / 2 + 16)], output)
            }
        }
    }

    /// Conversations that begin at random times and go on as soon as their user has read the answer.
    fn conversations(&mut self, count: usize, replicas: usize) {
        let mut cost = 0.0;
        let mut beginnings = Vec::new();
        let mut own = 1000;
        while self.requests.len() < count {
            beginnings.push(self.requests.len());
            // The same instructions for all, then the conversation's own.
            let mut segments = vec![(1, 256), (own, 0)];
            for turn in 0..self.between(3, 9) {
                let new = self.between(32, 384);
                let output = self.between(48, 192);
                segments[1].1 += new;
                cost += self.cost(new, output);
                let pause = (-self.unit().ln() * 4.0 * SECOND as f64) as Nanos;
                let previous = self.requests.len().wrapping_sub(1);
                let arrival = match turn {
                    0 => Arrival::At(0),
                    _ => Arrival::After { request: previous, pause },
                };
                self.push(arrival, &segments, output);
                segments[1].1 += output;
            }
            own += 1;
        }
        let seconds = cost / (Kind::MultiTurn.load() * replicas as f64);
        let mut at = 0.0;
        let gap = seconds / beginnings.len() as f64;
        for request in beginnings {
            at += -self.unit().ln() * gap;
            self.requests[request].arrival = Arrival::At((at * SECOND as f64) as Nanos);
        }
    }

    fn push(&mut self, arrival: Arrival, segments: &[Segment], output_tokens: u32) {
        let block_tokens = self.config.block_tokens as usize;
        let token = |segment: u64, position: u32| mix(segment << 24 ^ u64::from(position)) as u32;
        let mut tokens: Vec<u32> = segments
            .iter()
            .flat_map(|&(segment, count)| (0..count).map(move |position| token(segment, position)))
            .collect();
        let prompt_tokens = tokens.len() as u32;
        let chain = Chain::of_tokens(&tokens, block_tokens, 1);
        // The answer continues the last segment: the next turn of a conversation repeats it.
        let (last, from) = segments[segments.len() - 1];
        tokens.extend((from..from + output_tokens).map(|position| token(last, position)));
        let mut parent = 0;
        let blocks = tokens
            .chunks_exact(block_tokens)
            .map(|block| {
                parent = block.iter().fold(parent, |hash, &token| mix(hash ^ u64::from(token)));
                parent
            })
            .collect();
        let told = f64::from(prompt_tokens) * (0.85 + 0.3 * self.unit());
        let spec = Rc::new(Spec { blocks, prompt_tokens, output_tokens });
        self.requests.push(Request { arrival, spec, chain, told_prompt_tokens: told as u32 });
    }

    /// Seconds of a replica that is well filled.
    fn cost(&self, uncached_tokens: u32, output_tokens: u32) -> f64 {
        let EngineConfig { step, prefill_token, decode_row, .. } = self.config;
        let row = decode_row + step / 12;
        let nanos = Nanos::from(uncached_tokens) * prefill_token + Nanos::from(output_tokens) * row;
        nanos as f64 / SECOND as f64
    }

    fn unit(&mut self) -> f64 {
        unit(&mut self.rng)
    }

    fn between(&mut self, least: u32, most: u32) -> u32 {
        least + (self.unit() * f64::from(most - least)) as u32
    }

    fn lognormal(&mut self, median: f64, sigma: f64, most: u32) -> u32 {
        let angle = std::f64::consts::TAU * self.unit();
        let normal = (-2.0 * self.unit().ln()).sqrt() * angle.cos();
        ((median * (sigma * normal).exp()) as u32).clamp(8, most)
    }
}

/// Requests that come almost at once in bursty traffic.
const CLUMP: usize = 16;

/// The time from the arrival before to that of request `number`, in units of the mean.
fn gap(kind: Kind, number: usize, rng: &mut StdRng) -> f64 {
    let exponential = -unit(rng).ln();
    match kind {
        Kind::Bursty if number.is_multiple_of(CLUMP) => exponential * (CLUMP as f64 - 0.5),
        Kind::Bursty => exponential * 0.5 / (CLUMP as f64 - 1.0),
        // A mix of two: twice as uneven as arrivals at random.
        Kind::TraceLike => exponential * if unit(rng) < 0.2 { 3.4 } else { 0.4 },
        _ => exponential,
    }
}

/// Above 0, up to 1.
fn unit(rng: &mut StdRng) -> f64 {
    ((rng.next_u64() >> 11) + 1) as f64 / (1u64 << 53) as f64
}

pub(crate) fn mix(mut value: u64) -> u64 {
    value = (value ^ 0x9e37_79b9_7f4a_7c15).wrapping_mul(0xff51_afd7_ed55_8ccd);
    value = (value ^ (value >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    value ^ (value >> 33)
}
