//! How a request passes through the router: the router receives the request, selects a replica, sends the request to
//! it, and forwards the answer to the client.
//!
//! ```text
//! client ─► receive ─► Fields ─► Dispatcher::place ─► attempt ─► Relay ─► client
//!                                      ▲                 │
//!                                      └──── retry ◄─────┘  only until the client has received the first byte
//! ```
//!
//! Bodies are forwarded unchanged, with two exceptions. A stream that breaks ends with an error event. If a token quota
//! applies and the client did not request the usage of a stream, the router requests it, and removes it from the events
//! before the client receives them.

use std::convert::Infallible;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::request::Parts;
use http::{HeaderValue, Method, Request, Response, StatusCode, Uri, header};
use hyper::body::Incoming;
use proto::path::standard_path;
use xxhash_rust::xxh3::xxh3_64;

use crate::access::Client;
use crate::app::App;
use crate::deferred::run_deferred;
use crate::endpoint::Endpoint;
use crate::error::Error;
use crate::limits::Rates;
use crate::policy::Demand;
use crate::prefix::{PrefixHashes, PromptContext};
use crate::queue::{NO_TENANT, PriorityClass, QueuedRequest, UnknownPriorityClass};
use crate::served_model::ServedModel;
use crate::tenant;
use crate::waiting::PlacementRequest;

mod attempt;
mod body;
mod failure;
pub(crate) mod fields;
mod headers;
mod images;
mod metering;
mod outgoing;
mod receive;
mod record;
mod relay;
pub(crate) mod request_body;
mod request_id;
mod retry;
mod retry_safety;
mod sse;
mod stored_object;
pub(crate) mod upstream;
mod usage;
mod worker;

pub(crate) use body::Body;
use fields::Fields;
use headers::ForwardingContext;
use images::RoutingPrompt;
use outgoing::OutgoingRequest;
use receive::UnreadBody;
use record::{RequestRecord, TokensUsed};
use request_body::RequestBody;
use retry::Destination;
use retry_safety::RetrySafety;
pub(crate) use worker::Worker;

/// The header with which a client sets the priority class of a request.
const PRIORITY: &str = "x-ovfleet-priority";
/// The header with which a client limits the time that its request waits for a replica, in seconds.
const TIMEOUT: &str = "x-ovfleet-timeout";
/// The header with which a client names its session.
const SESSION: &str = "x-session-id";

/// Answers any request from the client at `client_address`.
pub(crate) async fn serve(
    worker: Arc<Worker>,
    client_address: IpAddr,
    request: Request<Incoming>,
) -> Result<Response<Body>, Infallible> {
    let path = standard_path(request.uri().path()).into_owned();
    let Some(endpoint) = Endpoint::from_path(&path) else {
        // Run the deferred jobs first, so that the metrics include the requests that this thread has answered.
        run_deferred();
        return Ok(worker.admin.answer(request).await.map(Body::page));
    };
    let request_id = worker.request_ids.of(request.headers());
    let mut record = RequestRecord::new(&worker.app, endpoint, &request_id, request.headers());
    let head = RequestHead { endpoint, path, client_address, request_id };
    let (parts, body) = request.into_parts();
    let mut body = Some(UnreadBody::new(&parts.headers, body));
    let mut answer = match forward(&worker, &head, parts, &mut body, &mut record).await {
        Ok(answer) => answer,
        Err(error) => {
            record.rejected(&error);
            if let Some(body) = body {
                body.discard(&worker.app).await;
            }
            error.into_response().map(Body::whole)
        }
    };
    answer.headers_mut().insert(headers::REQUEST_ID, head.request_id);
    Ok(answer)
}

/// The information about a request that is known before its body is read.
struct RequestHead {
    endpoint: Endpoint,
    /// The standard spelling of the path.
    path: String,
    client_address: IpAddr,
    request_id: HeaderValue,
}

