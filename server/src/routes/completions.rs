//! Serves `/completions`.

use axum::extract::{Request, State};
use axum::response::Response;
use server_openai::{Completion, CompletionChoice, CompletionRequest, Usage};

use super::generate::{AnswerContext, TextEndpoint, WholeChoice, generate};
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

    fn start(context: &AnswerContext, index: u32, events: &mut Events) {
        let text = context.echo(index).to_owned();
        if !text.is_empty() || context.answer_options.token_ids {
            let logprobs = probabilities::echoed(context, index);
            let prompt_token_ids = probabilities::prompt_token_ids(context, index);
            let choice =
                CompletionChoice { index, text, logprobs, prompt_token_ids, ..CompletionChoice::default() };
            events.push(&completion(context, vec![choice], context.chunk_usage()));
        }
    }

    fn delta(context: &AnswerContext, delta: ChoiceDelta, events: &mut Events) {
        let index = delta.choice();
        let choice = match delta {
            ChoiceDelta::Text { text, tokens, .. } => {
                let token_ids = probabilities::token_ids(context, &tokens, &[]);
                let logprobs = probabilities::completion(context, index, tokens);
                CompletionChoice { index, text, logprobs, token_ids, ..CompletionChoice::default() }
            }
            ChoiceDelta::End { reason, tokens, .. } => {
                let token_ids = probabilities::token_ids(context, &[], &tokens).filter(|ids| !ids.is_empty());
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
        events.push(&completion(context, vec![choice], context.chunk_usage()));
    }

    fn usage(context: &AnswerContext, usage: Usage, events: &mut Events) {
        events.push(&completion(context, Vec::new(), Some(Some(usage))));
    }

    fn whole(context: AnswerContext, choices: Vec<WholeChoice>, usage: Usage) -> Completion {
        let choices = (0..).zip(choices).map(|(index, choice)| {
            let token_ids = probabilities::token_ids(&context, &choice.tokens, &choice.end_tokens);
            let generated = probabilities::completion(&context, index, choice.tokens);
            CompletionChoice {
                index,
                text: choice.text,
                logprobs: probabilities::joined(probabilities::echoed(&context, index), generated),
                finish_reason: choice.reason,
                token_ids,
                prompt_token_ids: probabilities::prompt_token_ids(&context, index),
                prompt_logprobs: probabilities::prompt_logprobs(&context, index),
            }
        });
        let choices = choices.collect();
        completion(&context, choices, Some(Some(usage)))
    }
}

/// Returns a whole answer or a chunk, which have the same format.
fn completion(
    context: &AnswerContext,
    choices: Vec<CompletionChoice>,
    usage: Option<Option<Usage>>,
) -> Completion {
    Completion {
        id: context.id.clone(),
        object: "text_completion",
        created: context.created,
        model: context.answer_options.model.clone(),
        choices,
        usage,
        system_fingerprint: context.fingerprint.clone(),
    }
}
