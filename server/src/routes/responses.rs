//! Serves `/responses`. This module looks up the objects that a request refers to, and prepares the request. [`answer`]
//! generates the response, and [`stored`] serves stored responses.

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
use tokio_util::sync::CancellationToken;

use self::answer::{Delivery, PendingResponse};
use super::submission::{Submission, submit};
use super::{body, counted, preparation, probabilities};
use crate::app::{App, ServedModel};
use crate::dispatches::Dispatch;
use crate::error::{Error, Resource};
use crate::limits::BudgetExhausted;
use crate::model::unix_time;
use crate::prepare::responses::{
    Context, PreparedResponse, References, count_input_tokens, references, responses,
};
use crate::prepare::{self, Endpoint, Media, Target};
use crate::responses::{Assembly, LogprobFormat, NewResponse, RetainedRequest};
use crate::store::{Id, Kind};
use crate::tenant::Tenant;
pub(super) use context::{Lookup, conversation, damaged, no_conversation, unreadable};
pub(super) use query::{Page, PagePosition, Selection};
pub(super) use stored::{cancel, delete, input_items, list, retrieve};

/// The name of the endpoint in metrics and logs.
const ENDPOINT: &str = "responses";

/// Handles `POST /responses`.
pub(super) async fn create(State(app): State<App>, request: Request) -> Response {
    let arrived = Instant::now();
    let dispatch = Dispatch::of(request.headers());
    let accepted = accept(&app, request, arrived).await;
    if let Some(dispatch) = dispatch {
        app.dispatches().record(dispatch, accepted.is_ok().then(|| app.submissions()));
    }
    counted::mark(match accepted {
        Ok(pending) => answer::answer(app, pending).await,
        Err(error) => counted::rejected(&app, ENDPOINT, error),
    })
}

async fn accept(app: &App, request: Request, arrived: Instant) -> Result<PendingResponse, Error> {
    app.served()?;
    let tenant = Tenant::of(request.headers())?;
    let body = body::read(app, request).await?;
    let served = app.served()?;
    let admitted = app.admission().admit()?;
    let id = app.store().new_id(Kind::Response);
    let PreparedResponse { mut prepared, mut response, ids, mut input, call_names } =
        prepare(app, body, id, tenant, responses).await?;
    tenant.assign_prompts(&mut prepared.prompts);
    response.created_at = unix_time();
    response.store &= app.store().is_enabled();
    if response.background && !response.store {
        let problem = "requires stored responses, which this server has disabled (--max-stored-responses 0)";
        return Err(Error::invalid("background", problem));
    }
    let delivery = match (response.background, prepared.answer_options.stream) {
        (true, follows) => Delivery::Background { follows },
        (false, true) => Delivery::Streamed,
        (false, false) => Delivery::Whole,
    };
    if !response.store && response.conversation.is_none() {
        input.clear();
    }
    let retained = RetainedRequest::new(app.body_bytes(), input, &response);
    let retained = retained.map_err(|BudgetExhausted| app.overloaded(Resource::BodyBytes))?;
    let logprobs = prepared.answer_options.logprobs.map(|_| {
        let tokenizer = Arc::clone(&served.model.text.tokenizer);
        let names_by_id = prepared.answer_options.names_by_id;
        Box::new(move |tokens| probabilities::entries(&tokenizer, tokens, names_by_id)) as LogprobFormat
    });
    let (choices, prompts) = (prepared.answer_options.choices, prepared.prompts);
    let admitted = admitted.with_image_memory(prepared.image_memory);
    let (id, text) = (id.to_string(), &prepared.text);
    let submission = Submission { endpoint: ENDPOINT, id, arrived, admitted, prompts, text, choices };
    let answer = submit(app, served, submission)?;
    let assembly = Assembly::new(NewResponse { response, ids, logprobs, choices, call_names });
    Ok(PendingResponse { assembly, retained, answer, delivery, tenant })
}

/// Parses a body, looks up the objects that it refers to, and prepares the request with `prepare_request`.
async fn prepare<T: Send + 'static>(
    app: &App,
    body: Bytes,
    id: Id,
    tenant: Tenant,
    prepare_request: fn(&wire::Request, Context, Id, Target<'_>) -> Result<T, Error>,
) -> Result<T, Error> {
    let seed = app.next_id().seed();
    let work = move |app: &App, media: &Media, canceled: &CancellationToken, request: &ReferringRequest| {
        let ServedModel { model, engine, .. } = app.served()?;
        let context = context::find(app, tenant, &request.references)?;
        let target = Target { model, limits: engine.limits(), media, canceled, seed };
        prepare_request(&request.request, context, id, target)
    };
    if !preparation::is_light(&body) {
        return preparation::with_media(app, tenant, false, move |app, media, canceled| {
            work(app, media, canceled, &ReferringRequest::read(&body)?)
        })
        .await;
    }
    let request = ReferringRequest::read(&body)?;
    // Stored objects may be on disk, so looking them up may block.
    let is_light = request.references.is_empty();
    preparation::with_media(app, tenant, is_light, move |app, media, canceled| {
        work(app, media, canceled, &request)
    })
    .await
}

/// A request, and its references to stored objects.
struct ReferringRequest {
    request: wire::Request,
    references: References,
}

impl ReferringRequest {
    fn read(body: &[u8]) -> Result<Self, Error> {
        let request = wire::Request::read(&prepare::checked(Endpoint::Responses, body)?)?;
        let references = references(&request)?;
        Ok(Self { request, references })
    }
}

/// Handles `POST /responses/input_tokens`, which returns the number of tokens of the prompt.
pub(super) async fn input_tokens(State(app): State<App>, request: Request) -> Response {
    let counted = async {
        app.served()?;
        let tenant = Tenant::of(request.headers())?;
        let body = body::read(&app, request).await?;
        let _admitted = app.admission().admit()?;
        let id = app.store().new_id(Kind::Response);
        let tokens = prepare(&app, body, id, tenant, count_input_tokens).await?;
        Ok(Json(InputTokens { object: Object::InputTokens, input_tokens: tokens }).into_response())
    };
    counted::answered(&app, ENDPOINT, None, counted.await)
}
