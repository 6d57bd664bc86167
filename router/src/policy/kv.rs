//! The default policy, which picks the replica with the lowest estimated time to the first token.
//!
//! The estimate is the sum of the delays at a replica: the time to compute the prompt tokens that are ahead of the
//! request (those in the report and those sent since then); the time to compute the request's own prompt tokens that
//! are not cached there; the time to encode the images that must be encoded first; the time by which sequences that
//! decode in the same steps prolong these steps; the wait for a sequence to end, if the replica already runs as many as
//! it can; the wait for free blocks; and a penalty that grows with the used fraction of the cache, steeply when the
//! cache is nearly full. `docs/decisions/0010-routing.md` explains the decisions behind the estimate and contains the
//! measurements.

use std::time::Duration;

use super::candidate::{Candidate, Demand, Terms};
use super::counts::weighted;
use crate::ledger::{LoadSnapshot, ReportedLoad};

/// The constants of the estimate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KvConfig {
    /// Whether cached prefixes are compared.
    pub uses_prefixes: bool,
    /// A cached prefix attracts requests to a replica only up to this multiple of the mean number of requests in
    /// flight. The limit applies only if no replica has a report: nothing else would then prevent a prefix from
    /// attracting all requests.
    pub bounded_load: f32,
    /// The penalty of a half-full cache, in seconds.
    pub cache_pressure: f32,
    /// The time by which each decoding sequence prolongs a step that computes prompts, as a fraction of the time per
    /// generated token.
    pub decode_interference: f32,
    /// The number of prompt tokens that a replica is assumed to compute in a step in which other sequences decode.
    pub step_tokens: f32,
    /// The assumed prefill speed of a replica that has not computed a prompt yet, if no other candidate has either.
    pub prefill_tokens_per_second: f32,
    /// The assumed decode speed of a replica that has not generated a token yet, if no other candidate has either.
    pub decode_tokens_per_second: f32,
    /// The assumed speed of the image encoder of a replica that has not encoded an image yet, if no other candidate has
    /// either.
    pub image_tokens_per_second: f32,
}

impl Default for KvConfig {
    fn default() -> Self {
        Self {
            uses_prefixes: true,
            bounded_load: 1.25,
            cache_pressure: 0.02,
            decode_interference: 0.4,
            step_tokens: 96.0,
            prefill_tokens_per_second: 1000.0,
            decode_tokens_per_second: 100.0,
            image_tokens_per_second: 300.0,
        }
    }
}

pub(super) fn score(config: &KvConfig, demand: &Demand, candidates: &[Candidate], terms: &mut Vec<Terms>) {
    let has_report =
        |candidate: &&Candidate| candidate.accepts_requests() && candidate.snapshot.reported.is_some();
    if !candidates.iter().any(|candidate| has_report(&candidate)) {
        return by_in_flight(config, candidates, terms);
    }
    let speeds = TypicalSpeeds::of(config, candidates);
    terms.extend(candidates.iter().map(|candidate| estimate(config, demand, candidate, &speeds)));
    // Score a replica without a report by its requests in flight: assume that it is as slow as the other replicas are
    // on average with the same number of requests. Otherwise, it would either look idle and attract all requests, or
    // receive none.
    let reporting = candidates.iter().zip(&*terms).filter(|(candidate, _)| has_report(candidate));
    let each = reporting.map(|(candidate, terms)| terms.score / weighted(candidate));
    let (sum, count) = each.fold((0.0, 0), |(sum, count), each| (sum + each, count + 1));
    for (candidate, terms) in candidates.iter().zip(terms) {
        if candidate.snapshot.reported.is_none() {
            terms.score = sum / f64::from(count) * weighted(candidate);
            terms.is_score_time = true;
        }
    }
}

/// A replica whose measured speed is within this factor of the typical speed is assumed to have the typical speed.
/// Measured speeds differ by chance, above all with short prompts, and a chance difference should not attract requests.
const SPEED_FACTOR: f64 = 3.0;
/// The age above which a measured speed is ignored, because the replica may have been cold during the measurement. A
/// replica that was slow is therefore tried again at this interval.
const SPEED_AGE_MAX: Duration = Duration::from_secs(10);

/// The mean of the recently measured speeds of the replicas, of all measured speeds if none is recent, or the defaults
/// of [`KvConfig`] if none was measured. Replicas without a recent measurement are assumed to have these speeds.
struct TypicalSpeeds {
    prefill: f64,
    decode: f64,
    images: f64,
}

impl TypicalSpeeds {
    fn of(config: &KvConfig, candidates: &[Candidate]) -> Self {
        type Speed = fn(&ReportedLoad) -> f32;
        type Age = fn(&LoadSnapshot) -> Option<Duration>;
        let typical = |speed: Speed, age: Age, default: f32| {
            let reported = |candidate: &Candidate| candidate.snapshot.reported.as_ref().map_or(0.0, speed);
            let recent = candidates.iter().filter(|candidate| is_recent(age(&candidate.snapshot)));
            mean(recent.map(reported))
                .or_else(|| mean(candidates.iter().map(reported)))
                .unwrap_or(f64::from(default))
        };
        Self {
            prefill: typical(
                |reported| reported.prefill_tokens_per_second,
                |snapshot| snapshot.speed_age,
                config.prefill_tokens_per_second,
            ),
            decode: typical(
                |reported| reported.decode_tokens_per_second,
                |snapshot| snapshot.speed_age,
                config.decode_tokens_per_second,
            ),
            images: typical(
                |reported| reported.image_tokens_per_second,
                |snapshot| snapshot.image_speed_age,
                config.image_tokens_per_second,
            ),
        }
    }
}

