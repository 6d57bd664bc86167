//! A request's way through the router: read, judged, placed, sent, and its answer passed back as it comes.
//!
//! ```text
//! client ─► read ─► Fields ─► Dispatch::place ─► attempt ─► Relay ─► client
//!                                  ▲                │
//!                                  └── elsewhere ◄──┘  only before the first byte
//! ```
//!
//! Bytes are passed on as they are. What this module may not do is to write anything of its own into an
//! answer that has begun, but for the one event that says that it has broken.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::request::Parts;
use http::{HeaderValue, Method, Request, Response, header};
use http_body_util::{BodyExt as _, Limited};
use hyper::body::{Body as _, Incoming};
use tokio::sync::Notify;
use xxhash_rust::xxh3::xxh3_64;

use crate::access::Client;
use crate::admin::Admin;
use crate::app::App;
use crate::dispatch::Wanted;
use crate::error::Error;
use crate::fleet::Fleet;
use crate::later;
use crate::limits::Rates;
use crate::policy::Demand;
use crate::prefix::Chain;
use crate::queue::{Class, Waiter};

mod attempt;
mod body;
mod failure;
pub mod fields;
mod headers;
mod kept;
mod record;
mod relay;
mod retry;
mod sse;
pub(crate) mod upstream;
mod usage;

pub(crate) use body::Body;
use fields::Fields;
use record::Record;
use upstream::Pool;

/// The header by which a client says how urgent a request is.
const PRIORITY: &str = "x-ovfleet-priority";
/// The header by which a client says how long it waits for a place, in seconds.
const TIMEOUT: &str = "x-ovfleet-timeout";
/// The header by which a client names its session.
const SESSION: &str = "x-session-id";

/// What a thread that serves requests has.
#[derive(Debug)]
pub(crate) struct Worker {
    pub(crate) app: App,
    pub(crate) admin: Admin,
    pub(crate) pool: Pool,
    /// Wakes those who wait for an answer, twice a second.
    pub(crate) tick: Notify,
}

/// Which part of the API a request is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Endpoint {
    Chat,
    Completions,
    Responses,
    Conversations,
    Models,
    Other,
}

impl Endpoint {
    /// By the path; `None` if that is not of the API.
    fn of(path: &str) -> Option<Self> {
        // vLLM has these two without a prefix.
        if matches!(path, "/tokenize" | "/detokenize") {
            return Some(Self::Other);
        }
        let rest = path.strip_prefix("/v3/").or_else(|| path.strip_prefix("/v1/"))?;
        Some(match rest {
            "chat/completions" => Self::Chat,
            "completions" => Self::Completions,
            "responses" => Self::Responses,
            "conversations" => Self::Conversations,
            "models" => Self::Models,
            rest if rest.starts_with("responses/") => Self::Responses,
            rest if rest.starts_with("conversations/") => Self::Conversations,
            rest if rest.starts_with("models/") => Self::Models,
            _ => Self::Other,
        })
    }

    /// In metrics and logs.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Chat => "chat_completions",
            Self::Completions => "completions",
            Self::Responses => "responses",
            Self::Conversations => "conversations",
            Self::Models => "models",
            Self::Other => "other",
        }
    }
}

/// Answers a request, whatever it is for.
pub(crate) async fn serve(
    worker: Arc<Worker>,
    request: Request<Incoming>,
) -> Result<Response<Body>, Infallible> {
    let Some(endpoint) = Endpoint::of(request.uri().path()) else {
        // Who asks after requests that were answered on this thread finds them counted.
        later::catch_up();
        return Ok(worker.admin.answer(request).await);
    };
    let mut record = Record::new(&worker.app, endpoint, request.headers());
    let answer = forward(&worker, endpoint, request, &mut record).await;
    Ok(answer.unwrap_or_else(|error| {
        record.refused(&error);
        error.into_response()
    }))
}

/// A request as it is sent to replicas.
pub(crate) struct Outgoing {
    pub(crate) endpoint: Endpoint,
    pub(crate) method: Method,
    /// What all replicas are sent of the head.
    pub(crate) head: Vec<u8>,
    pub(crate) body: Bytes,
    /// Its answer is streamed.
    pub(crate) stream: bool,
    /// Bytes of its prompt, and its choices, to learn by.
    pub(crate) prompt_bytes: usize,
    pub(crate) choices: u32,
}

async fn forward(
    worker: &Arc<Worker>,
    endpoint: Endpoint,
    request: Request<Incoming>,
    record: &mut Record,
) -> Result<Response<Body>, Error> {
    let app = &worker.app;
    let client = app.access().client(request.headers())?;
    if endpoint == Endpoint::Models && matches!(*request.method(), Method::GET | Method::HEAD) {
        let answer = worker.admin.models(app, request.uri().path());
        record.whole(answer.is_ok(), None);
        return answer;
    }
    record.admitted(app.admit()?, client.clone());
    let (parts, body) = request.into_parts();
    let waiter = waiter(&parts)?;
    let body = read(app, body).await?;
    let fields = routing_fields(endpoint, &parts, &body)?;
    let kept = match kept::named(parts.uri.path(), &fields) {
        Some(named) => Some(kept::find(app, named, fields.model.as_deref()).await?),
        None => None,
    };
    let (fleet, only) = match kept {
        Some((fleet, replica)) => (fleet, Some(replica)),
        None => (fleet(app, &fields).await?, None),
    };
    let wanted = Wanted { only, ..wanted(app, &fleet, &parts, &fields) };
    if let Some(client) = &client {
        take(app, client, &wanted.demand, record)?;
    }
    let waiter = Waiter { tokens: wanted.demand.prompt_tokens, ..waiter };
    let outgoing = Outgoing {
        endpoint,
        stream: fields.stream,
        prompt_bytes: fields.prompt.len(),
        choices: wanted.demand.sequences,
        head: headers::for_replica(&parts, client.is_some(), record.trace().as_ref(), body.len()),
        method: parts.method,
        body: body.clone(),
    };
    retry::until_answered(worker, (&fleet, wanted, waiter), &outgoing, record).await
}

