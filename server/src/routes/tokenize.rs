//! Serves `/tokenize` and `/detokenize`, which do not use the engine.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse as _, Response};
use serde::Serialize;
use serde_json::Value;

use super::{body, counted, preparation, unread};
use crate::app::{App, ServedModel};
use crate::error::Error;
use crate::prepare::{self, Endpoint, Target};
use crate::tenant::Tenant;

pub(super) async fn tokenize(State(app): State<App>, request: Request) -> Response {
    let response = answer(&app, request, Endpoint::Tokenize, prepare::tokenize).await;
    counted::answered(&app, "tokenize", None, response)
}

pub(super) async fn detokenize(State(app): State<App>, request: Request) -> Response {
    let response = answer(&app, request, Endpoint::Detokenize, prepare::detokenize).await;
    counted::answered(&app, "detokenize", None, response)
}

async fn answer<T: Serialize + 'static>(
    app: &App,
    request: Request,
    endpoint: Endpoint,
    work: fn(&Value, Target<'_>) -> Result<T, Error>,
) -> Result<Response, Error> {
    app.served()?;
    let tenant = Tenant::of(request.headers())?;
    let body = body::read(app, request).await?;
    let admitted = Arc::new(app.admission().admit()?);
    let admitted_work = Arc::clone(&admitted);
    let (is_light, seed) = (preparation::is_light(&body), app.next_id().seed());
    let response = preparation::with_media(app, tenant, is_light, move |app, media, canceled| {
        let _admitted = &admitted_work;
        let ServedModel { model, engine, .. } = app.served()?;
        let request = prepare::checked(endpoint, &body)?;
        let answer = work(&request, Target { model, limits: engine.limits(), media, canceled, seed })?;
        // Serialize the answer here too, because serializing a large answer takes a long time.
        Ok(Json(answer).into_response())
    });
    unread::reserve_until_sent(app, response.await?, admitted)
}