/// Whether a speed of this age was measured recently.
fn is_recent(age: Option<Duration>) -> bool {
    age.is_some_and(|age| age <= SPEED_AGE_MAX)
}

/// The speed that a replica is assumed to have: the measured speed only if it is recent and differs clearly from the
/// typical speed.
fn assumed(measured: f32, age: Option<Duration>, typical: f64) -> f64 {
    let measured = f64::from(measured);
    let differs = measured * SPEED_FACTOR < typical || measured > typical * SPEED_FACTOR;
    if measured > 0.0 && differs && is_recent(age) { measured } else { typical }
}

fn mean(values: impl Iterator<Item = f32>) -> Option<f64> {
    let known = values.filter(|&value| value > 0.0);
    let (sum, count) = known.fold((0.0, 0), |(sum, count), value| (sum + f64::from(value), count + 1));
    (count > 0).then(|| sum / f64::from(count))
}

fn estimate(config: &KvConfig, demand: &Demand, candidate: &Candidate, speeds: &TypicalSpeeds) -> Terms {
    let booked = &candidate.snapshot.booked;
    let Some(reported) = &candidate.snapshot.reported else {
        return Terms { in_flight: booked.in_flight, ..Terms::default() };
    };
    let LoadSnapshot { speed_age, image_speed_age, .. } = candidate.snapshot;
    let prefill_speed = assumed(reported.prefill_tokens_per_second, speed_age, speeds.prefill);
    let decode_speed = assumed(reported.decode_tokens_per_second, speed_age, speeds.decode);
    let image_speed = assumed(reported.image_tokens_per_second, image_speed_age, speeds.images);
    let cost = candidate.cost(demand);

    // The replica has computed further tokens since its report.
    let age = candidate.snapshot.report_age.map_or(0.0, |age| age.as_secs_f64());
    let remaining = (reported.uncomputed_tokens as f64 - age * prefill_speed).max(0.0);
    let queued_tokens = remaining + booked.uncached_unreported as f64;
    let prompt_tokens = f64::from(cost.uncached_tokens);
    let (queued_prefill, prefill) = (queued_tokens / prefill_speed, prompt_tokens / prefill_speed);
    let queued_images = (reported.unencoded_image_tokens as f64 - age * image_speed).max(0.0)
        + booked.image_tokens_unreported as f64;
    let all_images = (queued_images + f64::from(cost.image_tokens)) / image_speed;
    // A request without images does not wait for the encoder. However, encoding the images of other requests slows down
    // the computation of its prompt and of the prompts queued before it. This computation takes at most twice as long.
    let image_encoding =
        if cost.image_tokens > 0 { all_images } else { all_images.min(queued_prefill + prefill) };
    let steps = 1.0 + (queued_tokens + prompt_tokens) / f64::from(config.step_tokens.max(1.0));
    let others = u64::from(reported.running) + booked.sequences_unreported;
    let decode_interference = f64::from(config.decode_interference) * steps * others as f64 / decode_speed;

    // The rate at which sequences end follows from the decode speed and the length of their outputs.
    let output = f64::from(demand.output_tokens.max(1));
    let present = u64::from(reported.running) + u64::from(reported.waiting) + booked.sequences_unreported;
    let excess = match reported.sequences_max {
        0 => 0,
        limit => (present + u64::from(cost.sequences)).saturating_sub(u64::from(limit)),
    };
    let sequence_wait = excess as f64 * output / decode_speed;

    let total = f64::from(reported.blocks_total.max(1));
    let held =
        (u64::from(reported.blocks_active) + candidate.blocks_claimed() + u64::from(cost.blocks)) as f64;
    let per_sequence = f64::from(reported.blocks_active) / f64::from(reported.running.max(1));
    let missing = if reported.blocks_total == 0 { 0.0 } else { (held - total).max(0.0) };
    let block_wait = missing / per_sequence.max(1.0) * output / decode_speed;
    let filled = if reported.blocks_total == 0 { 0.0 } else { (held / total).min(0.99) };
    let cache_pressure = f64::from(config.cache_pressure) * filled / (1.0 - filled);

    let weight = f64::from(candidate.weight.max(f32::MIN_POSITIVE));
    Terms {
        score: (queued_prefill
            + prefill
            + image_encoding
            + decode_interference
            + sequence_wait
            + block_wait
            + cache_pressure)
            / weight,
        is_score_time: true,
        queued_prefill,
        prefill,
        image_encoding,
        decode_interference,
        sequence_wait,
        block_wait,
        cache_pressure,
        in_flight: booked.in_flight,
        cached_tokens: candidate.cached_tokens,
    }
}

/// Scores all candidates by requests in flight; the candidates with the longest cached prefix get the lowest score if
/// their load permits it.
fn by_in_flight(config: &KvConfig, candidates: &[Candidate], terms: &mut Vec<Terms>) {
    let in_flight = |candidate: &Candidate| f64::from(candidate.snapshot.booked.in_flight);
    let mean = candidates.iter().map(in_flight).sum::<f64>() / candidates.len().max(1) as f64;
    let longest = candidates.iter().map(|candidate| candidate.cached_tokens).max().unwrap_or(0);
    terms.extend(candidates.iter().map(|candidate| {
        let is_bounded = in_flight(candidate) + 1.0 <= f64::from(config.bounded_load) * (mean + 1.0);
        let is_cached = longest > 0 && candidate.cached_tokens == longest;
        Terms {
            score: if is_cached && is_bounded { 0.0 } else { weighted(candidate) },
            in_flight: candidate.snapshot.booked.in_flight,
            cached_tokens: candidate.cached_tokens,
            ..Terms::default()
        }
    }));
}
