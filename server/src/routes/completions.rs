//! `/completions`.

use axum::extract::{Request, State};
use axum::response::Response;
use server_openai::{Completion, CompletionChoice, CompletionRequest, FinishReason, Usage};

use super::generate::{Head, Shape, WholeChoice, generate};
use super::probabilities;
use crate::app::App;
use crate::error::Error;
use crate::prepare::{self, Endpoint, Prepared, Target};
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
        let request = prepare::checked(Endpoint::Completions, body)?;
        prepare::completion(CompletionRequest::read(&request)?, target)
    }

    fn begin(head: &Head, index: u32, events: &mut Events) {
        let text = head.echo(index).to_owned();
        if !text.is_empty() || head.reply.token_ids {
            let logprobs = probabilities::echoed(head, index);
            let prompt_token_ids = probabilities::prompt_token_ids(head, index);
            let choice = CompletionChoice { text, logprobs, prompt_token_ids, ..blank(index) };
            events.push(&chunk(head, vec![choice], head.chunk_usage()));
        }
    }

    fn text(head: &Head, index: u32, (text, tokens): (String, Vec<TokenText>), events: &mut Events) {
        let token_ids = probabilities::token_ids(head, &tokens);
        let logprobs = probabilities::completion(head, index, tokens);
        let choice = CompletionChoice { text, logprobs, token_ids, ..blank(index) };
        events.push(&chunk(head, vec![choice], head.chunk_usage()));
    }

    fn end(head: &Head, index: u32, reason: FinishReason, events: &mut Events) {
        let choice = CompletionChoice { finish_reason: Some(reason), ..blank(index) };
        events.push(&chunk(head, vec![choice], head.chunk_usage()));
    }

    fn usage(head: &Head, usage: Usage, events: &mut Events) {
        events.push(&chunk(head, Vec::new(), Some(Some(usage))));
    }

    fn whole(head: Head, choices: Vec<WholeChoice>, usage: Usage) -> Completion {
        let choices = (0..).zip(choices).map(|(index, choice)| {
            let token_ids = probabilities::token_ids(&head, &choice.tokens);
            let generated = probabilities::completion(&head, index, choice.tokens);
            CompletionChoice {
                text: choice.text,
                logprobs: probabilities::joined(probabilities::echoed(&head, index), generated),
                finish_reason: choice.reason,
                token_ids,
                prompt_token_ids: probabilities::prompt_token_ids(&head, index),
                prompt_logprobs: probabilities::prompt_logprobs(&head, index),
                ..blank(index)
            }
        });
        let choices = choices.collect();
        chunk(&head, choices, Some(Some(usage)))
    }
}

/// A choice of which nothing is told.
fn blank(index: u32) -> CompletionChoice {
    CompletionChoice {
        index,
        text: String::new(),
        logprobs: None,
        finish_reason: None,
        token_ids: None,
        prompt_token_ids: None,
        prompt_logprobs: None,
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
