//! Compares the sampler with a slow reference in double precision, and tests edge cases.

use std::sync::Arc;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::*;

fn choose(logits: &[f32], sampling: &Sampling) -> Result<TokenId, SampleError> {
    let history = History::new(&[], sampling);
    let stop = StopCriteria::default();
    Sampler::new().sample(
        logits,
        &SamplingContext { sampling, stop: &stop, history: &history, index: 0, allowed: None },
    )
}

fn sampling(temperature: f32) -> Sampling {
    Sampling { temperature, ..Sampling::greedy() }
}

/// Returns the probability of each token according to the definition of [`Sampling`], in double precision and by
/// sorting.
fn reference(
    logits: &[f32],
    context: &SamplingContext<'_>,
    prompt: &[TokenId],
    output: &[TokenId],
) -> Vec<f64> {
    let SamplingContext { sampling, stop, .. } = context;
    let mut x = logits.to_vec();
    for &(token, bias) in &sampling.logit_bias {
        x[token as usize] += bias;
    }
    for (token, x) in (0..).zip(&mut x) {
        let count = output.iter().filter(|&&other| other == token).count();
        if count > 0 || prompt.contains(&token) {
            let penalty = sampling.repetition_penalty;
            *x = if *x > 0.0 { *x / penalty } else { *x * penalty };
        }
        if count > 0 {
            *x -= sampling.frequency_penalty * count as f32 + sampling.presence_penalty;
        }
        if output.len() < stop.min_tokens as usize && stop.stop_token_ids.contains(&token) {
            *x = f32::NEG_INFINITY;
        }
    }
    // Up to here, the logits are computed in single precision, as in the sampler, so that equal logits remain equal.
    let x: Vec<f64> = x.into_iter().map(f64::from).collect();
    let mut order: Vec<usize> = (0..x.len()).collect();
    order.sort_by(|&a, &b| x[b].partial_cmp(&x[a]).unwrap().then(a.cmp(&b)));
    if sampling.temperature == 0.0 {
        order.truncate(1);
    }
    if sampling.top_k > 0 {
        order.truncate(sampling.top_k as usize);
    }
    let temperature = if sampling.temperature == 0.0 { 1.0 } else { f64::from(sampling.temperature) };
    let max = x[order[0]];
    let weight = |token: usize| ((x[token] - max) / temperature).exp();
    let total: f64 = order.iter().map(|&token| weight(token)).sum();
    let mut sum = 0.0;
    let nucleus = order.iter().position(|&token| {
        sum += weight(token) / total;
        sum >= f64::from(sampling.top_p)
    });
    if sampling.top_p < 1.0 {
        order.truncate(nucleus.map_or(order.len(), |last| last + 1));
    }
    order.retain(|&token| weight(token) >= f64::from(sampling.min_p));
    let total: f64 = order.iter().map(|&token| weight(token)).sum();
    let mut probabilities = vec![0.0; x.len()];
    order.iter().for_each(|&token| probabilities[token] = weight(token) / total);
    probabilities
}

/// Returns the token at which the cumulative probabilities exceed `u`, and the distance of `u` from the token's
/// boundaries. If `u` is too close to a boundary, rounding may select a neighbor.
fn invert(probabilities: &[f64], u: f64) -> (TokenId, f64) {
    let mut sum = 0.0;
    for (token, &probability) in (0..).zip(probabilities) {
        if probability > 0.0 && u < sum + probability {
            return (token, (u - sum).min(sum + probability - u));
        }
        sum += probability;
    }
    (0, 0.0)
}

fn random_logits(rng: &mut StdRng, length: usize) -> Vec<f32> {
    let (spread, shape) = (rng.random_range(0.1f32..20.0), rng.random_range(0..4));
    let mut logits: Vec<f32> = (0..length).map(|_| spread * rng.random_range(-1f32..1.0)).collect();
    match shape {
        // Round the logits, so that many are equal.
        0 => logits.iter_mut().for_each(|logit| *logit = logit.round()),
        1 => logits.sort_unstable_by(f32::total_cmp),
        2 => {
            for _ in 0..length / 2 {
                let token = rng.random_range(0..length);
                logits[token] = f32::NEG_INFINITY;
            }
            logits[length / 2] = 1.0;
        }
        _ => {}
    }
    logits
}

fn random_sampling(rng: &mut StdRng, vocabulary: u32) -> Sampling {
    let mut maybe = |value: f32, neutral: f32| if rng.random_bool(0.5) { value } else { neutral };
    let mut sampling = Sampling {
        temperature: maybe(0.7, 1.0),
        top_p: maybe(0.83, 1.0),
        min_p: maybe(0.02, 0.0),
        repetition_penalty: maybe(1.3, 1.0),
        frequency_penalty: maybe(0.4, 0.0),
        presence_penalty: maybe(-0.6, 0.0),
        ..Sampling::greedy()
    };
    sampling.temperature *= rng.random_range(0.2f32..2.0);
    sampling.top_k = if rng.random_bool(0.5) { rng.random_range(1..=vocabulary + 3) } else { 0 };
    sampling.seed = rng.random();
    for _ in 0..rng.random_range(0..4) {
        sampling.logit_bias.push((rng.random_range(0..vocabulary), rng.random_range(-9f32..9.0)));
    }
    sampling
}