async fn forward(
    worker: &Arc<Worker>,
    head: &RequestHead,
    mut parts: Parts,
    body: &mut Option<UnreadBody>,
    record: &mut RequestRecord,
) -> Result<Response<Body>, Error> {
    let (app, endpoint, path) = (&worker.app, head.endpoint, head.path.as_str());
    let client = app.access().client(&parts.headers)?;
    if worker.via.has_passed(&parts.headers) {
        return Err(Error::Loop);
    }
    if endpoint == Endpoint::Models && matches!(parts.method, Method::GET | Method::HEAD) {
        let answer = worker.admin.models(app, path)?;
        record.completed(StatusCode::OK, TokensUsed::None);
        return Ok(answer.map(Body::whole));
    }
    record.admitted(app.admit()?, client.clone());
    tenant::set_header(&mut parts.headers, client.as_ref(), app.settings().key_isolation);
    let queued = queued_request(&parts)?;
    check_encoding(&parts)?;
    let body = match body.take() {
        Some(body) => body.receive(app).await?,
        None => Bytes::new(),
    };
    let fields = routing_fields(endpoint, &parts, &body)?;
    let (served_model, required_replica) = match stored_object::referenced(path, &fields) {
        Some(object) => {
            let model = fields.model.as_deref();
            let (served_model, replica) = stored_object::locate(app, object, model, queued).await?;
            (served_model, Some(replica))
        }
        None => (served_model_of(app, &fields, queued).await?, None),
    };
    let prompt = images::without_images(fields.prompt);
    let placement_request = PlacementRequest {
        required_replica,
        ..placement_request(app, &served_model, &parts, &fields, &prompt)
    };
    let demand = placement_request.demand;
    let is_computed = is_computed(&parts.method, endpoint, path);
    let has_token_quota = match &client {
        Some(client) => charge(app, client, is_computed.then_some(&demand), record)?,
        None => false,
    };
    let metered = match endpoint {
        Endpoint::Chat | Endpoint::Completions if has_token_quota && fields.is_stream => {
            metering::request_usage(&body, &fields)
        }
        // Streams of the Responses API always report the usage.
        _ => None,
    };
    let prompt_bytes = measurable_prompt_bytes(&fields, &prompt);
    // The prompt without its images can be a large copy, and the answer can take minutes.
    drop(prompt);
    let queued = QueuedRequest { tenant: demand.tenant, tokens: demand.prompt_tokens, ..queued };
    let forwarding = ForwardingContext {
        client_address: head.client_address,
        request_id: &head.request_id,
        via: &worker.via,
        hides_key: client.is_some(),
        trace: record.trace(),
        has_body: !body.is_empty(),
    };
    let retry_safety = RetrySafety::of(&parts.method, path, &fields);
    let outgoing = OutgoingRequest {
        endpoint,
        request_id: head.request_id.clone(),
        retry_safety,
        is_stream: fields.is_stream,
        hides_usage: metered.is_some(),
        is_computed,
        prompt_bytes,
        choices: demand.sequences,
        headers: headers::for_replica(&mut parts, forwarding),
        uri: parts.uri.path_and_query().cloned().map_or(Uri::default(), Uri::from),
        method: parts.method,
        body: metered.unwrap_or_else(|| RequestBody::whole(body)),
    };
    let destination = Destination { served_model, request: placement_request, queued };
    retry::send_until_answered(worker, destination, &outgoing, record).await
}

/// Returns the queue entry of the request, with the priority class and the deadline from its headers. The tenant and
/// the number of tokens are placeholders.
fn queued_request(parts: &Parts) -> Result<QueuedRequest, Error> {
    let text = |name| parts.headers.get(name).map(|value: &HeaderValue| value.to_str().unwrap_or_default());
    let class = text(PRIORITY).map_or(Ok(PriorityClass::default()), str::parse).map_err(
        |error: UnknownPriorityClass| Error::Header { header: PRIORITY, problem: error.to_string() },
    )?;
    let parse_deadline = |seconds: &str| {
        let timeout = seconds.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        timeout.and_then(|timeout| Instant::now().checked_add(timeout)).ok_or_else(|| Error::Header {
            header: TIMEOUT,
            problem: format!("{seconds:?} is not a non-negative number of seconds, such as 2.5"),
        })
    };
    let deadline = text(TIMEOUT).map(parse_deadline).transpose()?;
    Ok(QueuedRequest { tenant: NO_TENANT, class, tokens: 0, arrived: Instant::now(), deadline })
}

fn routing_fields<'a>(endpoint: Endpoint, parts: &Parts, body: &'a [u8]) -> Result<Fields<'a>, Error> {
    if body.is_empty() {
        return Ok(Fields::default());
    }
    let is_json = || {
        let content_type = parts.headers.get(header::CONTENT_TYPE).map(HeaderValue::as_bytes);
        content_type.is_some_and(|value| memchr::memmem::find(value, b"json").is_some())
    };
    match endpoint {
        Endpoint::Chat | Endpoint::Completions | Endpoint::Responses => Ok(fields::read(body, endpoint)?),
        // The body of a request to another endpoint may be JSON and name a model.
        _ if is_json() => Ok(fields::read(body, endpoint).unwrap_or_default()),
        _ => Ok(Fields::default()),
    }
}

