//! Tests forms that need a lot of memory. Each lexer and each parser of a sequence has a limit, and another limit
//! applies to all of them together with the compiled grammars. A sequence that exceeds a limit does not affect others.

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
        assert!(allowed.contains(byte.into()), "{:?} is not allowed", char::from(byte));
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
    // A token is not lost if it is chosen before the failure and committed after the failure.
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
        memory_bytes_max: 8 << 20,
        cached_memory_bytes_max: 4 << 20,
        lexer_bytes_max: 1 << 20,
        ..GuideLimits::default()
    };
    let compiler = compiler(limits);
    let mut most = 0;
    for number in 0..40 {
        let guide = compiler.compile(&growing(&format!("{number:02}"), 11)).unwrap();
        let mut state = guide.start().unwrap();
        let text = format!("{number:02}").into_bytes().into_iter().chain(letters(number, 600));
        follow(&mut *state, text).unwrap();
        most = most.max(compiler.memory_bytes());
    }
    assert!(most <= limits.memory_bytes_max, "{most}");
    drop(compiler.compile(&growing("", 3)).unwrap());
    let rest = compiler.memory_bytes();
    assert!(rest <= limits.cached_memory_bytes_max + (1 << 20), "{rest}");
}

#[test]
fn lexers_above_the_average_fail_when_all_in_use_exceed_the_limit() {
    let limits =
        GuideLimits { memory_bytes_max: 6 << 20, cached_memory_bytes_max: 3 << 20, ..GuideLimits::default() };
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
        assert!(compiler.memory_bytes() < limits.memory_bytes_max * 2, "{}", compiler.memory_bytes());
    }
    assert!((1..16).contains(&failed), "{failed}");
    for (number, state) in states.iter_mut().enumerate() {
        let text = format!("x{number}").into_bytes().into_iter().chain(letters(9, 50));
        follow(&mut **state, text).unwrap();
    }
    drop((large, states));
    follow(&mut *compiler.compile(&growing("y", 12)).unwrap().start().unwrap(), *b"yabab").unwrap();
    assert!(compiler.memory_bytes() < limits.memory_bytes_max, "{}", compiler.memory_bytes());
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

/// A grammar for which each row of the parser has an item for each of `count` alternatives.
fn wide(prefix: &str, count: u32) -> Form {
    let alternatives: Vec<String> = (0..count).map(|number| format!("\"{prefix}{number}\"")).collect();
    let text = format!("start: (\"x\" | {})*\n", alternatives.join(" | "));
    Form::Grammar { text, at: "grammar".to_owned() }
}

#[test]
fn a_sequence_whose_text_needs_too_much_memory_fails_alone() {
    let limits = GuideLimits { sequence_bytes_max: 1 << 20, ..GuideLimits::default() };
    let compiler = compiler(limits);
    let guide = compiler.compile(&wide("", 200)).unwrap();
    let mut beside = guide.start().unwrap();
    follow(&mut *beside, *b"xxx").unwrap();
    let before = compiler.memory_bytes();
    let mut long = guide.start().unwrap();
    let error = follow(&mut *long, [b'x'; 2000]).unwrap_err();
    assert!(matches!(error, GuideError::TooComplex(_)), "{error}");
    let grown = compiler.memory_bytes() - before;
    assert!((limits.sequence_bytes_max..limits.sequence_bytes_max + (64 << 10)).contains(&grown), "{grown}");
    follow(&mut *beside, *b"xxx").unwrap();
    drop(long);
    assert!(compiler.memory_bytes() < before + (64 << 10), "{}", compiler.memory_bytes());
}