#[test]
fn agrees_with_a_slow_reference_on_random_logits_and_parameters() {
    let mut rng = StdRng::seed_from_u64(7);
    let mut sampler = Sampler::new();
    let mut compared = 0;
    for round in 0..4000 {
        let vocabulary = [3, 40, 257, 4000][round % 4];
        let logits = random_logits(&mut rng, vocabulary as usize);
        let sampling = random_sampling(&mut rng, vocabulary);
        let mut tokens = |count| -> Vec<TokenId> {
            (0..rng.random_range(0..count)).map(|_| rng.random_range(0..vocabulary)).collect()
        };
        let (prompt, output, stops) = (tokens(30), tokens(30), tokens(3));
        let stop = StopCriteria { stop_token_ids: stops, min_tokens: 10, max_tokens: 100 };
        let mut history = History::new(&prompt, &sampling);
        output.iter().for_each(|&token| history.push(token));
        let context =
            SamplingContext { sampling: &sampling, stop: &stop, history: &history, index: 2, allowed: None };

        let probabilities = reference(&logits, &context, &prompt, &output);
        if probabilities.iter().all(|&probability| probability == 0.0) {
            assert_eq!(sampler.sample(&logits, &context), Err(SampleError::NoTokenLeft), "round {round}");
            continue;
        }
        let u = uniform(sampling.seed, 2, history.generated());
        let (expected, margin) = invert(&probabilities, u);
        let token = sampler.sample(&logits, &context).unwrap();
        assert!(probabilities[token as usize] > 0.0, "round {round}: {token} is not kept by {sampling:?}");
        if margin > 1e-5 {
            compared += 1;
            assert_eq!(token, expected, "round {round}: {sampling:?}");
        }
    }
    assert!(compared > 3500, "only {compared} draws were not near a boundary");
}

#[test]
fn draws_follow_the_probabilities() {
    // Chi-square with 7 degrees of freedom exceeds 24.3 with a probability of 0.1%.
    let logits: Vec<f32> = [0.30f32, 0.05, 0.15, 0.02, 0.18, 0.12, 0.08, 0.10].map(f32::ln).to_vec();
    let draws = 40_000;
    for (index, filtered) in [(0, false), (1, false), (0, true)] {
        // With this `top_p`, the nucleus contains all tokens, but the sampler draws from a list of candidates instead
        // of the whole vocabulary. The distribution is the same.
        let top_p = if filtered { 0.999_999 } else { 1.0 };
        let sampling = Sampling { seed: 11, top_p, ..sampling(1.0) };
        let (mut history, stop) = (History::new(&[], &sampling), StopCriteria::default());
        let (mut sampler, mut counts) = (Sampler::new(), [0f64; 8]);
        for _ in 0..draws {
            let context =
                SamplingContext { sampling: &sampling, stop: &stop, history: &history, index, allowed: None };
            let token = sampler.sample(&logits, &context).unwrap();
            counts[token as usize] += 1.0;
            history.push(token);
        }
        let chi_square: f64 = (counts.iter().zip(&logits))
            .map(|(&count, &logit)| {
                let expected = f64::from(logit.exp()) * f64::from(draws);
                (count - expected).powi(2) / expected
            })
            .sum();
        assert!(chi_square < 24.3, "chi-square is {chi_square} for the counts {counts:?}");
    }
}

#[test]
fn a_draw_depends_on_seed_sequence_and_position() {
    let draws = |seed, index| -> Vec<u64> { (0..64).map(|i| uniform(seed, index, i).to_bits()).collect() };
    assert_eq!(draws(3, 0), draws(3, 0));
    let mut all = [draws(3, 0), draws(3, 1), draws(4, 0), draws(0, 0), draws(u64::MAX, 0)].concat();
    all.sort_unstable();
    all.dedup();
    assert_eq!(all.len(), 5 * 64, "all draws differ");
    assert!(all.iter().all(|&bits| (0.0..1.0).contains(&f64::from_bits(bits))));
}

#[test]
fn greedy_returns_the_lowest_of_equal_tokens() {
    let logits = [0.0, 3.0, f32::NEG_INFINITY, 3.0];
    assert_eq!(choose(&logits, &sampling(0.0)), Ok(1));
    for sampling in [
        Sampling { top_k: 1, ..sampling(5.0) },
        Sampling { top_p: 0.0, ..sampling(5.0) },
        Sampling { top_p: 1e-9, ..sampling(5.0) },
    ] {
        for seed in 0..50 {
            assert_eq!(choose(&logits, &Sampling { seed, ..sampling.clone() }), Ok(1), "{sampling:?}");
        }
    }
}