/// Checks that the body is not compressed. Replicas do not decompress bodies, and the router must read the fields that
/// determine the replica and the charge.
fn check_encoding(parts: &Parts) -> Result<(), Error> {
    let mut encodings = parts.headers.get_all(header::CONTENT_ENCODING).iter();
    match encodings.find(|encoding| !encoding.as_bytes().eq_ignore_ascii_case(b"identity")) {
        Some(encoding) => {
            Err(Error::ContentEncoding(String::from_utf8_lossy(encoding.as_bytes()).into_owned()))
        }
        None => Ok(()),
    }
}

/// Whether a replica computes the answer and its usage. The answer to another request, such as one for a stored
/// response, contains at most the usage of an earlier request.
fn is_computed(method: &Method, endpoint: Endpoint, path: &str) -> bool {
    *method == Method::POST
        && match endpoint {
            Endpoint::Chat | Endpoint::Completions => true,
            Endpoint::Responses => path.ends_with("/responses"),
            Endpoint::Conversations | Endpoint::Models => false,
            Endpoint::Other => !path.ends_with("tokenize"),
        }
}

/// Waits until a replica serves the model that the request names, and returns this model. A request that names no model
/// is for the only served model, if there is exactly one.
async fn served_model_of(
    app: &App,
    fields: &Fields<'_>,
    queued: QueuedRequest,
) -> Result<Arc<ServedModel>, Error> {
    let model = fields.model.as_deref();
    let served_model = app.dispatcher().await_model(model, queued).await?;
    served_model.ok_or_else(|| {
        model.map_or(Error::MissingModel, |model| {
            Error::UnknownModel(model.chars().take(fields::MODEL_SHOWN_MAX).collect())
        })
    })
}

fn placement_request(
    app: &App,
    served_model: &ServedModel,
    parts: &Parts,
    fields: &Fields<'_>,
    prompt: &RoutingPrompt<'_>,
) -> PlacementRequest {
    let expectations = served_model.expectations();
    let estimates = &expectations.estimates;
    let session = parts.headers.get(SESSION).map(HeaderValue::as_bytes).or(fields.user);
    let tenant = parts.headers.get(tenant::HEADER);
    let demand = Demand {
        prompt_tokens: estimates.prompt_tokens(prompt_bytes(fields, prompt)),
        image_tokens: prompt.image_tokens,
        images_start: estimates.prompt_tokens(prompt.images.start),
        images_end: estimates.prompt_tokens(prompt.images.end),
        output_tokens: estimates.output_tokens(fields.output_tokens_max()),
        output_tokens_max: fields.output_tokens_max(),
        sequences: fields.choices.max(fields.best_of).unwrap_or(1).max(1),
        session: session.map(xxh3_64),
        tenant: tenant.map_or(NO_TENANT, |tenant| xxh3_64(tenant.as_bytes())),
    };
    app.metrics().record_prompt(demand.prompt_tokens);
    let prefix_hashes = if app.settings().policy.uses_prefixes() {
        let tenant = tenant.map_or(&[][..], HeaderValue::as_bytes);
        let context = PromptContext {
            adapter: if served_model.is_base_model() { "" } else { &served_model.name },
            tenant,
            cache_salt: fields.cache_salt,
            tools: fields.tools,
            functions: fields.functions,
            instructions: fields.instructions,
            documents: fields.documents,
        };
        PrefixHashes::of_text(
            &prompt.text,
            expectations.block_bytes.get(),
            context.seed(app.dispatcher().seed),
        )
    } else {
        PrefixHashes::default()
    };
    PlacementRequest {
        demand,
        prefix_hashes: Arc::new(prefix_hashes),
        failed_replicas: Vec::new(),
        required_replica: None,
    }
}

/// The number of bytes from which the number of prompt tokens is estimated: those of the prompt itself, and those of
/// the other members that the replica inserts into the prompt.
fn prompt_bytes(fields: &Fields<'_>, prompt: &RoutingPrompt<'_>) -> usize {
    let members = [fields.tools, fields.functions, fields.instructions, fields.documents, fields.suffix];
    prompt.text.len() + members.iter().map(|member| member.len()).sum::<usize>()
}

