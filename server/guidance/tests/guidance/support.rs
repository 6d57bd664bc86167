//! A small vocabulary, a check of whether texts match a form, and random texts sampled from a form.

use std::sync::LazyLock;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use server_engine::{
    Guide as _, GuideState, History, Progress, Sampler, Sampling, SamplingContext, TokenSet,
};
use server_guidance::{Compiler, Form, Guide, Vocabulary};
use server_scheduler::StopCriteria;

/// The special tokens, with IDs from 256.
pub(crate) const SPECIAL: [&str; 14] = [
    "<end>",
    "<think>",
    "</think>",
    "<|tool_call>",
    "<tool_call|>",
    "<|\"|>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|channel|>",
    "<|message|>",
    "<|start|>",
    "<|end|>",
    "<|call|>",
    "<|constrain|>",
];

/// Tokens of several bytes, with the IDs after those of the special tokens.
const LONGER: [&str; 40] = [
    "{\"", "\":", "\": ", "\", \"", ", ", "\"}", "\"]", "}}", "]}", "true", "false", "null", "True", "None",
    "  ", "\n\n", "12", "34", "0.", "e5", "-1", "the", " and", "name", "arg", "uments", "value", "type",
    "ab", "xyz", "ä", "日本", "🦀", "\\n", "\\\"", "</", "tool", "_call", ">\n", "para",
];

pub(crate) fn vocabulary() -> Vocabulary {
    let bytes = (0..=255u8).map(|byte| (vec![byte], false));
    let special = SPECIAL.iter().map(|text| (text.as_bytes().to_vec(), true));
    let longer = LONGER.iter().map(|text| (text.as_bytes().to_vec(), false));
    Vocabulary::new(bytes.chain(special).chain(longer)).unwrap()
}

pub(crate) static COMPILER: LazyLock<Compiler> = LazyLock::new(|| Compiler::new(vocabulary(), 2).unwrap());

pub(crate) fn compile(form: &Form) -> Guide {
    COMPILER.compile(form).unwrap_or_else(|invalid| panic!("{invalid}: {form:?}"))
}

/// How a text matches a form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fit {
    /// The text matches the form.
    Whole,
    /// The text is a proper prefix of a match.
    Begun,
    /// The text does not match beyond this many bytes.
    NotAfter(usize),
}

/// Matches `text` against a form: special tokens as whole tokens, and everything else byte by byte.
pub(crate) fn fit(guide: &Guide, text: &str) -> Fit {
    let vocabulary = COMPILER.vocabulary();
    let mut state = guide.start().unwrap();
    let mut allowed = TokenSet::new(vocabulary.len() as u32);
    let mut at = 0;
    let mut ended = false;
    while at < text.len() {
        let special = SPECIAL.iter().find(|special| text[at..].starts_with(*special));
        let tokens: Vec<u32> = match special {
            Some(special) => vec![vocabulary.special(special).unwrap()],
            None => {
                let letter = text[at..].chars().next().unwrap();
                letter.to_string().bytes().map(u32::from).collect()
            }
        };
        for token in tokens {
            allowed.clear();
            if ended || state.allow(&mut allowed).unwrap() == Progress::Ended || !allowed.contains(token) {
                return Fit::NotAfter(at);
            }
            ended = state.commit(token).unwrap() == Progress::Ended;
            at += vocabulary.bytes(token).len();
        }
    }
    allowed.clear();
    if ended || state.allow(&mut allowed).unwrap() != Progress::Open { Fit::Whole } else { Fit::Begun }
}

/// Asserts that the form accepts all of `fitting` and none of `others`.
pub(crate) fn check(form: &Form, fitting: &[&str], others: &[&str]) {
    let guide = compile(form);
    for text in fitting {
        assert_eq!(fit(&guide, text), Fit::Whole, "{text:?} in {form:?}");
    }
    for text in others {
        assert_ne!(fit(&guide, text), Fit::Whole, "{text:?} in {form:?}");
    }
}

/// A random text that follows a form, and whether it is complete.
pub(crate) struct SampledText {
    pub(crate) bytes: Vec<u8>,
    pub(crate) is_whole: bool,
}

impl SampledText {
    /// Returns the text, which must be complete. A complete text is valid UTF-8.
    pub(crate) fn text(&self) -> String {
        String::from_utf8(self.bytes.clone()).expect("a complete text is valid UTF-8")
    }
}

/// Samples a text with random logits. Tokens that close a string or a bracket get higher logits, because strings would
/// otherwise become long.
pub(crate) fn draw(guide: &Guide, seed: u64, tokens_max: usize) -> SampledText {
    let vocabulary = COMPILER.vocabulary();
    let mut rng = StdRng::seed_from_u64(seed);
    let closes: Vec<f32> = (0..vocabulary.len() as u32)
        .map(|token| match vocabulary.bytes(token) {
            [b'"' | b'}' | b']' | b'>'] => 4.0,
            bytes if bytes.ends_with(b"\"") || bytes.ends_with(b"}") => 2.5,
            bytes if vocabulary.is_special(token) || bytes.starts_with(b"<") => 3.0,
            _ => 0.0,
        })
        .collect();
    let sampling = Sampling { temperature: 1.0, seed, ..Sampling::greedy() };
    let (stop, mut history) = (StopCriteria::default(), History::new(&[], &sampling));
    let mut sampler = Sampler::new();
    let mut state = guide.start().unwrap();
    let mut allowed = TokenSet::new(vocabulary.len() as u32);
    let mut bytes = Vec::new();
    let mut is_whole = false;
    for _ in 0..tokens_max {
        allowed.clear();
        let progress = state.allow(&mut allowed).unwrap_or_else(|error| {
            panic!("{error} after {:?} with seed {seed}", String::from_utf8_lossy(&bytes))
        });
        // Where the text may end, it ends with a probability of one half.
        if progress == Progress::Ended || (progress == Progress::MayEnd && rng.random_bool(0.5)) {
            is_whole = true;
            break;
        }
        assert!(!allowed.is_empty(), "nothing may follow {:?}", String::from_utf8_lossy(&bytes));
        let logits: Vec<f32> = closes.iter().map(|close| close + rng.random_range(-2f32..2.0)).collect();
        let choice = SamplingContext {
            sampling: &sampling,
            stop: &stop,
            history: &history,
            index: 0,
            allowed: Some(&allowed),
        };
        let token = sampler.sample(&logits, &choice).unwrap();
        history.push(token);
        bytes.extend_from_slice(vocabulary.bytes(token));
        if state.commit(token).unwrap() == Progress::Ended {
            is_whole = true;
            break;
        }
    }
    SampledText { bytes, is_whole }
}

/// Returns the tokens that are allowed at the beginning, and the state at the beginning.
pub(crate) fn first(guide: &Guide) -> (TokenSet, Box<dyn GuideState>) {
    let mut state = guide.start().unwrap();
    let mut allowed = TokenSet::new(COMPILER.vocabulary().len() as u32);
    state.allow(&mut allowed).unwrap();
    (allowed, state)
}
