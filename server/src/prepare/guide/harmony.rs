//! Forms of answers in Harmony: the whole answer consists of messages, and only the content of the last one is
//! constrained. The other messages contain reasoning or a preamble.
//!
//! The form does not include the token that ends the answer, so the form of a call ends with the arguments.

use server_guidance::Form;

use super::tools::Calls;

/// Returns the form of a message that is not the last one of the answer.
fn message(channel: &str) -> Form {
    Form::Sequence(vec![
        Form::literal(format!("<|channel|>{channel}<|message|>")),
        Form::Until("<|end|>".to_owned()),
        Form::literal("<|start|>assistant"),
    ])
}

/// Returns the form of any number of messages in the analysis channel.
fn analysis() -> Form {
    message("analysis").repeated(0)
}

fn last(content: Form) -> Form {
    Form::Sequence(vec![
        Form::Choice(vec![
            Form::literal("<|channel|>final<|message|>"),
            Form::literal("<|channel|>final <|constrain|>json<|message|>"),
        ]),
        content,
    ])
}

/// Returns the form of an answer with this content and without calls.
pub(super) fn answer(content: Form) -> Form {
    Form::Sequence(vec![analysis(), last(content)])
}

/// Returns the form of an answer that ends with a call or, unless `must_call` is set, with content.
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
    // A preamble (a message in the commentary channel) is content too, so it is not allowed if the content is
    // constrained.
    if content.is_none() {
        parts.extend([message("commentary").optional(), analysis()]);
    }
    parts.push(Form::Choice(ends));
    Form::Sequence(parts)
}
