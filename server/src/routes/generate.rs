//! The code that the chat and completions endpoints share. Both admit, prepare and submit a request, and answer it
//! either with chunks or with a whole answer that combines the same deltas. [`TextEndpoint`] defines the differences
//! between the endpoints.

use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Instant;

use axum::body::Bytes;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use server_engine::{ScoredToken, TokenId};
use server_openai::{ChoiceFinishReason, Usage};
use server_text::Tokenizer;

use super::stream::{Encoder, stream};
use super::submission::{Submission, submit, with_request_id};
use super::unread::hold_until_sent;
use super::{body, counted, preparation};
use crate::app::{App, RequestId, ServedModel};
use crate::compat::ErrorFormat;
use crate::dispatches::Dispatch;
use crate::encoding::{self, EncodingCost};
use crate::error::Error;
use crate::model::unix_time;
use crate::prepare::{AnswerOptions, PreparedRequest, Target, UsageReporting};
use crate::respond::{Answer, ChoiceDelta, TokenText};
use crate::sse::Events;
use crate::tenant::Tenant;

/// An endpoint that generates text.
pub(super) trait TextEndpoint: Send + 'static {
    /// The name of the endpoint in metrics and logs.
    const NAME: &'static str;
    /// The prefix of the IDs of the endpoint's answers.
    const ID_PREFIX: &'static str;
    /// The type of a whole answer.
    type Whole: Serialize;

    /// Parses and prepares a request.
    fn prepare(body: &[u8], target: Target<'_>) -> Result<PreparedRequest, Error>;
    /// Encodes the first chunk of a choice, if the endpoint sends one before the first delta.
    fn start(context: &AnswerContext, choice: u32, events: &mut Events);
    /// Encodes a delta as a chunk.
    fn delta(context: &AnswerContext, delta: ChoiceDelta, events: &mut Events);
    /// Encodes the chunk with the usage.
    fn usage(context: &AnswerContext, usage: Usage, events: &mut Events);
    /// Returns the whole answer.
    fn whole(context: AnswerContext, choices: Vec<WholeChoice>, usage: Usage) -> Self::Whole;
}

/// The values that are needed, in addition to the deltas, to encode an answer as a whole or as chunks.
pub(super) struct AnswerContext {
    pub(super) id: String,
    pub(super) created: u64,
    pub(super) fingerprint: String,
    pub(super) answer_options: AnswerOptions,
    /// For each prompt, the echoed text at the beginning of its choices, which is empty without `echo`.
    pub(super) echoes: Vec<String>,
    pub(super) tokenizer: Arc<Tokenizer>,
    /// For each prompt, the log probabilities of its tokens except the first, if they are requested.
    pub(super) scores: Vec<Option<Arc<[ScoredToken]>>>,
    /// The usage up to this point.
    pub(super) usage: Usage,
    pub(super) errors: ErrorFormat,
}

impl AnswerContext {
    /// Returns the total number of choices of all prompts.
    fn choices(&self) -> u32 {
        self.answer_options.choices * self.echoes.len() as u32
    }

    /// Returns the index of a choice's prompt.
    pub(super) fn prompt_of(&self, choice: u32) -> usize {
        (choice / self.answer_options.choices) as usize
    }

    /// Returns the prefix of a choice's text.
    pub(super) fn echo(&self, choice: u32) -> &str {
        &self.echoes[self.prompt_of(choice)]
    }

    /// Returns the `usage` member of a chunk that contains a choice.
    pub(super) fn chunk_usage(&self) -> Option<Option<Usage>> {
        match self.answer_options.usage {
            UsageReporting::Never => None,
            UsageReporting::LastChunk => Some(None),
            UsageReporting::EveryChunk => Some(Some(self.usage)),
        }
    }
}

