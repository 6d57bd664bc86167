//! Tests free text before a form.

use serde_json::json;
use server_guidance::{Form, Guide};

use crate::support::{COMPILER, Fit, compile, draw, first, fit};

fn object() -> Guide {
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": false});
    compile(&Form::Json { schema, at: "schema".to_owned() })
}

#[test]
fn reasoning_may_precede_the_form() {
    let guide = object().after(COMPILER.preface(Some("<think>"), "</think>").unwrap());
    for text in ["{\"a\":1}", "<think>x{}</think>{\"a\":1}", "<think></think>\n{\"a\": 1}"] {
        assert_eq!(fit(&guide, text), Fit::Whole, "{text}");
    }
    for (text, at) in [("x", 0), ("<think>x</think>x", 16), ("<think></think>\n\n{", 16), ("</think>", 0)] {
        assert_eq!(fit(&guide, text), Fit::NotAfter(at), "{text}");
    }
    assert_eq!(fit(&guide, "<think>no end"), Fit::Begun);
    // No special token other than the mark is allowed in the reasoning.
    assert_eq!(fit(&guide, "<think>x<end>"), Fit::NotAfter(8));
    assert_eq!(fit(&guide, "<think>x<|end|>"), Fit::NotAfter(8));
}

#[test]
fn reasoning_that_the_prompt_began_precedes_the_form() {
    let guide = object().after(COMPILER.preface(None, "</think>").unwrap());
    assert_eq!(fit(&guide, "why</think>{\"a\":1}"), Fit::Whole);
    assert_eq!(fit(&guide, "{\"a\":1}"), Fit::Begun);
}

#[test]
fn a_mark_spelled_by_several_tokens_ends_the_text() {
    let guide = object().after(COMPILER.preface(None, "\nDone:").unwrap());
    for text in ["why\nDone:{\"a\":1}", "\n\nDone:\n{\"a\":1}", "\nDon\nDone:{\"a\":1}"] {
        assert_eq!(fit(&guide, text), Fit::Whole, "{text}");
    }
    assert_eq!(fit(&guide, "\nDone:x"), Fit::NotAfter(6));
    // A token that completes the mark and has further bytes is not allowed, unless these bytes are a newline.
    let guide = object().after(COMPILER.preface(None, "x</think>").unwrap());
    let (_, mut state) = first(&guide);
    let vocabulary = COMPILER.vocabulary();
    for letter in "x</think".bytes() {
        state.commit(u32::from(letter)).unwrap();
    }
    let mut allowed = server_engine::TokenSet::new(vocabulary.len() as u32);
    state.allow(&mut allowed).unwrap();
    assert!(allowed.contains(vocabulary.token(">\n").unwrap()));
    assert!(allowed.contains(u32::from(b'>')) && allowed.contains(u32::from(b'y')));
    state.commit(vocabulary.token(">\n").unwrap()).unwrap();
    allowed.clear();
    state.allow(&mut allowed).unwrap();
    assert!(allowed.contains(u32::from(b'{')) && !allowed.contains(u32::from(b'y')));
    assert!(!allowed.contains(u32::from(b'\n')), "one newline is layout, a second is not");
}

#[test]
fn a_preface_needs_a_token_that_opens_it() {
    assert!(COMPILER.preface(Some("<reason>"), "</reason>").is_none());
    assert!(COMPILER.preface(None, "").is_none());
}

#[test]
fn sampled_texts_are_reasoning_followed_by_the_form() {
    let guide = object().after(COMPILER.preface(Some("<think>"), "</think>").unwrap());
    let (mut thought, mut whole) = (0, 0);
    for seed in 0..60 {
        let drawn = draw(&guide, seed, 400);
        // Reasoning may consist of any bytes, so it may be invalid UTF-8.
        let text = String::from_utf8_lossy(&drawn.bytes);
        let Some(rest) = text.strip_prefix("<think>") else { continue };
        thought += 1;
        if drawn.is_whole {
            whole += 1;
            let (_, answer) = rest.split_once("</think>").unwrap();
            assert!(serde_json::from_str::<serde_json::Value>(answer).unwrap().is_object(), "{answer}");
        }
    }
    assert!(
        thought > 10 && whole > thought / 3,
        "{thought} texts have reasoning, {whole} of them are complete"
    );
}

#[test]
fn a_form_that_begins_with_a_newline_reads_it_even_if_several_tokens_are_committed_at_once() {
    let form = Form::Regex { pattern: "\n(yes|no)".to_owned(), at: "regex".to_owned() };
    let guide = compile(&form).after(COMPILER.preface(None, "</think>").unwrap());
    let vocabulary = COMPILER.vocabulary();
    let (_, mut state) = first(&guide);
    for token in [vocabulary.special("</think>").unwrap(), u32::from(b'\n'), u32::from(b'y')] {
        state.commit(token).unwrap();
    }
    let mut allowed = server_engine::TokenSet::new(vocabulary.len() as u32);
    state.allow(&mut allowed).unwrap();
    assert!(allowed.contains(u32::from(b'e')) && !allowed.contains(u32::from(b'y')));
}

#[test]
fn a_fork_is_independent() {
    let guide = object().after(COMPILER.preface(Some("<think>"), "</think>").unwrap());
    let vocabulary = COMPILER.vocabulary();
    let (_, mut state) = first(&guide);
    state.commit(vocabulary.special("<think>").unwrap()).unwrap();
    let mut fork = state.fork();
    state.commit(vocabulary.special("</think>").unwrap()).unwrap();
    let allowed = |state: &mut dyn server_engine::GuideState| {
        let mut allowed = server_engine::TokenSet::new(vocabulary.len() as u32);
        state.allow(&mut allowed).unwrap();
        allowed
    };
    assert!(!allowed(state.as_mut()).contains(u32::from(b'x')));
    assert!(allowed(fork.as_mut()).contains(u32::from(b'x')));
}
