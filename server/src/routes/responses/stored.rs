//! What may be done with a response that is stored or being made in the background.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, Request, State};
use axum::http::Uri;
use axum::response::{IntoResponse, Response};
use server_openai::responses::{DeletedObject, Item, List, Object, Response as Made, ResponseError, Status};

use super::context::{self, Chain, Part, damaged};
use super::query::{Offer, Page, Selection};
use super::{answer, query};
use crate::app::App;
use crate::error::Error;
use crate::responses::Live;
use crate::routes::stored_objects::answered;
use crate::sse::{self, Events};
use crate::store::{Id, Kind, Stored};
use crate::tenant::Tenant;

/// In metrics and logs.
const ENDPOINT: &str = "responses_stored";

/// `GET /responses/{id}`.
pub(in crate::routes) async fn retrieve(
    State(app): State<App>,
    Path(id): Path<String>,
    request: Request,
) -> Response {
    let uri = request.uri().clone();
    answered(&app, ENDPOINT, request.headers(), async |tenant| {
        query::check_include(&uri)?;
        let from = query::events_from(&uri)?;
        match (from, app.background().find(&id, tenant)) {
            (None, Some(live)) => Ok(Json(live.response()).into_response()),
            (None, None) => Ok(Json(read(&app, tenant, &id).await?).into_response()),
            (Some(from), Some(live)) if live.keeps_events() => Ok(answer::follow(live, from)),
            (Some(from), None) => replay(&app, tenant, &id, from).await,
            (Some(_), Some(_)) => Err(no_events()),
        }
    })
    .await
}

/// `DELETE /responses/{id}`.
pub(in crate::routes) async fn delete(
    State(app): State<App>,
    Path(id): Path<String>,
    request: Request,
) -> Response {
    answered(&app, ENDPOINT, request.headers(), async |tenant| {
        let was_live = end(app.background().find(&id, tenant)).await;
        let parsed = Id::parse(&id).filter(|id| id.kind() == Kind::Response);
        let removed = match parsed {
            Some(parsed) => app.store().run(move |store| store.remove(parsed, tenant)).await,
            None => false,
        };
        if !(removed || was_live) {
            return Err(unknown(&id));
        }
        let deleted = DeletedObject { id: id.clone(), object: Object::Response, deleted: true };
        Ok(Json(deleted).into_response())
    })
    .await
}

/// `POST /responses/{id}/cancel`.
pub(in crate::routes) async fn cancel(
    State(app): State<App>,
    Path(id): Path<String>,
    request: Request,
) -> Response {
    answered(&app, ENDPOINT, request.headers(), async |tenant| {
        let live = app.background().find(&id, tenant);
        if end(live.clone()).await
            && let Some(live) = live
        {
            return Ok(Json(live.response()).into_response());
        }
        let response = read(&app, tenant, &id).await?;
        if !response.background {
            let problem =
                "only responses in the background can be cancelled; to end others, close the connection";
            return Err(Error::invalid("response_id", problem));
        }
        // It has ended already: it is as it stays.
        Ok(Json(response).into_response())
    })
    .await
}

/// `GET /responses/{id}/input_items`.
pub(in crate::routes) async fn input_items(
    State(app): State<App>,
    Path(id): Path<String>,
    request: Request,
) -> Response {
    let uri = request.uri().clone();
    answered(&app, ENDPOINT, request.headers(), async |tenant| items(&app, tenant, id, &uri).await).await
}

async fn items(app: &App, tenant: Tenant, id: String, uri: &Uri) -> Result<Response, Error> {
    query::check_include(uri)?;
    let page = Page::of(uri)?;
    let whole = app.clone();
    let name = id.clone();
    let found = app.store().run(move |_| given(&whole, tenant, &name, &page)).await?;
    let (data, has_more) = found.ok_or_else(|| unknown(&id))?;
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

/// A page of what a response was made from: the responses that it follows, as far as those are stored, and what its
/// request added. One record is in memory at a time.
fn given(app: &App, tenant: Tenant, name: &str, page: &Page) -> Result<Option<(Vec<Item>, bool)>, Error> {
    let chain = match Chain::of(app, tenant, name)? {
        Ok(chain) => chain,
        Err(_) => Chain::of_one(app, tenant, name),
    };
    let (mut selection, mut data) = (Selection::new(page), Vec::new());
    let mut numbers: Vec<usize> = (0..chain.len()).collect();
    if !page.is_descending() {
        numbers.reverse();
    }
    'links: for number in numbers {
        let link = match chain.link(number)? {
            Ok(link) => link,
            // It was evicted in this moment.
            Err(_) if number > 0 => continue,
            Err(_) => return Ok(None),
        };
        let mut items = link.items(if number == 0 { Part::Input } else { Part::All })?;
        if page.is_descending() {
            items.reverse();
        }
        for item in items {
            match selection.offer(item.id(), item.bytes()) {
                Offer::Skip => {}
                Offer::Take => data.push(Arc::unwrap_or_clone(item.parse()?)),
                Offer::End => break 'links,
            }
        }
    }
    if chain.len() == 0 { Ok(None) } else { Ok(Some((data, selection.finish()?))) }
}

async fn read(app: &App, tenant: Tenant, name: &str) -> Result<Made, Error> {
    let (whole, id) = (app.clone(), name.to_owned());
    let found = app.store().run(move |_| {
        let stored = context::response(&whole, tenant, &id)?;
        stored.map(|stored| stored.response().map_err(damaged)).transpose()
    });
    let mut response = found.await?.ok_or_else(|| unknown(name))?;
    if !response.status.is_final() && app.background().find(name, tenant).is_none() {
        lost(&mut response);
    }
    Ok(response)
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

/// The events of a stored response, from the one of this number on.
async fn replay(app: &App, tenant: Tenant, name: &str, from: usize) -> Result<Response, Error> {
    let (whole, id) = (app.clone(), name.to_owned());
    let found = app.store().run(move |_| {
        let stored = context::response(&whole, tenant, &id)?;
        stored.map(|stored| events_of(&stored, from)).transpose()
    });
    let events = found.await?.ok_or_else(|| unknown(name))?;
    Ok(sse::response(futures_util::stream::once(std::future::ready(events))))
}

fn events_of(stored: &Stored, from: usize) -> Result<axum::body::Bytes, Error> {
    let mut kept = stored.events().peekable();
    if kept.peek().is_none() {
        return Err(no_events());
    }
    let mut events = Events::default();
    for event in kept.skip(from) {
        events.push_raw(&event.map_err(damaged)?);
    }
    events.done();
    Ok(events.take())
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
