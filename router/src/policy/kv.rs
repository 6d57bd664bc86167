//! The default policy: the least estimated time to the first token.
//!
//! The estimate adds up what a request meets at a replica: the prompt tokens that are ahead of it, reported or
//! sent since; its own, as far as they are not cached there; the wait for a place where as many sequences run
//! as may; the wait for blocks where all are held; and a weight for a cache that fills up, because sequences
//! that outgrow it are computed twice. Decisions and figures: `docs/decisions/0010-routing.md`.

use std::time::Duration;

use super::candidate::{Candidate, Demand, Terms};
use super::counts::weighted;
use crate::ledger::ReportedLoad;

/// What the estimate takes for granted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KvConfig {
    /// Whether cached prefixes are looked for.
    pub prefix: bool,
    /// How far above the mean of the candidates a replica's requests in flight may be for a cached prefix to
    /// count there, where a report is missing and nothing else keeps a prefix from drawing everything.
    pub bounded_load: f32,
    /// Seconds that a half-full cache is worth.
    pub pressure: f32,
    /// The part of a generated token's time that a step with prompts is longer for each sequence in it.
    pub company: f32,
    /// Tokens of prompts that a replica computes in a step beside sequences that generate.
    pub step_tokens: f32,
    /// Prompt tokens a second of a replica that has not computed any yet, if none of the others has.
    pub prefill_tokens_per_second: f32,
    /// Generated tokens a second of such a replica.
    pub decode_tokens_per_second: f32,
}

impl Default for KvConfig {
    fn default() -> Self {
        Self {
            prefix: true,
            bounded_load: 1.25,
            pressure: 0.02,
            company: 0.4,
            step_tokens: 96.0,
            prefill_tokens_per_second: 1000.0,
            decode_tokens_per_second: 100.0,
        }
    }
}

pub(super) fn score(config: &KvConfig, demand: &Demand, candidates: &[Candidate], terms: &mut Vec<Terms>) {
    let is_known = |candidate: &&Candidate| candidate.takes_requests() && candidate.view.reported.is_some();
    if !candidates.iter().any(|candidate| is_known(&candidate)) {
        return by_in_flight(config, candidates, terms);
    }
    let speeds = Speeds::of(config, candidates);
    terms.extend(candidates.iter().map(|candidate| estimate(config, demand, candidate, &speeds)));
    // A replica without a report is compared by requests in flight: it is taken to be as slow as the others
    // are, on average, with as many. It neither draws requests for looking idle nor goes without.
    let known = candidates.iter().zip(&*terms).filter(|(candidate, _)| is_known(candidate));
    let each = known.map(|(candidate, terms)| terms.score / weighted(candidate));
    let (sum, count) = each.fold((0.0, 0), |(sum, count), each| (sum + each, count + 1));
    for (candidate, terms) in candidates.iter().zip(terms) {
        if candidate.view.reported.is_none() {
            terms.score = sum / f64::from(count) * weighted(candidate);
        }
    }
}

/// Measured speeds differ by chance, above all where prompts are short: replicas whose speed is within this factor of
/// the mean are taken to be equally fast, so that a request that could go to any goes to any.
const SPEED_FACTOR: f64 = 3.0;
/// A speed that was not measured anew for so long is not held against a replica: it may have been cold. A slower replica
/// is tried again at this interval.
const SPEED_AGE_MAX: Duration = Duration::from_secs(10);

/// The mean speeds of those that have shown them lately, or at all: what the others are taken to do.
struct Speeds {
    prefill: f64,
    decode: f64,
}

impl Speeds {
    fn of(config: &KvConfig, candidates: &[Candidate]) -> Self {
        let typical = |speed: fn(&ReportedLoad) -> f32, default: f32| {
            let reported = |candidate: &Candidate| candidate.view.reported.as_ref().map_or(0.0, speed);
            let lately = candidates.iter().filter(|candidate| is_measured(candidate));
            mean(lately.map(reported))
                .or_else(|| mean(candidates.iter().map(reported)))
                .unwrap_or(f64::from(default))
        };
        Self {
            prefill: typical(|reported| reported.prefill_tokens_per_second, config.prefill_tokens_per_second),
            decode: typical(|reported| reported.decode_tokens_per_second, config.decode_tokens_per_second),
        }
    }
}

/// Whether the speeds of a replica were measured lately.
fn is_measured(candidate: &Candidate) -> bool {
    candidate.view.speed_age.is_some_and(|age| age <= SPEED_AGE_MAX)
}

