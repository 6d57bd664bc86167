//! Runs each competitor with the same traffic, and summarizes the results.

use router::policy::{KvConfig, Policy};

use crate::engine::EngineConfig;
use crate::fleet::{Outcomes, Router, run};
use crate::routers::{LeastLoad, LlmD, Oracle, Ovfleet};
use crate::workload::{Kind, Request, workload};

/// A replica with a small model on eight cores: its step times are a quarter of those measured on two cores
/// (`docs/performance/results.md`), its cache has space for 32,768 tokens, and its step sizes are the server's
/// defaults.
pub(crate) const REPLICA: EngineConfig = EngineConfig {
    block_tokens: 16,
    blocks_total: 2048,
    max_num_batched_tokens: 512,
    max_chunk_tokens: 128,
    max_num_seqs: 32,
    step: 3_000_000,
    prefill_token: 420_000,
    decode_token: 1_600_000,
};

/// A way to pick replicas.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Competitor {
    Ovfleet(Policy),
    LlmD,
    LlmDPrefix,
    LeastLoad,
    Oracle,
}

/// The parameters of the runs. Each competitor serves each kind of traffic once per seed.
#[derive(Clone, Debug)]
pub(crate) struct Arena {
    pub(crate) replicas: usize,
    pub(crate) requests: usize,
    pub(crate) seeds: Vec<u64>,
}

/// The results of a competitor with one kind of traffic, as medians over the seeds unless stated otherwise.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Score {
    /// The 99th percentile of the time to the first token, in seconds.
    pub(crate) p99: f64,
    /// The median of the time to the first token, in seconds.
    pub(crate) p50: f64,
    /// The 99th percentile of the mean time between two tokens of an answer, in seconds.
    pub(crate) between: f64,
    /// The number of requests of the busiest replica, divided by the mean over all replicas; the largest value over all
    /// seeds.
    pub(crate) hottest: f64,
    /// The fraction of prompt tokens that were cached.
    pub(crate) cached: f64,
}

impl Competitor {
    pub(crate) fn all() -> Vec<Self> {
        let ours =
            [Policy::Kv(KvConfig::default()), Policy::RoundRobin, Policy::LeastRequests, Policy::PowerOfTwo];
        let others = [Self::LlmD, Self::LlmDPrefix, Self::LeastLoad, Self::Oracle];
        ours.into_iter().map(Self::Ovfleet).chain(others).collect()
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Ovfleet(policy) => policy.name(),
            Self::LlmD => "llm-d queue + kv",
            Self::LlmDPrefix => "llm-d queue + kv + prefix",
            Self::LeastLoad => "smg least_load",
            Self::Oracle => "oracle",
        }
    }

    fn router(self, replicas: usize, seed: u64) -> Box<dyn Router> {
        match self {
            Self::Ovfleet(policy) => Box::new(Ovfleet::new(policy, replicas, seed)),
            Self::LlmD => Box::new(LlmD::new(replicas, false, seed)),
            Self::LlmDPrefix => Box::new(LlmD::new(replicas, true, seed)),
            Self::LeastLoad => Box::new(LeastLoad::new(replicas)),
            Self::Oracle => Box::new(Oracle),
        }
    }
}

impl Arena {
    /// The scores of the competitors with this kind of traffic.
    pub(crate) fn scores(&self, kind: Kind, competitors: &[Competitor]) -> Vec<Score> {
        let traffic: Vec<Vec<Request>> = self
            .seeds
            .iter()
            .map(|&seed| workload(kind, self.replicas, REPLICA, self.requests, seed))
            .collect();
        let score = |competitor: &Competitor| {
            let runs = traffic.iter().zip(&self.seeds).map(|(requests, &seed)| {
                let mut router = competitor.router(self.replicas, seed);
                summary(run(requests, self.replicas, REPLICA, router.as_mut()))
            });
            medians(&runs.collect::<Vec<_>>())
        };
        competitors.iter().map(score).collect()
    }
}

fn summary(mut outcomes: Outcomes) -> Score {
    outcomes.first_token.sort_by(f64::total_cmp);
    outcomes.between_tokens.sort_by(f64::total_cmp);
    let percentile = |sorted: &[f64], rank: f64| sorted[((sorted.len() - 1) as f64 * rank) as usize];
    Score {
        p99: percentile(&outcomes.first_token, 0.99),
        p50: percentile(&outcomes.first_token, 0.5),
        between: percentile(&outcomes.between_tokens, 0.99),
        hottest: outcomes.hottest,
        cached: outcomes.cached,
    }
}

fn medians(runs: &[Score]) -> Score {
    let median = |figure: fn(&Score) -> f64| {
        let mut values: Vec<f64> = runs.iter().map(figure).collect();
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    };
    Score {
        p99: median(|run| run.p99),
        p50: median(|run| run.p50),
        between: median(|run| run.between),
        hottest: runs.iter().map(|run| run.hottest).fold(0.0, f64::max),
        cached: median(|run| run.cached),
    }
}
