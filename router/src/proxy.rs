//! A request's way through the router: read, judged, placed, sent, and its answer passed back as it comes.
//!
//! ```text
//! client ─► read ─► Fields ─► Dispatch::place ─► attempt ─► Relay ─► client
//!                                  ▲                │
//!                                  └── elsewhere ◄──┘  only before the first byte
//! ```
//!
//! Bodies are passed on as they are, with two exceptions: a stream that breaks ends with an event that says so, and
//! where a token quota applies the router requests the usage of a stream and removes it from the events again.

use std::convert::Infallible;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Uri, header};
use http_body_util::BodyExt as _;
use hyper::body::{Body as _, Incoming};
use tokio::sync::Notify;
use xxhash_rust::xxh3::xxh3_64;

use crate::access::Client;
use crate::admin::Admin;
use crate::app::App;
use crate::body_budget::{BudgetExceeded, BudgetLimits};
use crate::dispatch::{Placed, Wanted};
use crate::error::Error;
use crate::fleet::Fleet;
use crate::later;
use crate::limits::Rates;
use crate::policy::Demand;
use crate::prefix::{Chain, PromptContext};
use crate::queue::{Class, Waiter};
use crate::replicas::Replicas;
use crate::tenant;

mod attempt;
mod body;
mod failure;
pub mod fields;
mod headers;
mod kept;
mod metering;
mod record;
mod relay;
mod repeat;
pub(crate) mod request_body;
mod request_id;
mod retry;
mod sse;
pub(crate) mod upstream;
mod usage;

pub(crate) use body::Body;
use fields::Fields;
use headers::{Forwarding, Via};
use record::{Record, Spent};
use repeat::Repeat;
use request_body::RequestBody;
use request_id::RequestIds;
use retry::Destination;
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
    via: Via,
    request_ids: RequestIds,
}