#[test]
fn min_p_of_one_keeps_only_the_most_probable() {
    let logits = [0.0, 3.0, 2.999, 3.0];
    let mut seen = [0; 4];
    for seed in 0..200 {
        seen[choose(&logits, &Sampling { min_p: 1.0, seed, ..sampling(9.0) }).unwrap() as usize] += 1;
    }
    assert_eq!((seen[0], seen[2]), (0, 0));
    assert!(seen[1] > 50 && seen[3] > 50, "{seen:?}");
}

#[test]
fn extreme_temperatures_are_greedy_and_uniform() {
    let logits = [0.5, 0.6, -3.0, f32::NEG_INFINITY];
    let mut seen = [0; 4];
    for seed in 0..400 {
        for cold in [1e-45, 1e-30, 1e-6, -1.0, f32::NAN] {
            assert_eq!(choose(&logits, &Sampling { seed, ..sampling(cold) }), Ok(1));
        }
        seen[choose(&logits, &Sampling { seed, ..sampling(f32::MAX) }).unwrap() as usize] += 1;
    }
    assert_eq!(seen[3], 0, "a token with zero probability is never drawn");
    assert!(seen[..3].iter().all(|&count| count > 90), "{seen:?}");
}

#[test]
fn banned_tokens_are_never_drawn() {
    let vocabulary = 1000;
    let logits: Vec<f32> = (0..vocabulary).map(|token| token as f32 * 0.01).collect();
    let bias: Vec<_> = (0..vocabulary).filter(|&token| token != 5).collect();
    let bias: Vec<_> = bias.into_iter().map(|token| (token, f32::NEG_INFINITY)).collect();
    for temperature in [0.0, 1.0] {
        for (top_p, top_k) in [(1.0, 0), (0.5, 0), (1.0, 7), (0.5, 7)] {
            let only = Sampling { logit_bias: bias.clone(), top_p, top_k, ..sampling(temperature) };
            assert_eq!(choose(&logits, &only), Ok(5));
            let mut none = only;
            none.logit_bias.push((5, f32::NEG_INFINITY));
            assert_eq!(choose(&logits, &none), Err(SampleError::NoTokenLeft));
        }
    }
}

#[test]
fn stop_tokens_are_banned_before_min_tokens() {
    let sampling = sampling(0.0);
    let stop = StopCriteria { stop_token_ids: vec![2, 1, 999], max_tokens: 9, min_tokens: 2 };
    let mut history = History::new(&[], &sampling);
    let mut chosen = Vec::new();
    for _ in 0..4 {
        let context =
            SamplingContext { sampling: &sampling, stop: &stop, history: &history, index: 0, allowed: None };
        let token = Sampler::new().sample(&[0.0, 1.0, 2.0], &context).unwrap();
        history.push(token);
        chosen.push(token);
    }
    assert_eq!(chosen, [0, 0, 2, 2]);
}

#[test]
fn huge_penalties_and_biases_ban_or_force_and_never_panic() {
    let mut history = History::new(&[0], &Sampling { repetition_penalty: 2.0, ..sampling(0.0) });
    history.push(1);
    let stop = StopCriteria::default();
    let check = |sampling: Sampling, expected| {
        for temperature in [0.0, 1.0] {
            let sampling = Sampling { temperature, ..sampling.clone() };
            let context = SamplingContext {
                sampling: &sampling,
                stop: &stop,
                history: &history,
                index: 0,
                allowed: None,
            };
            assert_eq!(Sampler::new().sample(&[3.0, 50.0, -9.0], &context), Ok(expected), "{sampling:?}");
        }
    };
    check(Sampling { frequency_penalty: f32::MAX, ..sampling(0.0) }, 0);
    check(Sampling { presence_penalty: f32::MAX, top_p: 0.9, ..sampling(0.0) }, 0);
    check(Sampling { frequency_penalty: -f32::MAX, ..sampling(0.0) }, 1);
    check(Sampling { logit_bias: vec![(2, f32::INFINITY)], ..sampling(0.0) }, 2);
    check(
        Sampling { logit_bias: vec![(2, f32::MAX), (2, f32::MAX), (7, 1.0)], top_k: 2, ..sampling(0.0) },
        2,
    );
    check(Sampling { logit_bias: vec![(1, f32::INFINITY), (1, f32::NEG_INFINITY)], ..sampling(0.0) }, 0);
}

