//! What the endpoints that generate text have in common: admit, prepare, submit, answer. An endpoint says
//! how its request is prepared and what its answer looks like: [`Shape`].

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Bytes;
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use serde::Serialize;
use server_engine::ScoredToken;
use server_openai::{FinishReason, Usage};
use server_text::Tokenizer;

use super::body;
use crate::app::{App, RequestId, Serving};
use crate::compat::ErrorShape;
use crate::dispatches::Dispatch;
use crate::error::{Error, Resource};
use crate::limits::NoSlot;
use crate::metrics::Record;
use crate::model::unix_time;
use crate::prepare::{Prepared, Reply, Target, UsageRule};
use crate::respond::{Answer, Delta, Deltas, Submitted, TokenText};
use crate::sse::{self, Events};
use crate::tenant::Tenant;

/// What sets an endpoint apart.
pub(super) trait Shape: 'static {
    /// In metrics and logs.
    const ENDPOINT: &'static str;
    /// The beginning of an answer's id.
    const ID: &'static str;
    /// A whole answer.
    type Whole: Serialize;

    /// Reads a body and prepares it.
    fn prepare(body: &[u8], target: Target<'_>) -> Result<Prepared, Error>;
    /// The first chunk of a choice, if there is one before its text.
    fn begin(head: &Head, choice: u32, events: &mut Events);
    /// A chunk with text.
    fn text(head: &Head, choice: u32, piece: (String, Vec<TokenText>), events: &mut Events);
    /// A chunk with reasoning, where requests can have any.
    fn reasoning(_: &Head, _choice: u32, _piece: (String, Vec<TokenText>), _: &mut Events) {}
    /// A chunk of a call, where requests can have any.
    fn call(_: &Head, _choice: u32, _piece: CallPiece, _: &mut Events) {}
    /// The last chunk of a choice.
    fn end(head: &Head, choice: u32, reason: FinishReason, events: &mut Events);
    /// The chunk with the usage.
    fn usage(head: &Head, usage: Usage, events: &mut Events);
    /// The whole answer.
    fn whole(head: Head, choices: Vec<WholeChoice>, usage: Usage) -> Self::Whole;
}

/// What all chunks of an answer have in common.
pub(super) struct Head {
    pub(super) id: String,
    pub(super) created: u64,
    pub(super) fingerprint: String,
    pub(super) reply: Reply,
    /// What the text of each prompt's choices begins with.
    pub(super) echoes: Vec<String>,
    pub(super) tokenizer: Arc<Tokenizer>,
    /// The log probabilities of each prompt's tokens from the second on, if they are asked for.
    pub(super) scores: Vec<Option<Arc<[ScoredToken]>>>,
    /// The tokens used so far.
    pub(super) usage: Usage,
    pub(super) errors: ErrorShape,
}

impl Head {
    /// How many choices there are of all prompts.
    fn choices(&self) -> u32 {
        self.reply.choices * self.echoes.len() as u32
    }

    /// Which prompt a choice is of.
    pub(super) fn prompt_of(&self, choice: u32) -> usize {
        (choice / self.reply.choices) as usize
    }

    /// What the text of a choice begins with.
    pub(super) fn echo(&self, choice: u32) -> &str {
        &self.echoes[self.prompt_of(choice)]
    }

    /// The `usage` of a chunk with a choice in it.
    pub(super) fn chunk_usage(&self) -> Option<Option<Usage>> {
        match self.reply.usage {
            UsageRule::Never => None,
            UsageRule::Last => Some(None),
            UsageRule::Always => Some(Some(self.usage)),
        }
    }
}

/// What is new in the call of this number, from 0.
pub(super) enum CallPiece {
    Begin { call: u32, id: String, name: String },
    Arguments { call: u32, text: String, tokens: Vec<TokenText> },
}

/// A choice, added up.
#[derive(Default)]
pub(super) struct WholeChoice {
    pub(super) text: String,
    pub(super) reasoning: String,
    pub(super) calls: Vec<WholeCall>,
    /// Of all of it, in order.
    pub(super) tokens: Vec<TokenText>,
    pub(super) reason: Option<FinishReason>,
}

/// A call, added up.
#[derive(Default)]
pub(super) struct WholeCall {
    pub(super) id: String,
    pub(super) name: String,
    pub(super) arguments: String,
}

