//! `/responses`: what a response is made from is looked up and prepared here; how it is answered is in [`answer`],
//! what may be done with one that is kept in [`stored`].

mod answer;
mod context;
mod query;
mod stored;

use std::sync::Arc;
use std::time::Instant;

use axum::Json;
use axum::body::Bytes;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use server_openai::responses::{self as wire, InputTokens, Object};

use super::body;
use super::generate::{self, Counted};
use crate::app::{App, Serving};
use crate::dispatches::Dispatch;
use crate::error::{Error, Resource};
use crate::limits::BudgetExhausted;
use crate::metrics::Record;
use crate::model::unix_time;
use crate::prepare::responses::{Ready, References, references, responses};
use crate::prepare::{self, Endpoint, Target};
use crate::respond::{Answer, Deltas};
use crate::responses::{Assembly, Begun, RetainedInput, Show};
use crate::store::{Id, Kind};
use crate::tenant::Tenant;
pub(super) use context::{Lookup, conversation, damaged, no_conversation, unreadable};
pub(super) use query::{Offer, Page, Selection};
pub(super) use stored::{cancel, delete, input_items, list, retrieve};

/// In metrics and logs.
const ENDPOINT: &str = "responses";

/// A response that is about to be made.
struct Making {
    assembly: Assembly,
    input: RetainedInput,
    answer: Deltas,
    way: Way,
    tenant: Tenant,
}

/// How the client gets it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Whole,
    Streamed,
    /// It asks again, or follows the events.
    Background {
        follows: bool,
    },
}

/// `POST /responses`.
pub(super) async fn create(State(app): State<App>, request: Request) -> Response {
    let arrived = Instant::now();
    let dispatch = Dispatch::of(request.headers());
    let begun = begin(&app, request, arrived).await;
    if let Some(dispatch) = dispatch {
        app.dispatches().arrived(dispatch, begun.is_ok().then(|| app.submissions()));
    }
    let mut response = match begun {
        Ok(making) => answer::answer(app, making).await,
        Err(error) => refused(&app, ENDPOINT, &error),
    };
    response.extensions_mut().insert(Counted);
    response
}

async fn begin(app: &App, request: Request, arrived: Instant) -> Result<Making, Error> {
    app.serving()?;
    let tenant = Tenant::of(request.headers())?;
    let body = body::read(app, request).await?;
    let serving = app.serving()?;
    let admitted = app.admission().admit()?;
    let id = app.store().name(Kind::Response);
    let mut ready = prepare(app, body, id, tenant).await?;
    tenant.claim(&mut ready.prepared.prompts);
    ready.response.created_at = unix_time();
    ready.response.store &= app.store().is_on();
    if ready.response.background && !ready.response.store {
        return Err(Error::invalid(
            "background",
            "nothing is kept here, so nobody could ask for the response",
        ));
    }
    let way = match (ready.response.background, ready.prepared.reply.stream) {
        (true, follows) => Way::Background { follows },
        (false, true) => Way::Streamed,
        (false, false) => Way::Whole,
    };
    let is_stored = ready.response.store || ready.response.conversation.is_some();
    let input = if is_stored { std::mem::take(&mut ready.input) } else { Vec::new() };
    let input = RetainedInput::new(app.body_bytes(), input);
    let input = input.map_err(|BudgetExhausted| app.overloaded(Resource::BodyBytes))?;
    let Ready { prepared, response, ids, input: _, call_names } = ready;
    let record = Record::new(app.clone(), ENDPOINT, id.to_string(), (arrived, admitted));
    let show = prepared.reply.logprobs.map(|_| {
        let tokenizer = Arc::clone(&serving.model.text.tokenizer);
        let names_by_id = prepared.reply.names_by_id;
        Box::new(move |tokens| super::probabilities::shown(&tokenizer, tokens, names_by_id)) as Show
    });
    let choices = prepared.reply.choices;
    let candidates = prepared.prompts.first().map_or(1, server_engine::Request::num_results);
    let submitted = generate::submit(app, serving, prepared.prompts)?;
    let answer = Answer::new(submitted, &serving.model.text.tokenizer, &prepared.text, record);
    let answer = Deltas::new(answer, candidates, choices);
    let assembly = Assembly::new(Begun { response, ids, show, choices, call_names });
    Ok(Making { assembly, input, answer, way, tenant })
}

/// Reads a body, looks up what it refers to, and prepares it.
async fn prepare(app: &App, body: Bytes, id: Id, tenant: Tenant) -> Result<Ready, Error> {
    let seed = app.next_id().seed();
    let work = move |app: &App, (request, references): (wire::Request, References)| {
        let Serving { model, engine, .. } = app.serving()?;
        let found = context::find(app, tenant, &references)?;
        responses(&request, found, id, Target { model, limits: engine.limits(), seed })
    };
    if !generate::is_light(&body) {
        return generate::apart(app, tenant, move |app| work(app, read(&body)?)).await;
    }
    let asked = read(&body)?;
    if asked.1.is_empty() {
        return work(app, asked);
    }
    // What is kept may be on the disk.
    generate::apart(app, tenant, move |app| work(app, asked)).await
}

/// A request, and what it refers to.
fn read(body: &[u8]) -> Result<(wire::Request, References), Error> {
    let request = wire::Request::read(&prepare::checked(Endpoint::Responses, body)?)?;
    let references = references(&request)?;
    Ok((request, references))
}

/// `POST /responses/input_tokens`: how long the prompt would be.
pub(super) async fn input_tokens(State(app): State<App>, request: Request) -> Response {
    let counted = async {
        app.serving()?;
        let tenant = Tenant::of(request.headers())?;
        let body = body::read(&app, request).await?;
        let _admitted = app.admission().admit()?;
        let ready = prepare(&app, body, app.store().name(Kind::Response), tenant).await?;
        let tokens = ready.prepared.prompts.iter().map(|prompt| prompt.prompt.len() as u64).sum();
        Ok(Json(InputTokens { object: Object::InputTokens, input_tokens: tokens }).into_response())
    };
    told(&app, ENDPOINT, None, counted.await)
}

/// The answer to a request that makes no tokens, counted.
pub(super) fn told(
    app: &App,
    endpoint: &'static str,
    dispatch: Option<Dispatch>,
    result: Result<Response, Error>,
) -> Response {
    if let Some(dispatch) = dispatch {
        app.dispatches().arrived(dispatch, None);
    }
    let mut response = match result {
        Ok(response) => {
            app.metrics().count(endpoint, "ok", response.status());
            response
        }
        Err(error) => refused(app, endpoint, &error),
    };
    response.extensions_mut().insert(Counted);
    response
}

fn refused(app: &App, endpoint: &'static str, error: &Error) -> Response {
    app.metrics().count(endpoint, error.label(), error.status());
    tracing::debug!(endpoint, outcome = error.label(), "request refused");
    error.clone().into_response()
}

impl References {
    fn is_empty(&self) -> bool {
        self.previous.is_none() && self.conversation.is_none() && self.items.is_empty()
    }
}
