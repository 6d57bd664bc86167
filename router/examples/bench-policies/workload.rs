//! Six kinds of traffic, each a function of a seed.
//!
//! The arrival rate is a fraction of the fleet's best throughput, so that all kinds are about equally hard, even when
//! the speeds of the replicas change.

use std::rc::Rc;

use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use router::policy::mix;
use router::prefix::PrefixHashes;

use crate::engine::{EngineConfig, Nanos, SECOND, Spec};

/// A kind of traffic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Requests of equal size at random times.
    Uniform,
    /// About one in five requests is long; the others are short.
    Bimodal,
    /// Requests of different sizes arrive in bursts of sixteen.
    Bursty,
    /// About half of the prompts begin with the same 2,048 tokens.
    OneHotPrefix,
    /// Conversations: each prompt consists of the previous prompt, its answer and a new message.
    MultiTurn,
    /// Requests like those in traces of production services: sizes over two orders of magnitude, uneven arrivals, and
    /// some prefixes that are more popular than others.
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

    /// The arrival rate as a fraction of the best throughput.
    fn load(self) -> f64 {
        match self {
            Self::Uniform | Self::Bimodal | Self::OneHotPrefix | Self::MultiTurn => 0.8,
            Self::TraceLike => 0.75,
            Self::Bursty => 0.6,
        }
    }
}

/// The time at which a request arrives.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Arrival {
    /// The request arrives at this time.
    At(Nanos),
    /// The request arrives some time after the answer to another request is complete.
    After { request: usize, pause: Nanos },
}

/// A request, and the information that the router receives about it.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) arrival: Arrival,
    pub(crate) spec: Rc<Spec>,
    pub(crate) prefix_hashes: PrefixHashes,
    /// The number of prompt tokens with a random error of up to 15%, like an estimate from the bytes of the prompt.
    pub(crate) estimated_prompt_tokens: u32,
}

/// Generates requests from segments of text.
struct RequestMaker {
    rng: StdRng,
    config: EngineConfig,
    requests: Vec<Request>,
}

/// The first `tokens` tokens of a text.
#[derive(Clone, Copy)]
struct Segment {
    text: u64,
    tokens: u32,
}

/// Generates `count` requests for a fleet of `replicas` with this configuration, or a few more to complete the last
/// conversation.
pub(crate) fn workload(
    kind: Kind,
    replicas: usize,
    config: EngineConfig,
    count: usize,
    seed: u64,
) -> Vec<Request> {
    let rng = StdRng::seed_from_u64(seed ^ (kind as u64) << 32);
    let mut maker = RequestMaker { rng, config, requests: Vec::new() };
    match kind {
        Kind::MultiTurn => maker.conversations(count, replicas),
        _ => maker.independent(kind, count, replicas),
    }
    maker.requests
}

impl RequestMaker {
    fn independent(&mut self, kind: Kind, count: usize, replicas: usize) {
        let mut cost = 0.0;
        for number in 0..count {
            let (segments, output) = self.sizes(kind, number as u64 + 1000);
            let all: u32 = segments.iter().map(|segment| segment.tokens).sum();
            let unshared = segments[segments.len() - 1].tokens;
            cost += self.cost(unshared + (all - unshared) / 10, output);
            self.push(Arrival::At(0), &segments, output);
        }
        let rate = kind.load() * replicas as f64 / (cost / count as f64);
        let mut at = 0.0;
        for (number, request) in self.requests.iter_mut().enumerate() {
            at += gap(kind, number, &mut self.rng) / rate;
            request.arrival = Arrival::At((at * SECOND as f64) as Nanos);
        }
    }