impl WholeChoice {
    fn add(&mut self, delta: Delta) {
        match delta {
            Delta::Text { text, tokens, .. } => {
                self.text.push_str(&text);
                self.tokens.extend(tokens);
            }
            Delta::Reasoning { text, tokens, .. } => {
                self.reasoning.push_str(&text);
                self.tokens.extend(tokens);
            }
            Delta::CallBegin { id, name, .. } => {
                self.calls.push(WholeCall { id, name, arguments: String::new() });
            }
            Delta::CallArguments { text, tokens, .. } => {
                if let Some(call) = self.calls.last_mut() {
                    call.arguments.push_str(&text);
                }
                self.tokens.extend(tokens);
            }
            Delta::CallEnd { .. } => {}
            Delta::End { reason, .. } => self.reason = Some(reason),
        }
    }
}

/// Marks an answer that was counted by its endpoint.
#[derive(Clone, Copy)]
pub(super) struct Counted;

/// Answers a request.
pub(super) async fn generate<S: Shape>(app: App, request: axum::extract::Request) -> Response {
    let arrived = Instant::now();
    let dispatch = Dispatch::of(request.headers());
    let begun = begin::<S>(&app, request, arrived).await;
    if let Some(dispatch) = dispatch {
        app.dispatches().arrived(dispatch, begun.is_ok().then(|| app.submissions()));
    }
    let mut response = match begun {
        Ok((head, answer)) if head.reply.stream => streamed::<S>(head, answer).await,
        Ok((head, answer)) => whole::<S>(head, answer).await,
        Err(error) => {
            app.metrics().count(S::ENDPOINT, error.label(), error.status());
            tracing::debug!(endpoint = S::ENDPOINT, outcome = error.label(), "request refused");
            error.into_response()
        }
    };
    response.extensions_mut().insert(Counted);
    response
}

async fn begin<S: Shape>(
    app: &App,
    request: axum::extract::Request,
    arrived: Instant,
) -> Result<(Head, Deltas), Error> {
    app.serving()?;
    let errors = ErrorShape::of(&request);
    let tenant = Tenant::of(request.headers())?;
    let body = body::read(app, request).await?;
    let serving = app.serving()?;
    let admitted = app.admission().admit()?;
    let id = app.next_id();
    let prepared = prepare::<S>(app, body, id, tenant).await?;
    let Prepared { mut prompts, echoes, text, reply } = prepared;
    tenant.claim(&mut prompts);
    let (candidates, wanted) =
        (prompts.first().map_or(1, server_engine::Request::num_results), reply.choices);
    let submitted = submit(app, serving, prompts)?;
    let head = Head {
        id: format!("{}-{id}", S::ID),
        created: unix_time(),
        fingerprint: serving.model.fingerprint.clone(),
        reply,
        echoes,
        tokenizer: Arc::clone(&serving.model.text.tokenizer),
        scores: Vec::new(),
        usage: Usage::default(),
        errors,
    };
    let record = Record::new(app.clone(), S::ENDPOINT, head.id.clone(), (arrived, admitted));
    let answer = Answer::new(submitted, &serving.model.text.tokenizer, &text, record);
    Ok((head, Deltas::new(answer, candidates, wanted)))
}

/// Larger bodies, and those with something to compile, are prepared on a thread of their own, so that others' tokens do
/// not wait meanwhile.
const INLINE_BYTES_MAX: usize = 16 * 1024;

async fn prepare<S: Shape>(app: &App, body: Bytes, id: RequestId, tenant: Tenant) -> Result<Prepared, Error> {
    let work = move |app: &App, body: &[u8]| {
        let Serving { model, engine, .. } = app.serving()?;
        S::prepare(body, Target { model, limits: engine.limits(), seed: id.seed() })
    };
    if is_light(&body) { work(app, &body) } else { apart(app, tenant, move |app| work(app, &body)).await }
}

/// Whether a body is read and prepared in no time.
pub(super) fn is_light(body: &[u8]) -> bool {
    body.len() <= INLINE_BYTES_MAX && !crate::prepare::may_compile(body)
}

/// Prepares a request on a thread of its own, once one of the slots for that is free.
pub(super) async fn apart<T: Send + 'static>(
    app: &App,
    tenant: Tenant,
    work: impl FnOnce(&App) -> Result<T, Error> + Send + 'static,
) -> Result<T, Error> {
    let slot =
        app.preparations().slot(tenant).await.map_err(|NoSlot| app.overloaded(Resource::Preparation))?;
    let app = app.clone();
    let work = slot.run(move || work(&app)).await;
    work.unwrap_or_else(|| Err(Error::Internal("failed to prepare the request".to_owned())))
}

