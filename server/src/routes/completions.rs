//! Serves `/completions`.

use axum::extract::{Request, State};
use axum::response::Response;
use server_openai::{Completion, CompletionChoice, CompletionRequest, Usage};

use super::generate::{Head, TextEndpoint, WholeChoice, generate};
use super::probabilities;
use crate::app::App;
use crate::error::Error;
use crate::prepare::{self, Endpoint, PreparedRequest, Target};
use crate::respond::ChoiceDelta;
use crate::sse::Events;

pub(super) async fn completions(State(app): State<App>, request: Request) -> Response {
    generate::<Completions>(app, request).await
}

/// The completions endpoint.
enum Completions {}

impl TextEndpoint for Completions {
    const NAME: &'static str = "completions";
    const ID_PREFIX: &'static str = "cmpl";
    type Whole = Completion;

    fn prepare(body: &[u8], target: Target<'_>) -> Result<PreparedRequest, Error> {
        let request = prepare::checked(Endpoint::Completions, body)?;
        prepare::completion(CompletionRequest::read(&request)?, target)
    }

    fn start(head: &Head, index: u32, events: &mut Events) {
        let text = head.echo(index).to_owned();
        if !text.is_empty() || head.reply.token_ids {
            let logprobs = probabilities::echoed(head, index);
            let prompt_token_ids = probabilities::prompt_token_ids(head, index);
            let choice =
                CompletionChoice { index, text, logprobs, prompt_token_ids, ..CompletionChoice::default() };
            events.push(&completion(head, vec![choice], head.chunk_usage()));
        }
    }

    fn delta(head: &Head, delta: ChoiceDelta, events: &mut Events) {
        let index = delta.choice();
        let choice = match delta {
            ChoiceDelta::Text { text, tokens, .. } => {
                let token_ids = probabilities::token_ids(head, &tokens, &[]);
                let logprobs = probabilities::completion(head, index, tokens);
                CompletionChoice { index, text, logprobs, token_ids, ..CompletionChoice::default() }
            }
            ChoiceDelta::End { reason, tokens, .. } => {
                let token_ids = probabilities::token_ids(head, &[], &tokens).filter(|ids| !ids.is_empty());
                CompletionChoice {
                    index,
                    finish_reason: Some(reason),
                    token_ids,
                    ..CompletionChoice::default()
                }
            }
            // The text of completions is not parsed.
            ChoiceDelta::Reasoning { .. }
            | ChoiceDelta::CallBegin { .. }
            | ChoiceDelta::CallArguments { .. }
            | ChoiceDelta::CallEnd { .. } => return,
        };
        events.push(&completion(head, vec![choice], head.chunk_usage()));
    }

    fn usage(head: &Head, usage: Usage, events: &mut Events) {
        events.push(&completion(head, Vec::new(), Some(Some(usage))));
    }

    fn whole(head: Head, choices: Vec<WholeChoice>, usage: Usage) -> Completion {
        let choices = (0..).zip(choices).map(|(index, choice)| {
            let token_ids = probabilities::token_ids(&head, &choice.tokens, &choice.end_tokens);
            let generated = probabilities::completion(&head, index, choice.tokens);
            CompletionChoice {
                index,
                text: choice.text,
                logprobs: probabilities::joined(probabilities::echoed(&head, index), generated),
                finish_reason: choice.reason,
                token_ids,
                prompt_token_ids: probabilities::prompt_token_ids(&head, index),
                prompt_logprobs: probabilities::prompt_logprobs(&head, index),
            }
        });
        let choices = choices.collect();
        completion(&head, choices, Some(Some(usage)))
    }
}

/// Returns a whole answer or a chunk, which have the same format.
fn completion(head: &Head, choices: Vec<CompletionChoice>, usage: Option<Option<Usage>>) -> Completion {
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
