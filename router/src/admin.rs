//! The pages for administrators (probes, metrics, the state of the replicas, the most recent picks, and the console),
//! and the gRPC service. The list of models is the only part of the API that this module serves.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use bytes::Bytes;
use hyper::body::Incoming;
use percent_encoding::percent_decode_str;
use serde_json::{Value, json};
use tower::ServiceExt as _;

use crate::app::App;
use crate::dispatch::{Pick, ScoredCandidate};
use crate::error::Error;
use crate::health::HealthState;
use crate::proxy::fields::MODEL_SHOWN_MAX;
use crate::replica::{ListedModel, Replica};
use crate::served_model::ServedModel;
use crate::watch_replicas;

/// The page of the console. It is self-contained: it loads no other files.
const CONSOLE: &str = include_str!("admin/console.html");
/// The content security policy of the console: the page may run only inline scripts and call only this router.
const CONSOLE_POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; \
     connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// A set of pages that are not part of the API.
#[derive(Clone, Debug)]
pub(crate) struct Pages(Router);

impl Pages {
    /// The pages on `--admin-port`: the probes and the metrics.
    pub(crate) fn probes(app: App) -> Self {
        Self(probes().fallback(unknown_path).method_not_allowed_fallback(unsupported_method).with_state(app))
    }

    /// The gRPC service on `--grpc-port`.
    pub(crate) fn grpc(app: App) -> Self {
        Self(tonic::service::Routes::new(watch_replicas::server(app)).into_axum_router())
    }

    fn all(app: App) -> Self {
        let router = probes()
            .route("/debug/replicas", get(replicas))
            .route("/debug/picks", get(picks))
            .route("/console", get(console));
        Self(router.fallback(unknown_path).method_not_allowed_fallback(unsupported_method).with_state(app))
    }

    pub(crate) async fn answer(&self, request: http::Request<Incoming>) -> http::Response<Body> {
        let Ok(response) = self.0.clone().oneshot(request.map(Body::new)).await;
        response
    }
}

fn probes() -> Router<App> {
    Router::new()
        .route("/v2/health/live", get(live))
        .route("/v2/health/ready", get(ready))
        .route("/metrics", get(metrics))
}

/// All pages, and the list of models.
#[derive(Clone, Debug)]
pub(crate) struct Admin {
    pages: Pages,
    /// The time at which the process started, in seconds since the Unix epoch.
    created: u64,
}

impl Admin {
    pub(crate) fn new(app: App) -> Self {
        Self { pages: Pages::all(app), created: unix_seconds(SystemTime::now()) as u64 }
    }

    /// Answers a request that is not for the API.
    pub(crate) async fn answer(&self, request: http::Request<Incoming>) -> http::Response<Body> {
        self.pages.answer(request).await
    }

    /// The list of all served models, or the model that `path` names.
    ///
    /// # Errors
    /// The model that `path` names is not served.
    pub(crate) fn models(&self, app: &App, path: &str) -> Result<http::Response<Bytes>, Error> {
        let served_models = app.dispatcher().replicas.served_models();
        let is_served = |served_model: &&Arc<ServedModel>| !served_model.replicas().is_empty();
        let describe = |served_model: &Arc<ServedModel>| describe_model(served_model, self.created);
        let body = match path.split_once("/models/") {
            Some((_, id)) => {
                let id = decoded(id);
                let served_model = served_models.get(&id).filter(is_served);
                served_model
                    .map(describe)
                    .ok_or_else(|| Error::UnknownModel(id.chars().take(MODEL_SHOWN_MAX).collect()))?
            }
            None => {
                let data: Vec<Value> = served_models.values().filter(is_served).map(describe).collect();
                json!({"object": "list", "data": data})
            }
        };
        let mut response = http::Response::new(Bytes::from(body.to_string()));
        let json = http::HeaderValue::from_static("application/json");
        response.headers_mut().insert(header::CONTENT_TYPE, json);
        Ok(response)
    }
}