/// All prompts or none: those already submitted are dropped with the error.
pub(super) fn submit(
    app: &App,
    serving: &Serving,
    prompts: Vec<server_engine::Request>,
) -> Result<Vec<Submitted>, Error> {
    let limits = serving.engine.limits();
    let adapter = prompts.first().and_then(|prompt| serving.model.adapter(prompt.adapter));
    let submit = |prompt: server_engine::Request| {
        let (choices, prompt_tokens) = (prompt.num_results(), prompt.prompt.len());
        let scored = prompt.sampling.prompt_logprobs.is_some();
        match serving.engine.submit(prompt) {
            Ok(stream) => Ok(Submitted { stream, choices, prompt_tokens, scored }),
            Err(error) => {
                let retry_after: Duration = app.admission().retry_after(Instant::now());
                Err(Error::from_submit(error, retry_after, limits.requests.max_queue))
            }
        }
    };
    let submitted = prompts.into_iter().map(submit).collect();
    if let (Ok(_), Some(adapter)) = (&submitted, adapter) {
        app.metrics().count_adapter(&adapter.name);
    }
    submitted
}

async fn whole<S: Shape>(mut head: Head, mut answer: Deltas) -> Response {
    let begun = |choice| WholeChoice { text: head.echo(choice).to_owned(), ..WholeChoice::default() };
    let mut choices: Vec<WholeChoice> = (0..head.choices()).map(begun).collect();
    while let Some(deltas) = answer.next().await {
        let deltas = match deltas {
            Ok(deltas) => deltas,
            Err(error) => return error.into_response(),
        };
        for delta in deltas {
            choices[delta.choice() as usize].add(delta);
        }
    }
    head.scores = answer.scores();
    let id = head.id.clone();
    named(axum::Json(S::whole(head, choices, answer.usage())).into_response(), &id)
}

async fn streamed<S: Shape>(head: Head, mut answer: Deltas) -> Response {
    // Until the first token an error has a status of its own, and who passes requests on may try elsewhere.
    let first = match answer.next().await {
        Some(Err(error)) => return error.into_response(),
        first => first,
    };
    let id = head.id.clone();
    let state = Streamed::<S> { head, answer, first: Some(first), shape: std::marker::PhantomData };
    let events = stream::unfold(Some(state), |state| async move {
        let mut state = state?;
        let mut events = Events::default();
        let more = state.next(&mut events).await;
        Some((events.take(), more.then_some(state)))
    });
    named(sse::response(events), &id)
}

/// An answer that is being sent.
struct Streamed<S> {
    head: Head,
    answer: Deltas,
    /// What came before the answer was begun.
    first: Option<Option<Result<Vec<Delta>, Error>>>,
    shape: std::marker::PhantomData<fn() -> S>,
}

impl<S: Shape> Streamed<S> {
    /// Puts what is new into `events`. Returns whether there is more to come.
    async fn next(&mut self, events: &mut Events) -> bool {
        let deltas = match self.first.take() {
            Some(first) => {
                self.head.scores = self.answer.scores();
                self.head.usage = self.answer.usage();
                let head = &self.head;
                (0..head.choices()).for_each(|choice| S::begin(head, choice, events));
                first
            }
            None => self.answer.next().await,
        };
        self.head.usage = self.answer.usage();
        let head = &self.head;
        match deltas {
            Some(Ok(deltas)) => {
                for delta in deltas {
                    put::<S>(head, delta, events);
                }
                true
            }
            // The status is long sent: the error is an event, and no [DONE] says that all is well.
            Some(Err(error)) => {
                head.errors.put(&error, events);
                false
            }
            None => {
                if head.reply.usage != UsageRule::Never {
                    S::usage(head, self.answer.usage(), events);
                }
                events.done();
                false
            }
        }
    }
}

fn put<S: Shape>(head: &Head, delta: Delta, events: &mut Events) {
    match delta {
        Delta::Text { choice, text, tokens } => S::text(head, choice, (text, tokens), events),
        Delta::Reasoning { choice, text, tokens } => S::reasoning(head, choice, (text, tokens), events),
        Delta::CallBegin { choice, call, id, name } => {
            S::call(head, choice, CallPiece::Begin { call, id, name }, events);
        }
        Delta::CallArguments { choice, call, text, tokens } => {
            S::call(head, choice, CallPiece::Arguments { call, text, tokens }, events);
        }
        // Whoever reads the chunks sees it by what comes next.
        Delta::CallEnd { .. } => {}
        Delta::End { choice, reason } => S::end(head, choice, reason, events),
    }
}

/// The official clients show this header as the request's id.
pub(super) fn named(mut response: Response, id: &str) -> Response {
    if let Ok(id) = id.parse() {
        response.headers_mut().insert("x-request-id", id);
    }
    response
}
