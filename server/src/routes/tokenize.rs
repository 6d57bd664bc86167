//! `/tokenize` and `/detokenize`: no engine takes part.

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde_json::Value;

use super::body;
use super::generate::{self, Counted};
use crate::app::{App, Serving};
use crate::error::Error;
use crate::prepare::{self, Endpoint, Target};
use crate::tenant::Tenant;

pub(super) async fn tokenize(State(app): State<App>, request: Request) -> Response {
    answer(&app, request, ("tokenize", Endpoint::Tokenize), prepare::tokenize).await
}

pub(super) async fn detokenize(State(app): State<App>, request: Request) -> Response {
    answer(&app, request, ("detokenize", Endpoint::Detokenize), prepare::detokenize).await
}

async fn answer<T: Serialize + Send + 'static>(
    app: &App,
    request: Request,
    (name, endpoint): (&'static str, Endpoint),
    work: fn(&Value, Target<'_>) -> Result<T, Error>,
) -> Response {
    let mut response = match compute(app, request, endpoint, work).await {
        Ok(answer) => {
            app.metrics().count(name, "ok", axum::http::StatusCode::OK);
            Json(answer).into_response()
        }
        Err(error) => {
            app.metrics().count(name, error.label(), error.status());
            error.into_response()
        }
    };
    response.extensions_mut().insert(Counted);
    response
}

async fn compute<T: Send + 'static>(
    app: &App,
    request: Request,
    endpoint: Endpoint,
    work: fn(&Value, Target<'_>) -> Result<T, Error>,
) -> Result<T, Error> {
    app.serving()?;
    let tenant = Tenant::of(request.headers())?;
    let body = body::read(app, request).await?;
    let admitted = app.admission().admit()?;
    let (is_light, seed) = (generate::is_light(&body), app.next_id().seed());
    let work = move |app: &App| {
        let _admitted = admitted;
        let Serving { model, engine, .. } = app.serving()?;
        let request = prepare::checked(endpoint, &body)?;
        work(&request, Target { model, limits: engine.limits(), seed })
    };
    // Others' tokens do not wait for long texts.
    if is_light { work(app) } else { generate::apart(app, tenant, work).await }
}