/// The combined deltas of a choice.
#[derive(Default)]
pub(super) struct WholeChoice {
    pub(super) text: String,
    pub(super) reasoning: String,
    pub(super) calls: Vec<WholeCall>,
    /// The tokens of all deltas but the last, in order.
    pub(super) tokens: Vec<TokenText>,
    /// The tokens of the last delta, which are not part of the text.
    pub(super) end_tokens: Vec<TokenId>,
    pub(super) reason: Option<ChoiceFinishReason>,
}

/// A tool call. If the choice was cut off, the arguments may be incomplete.
pub(super) struct WholeCall {
    pub(super) id: String,
    pub(super) name: String,
    pub(super) arguments: String,
}

impl WholeChoice {
    /// Returns the size in bytes of the text, the reasoning, and the arguments of the calls.
    fn text_bytes(&self) -> usize {
        let arguments: usize = self.calls.iter().map(|call| call.arguments.len()).sum();
        self.text.len() + self.reasoning.len() + arguments
    }

    fn add(&mut self, delta: ChoiceDelta) {
        match delta {
            ChoiceDelta::Text { text, tokens, .. } => {
                self.text.push_str(&text);
                self.tokens.extend(tokens);
            }
            ChoiceDelta::Reasoning { text, tokens, .. } => {
                self.reasoning.push_str(&text);
                self.tokens.extend(tokens);
            }
            ChoiceDelta::CallBegin { id, name, .. } => {
                self.calls.push(WholeCall { id, name, arguments: String::new() });
            }
            ChoiceDelta::CallArguments { text, tokens, .. } => {
                if let Some(call) = self.calls.last_mut() {
                    call.arguments.push_str(&text);
                }
                self.tokens.extend(tokens);
            }
            ChoiceDelta::CallEnd { .. } => {}
            ChoiceDelta::End { reason, tokens, .. } => {
                (self.reason, self.end_tokens) = (Some(reason), tokens);
            }
        }
    }
}

/// Answers a request.
pub(super) async fn generate<E: TextEndpoint>(app: App, request: axum::extract::Request) -> Response {
    let arrived = Instant::now();
    let dispatch = Dispatch::of(request.headers());
    let accepted = accept::<E>(&app, request, arrived).await;
    if let Some(dispatch) = dispatch {
        app.dispatches().record(dispatch, accepted.is_ok().then(|| app.submissions()));
    }
    counted::mark(match accepted {
        Ok((context, answer)) => respond::<E>(context, answer).await.unwrap_or_else(Error::into_response),
        Err(error) => counted::rejected(&app, E::NAME, error),
    })
}

async fn accept<E: TextEndpoint>(
    app: &App,
    request: axum::extract::Request,
    arrived: Instant,
) -> Result<(AnswerContext, Answer), Error> {
    app.served()?;
    let errors = ErrorFormat::of(&request);
    let tenant = Tenant::of(request.headers())?;
    let body = body::read(app, request).await?;
    let served = app.served()?;
    let admitted = app.admission().admit()?;
    let id = app.next_id();
    let PreparedRequest { mut prompts, image_memory, echoes, text, answer_options } =
        prepare::<E>(app, body, id, tenant).await?;
    tenant.assign_prompts(&mut prompts);
    let admitted = admitted.with_image_memory(image_memory);
    let id = format!("{}-{id}", E::ID_PREFIX);
    let (text, choices) = (&text, answer_options.choices);
    let submission =
        Submission { endpoint: E::NAME, id: id.clone(), arrived, admitted, prompts, text, choices };
    let answer = submit(app, served, submission)?;
    let context = AnswerContext {
        id,
        created: unix_time(),
        fingerprint: served.model.fingerprint.clone(),
        answer_options,
        echoes,
        tokenizer: Arc::clone(&served.model.text.tokenizer),
        scores: Vec::new(),
        usage: Usage::default(),
        errors,
    };
    Ok((context, answer))
}