/// The model as an object of the OpenAI API, with vLLM's names for the properties that are not part of this API.
fn describe_model(served_model: &ServedModel, created: u64) -> Value {
    let mut model =
        json!({"id": served_model.name, "object": "model", "created": created, "owned_by": "ovfleet"});
    let ListedModel { max_model_len, root, parent } = served_model.listed().unwrap_or_default();
    let properties = [
        ("max_model_len", max_model_len.map(Value::from)),
        ("root", root.map(Value::from)),
        ("parent", parent.map(Value::from)),
    ];
    for (name, value) in properties {
        if let Some(value) = value {
            model[name] = value;
        }
    }
    model
}

/// Decodes the percent-encoding of a part of a path. Returns the part unchanged if the result is not UTF-8.
fn decoded(text: &str) -> String {
    percent_decode_str(text).decode_utf8().unwrap_or(Cow::Borrowed(text)).into_owned()
}

/// Liveness: the process answers. Readiness is a separate probe.
async fn live() -> StatusCode {
    StatusCode::OK
}

/// Readiness: whether clients should send requests.
async fn ready(State(app): State<App>) -> StatusCode {
    if app.is_ready() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }
}

async fn metrics(State(app): State<App>) -> Response {
    const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, CONTENT_TYPE)], app.scrape()).into_response()
}

async fn console() -> Response {
    let headers = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8"),
        (header::CONTENT_SECURITY_POLICY, CONSOLE_POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::CACHE_CONTROL, "no-cache"),
    ];
    (headers, CONSOLE).into_response()
}

async fn unknown_path(uri: axum::http::Uri) -> Response {
    reject(Error::UnknownPath(uri.path().chars().take(256).collect()))
}

async fn unsupported_method(method: axum::http::Method, uri: axum::http::Uri) -> Response {
    reject(Error::Method { method: method.to_string(), path: uri.path().to_owned() })
}

fn reject(error: Error) -> Response {
    error.into_response().map(Body::from)
}

async fn replicas(State(app): State<App>, headers: HeaderMap) -> Response {
    if let Err(error) = app.access().client(&headers) {
        return reject(error);
    }
    let dispatcher = app.dispatcher();
    let replicas: Vec<Value> =
        dispatcher.replicas.all().iter().map(|replica| describe(&app, replica)).collect();
    axum::Json(json!({
        "policy": app.settings().policy.name(),
        "requests_in_flight": app.requests_in_flight(),
        "requests_queued": dispatcher.queued(),
        "requests_without_replica": dispatcher.requests_without_replica(),
        "replicas": replicas,
    }))
    .into_response()
}

fn describe(app: &App, replica: &Replica) -> Value {
    let now = Instant::now();
    let snapshot = replica.ledger.snapshot(now, app.settings().report_ttl);
    let health_state = match app.dispatcher().health().state(replica.identity, now) {
        HealthState::Trusted => "trusted",
        HealthState::Probing => "probing",
        HealthState::Ejected => "ejected",
    };
    let status = replica.status();
    let load = &status.load;
    json!({
        "name": replica.discovered.name,
        "address": replica.discovered.http.to_string(),
        "models": status.models,
        "state": snapshot.state.map_or("unknown", |state| match state {
            proto::v1alpha1::State::Unspecified => "unknown",
            proto::v1alpha1::State::Starting => "starting",
            proto::v1alpha1::State::Serving => "serving",
            proto::v1alpha1::State::Draining => "draining",
            proto::v1alpha1::State::Stopped => "stopped",
        }),
        "health_state": health_state,
        "is_connected": status.is_connected,
        "problem": status.problem,
        "report_age_seconds": snapshot.report_age.map(|age| age.as_secs_f64()),
        "answered": replica.answered.load(std::sync::atomic::Ordering::Relaxed),
        "failed": replica.failed.load(std::sync::atomic::Ordering::Relaxed),
        "in_flight": snapshot.booked.in_flight,
        "unreported": snapshot.booked.unreported,
        "load": {
            "blocks_total": load.blocks_total,
            "blocks_active": load.blocks_active,
            "blocks_evictable": load.blocks_evictable,
            "blocks_free": load.blocks_free,
            "running": load.running,
            "waiting": load.waiting,
            "uncomputed_tokens": load.uncomputed_tokens,
            "prefill_tokens_per_second": finite(load.prefill_tokens_per_second),
            "decode_tokens_per_second": finite(load.decode_tokens_per_second),
            "unencoded_image_tokens": load.unencoded_image_tokens,
            "preemptions_total": load.preemptions_total,
            "sleeping": load.sleeping,
        },
    })
}

