//! Forms whose lexers grow: each lexer has a limit, all lexers together have one, and a sequence that exceeds a limit
//! does not affect others.

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use server_engine::{Guide as _, GuideError, GuideState, Progress, TokenSet};
use server_guidance::limits::GuideLimits;
use server_guidance::{Compiler, Form, Guide};

use crate::support::vocabulary;

fn compiler(limits: GuideLimits) -> Compiler {
    Compiler::with_limits(vocabulary(), limits).unwrap()
}

/// A form whose automaton has a state for each text of `length` letters.
fn growing(prefix: &str, length: u32) -> Form {
    Form::Regex { pattern: format!("{prefix}[ab]*a[ab]{{{length}}}"), at: "regex".to_owned() }
}

fn follow(state: &mut dyn GuideState, text: impl IntoIterator<Item = u8>) -> Result<Progress, GuideError> {
    let mut progress = Progress::Open;
    for byte in text {
        let mut allowed = TokenSet::new(vocabulary().len() as u32);
        progress = state.allow(&mut allowed)?;
        assert!(allowed.contains(byte.into()), "{:?} may come", char::from(byte));
        state.commit(byte.into())?;
    }
    Ok(progress)
}

fn letters(seed: u64, count: usize) -> Vec<u8> {
    let mut rng = StdRng::seed_from_u64(seed);
    (0..count).map(|_| rng.random_range(b'a'..=b'b')).collect()
}

#[test]
fn a_sequence_that_exhausts_its_lexer_fails_alone() {
    let compiler = compiler(GuideLimits { lexer_states_max: 300, ..GuideLimits::default() });
    let form = growing("", 12);
    let guide = compiler.compile(&form).unwrap();
    let mut beside = guide.start().unwrap();
    follow(&mut *beside, letters(1, 20)).unwrap();
    // Tokens that were committed before the failure are not lost either.
    let mut allowed = TokenSet::new(vocabulary().len() as u32);
    let mut between = guide.start().unwrap();
    between.allow(&mut allowed).unwrap();
    for seed in 0..3 {
        let mut exhausting = guide.start().unwrap();
        let error = follow(&mut *exhausting, letters(seed, 2_000)).unwrap_err();
        assert!(matches!(error, GuideError::TooComplex(_)), "{error}");
        follow(&mut *guide.start().unwrap(), letters(seed, 20)).unwrap();
        follow(&mut *compiler.compile(&form).unwrap().start().unwrap(), letters(seed, 20)).unwrap();
    }
    between.commit(b'a'.into()).unwrap();
    for state in [&mut beside, &mut between] {
        let mut copy = state.fork();
        assert_eq!(follow(&mut **state, letters(2, 20)), follow(&mut *copy, letters(2, 20)));
    }
}

#[test]
fn idle_compiled_forms_are_dropped_when_lexers_need_memory() {
    let limits = GuideLimits {
        lexer_bytes_max: 8 << 20,
        cached_lexer_bytes_max: 4 << 20,
        lane_bytes_max: 1 << 20,
        ..GuideLimits::default()
    };
    let compiler = compiler(limits);
    let mut most = 0;
    for number in 0..40 {
        let guide = compiler.compile(&growing(&format!("{number:02}"), 11)).unwrap();
        let mut state = guide.start().unwrap();
        let text = format!("{number:02}").into_bytes().into_iter().chain(letters(number, 600));
        follow(&mut *state, text).unwrap();
        most = most.max(compiler.lexer_bytes());
    }
    assert!(most <= limits.lexer_bytes_max, "{most}");
    drop(compiler.compile(&growing("", 3)).unwrap());
    let rest = compiler.lexer_bytes();
    assert!(rest <= limits.cached_lexer_bytes_max + (1 << 20), "{rest}");
}

#[test]
fn lexers_above_the_average_fail_when_all_in_use_exceed_the_limit() {
    let limits =
        GuideLimits { lexer_bytes_max: 6 << 20, cached_lexer_bytes_max: 3 << 20, ..GuideLimits::default() };
    let compiler = compiler(limits);
    let small: Vec<Guide> =
        (0..4).map(|number| compiler.compile(&growing(&format!("x{number}"), 2)).unwrap()).collect();
    let mut states: Vec<_> = small.iter().map(|guide| guide.start().unwrap()).collect();
    let mut failed = 0;
    let mut large = Vec::new();
    for number in 0..16 {
        let guide = compiler.compile(&growing(&format!("{number:02}"), 12)).unwrap();
        let mut state = guide.start().unwrap();
        let text = format!("{number:02}").into_bytes().into_iter().chain(letters(number, 700));
        match follow(&mut *state, text) {
            Ok(_) => {}
            Err(GuideError::TooComplex(_)) => failed += 1,
            Err(error) => panic!("{error}"),
        }
        large.push(state);
        assert!(compiler.lexer_bytes() < limits.lexer_bytes_max * 2, "{}", compiler.lexer_bytes());
    }
    assert!((1..16).contains(&failed), "{failed}");
    for (number, state) in states.iter_mut().enumerate() {
        let text = format!("x{number}").into_bytes().into_iter().chain(letters(9, 50));
        follow(&mut **state, text).unwrap();
    }
    drop((large, states));
    follow(&mut *compiler.compile(&growing("y", 12)).unwrap().start().unwrap(), *b"yabab").unwrap();
    assert!(compiler.lexer_bytes() < limits.lexer_bytes_max, "{}", compiler.lexer_bytes());
}

#[test]
fn a_form_that_exhausts_its_lexer_at_the_start_is_rejected_when_compiled() {
    let compiler = compiler(GuideLimits { step_fuel: 400, ..GuideLimits::default() });
    let words = |count: u64| -> Vec<String> {
        (1..=count).map(|number| format!("{:016x}", number.wrapping_mul(0x9e37_79b9_7f4a_7c15))).collect()
    };
    let form =
        |count| Form::Json { schema: serde_json::json!({"enum": words(count)}), at: "schema".to_owned() };
    let guide = compiler.compile(&form(3)).unwrap();
    follow(&mut *guide.start().unwrap(), format!("\"{}\"", words(3)[1]).into_bytes()).unwrap();
    let error = compiler.compile(&form(1_000)).unwrap_err();
    assert_eq!(error.at, "schema");
    assert!(error.problem.contains("too many expressions"), "{error}");
}
