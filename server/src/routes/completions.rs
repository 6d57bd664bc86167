//! `/completions`.

use axum::extract::{Request, State};
use axum::response::Response;
use serde_json::{Map, Value};
use server_openai::{
    Completion, CompletionChoice, CompletionLogprobs, CompletionRequest, FinishReason, Usage,
};
use server_text::Tokenizer;

use super::generate::{Head, Shape, WholeChoice, generate};
use crate::app::App;
use crate::error::Error;
use crate::prepare::{self, Prepared, Target};
use crate::respond::TokenText;
use crate::sse::Events;

pub(super) async fn completions(State(app): State<App>, request: Request) -> Response {
    generate::<Completions>(app, request).await
}

/// The shape of the completions endpoint.
enum Completions {}

impl Shape for Completions {
    const ENDPOINT: &'static str = "completions";
    const ID: &'static str = "cmpl";
    type Whole = Completion;

    fn prepare(body: &[u8], target: Target<'_>) -> Result<Prepared, Error> {
        prepare::completion(CompletionRequest::parse(body)?, target)
    }

    fn begin(head: &Head, index: u32, events: &mut Events) {
        let text = head.echoes[index as usize].clone();
        if !text.is_empty() {
            let choice = CompletionChoice { index, text, logprobs: None, finish_reason: None };
            events.push(&chunk(head, vec![choice], head.no_usage()));
        }
    }

    fn text(head: &Head, index: u32, (text, tokens): (String, Vec<TokenText>), events: &mut Events) {
        let logprobs = logprobs(head, tokens);
        let choice = CompletionChoice { index, text, logprobs, finish_reason: None };
        events.push(&chunk(head, vec![choice], head.no_usage()));
    }

    fn end(head: &Head, index: u32, reason: FinishReason, events: &mut Events) {
        let finish_reason = Some(reason);
        let choice = CompletionChoice { index, text: String::new(), logprobs: None, finish_reason };
        events.push(&chunk(head, vec![choice], head.no_usage()));
    }

    fn usage(head: &Head, usage: Usage, events: &mut Events) {
        events.push(&chunk(head, Vec::new(), Some(Some(usage))));
    }

    fn whole(head: Head, choices: Vec<WholeChoice>, usage: Usage) -> Completion {
        let choices = (0..)
            .zip(choices)
            .map(|(index, choice)| CompletionChoice {
                index,
                text: choice.text,
                logprobs: logprobs(&head, choice.tokens),
                finish_reason: choice.reason,
            })
            .collect();
        chunk(&head, choices, Some(Some(usage)))
    }
}

/// Whole answers and chunks are of one shape.
fn chunk(head: &Head, choices: Vec<CompletionChoice>, usage: Option<Option<Usage>>) -> Completion {
    Completion {
        id: head.id.clone(),
        object: "text_completion",
        created: head.created,
        model: head.reply.model.clone(),
        choices,
        usage,
        system_fingerprint: head.fingerprint.clone(),
    }
}

fn logprobs(head: &Head, tokens: Vec<TokenText>) -> Option<CompletionLogprobs> {
    head.reply.logprobs?;
    let tokenizer: &Tokenizer = &head.tokenizer;
    let mut logprobs = CompletionLogprobs::default();
    for TokenText { token, start, logprob, top } in tokens {
        let name = name(tokenizer, token);
        // The generated token is among them, whether or not it is one of the most probable.
        let mut tops = Map::new();
        for top in top {
            tops.insert(self::name(tokenizer, top.token), number(top.logprob));
        }
        tops.entry(name.clone()).or_insert_with(|| number(logprob));
        logprobs.tokens.push(name);
        logprobs.token_logprobs.push(logprob);
        logprobs.top_logprobs.push(tops);
        logprobs.text_offset.push(start);
    }
    Some(logprobs)
}

/// The token's text; of bytes that are no text by themselves, their values, which keeps tokens apart.
fn name(tokenizer: &Tokenizer, token: u32) -> String {
    let bytes = tokenizer.token_bytes(token);
    std::str::from_utf8(bytes).map_or_else(
        |_| bytes.iter().fold("bytes:".to_owned(), |name, byte| format!("{name}\\x{byte:02x}")),
        str::to_owned,
    )
}

/// As an f32 is written, in its shortest form: a `Value` holds an f64, whose digits would be those of the widened
/// number.
fn number(logprob: f32) -> Value {
    let shortest = logprob.to_string().parse().ok();
    shortest.and_then(serde_json::Number::from_f64).map_or(Value::Null, Value::Number)
}