async fn prepare<E: TextEndpoint>(
    app: &App,
    body: Bytes,
    id: RequestId,
    tenant: Tenant,
) -> Result<PreparedRequest, Error> {
    let is_light = preparation::is_light(&body);
    preparation::with_media(app, tenant, is_light, move |app, media, canceled| {
        let ServedModel { model, engine, .. } = app.served()?;
        E::prepare(&body, Target { model, limits: engine.limits(), media, canceled, seed: id.seed() })
    })
    .await
}

/// Returns the response with the answer, or the error if the answer failed before its response began.
async fn respond<E: TextEndpoint>(mut context: AnswerContext, answer: Answer) -> Result<Response, Error> {
    let id = context.id.clone();
    let response = if context.answer_options.stream {
        let encoder = move |answer: &Answer| {
            (context.scores, context.usage) = (answer.scores(), answer.usage());
            Box::new(ChunkEncoder::<E> { context, endpoint: PhantomData })
        };
        stream(answer, encoder).await?
    } else {
        whole::<E>(context, answer).await?
    };
    Ok(with_request_id(response, &id))
}

async fn whole<E: TextEndpoint>(mut context: AnswerContext, mut answer: Answer) -> Result<Response, Error> {
    let empty = |choice| WholeChoice { text: context.echo(choice).to_owned(), ..WholeChoice::default() };
    let mut choices: Vec<WholeChoice> = (0..context.choices()).map(empty).collect();
    let usage = answer.fold(|delta| choices[delta.choice() as usize].add(delta)).await?;
    context.scores = answer.scores();
    let AnswerOptions { logprobs, prompt_logprobs, token_ids, .. } = &context.answer_options;
    let has_tokens = *token_ids || logprobs.or(*prompt_logprobs).is_some();
    let text_bytes: usize = choices.iter().map(WholeChoice::text_bytes).sum();
    let cost = if has_tokens { EncodingCost::High } else { EncodingCost::of_text(text_bytes) };
    let encode = move || axum::Json(E::whole(context, choices, usage)).into_response();
    let response = encoding::run(cost, encode).await;
    Ok(hold_until_sent(response, answer.into_record()))
}

/// Encodes an answer as chunks.
struct ChunkEncoder<E> {
    context: AnswerContext,
    endpoint: PhantomData<fn() -> E>,
}

impl<E: TextEndpoint> Encoder for ChunkEncoder<E> {
    fn num_opening_parts(&self) -> u32 {
        self.context.choices()
    }

    /// Returns the cost of the first chunk of a choice, which can contain the text, the token IDs and the log
    /// probabilities of the prompt.
    fn opening_cost(&self, choice: u32) -> EncodingCost {
        let prompt = self.context.answer_options.prompts.get(self.context.prompt_of(choice));
        let tokens = EncodingCost::of_tokens(prompt.map_or(0, |prompt| prompt.len()));
        tokens.max(EncodingCost::of_text(self.context.echo(choice).len()))
    }

    fn opening(&mut self, choice: u32, events: &mut Events) {
        E::start(&self.context, choice, events);
    }

    fn deltas_cost(&self, deltas: &[ChoiceDelta]) -> EncodingCost {
        ChoiceDelta::encoding_cost(deltas)
    }

    fn deltas(&mut self, deltas: Vec<ChoiceDelta>, usage: Usage, events: &mut Events) {
        self.context.usage = usage;
        deltas.into_iter().for_each(|delta| E::delta(&self.context, delta, events));
    }

    async fn finish(self: Box<Self>, usage: Usage, mut events: Events) -> Events {
        if self.context.answer_options.usage != UsageReporting::Never {
            E::usage(&self.context, usage, &mut events);
        }
        events.done();
        events
    }

    /// Appends the error as an event, because the status has already been sent. No `[DONE]` follows.
    async fn fail(self: Box<Self>, error: Error, mut events: Events) -> Events {
        self.context.errors.push_error(&error, &mut events);
        events
    }
}
