//! Harmony as a form: the whole answer is messages, of which only what counts is held to anything. Reasoning may come
//! before, in messages of its own.
//!
//! What ends an answer is none of the form: a call is over with its arguments.

use server_guidance::Form;

use super::tools::Calls;

/// Messages of analysis, any number of them.
fn analysis() -> Form {
    Form::Sequence(vec![
        Form::literal("<|channel|>analysis<|message|>"),
        Form::Until("<|end|>".to_owned()),
        Form::literal("<|start|>assistant"),
    ])
    .repeated(0)
}

/// What is said before a call.
fn preamble() -> Form {
    Form::Sequence(vec![
        Form::literal("<|channel|>commentary<|message|>"),
        Form::Until("<|end|>".to_owned()),
        Form::literal("<|start|>assistant"),
    ])
}

fn last(content: Form) -> Form {
    let header = |text: &str| Form::literal(text);
    Form::Sequence(vec![
        Form::Choice(vec![
            header("<|channel|>final<|message|>"),
            header("<|channel|>final <|constrain|>json<|message|>"),
        ]),
        content,
    ])
}

/// An answer that is held to something.
pub(super) fn answer(content: Form) -> Form {
    Form::Sequence(vec![analysis(), last(content)])
}

/// An answer that is, or may be, a call.
pub(super) fn with_calls(calls: &Calls<'_>, must_call: bool, content: Option<&Form>) -> Form {
    let call = |(name, arguments): (&str, Form)| {
        Form::Sequence(vec![
            Form::literal(format!("<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>")),
            arguments,
        ])
    };
    let mut ends: Vec<Form> = calls.json_arguments().map(call).collect();
    if !must_call {
        ends.push(last(content.cloned().unwrap_or_else(Form::text)));
    }
    let mut parts = vec![analysis()];
    // A preamble is content, which is of its form or not there.
    if content.is_none() {
        parts.extend([preamble().optional(), analysis()]);
    }
    parts.push(Form::Choice(ends));
    Form::Sequence(parts)
}
