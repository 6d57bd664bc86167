//! Operations on the logits of the tokens that a guide allows.

use server_scheduler::TokenId;

use super::scan::Peak;
use crate::guide::{SetBits, TokenSet};

/// If less than `1 / SPARSE` of the tokens are allowed, non-greedy sampling gathers their logits and reads no others.
const SPARSE: usize = 8;

const WORD: usize = u32::BITS as usize;

/// If a word has at most this many allowed tokens, their logits are read one by one.
const BITS_MAX: u32 = 4;

/// Whether so few tokens are allowed that their logits should be gathered.
pub(super) fn is_sparse(allowed: &TokenSet, logits: &[f32]) -> bool {
    (allowed.len() as usize) < logits.len() / SPARSE
}

/// The peak among the allowed tokens. `None` if one of their logits is NaN or positive infinity. The value is negative
/// infinity if no token is allowed.
pub(super) fn peak(logits: &[f32], allowed: &TokenSet) -> Option<Peak> {
    let mut best = Peak { value: f32::NEG_INFINITY, token: 0 };
    let mut finite = true;
    for (index, (logits, &word)) in logits.chunks(WORD).zip(allowed.words()).enumerate() {
        if word == 0 {
            continue;
        }
        let (greatest, numbers) = greatest(logits, word);
        finite &= numbers;
        if greatest > best.value {
            let offset = SetBits(word).find(|&bit| logits.get(bit as usize) == Some(&greatest)).unwrap_or(0);
            best = Peak { value: greatest, token: (index * WORD) as TokenId + offset };
        }
    }
    finite.then_some(best)
}

/// The greatest of the logits whose bits in `word` are set, and whether all of them are valid.
fn greatest(logits: &[f32], word: u32) -> (f32, bool) {
    let mut greatest = f32::NEG_INFINITY;
    let mut numbers = true;
    match <&[f32; WORD]>::try_from(logits) {
        Ok(logits) if word.count_ones() > BITS_MAX => {
            // These loops have no branches, so that the compiler vectorizes them.
            let mut finite = [true; WORD];
            let values = masked(logits, word);
            for bit in 0..WORD {
                finite[bit] = values[bit] <= f32::MAX;
            }
            numbers = finite.iter().fold(true, |all, &finite| all & finite);
            greatest = values.into_iter().fold(greatest, |a, b| if b > a { b } else { a });
        }
        _ => {
            for &logit in SetBits(word).filter_map(|bit| logits.get(bit as usize)) {
                greatest = if logit > greatest { logit } else { greatest };
                numbers &= logit <= f32::MAX;
            }
        }
    }
    (greatest, numbers)
}

/// The logits whose bits in `word` are set, and negative infinity for the others.
fn masked(logits: &[f32; WORD], word: u32) -> [f32; WORD] {
    let mut values = [f32::NEG_INFINITY; WORD];
    for bit in 0..WORD {
        values[bit] = if word & (1 << bit) == 0 { f32::NEG_INFINITY } else { logits[bit] };
    }
    values
}

/// Fills `tokens` and `kept` with the allowed tokens and their logits, in the order of their ids.
pub(super) fn gather(logits: &[f32], allowed: &TokenSet, tokens: &mut Vec<TokenId>, kept: &mut Vec<f32>) {
    tokens.clear();
    kept.clear();
    for token in allowed.iter() {
        if let Some(&logit) = logits.get(token as usize) {
            tokens.push(token);
            kept.push(logit);
        }
    }
}

/// Fills `kept` with the logits of the allowed tokens, and negative infinity for all other tokens.
pub(super) fn mask(logits: &[f32], allowed: &TokenSet, kept: &mut Vec<f32>) {
    kept.clear();
    let (whole, rest) = logits.as_chunks::<WORD>();
    let mut words = allowed.words().iter().copied().chain(std::iter::repeat(0));
    for (logits, word) in whole.iter().zip(&mut words) {
        kept.extend_from_slice(&masked(logits, word));
    }
    let word = words.next().unwrap_or(0);
    let is_allowed = |bit: usize| word & (1 << bit) != 0;
    kept.extend(
        rest.iter().enumerate().map(|(bit, &logit)| if is_allowed(bit) { logit } else { f32::NEG_INFINITY }),
    );
}