    /// Returns the segments of a prompt, all of which except the last are shared, and the number of output tokens.
    fn sizes(&mut self, kind: Kind, text: u64) -> (Vec<Segment>, u32) {
        let unshared = |tokens: u32| Segment { text, tokens };
        match kind {
            Kind::Uniform | Kind::MultiTurn => (vec![unshared(512)], 128),
            Kind::Bimodal if self.unit() < 0.2 => {
                (vec![unshared(self.between(2000, 3000))], self.between(64, 256))
            }
            Kind::Bimodal => (vec![unshared(self.between(64, 256))], self.between(32, 128)),
            Kind::Bursty => {
                (vec![unshared(self.lognormal(300.0, 1.2, 4000))], self.lognormal(80.0, 0.6, 400))
            }
            Kind::OneHotPrefix if self.unit() < 0.5 => {
                let hot = Segment { text: 1, tokens: 2048 };
                (vec![hot, unshared(self.between(64, 256))], self.between(64, 192))
            }
            Kind::OneHotPrefix => (vec![unshared(self.between(256, 1024))], self.between(64, 192)),
            Kind::TraceLike => {
                let size = self.lognormal(600.0, 1.1, 8000);
                let output = self.lognormal(100.0, 0.9, 800);
                if self.unit() >= 0.4 {
                    return (vec![unshared(size)], output);
                }
                // The popularity of a prefix is inversely proportional to the square root of its rank.
                let rank = (self.unit().powi(2) * 20.0) as u64;
                let popular = Segment { text: rank + 1, tokens: 256 + rank as u32 * 64 };
                (vec![popular, unshared(size / 2 + 16)], output)
            }
        }
    }

    /// Generates conversations that begin at random times and continue when their user has read the answer.
    fn conversations(&mut self, count: usize, replicas: usize) {
        let mut cost = 0.0;
        let mut beginnings = Vec::new();
        let mut text = 1000;
        while self.requests.len() < count {
            beginnings.push(self.requests.len());
            // All conversations begin with the same system prompt.
            let mut segments = [Segment { text: 1, tokens: 256 }, Segment { text, tokens: 0 }];
            for turn in 0..self.between(3, 9) {
                let new = self.between(32, 384);
                let output = self.between(48, 192);
                segments[1].tokens += new;
                cost += self.cost(new, output);
                let pause = (-self.unit().ln() * 4.0 * SECOND as f64) as Nanos;
                let previous = self.requests.len().wrapping_sub(1);
                let arrival = match turn {
                    0 => Arrival::At(0),
                    _ => Arrival::After { request: previous, pause },
                };
                self.push(arrival, &segments, output);
                segments[1].tokens += output;
            }
            text += 1;
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
        let token = |text: u64, position: u32| mix(text << 24 ^ u64::from(position)) as u32;
        let mut tokens: Vec<u32> = segments
            .iter()
            .flat_map(|segment| (0..segment.tokens).map(move |position| token(segment.text, position)))
            .collect();
        let prompt_tokens = tokens.len() as u32;
        let prefix_hashes = PrefixHashes::of_tokens(&tokens, block_tokens, 1);
        // The answer extends the last segment, because the next turn of a conversation repeats it.
        let Segment { text, tokens: end } = segments[segments.len() - 1];
        tokens.extend((end..end + output_tokens).map(|position| token(text, position)));
        let estimated_prompt_tokens = (f64::from(prompt_tokens) * (0.85 + 0.3 * self.unit())) as u32;
        let spec = Rc::new(Spec { tokens, prompt_tokens });
        self.requests.push(Request { arrival, spec, prefix_hashes, estimated_prompt_tokens });
    }

    /// The time that a busy replica needs for a request, in seconds.
    fn cost(&self, uncached_tokens: u32, output_tokens: u32) -> f64 {
        let EngineConfig { step, prefill_token, decode_token, .. } = self.config;
        let token = decode_token + step / 12;
        let nanos = Nanos::from(uncached_tokens) * prefill_token + Nanos::from(output_tokens) * token;
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

/// Number of requests in a burst.
const BURST: usize = 16;

/// The time from the previous arrival to that of request `number`, in units of the mean.
fn gap(kind: Kind, number: usize, rng: &mut StdRng) -> f64 {
    let exponential = -unit(rng).ln();
    match kind {
        Kind::Bursty if number.is_multiple_of(BURST) => exponential * (BURST as f64 - 0.5),
        Kind::Bursty => exponential * 0.5 / (BURST as f64 - 1.0),
        // A mixture of two rates: the standard deviation of the gaps is about twice that of Poisson arrivals.
        Kind::TraceLike => exponential * if unit(rng) < 0.2 { 3.4 } else { 0.4 },
        _ => exponential,
    }
}

/// A random number above 0 and up to 1.
fn unit(rng: &mut StdRng) -> f64 {
    ((rng.next_u64() >> 11) + 1) as f64 / (1u64 << 53) as f64
}