fn finite(value: f32) -> f64 {
    if value.is_finite() { f64::from(value) } else { 0.0 }
}

async fn picks(State(app): State<App>, headers: HeaderMap) -> Response {
    if let Err(error) = app.access().client(&headers) {
        return reject(error);
    }
    let log = app.dispatcher().pick_log();
    // List the most recent pick first.
    let picks: Vec<Value> = log.iter().rev().map(explain).collect();
    drop(log);
    axum::Json(json!({"policy": app.settings().policy.name(), "picks": picks})).into_response()
}

fn explain(pick: &Pick) -> Value {
    let scored = |ScoredCandidate { replica, terms }: &ScoredCandidate| {
        json!({
            "replica": replica.discovered.name,
            // The score of a candidate that was not considered is infinite, which JSON cannot represent.
            "score": terms.score.is_finite().then_some(terms.score),
            "is_score_time": terms.is_score_time,
            "queued_prefill_seconds": terms.queued_prefill,
            "prefill_seconds": terms.prefill,
            "image_encoding_seconds": terms.image_encoding,
            "decode_interference_seconds": terms.decode_interference,
            "sequence_wait_seconds": terms.sequence_wait,
            "block_wait_seconds": terms.block_wait,
            "cache_pressure_seconds": terms.cache_pressure,
            "in_flight": terms.in_flight,
            "cached_tokens": terms.cached_tokens,
        })
    };
    json!({
        "at": unix_seconds(pick.at),
        "model": pick.served_model.name,
        "prompt_tokens": pick.demand.prompt_tokens,
        "output_tokens": pick.demand.output_tokens,
        "sequences": pick.demand.sequences,
        "candidates": pick.candidate_count,
        "picked": pick.candidates.first().map(scored),
        "others": pick.candidates.iter().skip(1).map(scored).collect::<Vec<_>>(),
    })
}

fn unix_seconds(time: SystemTime) -> f64 {
    time.duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::args::Args;
    use crate::discovery::DiscoveredReplica;
    use crate::policy::{Demand, Terms};

    #[test]
    fn an_explanation_says_whether_a_score_is_a_time() {
        let discovered = DiscoveredReplica {
            http: ([127, 0, 0, 1], 1).into(),
            grpc: None,
            name: "replica".to_owned(),
            pod: None,
        };
        let replica = Replica::new(discovered, 1);
        for is_score_time in [false, true] {
            let terms = Terms { score: 1.5, is_score_time, ..Terms::default() };
            let pick = Pick {
                at: UNIX_EPOCH,
                served_model: Arc::new(ServedModel::new("model".to_owned())),
                demand: Demand::default(),
                candidates: vec![ScoredCandidate { replica: Arc::clone(&replica), terms }],
                candidate_count: 1,
            };
            let explanation = explain(&pick);
            let picked = &explanation["picked"];
            assert_eq!((&picked["score"], &picked["is_score_time"]), (&json!(1.5), &json!(is_score_time)));
        }
    }

    #[test]
    fn an_error_repeats_only_the_beginning_of_a_long_name() {
        let app = App::new(Args::try_parse_from(["router"]).unwrap(), None);
        let path = format!("/v3/models/{}", "x".repeat(1000));
        let error = Admin::new(app.clone()).models(&app, &path).unwrap_err();
        assert_eq!(error, Error::UnknownModel("x".repeat(MODEL_SHOWN_MAX)));
    }

    #[test]
    fn percent_encoding_in_paths_is_decoded_if_it_is_valid() {
        for (given, read) in
            [("a%2Fb", "a/b"), ("a/b", "a/b"), ("100%", "100%"), ("%zz", "%zz"), ("%ff", "%ff")]
        {
            assert_eq!(decoded(given), read);
        }
    }
}