#[cfg(test)]
mod tests {
    use rand::rngs::StdRng;
    use rand::{RngExt, SeedableRng};
    use server_scheduler::StopCriteria;

    use super::*;
    use crate::request::Sampling;
    use crate::sampler::{History, SampleError, Sampler, SamplingContext};

    /// Samples once with the guide's set `allowed`, and once with a bias that bans all other tokens.
    fn both_ways(
        logits: &[f32],
        allowed: &TokenSet,
        sampling: &Sampling,
    ) -> [Result<TokenId, SampleError>; 2] {
        let (stop, history) = (StopCriteria::default(), History::new(&[1, 2, 3], sampling));
        let others = (0..logits.len() as TokenId).filter(|&token| !allowed.contains(token));
        let bans = others.map(|token| (token, f32::NEG_INFINITY));
        let banning = Sampling {
            logit_bias: sampling.logit_bias.iter().copied().chain(bans).collect(),
            ..sampling.clone()
        };
        let context =
            SamplingContext { sampling, stop: &stop, history: &history, index: 0, allowed: Some(allowed) };
        let banned = SamplingContext { sampling: &banning, allowed: None, ..context };
        [context, banned].map(|context| Sampler::new().sample(logits, &context))
    }

    #[test]
    fn allowing_tokens_equals_banning_the_others() {
        let mut rng = StdRng::seed_from_u64(3);
        let mut differ = 0;
        for round in 0..2000 {
            let vocabulary = [5, 64, 700, 3000][round % 4];
            let logits: Vec<f32> = (0..vocabulary).map(|_| rng.random_range(-9f32..9.0).round()).collect();
            let fraction = [0.001, 0.02, 0.5, 0.999][rng.random_range(0..4)];
            let mut allowed = TokenSet::new(vocabulary);
            (0..vocabulary).filter(|_| rng.random_bool(fraction)).for_each(|token| allowed.insert(token));
            let mut sampling = Sampling {
                temperature: [0.0, 0.7, 3.0][rng.random_range(0..3)],
                top_p: [1.0, 0.8][rng.random_range(0..2)],
                top_k: [0, 1, 20][rng.random_range(0..3)],
                min_p: [0.0, 0.1][rng.random_range(0..2)],
                repetition_penalty: [1.0, 1.4][rng.random_range(0..2)],
                seed: rng.random(),
                ..Sampling::greedy()
            };
            if rng.random_bool(0.3) {
                sampling.logit_bias.push((rng.random_range(0..vocabulary), 5.0));
            }
            let [chosen, expected] = both_ways(&logits, &allowed, &sampling);
            if let Ok(token) = chosen {
                assert!(allowed.contains(token), "round {round}: {token} is not allowed");
            }
            if sampling.temperature == 0.0 || sampling.top_k == 1 || chosen.is_err() {
                assert_eq!(chosen, expected, "round {round}: {sampling:?}");
            }
            // The two ways sum the weights in different orders, so draws near a boundary may differ.
            differ += u32::from(chosen != expected);
        }
        assert!(differ < 3, "{differ} draws differ");
    }

    #[test]
    fn logits_of_tokens_that_are_not_allowed_may_be_invalid() {
        let mut logits = vec![1.0; 100];
        (logits[7], logits[60], logits[99]) = (f32::NAN, 2.0, f32::INFINITY);
        for dense in [false, true] {
            let mut allowed = TokenSet::new(100);
            (50..if dense { 99 } else { 61 }).for_each(|token| allowed.insert(token));
            assert_eq!(both_ways(&logits, &allowed, &Sampling::greedy())[0], Ok(60));
            allowed.insert(99);
            let hot = Sampling { temperature: 1.0, ..Sampling::greedy() };
            for sampling in [Sampling::greedy(), hot] {
                assert_eq!(both_ways(&logits, &allowed, &sampling)[0], Err(SampleError::NotFinite));
            }
        }
    }

    #[test]
    fn tokens_outside_of_the_vocabulary_are_not_allowed() {
        let mut allowed = TokenSet::new(40);
        (0..40).for_each(|token| allowed.insert(token));
        let logits: Vec<f32> = (0..90).map(|token| token as f32).collect();
        for temperature in [0.0, 1e-6] {
            let sampling = Sampling { temperature, ..Sampling::greedy() };
            assert_eq!(both_ways(&logits, &allowed, &sampling)[0], Ok(39));
        }
    }
}
