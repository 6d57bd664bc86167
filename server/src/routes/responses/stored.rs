//! Serves requests for responses that are stored or generated in the background.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, Request, State};
use axum::http::Uri;
use axum::response::{IntoResponse, Response};
use server_openai::responses::{
    DeletedObject, Item, List, Object, Response as WireResponse, ResponseError, Status,
};

use super::context::{self, Chain, Part, damaged};
use super::query::{Page, PagePosition, Selection};
use super::{answer, query};
use crate::app::App;
use crate::error::Error;
use crate::responses::LiveResponse;
use crate::routes::stored_objects::{answered, json};
use crate::sse::{self, Events};
use crate::store::{Id, Kind, StoredRecord};
use crate::tenant::Tenant;

/// The name of the endpoint in metrics and logs.
const ENDPOINT: &str = "responses_stored";

/// Handles `GET /responses/{id}`.
pub(crate) async fn retrieve(State(app): State<App>, Path(id): Path<String>, request: Request) -> Response {
    let uri = request.uri().clone();
    answered(&app, ENDPOINT, request.headers(), async |tenant| {
        query::check_include(&uri)?;
        let from = query::events_from(&uri)?;
        match (from, app.background().find(&id, tenant)) {
            (None, Some(live)) => json(&app, move |_| Ok(live.response())).await,
            (None, None) => json(&app, move |app| read(app, tenant, &id)).await,
            (Some(from), Some(live)) if live.stores_events() => Ok(answer::follow(live.events(), from)),
            (Some(from), None) => replay(&app, tenant, &id, from).await,
            (Some(_), Some(_)) => Err(no_events()),
        }
    })
    .await
}

/// Handles `DELETE /responses/{id}`.
pub(crate) async fn delete(State(app): State<App>, Path(id): Path<String>, request: Request) -> Response {
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

/// Handles `POST /responses/{id}/cancel`.
pub(crate) async fn cancel(State(app): State<App>, Path(id): Path<String>, request: Request) -> Response {
    answered(&app, ENDPOINT, request.headers(), async |tenant| {
        let live = app.background().find(&id, tenant);
        if end(live.clone()).await
            && let Some(live) = live
        {
            return json(&app, move |_| Ok(live.response())).await;
        }
        json(&app, move |app| {
            let response = read(app, tenant, &id)?;
            if !response.background {
                let problem =
                    "only background responses can be canceled; close the connection to cancel other responses";
                return Err(Error::invalid("response_id", problem));
            }
            // The response has already ended.
            Ok(response)
        })
        .await
    })
    .await
}

/// Handles `GET /responses/{id}/input_items`.
pub(crate) async fn input_items(
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
    json(app, move |app| {
        let (data, has_more) = page_of_input(app, tenant, &id, &page)?.ok_or_else(|| unknown(&id))?;
        Ok(list(data, has_more))
    })
    .await
}

/// Returns the list object for a page of items.
pub(crate) fn list(data: Vec<Item>, has_more: bool) -> List {
    let id = |item: &Item| item.id().to_owned();
    List {
        object: Object::List,
        first_id: data.first().map(id),
        last_id: data.last().map(id),
        has_more,
        data,
    }
}

/// Returns a page of the input items of a response, which are the items that its request added. If all responses that
/// it follows are still stored, their items come first. Only one record is in memory at a time.
fn page_of_input(
    app: &App,
    tenant: Tenant,
    name: &str,
    page: &Page,
) -> Result<Option<(Vec<Item>, bool)>, Error> {
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
            // An earlier response may have just been evicted, so leave out its items.
            Err(_) if number > 0 => continue,
            Err(_) => return Ok(None),
        };
        let mut items = link.items(if number == 0 { Part::Input } else { Part::All })?;
        if page.is_descending() {
            items.reverse();
        }
        for item in items {
            match selection.add(item.id(), item.bytes()) {
                PagePosition::Skipped => {}
                PagePosition::OnPage => data.push(Arc::unwrap_or_clone(item.parse()?)),
                PagePosition::After => break 'links,
            }
        }
    }
    if chain.len() == 0 { Ok(None) } else { Ok(Some((data, selection.finish()?))) }
}

fn read(app: &App, tenant: Tenant, name: &str) -> Result<WireResponse, Error> {
    let stored = context::response(app, tenant, name)?.ok_or_else(|| unknown(name))?;
    let mut response = stored.response().map_err(damaged)?;
    if !response.status.is_final() && app.background().find(name, tenant).is_none() {
        mark_lost(&mut response);
    }
    Ok(response)
}

/// Marks a lost response as failed. Its last record says that it is still being generated, although the process that
/// generated it has ended or could not store a later record.
fn mark_lost(response: &mut WireResponse) {
    response.status = Status::Failed;
    let message = "the server stopped before the response was complete, or failed to store it".to_owned();
    response.error = Some(ResponseError { code: "server_error".to_owned(), message });
}

/// Cancels a response that is being generated, and waits until the work on it is done. Returns whether there was such a
/// response.
async fn end(live: Option<Arc<LiveResponse>>) -> bool {
    let Some(live) = live else { return false };
    live.cancel();
    live.done().await;
    true
}

/// Streams the events of a stored response, starting at the sequence number `from`.
async fn replay(app: &App, tenant: Tenant, name: &str, from: usize) -> Result<Response, Error> {
    let (owned, id) = (app.clone(), name.to_owned());
    let found = app.store().run(move |_| {
        let stored = context::response(&owned, tenant, &id)?;
        stored.map(|stored| events_of(&stored, from)).transpose()
    });
    let events = found.await?.ok_or_else(|| unknown(name))?;
    // The size of this body is known, so a large replay counts toward the limit for unread answers until it has been
    // sent.
    Ok(sse::of_body(events.into()))
}

fn events_of(stored: &StoredRecord, from: usize) -> Result<axum::body::Bytes, Error> {
    let mut recorded = stored.events().peekable();
    if recorded.peek().is_none() {
        return Err(no_events());
    }
    let mut events = Events::default();
    for event in recorded.skip(from) {
        events.push_raw(&event.map_err(damaged)?);
    }
    events.done();
    Ok(events.take())
}

fn no_events() -> Error {
    let problem = "only responses that were created with background and stream have stored events";
    Error::invalid("stream", problem)
}

fn unknown(id: &str) -> Error {
    Error::NotStored {
        code: "response_not_found",
        param: Some("response_id".to_owned()),
        message: format!("the response {id:?} is not stored; it may have been deleted"),
    }
}
