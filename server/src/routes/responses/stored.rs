//! What may be done with a response that is kept or being made in the background.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, Request, State};
use axum::http::Uri;
use axum::response::{IntoResponse, Response};
use server_openai::responses::{Deleted, Item, List, Object, Response as Made, ResponseError, Status};

use super::{answer, context, query};
use crate::app::App;
use crate::dispatches::Dispatch;
use crate::error::Error;
use crate::responses::Live;
use crate::sse::{self, Events};
use crate::store::{Id, Kind, ResponseRecord};

/// In metrics and logs.
const ENDPOINT: &str = "responses_stored";

/// `GET /responses/{id}`.
pub(in crate::routes) async fn retrieve(
    State(app): State<App>,
    Path(id): Path<String>,
    request: Request,
) -> Response {
    let (dispatch, uri) = (Dispatch::of(request.headers()), request.uri().clone());
    let retrieved = async {
        query::check_include(&uri)?;
        let from = query::events_from(&uri)?;
        let live = app.background().find(&id);
        match (from, live) {
            (None, Some(live)) => Ok(Json(live.response()).into_response()),
            (None, None) => Ok(Json(read(&app, &id).await?.response).into_response()),
            (Some(from), Some(live)) if live.keeps_events() => Ok(answer::follow(live, from)),
            (Some(from), None) => replay(read(&app, &id).await?, from),
            (Some(_), Some(_)) => Err(no_events()),
        }
    };
    let retrieved = retrieved.await;
    super::told(&app, ENDPOINT, dispatch, retrieved)
}

/// `DELETE /responses/{id}`.
pub(in crate::routes) async fn delete(
    State(app): State<App>,
    Path(id): Path<String>,
    request: Request,
) -> Response {
    let dispatch = Dispatch::of(request.headers());
    let deleted = async {
        let was_live = end(app.background().find(&id)).await;
        let parsed = Id::parse(&id).filter(|id| id.kind() == Kind::Response);
        let removed = match parsed {
            Some(parsed) => app.store().with(move |store| store.remove(parsed)).await,
            None => false,
        };
        if !(removed || was_live) {
            return Err(unknown(&id));
        }
        let deleted = Deleted { id: id.clone(), object: Object::Response, deleted: true };
        Ok(Json(deleted).into_response())
    };
    let deleted = deleted.await;
    super::told(&app, ENDPOINT, dispatch, deleted)
}

/// `POST /responses/{id}/cancel`.
pub(in crate::routes) async fn cancel(
    State(app): State<App>,
    Path(id): Path<String>,
    request: Request,
) -> Response {
    let dispatch = Dispatch::of(request.headers());
    let cancelled = async {
        let live = app.background().find(&id);
        if end(live.clone()).await
            && let Some(live) = live
        {
            return Ok(Json(live.response()).into_response());
        }
        let record = read(&app, &id).await?;
        if !record.response.background {
            let problem =
                "only responses in the background can be cancelled; to end others, close the connection";
            return Err(Error::invalid("response_id", problem));
        }
        // It has ended already: it is as it stays.
        Ok(Json(record.response).into_response())
    };
    let cancelled = cancelled.await;
    super::told(&app, ENDPOINT, dispatch, cancelled)
}

/// `GET /responses/{id}/input_items`.
pub(in crate::routes) async fn input_items(
    State(app): State<App>,
    Path(id): Path<String>,
    request: Request,
) -> Response {
    let (dispatch, uri) = (Dispatch::of(request.headers()), request.uri().clone());
    let listed = items(&app, id, &uri).await;
    super::told(&app, ENDPOINT, dispatch, listed)
}

async fn items(app: &App, id: String, uri: &Uri) -> Result<Response, Error> {
    query::check_include(uri)?;
    let page = query::Page::of(uri)?;
    let whole = app.clone();
    let name = id.clone();
    let found = app.store().with(move |_| given(&whole, &name)).await?;
    let (data, has_more) = page.take(found.ok_or_else(|| unknown(&id))?, Item::id)?;
    Ok(Json(list(data, has_more)).into_response())
}

/// A part of a list as it is answered.
pub(in crate::routes) fn list(data: Vec<Item>, has_more: bool) -> List {
    let name = |item: &Item| item.id().to_owned();
    List {
        object: Object::List,
        first_id: data.first().map(name),
        last_id: data.last().map(name),
        has_more,
        data,
    }
}

/// All that a response was made from, oldest first: what it follows, as far as that is kept, and what was new.
fn given(app: &App, name: &str) -> Result<Option<Vec<Item>>, Error> {
    let records = match context::chain(app, name)? {
        Ok(records) => records,
        Err(_) => match context::response(app, name)? {
            Some(record) => vec![record],
            None => return Ok(None),
        },
    };
    let mut items = Vec::new();
    let last = records.len().saturating_sub(1);
    for (index, record) in records.into_iter().rev().enumerate() {
        items.extend(record.input);
        if index < last {
            items.extend(record.response.output);
        }
    }
    Ok(Some(items))
}

async fn read(app: &App, name: &str) -> Result<ResponseRecord, Error> {
    let (whole, id) = (app.clone(), name.to_owned());
    let found = app.store().with(move |_| context::response(&whole, &id)).await?;
    let mut record = found.ok_or_else(|| unknown(name))?;
    if !record.response.status.is_final() && app.background().find(name).is_none() {
        lost(&mut record.response);
    }
    Ok(record)
}

/// It was being made when the process ended.
fn lost(response: &mut Made) {
    response.status = Status::Failed;
    let message = "the server ended before the response did".to_owned();
    response.error = Some(ResponseError { code: "server_error".to_owned(), message });
}

/// Ends a response that is being made. Returns whether there was one.
async fn end(live: Option<Arc<Live>>) -> bool {
    let Some(live) = live else { return false };
    live.cancel();
    live.done().await;
    true
}

fn replay(record: ResponseRecord, from: usize) -> Result<Response, Error> {
    let kept = record.events.ok_or_else(no_events)?;
    let mut events = Events::default();
    kept.iter().skip(from).for_each(|event| events.push_raw(event));
    events.done();
    let all = events.take();
    Ok(sse::response(futures_util::stream::once(std::future::ready(all))))
}

fn no_events() -> Error {
    let problem =
        "the events are kept of responses that were made with background and stream, and of no others";
    Error::invalid("stream", problem)
}

fn unknown(id: &str) -> Error {
    Error::NotKept {
        code: "response_not_found",
        param: Some("response_id".to_owned()),
        message: format!("the response {id:?} is not kept here, or no more"),
    }
}