/// What the headers say of how it may wait.
fn waiter(parts: &Parts) -> Result<Waiter, Error> {
    let text = |name| parts.headers.get(name).map(|value: &HeaderValue| value.to_str().unwrap_or_default());
    let class = text(PRIORITY).map_or(Ok(Class::default()), str::parse).map_err(
        |error: crate::queue::UnknownClass| Error::Header { header: PRIORITY, problem: error.to_string() },
    )?;
    let deadline = text(TIMEOUT)
        .map(|seconds| {
            let seconds = seconds.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
            let deadline = seconds.and_then(|seconds| Instant::now().checked_add(seconds));
            deadline
                .ok_or(Error::Header { header: TIMEOUT, problem: "this is no number of seconds".to_owned() })
        })
        .transpose()?;
    Ok(Waiter { class, tokens: 0, deadline })
}

/// The body, no larger and no slower than the limits have it.
async fn read(app: &App, body: Incoming) -> Result<Bytes, Error> {
    if body.is_end_stream() {
        return Ok(Bytes::new());
    }
    let settings = app.settings();
    let (limit, time) = (settings.max_body_bytes.0, settings.read_timeout);
    drop(settings);
    if body.size_hint().lower() > limit {
        return Err(Error::BodyTooLarge(limit));
    }
    let limited = Limited::new(body, usize::try_from(limit).unwrap_or(usize::MAX));
    let collected = tokio::time::timeout(time, limited.collect())
        .await
        .map_err(|_| Error::Body(format!("it took longer than {time:?}")))?;
    let collected = collected.map_err(|error| {
        if error.is::<http_body_util::LengthLimitError>() {
            Error::BodyTooLarge(limit)
        } else {
            Error::Body("the connection broke".to_owned())
        }
    })?;
    // Not copied if it came in one piece.
    Ok(collected.to_bytes())
}

fn routing_fields<'a>(endpoint: Endpoint, parts: &Parts, body: &'a [u8]) -> Result<Fields<'a>, Error> {
    if body.is_empty() {
        return Ok(Fields::default());
    }
    let is_json = || {
        let content_type = parts.headers.get(header::CONTENT_TYPE).map(HeaderValue::as_bytes);
        content_type.is_some_and(|value| memchr::memmem::find(value, b"json").is_some())
    };
    let is_encoded = parts.headers.contains_key(header::CONTENT_ENCODING);
    match endpoint {
        Endpoint::Chat | Endpoint::Completions | Endpoint::Responses if !is_encoded => {
            Ok(fields::read(body)?)
        }
        // Whatever replicas take beside these: a model may be named in it, or not.
        _ if is_json() && !is_encoded => Ok(fields::read(body).unwrap_or_default()),
        _ => Ok(Fields::default()),
    }
}

/// The replicas of the model that the request names.
async fn fleet(app: &App, fields: &Fields<'_>) -> Result<Arc<Fleet>, Error> {
    let model = fields.model.as_deref();
    let known = match model {
        Some(model) => app.dispatch().replicas.fleet(model),
        None => app.dispatch().replicas.only_fleet(),
    };
    if let Some(fleet) = known {
        return Ok(fleet);
    }
    let found = app.dispatch().await_model(model).await?;
    found.ok_or_else(|| {
        model.map_or(Error::MissingModel, |model| {
            Error::UnknownModel(model.chars().take(fields::MODEL_SHOWN_MAX).collect())
        })
    })
}

fn wanted(app: &App, fleet: &Fleet, parts: &Parts, fields: &Fields<'_>) -> Wanted {
    let expectations = fleet.expectations();
    let estimates = &expectations.estimates;
    let session = parts.headers.get(SESSION).map(HeaderValue::as_bytes).or(fields.user);
    let demand = Demand {
        prompt_tokens: estimates.prompt_tokens(fields.prompt.len() + fields.tools.len()),
        output_tokens: estimates.output_tokens(fields.answer_tokens_max),
        output_tokens_max: fields.answer_tokens_max,
        sequences: fields.choices.max(fields.candidates).unwrap_or(1).max(1),
        session: session.map(xxh3_64),
    };
    app.metrics().prompt(demand.prompt_tokens);
    let chain = if app.settings().policy.uses_prefixes() {
        // Tools come before all messages: with others there is nothing in common.
        let seed = app.dispatch().seed ^ if fields.tools.is_empty() { 0 } else { xxh3_64(fields.tools) };
        Chain::of_text(fields.prompt, expectations.block_bytes.get(), seed)
    } else {
        Chain::default()
    };
    Wanted { demand, chain: Arc::new(chain), tried: Vec::new(), only: None }
}

/// Takes the request from what its client may use.
fn take(app: &App, client: &Client, demand: &Demand, record: &mut Record) -> Result<(), Error> {
    let settings = app.settings();
    let rates = Rates { requests_per_minute: settings.key_requests, tokens_per_minute: settings.key_tokens };
    let tokens = demand.prompt_tokens.saturating_add(demand.output_tokens.saturating_mul(demand.sequences));
    app.access().take(client, rates, tokens)?;
    record.taken(tokens);
    Ok(())
}