impl Worker {
    /// A thread without connections to replicas as yet.
    pub(crate) fn new(app: App) -> Self {
        Self {
            admin: Admin::new(app.clone()),
            pool: Pool::default(),
            tick: Notify::new(),
            via: Via::new(app.dispatch().replicas.router()),
            request_ids: RequestIds::new(),
            app,
        }
    }
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
    pub(crate) const ALL: [Self; 6] =
        [Self::Chat, Self::Completions, Self::Responses, Self::Conversations, Self::Models, Self::Other];

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

/// What is known of a request before it is read.
struct Arrival {
    endpoint: Endpoint,
    client_address: IpAddr,
    request_id: HeaderValue,
}

/// Answers a request of the client at this address, whatever it is for.
pub(crate) async fn serve(
    worker: Arc<Worker>,
    client_address: IpAddr,
    request: Request<Incoming>,
) -> Result<Response<Body>, Infallible> {
    let Some(endpoint) = Endpoint::of(request.uri().path()) else {
        // Who asks after requests that were answered on this thread finds them counted.
        later::catch_up();
        return Ok(worker.admin.answer(request).await);
    };
    let request_id = worker.request_ids.of(request.headers());
    let arrival = Arrival { endpoint, client_address, request_id };
    let mut record = Record::new(&worker.app, &arrival, request.headers());
    let answer = forward(&worker, &arrival, request, &mut record).await;
    let mut answer = answer.unwrap_or_else(|error| {
        record.refused(&error);
        error.into_response()
    });
    answer.headers_mut().insert(headers::REQUEST_ID, arrival.request_id);
    Ok(answer)
}

/// A request as it is sent to replicas.
pub(crate) struct Outgoing {
    endpoint: Endpoint,
    request_id: HeaderValue,
    method: Method,
    uri: Uri,
    /// Those that all replicas get.
    headers: HeaderMap,
    body: RequestBody,
    /// Whether it may be sent again once a replica may have received it.
    repeat: Repeat,
    /// Its answer is streamed.
    stream: bool,
    /// The router requested the usage, and the client did not.
    hides_usage: bool,
    /// Bytes of its prompt, and its choices, to learn by.
    prompt_bytes: usize,
    choices: u32,
}

impl Outgoing {
    /// The request for this replica, which is one of `replicas`.
    fn request(&self, placed: &Placed, replicas: &Replicas) -> Request<RequestBody> {
        let mut request = Request::new(self.body.clone());
        *request.method_mut() = self.method.clone();
        *request.uri_mut() = self.uri.clone();
        let headers = request.headers_mut();
        *headers = self.headers.clone();
        headers.insert(header::HOST, placed.replica.authority.clone());
        if let Ok(dispatch) = HeaderValue::try_from(placed.header()) {
            headers.insert(headers::DISPATCH, dispatch);
        }
        replicas.authenticate(headers);
        request
    }
}

async fn forward(
    worker: &Arc<Worker>,
    arrival: &Arrival,
    request: Request<Incoming>,
    record: &mut Record,
) -> Result<Response<Body>, Error> {
    let (app, endpoint) = (&worker.app, arrival.endpoint);
    let client = app.access().client(request.headers())?;
    if worker.via.has_passed(request.headers()) {
        return Err(Error::Loop);
    }
    if endpoint == Endpoint::Models && matches!(*request.method(), Method::GET | Method::HEAD) {
        let answer = worker.admin.models(app, request.uri().path());
        if answer.is_ok() {
            record.whole(StatusCode::OK, Spent::Nothing);
        }
        return answer;
    }
    record.admitted(app.admit()?, client.clone());
    let (mut parts, body) = request.into_parts();
    tenant::set_header(&mut parts.headers, client.as_ref(), app.settings().key_isolation);
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
    let has_token_quota = match &client {
        Some(client) => take(app, client, &wanted.demand, record)?,
        None => false,
    };
    let metered = match endpoint {
        Endpoint::Chat | Endpoint::Completions if has_token_quota && fields.stream => {
            metering::request_usage(&body, &fields)
        }
        // Responses report it in any case.
        _ => None,
    };
    let waiter = Waiter { tokens: wanted.demand.prompt_tokens, ..waiter };
    let forwarding = Forwarding {
        client_address: arrival.client_address,
        request_id: &arrival.request_id,
        via: &worker.via,
        hides_key: client.is_some(),
        trace: record.trace(),
        has_body: !body.is_empty(),
    };
    let repeat = Repeat::of(&parts.method, parts.uri.path(), &fields);
    let outgoing = Outgoing {
        endpoint,
        request_id: arrival.request_id.clone(),
        repeat,
        stream: fields.stream,
        hides_usage: metered.is_some(),
        prompt_bytes: fields.prompt.len(),
        choices: wanted.demand.sequences,
        headers: headers::for_replica(&mut parts, forwarding),
        uri: parts.uri.path_and_query().cloned().map_or(Uri::default(), Uri::from),
        method: parts.method,
        body: metered.unwrap_or_else(|| RequestBody::whole(body)),
    };
    retry::until_answered(worker, Destination { fleet, wanted, waiter }, &outgoing, record).await
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
    Ok(Waiter { class, tokens: 0, arrived: Instant::now(), deadline })
}

/// The body, no larger and no slower than the limits have it.
async fn read(app: &App, mut body: Incoming) -> Result<Bytes, Error> {
    if body.is_end_stream() {
        return Ok(Bytes::new());
    }
    let settings = app.settings();
    let (limit, time) = (settings.max_body_bytes.0, settings.read_timeout);
    drop(settings);
    if body.size_hint().lower() > limit {
        return Err(Error::BodyTooLarge(limit));
    }
    let announced = usize::try_from(body.size_hint().lower()).unwrap_or(usize::MAX);
    let end = tokio::time::Instant::now() + time;
    let received = tokio::time::timeout_at(end, receive(app, &mut body, announced, limit)).await;
    let received = received.unwrap_or_else(|_| Err(Error::Body(format!("it took longer than {time:?}"))));
    if received.is_err() {
        // Whether the rest arrives or not, the error stands.
        let _ = tokio::time::timeout_at(end, discard(&mut body)).await;
    }
    received
}

/// Size of the part of a rejected body that the router reads and discards. A client that is still sending does not read
/// the answer, and closing the connection early would discard the answer with the unread data.
///
/// Beyond it: the router answers without reading the rest and closes the connection.
const DISCARDED_BYTES_MAX: usize = 64 << 20;

/// The body, counted against the limit for it and the one for all bodies as it comes.
async fn receive(app: &App, body: &mut Incoming, announced: usize, limit: u64) -> Result<Bytes, Error> {
    let total = app.settings().max_buffered_body_bytes.0;
    let limits = BudgetLimits::new(total, limit);
    let mut received = app.bodies().body(announced);
    while let Some(part) = next_part(body).await? {
        if received.len() + part.len() as u64 > limit {
            return Err(Error::BodyTooLarge(limit));
        }
        received.push(part, limits).map_err(|BudgetExceeded| Error::TooManyBodyBytes(total))?;
    }
    Ok(received.into_bytes())
}

/// Reads the rest of a body, up to [`DISCARDED_BYTES_MAX`].
async fn discard(body: &mut Incoming) -> Result<(), Error> {
    let mut discarded = 0;
    while let Some(part) = next_part(body).await? {
        discarded += part.len();
        if discarded > DISCARDED_BYTES_MAX {
            break;
        }
    }
    Ok(())
}

/// The next part of a body. Trailers are of no use here.
async fn next_part(body: &mut Incoming) -> Result<Option<Bytes>, Error> {
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|_| Error::Body("the connection broke".to_owned()))?;
        if let Ok(part) = frame.into_data() {
            return Ok(Some(part));
        }
    }
    Ok(None)
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
        let tenant = parts.headers.get(tenant::HEADER).map_or(&[][..], HeaderValue::as_bytes);
        let context =
            PromptContext { model: &fleet.model, tenant, cache_salt: fields.cache_salt, tools: fields.tools };
        Chain::of_text(fields.prompt, expectations.block_bytes.get(), context.seed(app.dispatch().seed))
    } else {
        Chain::default()
    };
    Wanted { demand, chain: Arc::new(chain), tried: Vec::new(), only: None }
}

/// Takes the request from what its client may use; returns whether the client's tokens are limited.
fn take(app: &App, client: &Client, demand: &Demand, record: &mut Record) -> Result<bool, Error> {
    let settings = app.settings();
    let rates = Rates { requests_per_minute: settings.key_requests, tokens_per_minute: settings.key_tokens };
    let tokens = demand.prompt_tokens.saturating_add(demand.output_tokens.saturating_mul(demand.sequences));
    app.access().take(client, rates, tokens)?;
    record.taken(tokens, demand);
    Ok(rates.tokens_per_minute.is_some())
}