/// The speed that a replica is taken to have: its own only where it is known to differ from what is typical.
fn expected(candidate: &Candidate, measured: f32, typical: f64) -> f64 {
    let measured = f64::from(measured);
    let differs = measured * SPEED_FACTOR < typical || measured > typical * SPEED_FACTOR;
    if measured > 0.0 && differs && is_measured(candidate) { measured } else { typical }
}

fn mean(values: impl Iterator<Item = f32>) -> Option<f64> {
    let known = values.filter(|&value| value > 0.0);
    let (sum, count) = known.fold((0.0, 0), |(sum, count), value| (sum + f64::from(value), count + 1));
    (count > 0).then(|| sum / f64::from(count))
}

fn estimate(config: &KvConfig, demand: &Demand, candidate: &Candidate, speeds: &Speeds) -> Terms {
    let booked = &candidate.view.booked;
    let Some(reported) = &candidate.view.reported else {
        return Terms { in_flight: booked.in_flight, ..Terms::default() };
    };
    let prefill = expected(candidate, reported.prefill_tokens_per_second, speeds.prefill);
    let decode = expected(candidate, reported.decode_tokens_per_second, speeds.decode);
    let cost = candidate.cost(demand);

    // The replica has gone on since it reported.
    let age = candidate.view.report_age.map_or(0.0, |age| age.as_secs_f64());
    let left = (reported.uncomputed_tokens as f64 - age * prefill).max(0.0);
    let ahead_tokens = left + booked.uncached_unreported as f64;
    let own_tokens = f64::from(cost.uncached_tokens);
    let (ahead, own) = (ahead_tokens / prefill, own_tokens / prefill);
    let steps = 1.0 + (ahead_tokens + own_tokens) / f64::from(config.step_tokens.max(1.0));
    let others = u64::from(reported.running) + booked.sequences_unreported;
    let company = f64::from(config.company) * steps * others as f64 / decode;

    // Sequences end at the rate at which their tokens come.
    let output = f64::from(demand.output_tokens.max(1));
    let present = u64::from(reported.running) + u64::from(reported.waiting) + booked.sequences_unreported;
    let beyond = match reported.sequences_max {
        0 => 0,
        limit => (present + u64::from(cost.sequences)).saturating_sub(u64::from(limit)),
    };
    let place = beyond as f64 * output / decode;

    let total = f64::from(reported.blocks_total.max(1));
    let held =
        (u64::from(reported.blocks_active) + candidate.blocks_claimed() + u64::from(cost.blocks)) as f64;
    let per_sequence = f64::from(reported.blocks_active) / f64::from(reported.running.max(1));
    let missing = if reported.blocks_total == 0 { 0.0 } else { (held - total).max(0.0) };
    let blocks = missing / per_sequence.max(1.0) * output / decode;
    let filled = if reported.blocks_total == 0 { 0.0 } else { (held / total).min(0.99) };
    let pressure = f64::from(config.pressure) * filled / (1.0 - filled);

    let weight = f64::from(candidate.weight.max(f32::MIN_POSITIVE));
    Terms {
        score: (ahead + own + company + place + blocks + pressure) / weight,
        ahead,
        own,
        company,
        place,
        blocks,
        pressure,
        in_flight: booked.in_flight,
        cached_tokens: candidate.cached_tokens,
    }
}

/// All by in-flight, with a step down for a cached prefix where the load allows it.
fn by_in_flight(config: &KvConfig, candidates: &[Candidate], terms: &mut Vec<Terms>) {
    let in_flight = |candidate: &Candidate| f64::from(candidate.view.booked.in_flight);
    let mean = candidates.iter().map(in_flight).sum::<f64>() / candidates.len().max(1) as f64;
    let longest = candidates.iter().map(|candidate| candidate.cached_tokens).max().unwrap_or(0);
    terms.extend(candidates.iter().map(|candidate| {
        let is_bounded = in_flight(candidate) + 1.0 <= f64::from(config.bounded_load) * (mean + 1.0);
        let is_cached = longest > 0 && candidate.cached_tokens == longest;
        Terms {
            score: if is_cached && is_bounded { 0.0 } else { weighted(candidate) },
            in_flight: candidate.view.booked.in_flight,
            cached_tokens: candidate.cached_tokens,
            ..Terms::default()
        }
    }));
}