#[test]
fn tokens_with_large_rows_are_consumed_when_the_next_set_is_computed() {
    let compiler = compiler(GuideLimits::default());
    let guide = compiler.compile(&wide("", 2000)).unwrap();
    // The first sequence records that the rows of the form are large.
    follow(&mut *guide.start().unwrap(), *b"x").unwrap();
    let mut state = guide.start().unwrap();
    let started = compiler.memory_bytes();
    for byte in *b"x1x" {
        state.commit(byte.into()).unwrap();
        state = state.fork();
    }
    assert_eq!(compiler.memory_bytes(), started);
    follow(&mut *state, *b"17x").unwrap();
    assert!(compiler.memory_bytes() > started + 2000 * 5);
}

#[test]
fn captured_texts_are_part_of_the_memory_of_a_sequence() {
    let compiler = compiler(GuideLimits { sequence_bytes_max: 1 << 20, ..GuideLimits::default() });
    let text = "start: r\nr[capture]: r \"x\" | \"x\"\n".to_owned();
    let guide = compiler.compile(&Form::Grammar { text, at: "grammar".to_owned() }).unwrap();
    let error = follow(&mut *guide.start().unwrap(), [b'x'; 3000]).unwrap_err();
    assert!(matches!(error, GuideError::TooComplex(_)), "{error}");
}

#[test]
fn sequences_above_the_average_fail_when_all_together_exceed_the_limit() {
    let limits =
        GuideLimits { memory_bytes_max: 8 << 20, cached_memory_bytes_max: 4 << 20, ..GuideLimits::default() };
    let compiler = compiler(limits);
    let guide = compiler.compile(&wide("", 200)).unwrap();
    let mut short: Vec<_> = (0..8).map(|_| guide.start().unwrap()).collect();
    let (mut failed, mut long) = (0, Vec::new());
    for _ in 0..16 {
        let mut state = guide.start().unwrap();
        match follow(&mut *state, [b'x'; 400]) {
            Ok(_) => {}
            Err(GuideError::TooComplex(_)) => failed += 1,
            Err(error) => panic!("{error}"),
        }
        long.push(state);
        assert!(compiler.memory_bytes() < limits.memory_bytes_max * 2, "{}", compiler.memory_bytes());
    }
    assert!((1..16).contains(&failed), "{failed}");
    for state in &mut short {
        follow(&mut **state, [b'x'; 10]).unwrap();
    }
    let copies: Vec<_> = short.iter().map(|state| state.fork()).collect();
    drop((short, long, copies));
    assert!(compiler.memory_bytes() < 2 << 20, "{}", compiler.memory_bytes());
}

/// A form whose grammar takes about a megabyte of memory and whose lexer takes much less.
fn repetitions(prefix: u32) -> Form {
    let parts: Vec<String> = (0..50).map(|number| format!("\"{prefix}-{number}\"{{0,5000}}")).collect();
    Form::Grammar { text: format!("start: {}\n", parts.join(" ")), at: "grammar".to_owned() }
}

#[test]
fn compiled_grammars_are_part_of_the_memory() {
    let limits =
        GuideLimits { memory_bytes_max: 8 << 20, cached_memory_bytes_max: 4 << 20, ..GuideLimits::default() };
    let compiler = compiler(limits);
    // Forms that no request uses are evicted to make room for others.
    for number in 0..10 {
        compiler.compile(&repetitions(number)).unwrap();
        assert!(compiler.memory_bytes() < limits.memory_bytes_max, "{}", compiler.memory_bytes());
    }
    let guides = (10..30).map(|number| compiler.compile(&repetitions(number)));
    let (used, rejected): (Vec<_>, Vec<_>) = guides.partition(Result::is_ok);
    assert!(!used.is_empty() && !rejected.is_empty(), "{} were compiled", used.len());
    for error in rejected {
        let error = error.unwrap_err();
        assert_eq!(error.at, "grammar");
        assert!(error.problem.contains("memory"), "{error}");
    }
    assert!(compiler.memory_bytes() < limits.memory_bytes_max * 2, "{}", compiler.memory_bytes());
    compiler.compile(&wide("small", 5)).unwrap();
    drop(used);
    compiler.compile(&repetitions(30)).unwrap();
}