#[test]
fn invalid_logits_are_rejected() {
    for bad in [f32::NAN, f32::INFINITY] {
        for temperature in [0.0, 1.0] {
            let mut logits = vec![0.0; 700];
            logits[699] = bad;
            assert_eq!(choose(&logits, &sampling(temperature)), Err(SampleError::NotFinite));
        }
    }
    assert_eq!(choose(&[f32::NEG_INFINITY; 9], &sampling(1.0)), Err(SampleError::NoTokenLeft));
}

#[test]
fn invalid_logits_are_rejected_even_where_they_are_replaced() {
    let ban = |token| vec![(token, f32::NEG_INFINITY)];
    let everything = [
        Sampling { logit_bias: ban(3), ..sampling(0.0) },
        Sampling { allowed_token_ids: Some([5].into()), ..sampling(0.0) },
        Sampling { bad_words: Arc::new([vec![3]]), ..sampling(0.0) },
        // This ban replaces a logit other than the invalid one.
        Sampling { logit_bias: ban(4), ..sampling(0.0) },
    ];
    for sampling in everything {
        for bad in [f32::NAN, f32::INFINITY] {
            let mut logits = vec![0.0; 700];
            assert!(choose(&logits, &sampling).is_ok());
            logits[3] = bad;
            assert_eq!(choose(&logits, &sampling), Err(SampleError::NotFinite), "{sampling:?}");
        }
    }
}

#[test]
fn logprobs_are_of_the_model_distribution_most_probable_first() {
    let mut rng = StdRng::seed_from_u64(5);
    let mut sampler = Sampler::new();
    for round in 0..300 {
        let logits = random_logits(&mut rng, [5, 300, 2000][round % 3]);
        let max = logits.iter().copied().map(f64::from).fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = logits.iter().map(|&logit| (f64::from(logit) - max).exp()).sum();
        let exact = |token: usize| f64::from(logits[token]) - max - sum.ln();
        let mut order: Vec<usize> = (0..logits.len()).filter(|&token| logits[token].is_finite()).collect();
        order.sort_by(|&a, &b| logits[b].partial_cmp(&logits[a]).unwrap().then(a.cmp(&b)));

        let count = rng.random_range(0..21);
        let report = sampler.logprobs(&logits, order[order.len() / 2] as TokenId, count);
        order.truncate(count as usize);
        assert!(report.top.iter().map(|top| top.token as usize).eq(order.iter().copied()), "round {round}");
        for top in report.top.iter().chain([&report.chosen]) {
            let error = f64::from(top.logprob) - exact(top.token as usize);
            assert!(error.abs() < 2e-6 * (1.0 + max.abs()), "round {round}: off by {error}");
        }
    }
}

#[test]
fn invalid_parameters_are_reported_by_name() {
    assert_eq!(sampling(0.7).invalid_parameter(), None);
    for (parameter, sampling) in [
        ("temperature", sampling(f32::NAN)),
        ("temperature", sampling(f32::INFINITY)),
        ("temperature", sampling(-0.1)),
        ("top_p", Sampling { top_p: 1.1, ..sampling(1.0) }),
        ("min_p", Sampling { min_p: f32::NAN, ..sampling(1.0) }),
        ("repetition_penalty", Sampling { repetition_penalty: 0.0, ..sampling(1.0) }),
        ("frequency_penalty", Sampling { frequency_penalty: f32::INFINITY, ..sampling(1.0) }),
        ("presence_penalty", Sampling { presence_penalty: f32::NAN, ..sampling(1.0) }),
        ("logit_bias", Sampling { logit_bias: vec![(1, f32::NAN)], ..sampling(1.0) }),
    ] {
        assert_eq!(sampling.invalid_parameter(), Some(parameter));
    }
}

#[test]
fn extreme_penalties_leave_a_token_to_sample() {
    let logits: Vec<f32> = (0..1000).map(|token| ((token * 37) % 101) as f32 - 50.0).collect();
    for repetition_penalty in [f32::from_bits(1), 1e-40, f32::MIN_POSITIVE, 1e-30, 1e30, f32::MAX] {
        for (temperature, top_p, min_p) in
            [(0.0, 1.0, 0.0), (1.0, 1.0, 0.0), (0.7, 0.9, 0.05), (1e-30, 0.5, 0.0)]
        {
            let sampling = Sampling { repetition_penalty, temperature, top_p, min_p, ..Sampling::greedy() };
            assert_eq!(sampling.invalid_parameter(), None);
            let mut history = History::new(&[1, 2, 3, 500], &sampling);
            history.push(999);
            let stop = StopCriteria::default();
            let context = SamplingContext {
                sampling: &sampling,
                stop: &stop,
                history: &history,
                index: 0,
                allowed: None,
            };
            let chosen = Sampler::new().sample(&logits, &context);
            assert!(chosen.is_ok_and(|token| token < 1000), "{sampling:?}: {chosen:?}");
            Sampler::new().candidates(&logits, &context, 8).expect("some tokens remain");
        }
    }
}