/// The number of bytes of the prompt, from which the bytes per token are derived; 0 if the number of tokens does not
/// depend on these bytes alone, because the prompt has images or continues stored turns.
fn measurable_prompt_bytes(fields: &Fields<'_>, prompt: &RoutingPrompt<'_>) -> usize {
    let has_history = fields.previous_response_id.is_some() || fields.conversation.is_some();
    if has_history || prompt.image_tokens > 0 { 0 } else { prompt_bytes(fields, prompt) }
}

/// Charges a request to the rate limits of its client, together with the tokens of `demand`, which is `None` if no
/// answer is computed. Returns whether the router limits the tokens of clients.
fn charge(
    app: &App,
    client: &Client,
    demand: Option<&Demand>,
    record: &mut RequestRecord,
) -> Result<bool, Error> {
    let settings = app.settings();
    let rates = Rates {
        requests_per_minute: settings.requests_per_minute,
        tokens_per_minute: settings.tokens_per_minute,
    };
    let tokens_of = |demand: &Demand| {
        demand.prompt_tokens.saturating_add(demand.output_tokens.saturating_mul(demand.sequences))
    };
    let tokens = demand.map_or(0, tokens_of);
    app.access().charge(client, rates, tokens)?;
    record.charged(tokens, demand.map_or(0, |demand| demand.prompt_tokens));
    Ok(rates.tokens_per_minute.is_some())
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::args::Args;
    use crate::discovery::DiscoveredReplica;
    use crate::replica::ListedModel;

    #[test]
    fn prompts_for_two_names_of_a_model_have_the_same_prefix_and_those_for_an_adapter_do_not() {
        let app = App::new(Args::try_parse_from(["router"]).unwrap(), None);
        let replicas = &app.dispatcher().replicas;
        let discovered = DiscoveredReplica {
            http: ([127, 0, 0, 1], 1).into(),
            grpc: None,
            name: "replica".to_owned(),
            pod: None,
        };
        let replica = Arc::clone(&replicas.update(&[discovered]).added[0]);
        let names = ["model", "alias", "adapter"].map(str::to_owned);
        replicas.observe_models(&replica, names.to_vec(), 0);

        let (parts, ()) = Request::new(()).into_parts();
        let body = format!(r#"{{"prompt":"{}"}}"#, "x".repeat(1000));
        let fields = fields::read(body.as_bytes(), Endpoint::Completions).unwrap();
        let prompt = images::without_images(fields.prompt);
        let hashes = |name: &str| {
            let served_model = replicas.served_model(name).unwrap();
            placement_request(&app, &served_model, &parts, &fields, &prompt).prefix_hashes
        };
        assert!(hashes("model").blocks() > 0);
        assert_ne!(hashes("model"), hashes("alias"), "before the replica has listed its models");
        replica.status().listed_models = names
            .map(|name| {
                let parent = (name == "adapter").then(|| "model".to_owned());
                (name, ListedModel { parent, ..ListedModel::default() })
            })
            .into();
        assert_eq!(hashes("model"), hashes("alias"));
        assert_ne!(hashes("model"), hashes("adapter"));
    }

    #[test]
    fn only_prompts_that_are_all_in_the_body_are_measured() {
        let measured = |endpoint, body: &str| {
            let fields = fields::read(body.as_bytes(), endpoint).unwrap();
            measurable_prompt_bytes(&fields, &images::without_images(fields.prompt))
        };
        let response = |body: &str| measured(Endpoint::Responses, body);
        assert_eq!(response(r#"{"input":"Hello","previous_response_id":null,"conversation":null}"#), 6);
        assert_eq!(response(r#"{"input":"Hello","previous_response_id":"resp_1"}"#), 0);
        assert_eq!(response(r#"{"input":"Hello","conversation":"conv_1"}"#), 0);
        assert_eq!(response(r#"{"input":"Hello","conversation":{"id":"conv_1"}}"#), 0);
        let chat = |body: &str| measured(Endpoint::Chat, body);
        assert_eq!(chat(r#"{"messages":["data:image/png;base64,AAAA"]}"#), 0);
        // The replica counts the tokens of everything that it inserts into the prompt.
        assert_eq!(chat(r#"{"messages":[],"tools":[{}],"documents":[{"a":1}]}"#), 1 + 4 + 9);
        assert_eq!(chat(r#"{"messages":[],"functions":[{}]}"#), 1 + 4);
        assert_eq!(response(r#"{"input":"Hello","instructions":"Be brief."}"#), 6 + 11);
        assert_eq!(measured(Endpoint::Completions, r#"{"prompt":"a(","suffix":")"}"#), 3 + 3);
    }
}
