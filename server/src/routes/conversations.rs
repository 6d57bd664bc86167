//! `/conversations`: what responses are said in, one after the other, without the client naming each.

use axum::Json;
use axum::extract::{Path, Request, State};
use axum::response::{IntoResponse, Response};
use server_openai::responses::{
    Conversation, ConversationRequest, Deleted, InputItem, Item, ItemsRequest, Object,
};

use super::body;
use super::responses::{Page, list, no_conversation, read_conversation, told, unreadable};
use crate::app::App;
use crate::dispatches::Dispatch;
use crate::error::Error;
use crate::model::unix_time;
use crate::prepare::responses::{Given, check_metadata, read_items};
use crate::store::{ConversationRecord, Id, ItemIds, Kind};

/// In metrics and logs.
const ENDPOINT: &str = "conversations";
/// Most items that are added at a time, as with OpenAI.
const ADDED_MAX: usize = 20;

/// `POST /conversations`.
pub(super) async fn create(State(app): State<App>, request: Request) -> Response {
    let dispatch = Dispatch::of(request.headers());
    let created = async {
        let body = body::read(&app, request).await?;
        let request = ConversationRequest::parse(&body)?;
        let metadata = request.metadata.unwrap_or_default();
        check_metadata(&metadata)?;
        if !app.store().is_on() {
            return Err(Error::invalid("conversation", "nothing is kept here"));
        }
        let id = app.store().name(Kind::Conversation);
        let mut ids = id.items();
        let items = added(&app, request.items.unwrap_or_default(), &mut ids).await?;
        let conversation = Conversation {
            id: id.to_string(),
            object: Object::Conversation,
            created_at: unix_time(),
            metadata,
        };
        let record = ConversationRecord { conversation: conversation.clone(), items, named: ids.count() };
        app.store().with(move |store| store.put(&record)).await.map_err(unkept)?;
        Ok(Json(conversation).into_response())
    };
    let created = created.await;
    told(&app, ENDPOINT, dispatch, created)
}

/// `GET /conversations/{id}`.
pub(super) async fn retrieve(State(app): State<App>, Path(id): Path<String>, request: Request) -> Response {
    let dispatch = Dispatch::of(request.headers());
    let retrieved = read(&app, id).await.map(|record| Json(record.conversation).into_response());
    told(&app, ENDPOINT, dispatch, retrieved)
}

/// `POST /conversations/{id}`: other metadata.
pub(super) async fn update(State(app): State<App>, Path(id): Path<String>, request: Request) -> Response {
    let dispatch = Dispatch::of(request.headers());
    let updated = async {
        let body = body::read(&app, request).await?;
        let metadata =
            ConversationRequest::parse(&body)?.metadata.ok_or_else(|| Error::missing("metadata"))?;
        check_metadata(&metadata)?;
        let change = move |record: &mut ConversationRecord| {
            record.conversation.metadata = metadata;
            record.conversation.clone()
        };
        Ok(Json(changed(&app, id, change).await?).into_response())
    };
    let updated = updated.await;
    told(&app, ENDPOINT, dispatch, updated)
}

/// `DELETE /conversations/{id}`.
pub(super) async fn delete(State(app): State<App>, Path(id): Path<String>, request: Request) -> Response {
    let dispatch = Dispatch::of(request.headers());
    let deleted = async {
        let parsed = named(&id)?;
        if !app.store().with(move |store| store.remove(parsed)).await {
            return Err(no_conversation(&id));
        }
        let deleted = Deleted { id, object: Object::ConversationDeleted, deleted: true };
        Ok(Json(deleted).into_response())
    };
    let deleted = deleted.await;
    told(&app, ENDPOINT, dispatch, deleted)
}

/// `GET /conversations/{id}/items`.
pub(super) async fn items(State(app): State<App>, Path(id): Path<String>, request: Request) -> Response {
    let (dispatch, uri) = (Dispatch::of(request.headers()), request.uri().clone());
    let listed = async {
        let page = Page::of(&uri)?;
        let (data, has_more) = page.take(read(&app, id).await?.items, Item::id)?;
        Ok(Json(list(data, has_more)).into_response())
    };
    let listed = listed.await;
    told(&app, ENDPOINT, dispatch, listed)
}

/// `POST /conversations/{id}/items`.
pub(super) async fn add(State(app): State<App>, Path(id): Path<String>, request: Request) -> Response {
    let dispatch = Dispatch::of(request.headers());
    let listed = async {
        let body = body::read(&app, request).await?;
        let given = ItemsRequest::parse(&body)?.items.ok_or_else(|| Error::missing("items"))?;
        // Read before anything is changed, and named as they are added.
        let parsed = named(&id)?;
        added(&app, given.clone(), &mut parsed.items()).await?;
        let whole = app.clone();
        let change = move |record: &mut ConversationRecord| {
            let mut ids = parsed.items_after(record.named);
            let items = resolved(&whole, given, &mut ids)?;
            record.named = ids.count();
            record.items.extend(items.iter().cloned());
            Ok::<_, Error>(items)
        };
        let items = changed(&app, id, change).await??;
        Ok(Json(list(items, false)).into_response())
    };
    let listed: Result<Response, Error> = listed.await;
    told(&app, ENDPOINT, dispatch, listed)
}

/// `GET /conversations/{id}/items/{item}`.
pub(super) async fn item(
    State(app): State<App>,
    Path((id, item)): Path<(String, String)>,
    request: Request,
) -> Response {
    let dispatch = Dispatch::of(request.headers());
    let found = async {
        let mut items = read(&app, id).await?.items.into_iter();
        let found = items.find(|kept| kept.id() == item);
        Ok(Json(found.ok_or_else(|| no_item(&item))?).into_response())
    };
    let found = found.await;
    told(&app, ENDPOINT, dispatch, found)
}

/// `DELETE /conversations/{id}/items/{item}`: the answer is the conversation.
pub(super) async fn remove(
    State(app): State<App>,
    Path((id, item)): Path<(String, String)>,
    request: Request,
) -> Response {
    let dispatch = Dispatch::of(request.headers());
    let removed = async {
        let change = move |record: &mut ConversationRecord| {
            let at = record.items.iter().position(|kept| kept.id() == item).ok_or_else(|| no_item(&item))?;
            record.items.remove(at);
            Ok(record.conversation.clone())
        };
        let conversation: Result<Conversation, Error> = changed(&app, id, change).await?;
        Ok(Json(conversation?).into_response())
    };
    let removed = removed.await;
    told(&app, ENDPOINT, dispatch, removed)
}

/// The items of a request, with those that they refer to in their places.
async fn added(app: &App, given: Vec<InputItem>, ids: &mut ItemIds) -> Result<Vec<Item>, Error> {
    if given.len() > ADDED_MAX {
        let problem = format!("has {} items, and {ADDED_MAX} may be added at a time", given.len());
        return Err(Error::coded("array_above_max_length", "items", problem));
    }
    let (whole, mut names) = (app.clone(), *ids);
    let read = app.store().with(move |_| {
        let items = resolved(&whole, given, &mut names)?;
        Ok::<_, Error>((items, names))
    });
    let (items, names) = read.await?;
    *ids = names;
    Ok(items)
}

fn resolved(app: &App, given: Vec<InputItem>, ids: &mut ItemIds) -> Result<Vec<Item>, Error> {
    let items = read_items(given, "items", ids)?;
    let item = |given| match given {
        Given::Item(item) => Ok(item),
        Given::Reference(name) => super::responses::item(app, &name)?.ok_or_else(|| no_item(&name)),
    };
    items.into_iter().map(item).collect()
}

async fn read(app: &App, id: String) -> Result<ConversationRecord, Error> {
    let whole = app.clone();
    app.store().with(move |_| read_conversation(&whole, &id)).await
}

async fn changed<T: Send + 'static>(
    app: &App,
    id: String,
    change: impl FnOnce(&mut ConversationRecord) -> T + Send + 'static,
) -> Result<T, Error> {
    let parsed = named(&id)?;
    let changed = app.store().with(move |store| store.change(parsed, change)).await;
    changed.map_err(|error| unreadable(&error))?.ok_or_else(|| no_conversation(&id))
}

fn named(id: &str) -> Result<Id, Error> {
    Id::parse(id).filter(|id| id.kind() == Kind::Conversation).ok_or_else(|| no_conversation(id))
}

fn no_item(id: &str) -> Error {
    Error::NotKept {
        code: "item_not_found",
        param: Some("item_id".to_owned()),
        message: format!("the item {id:?} is not kept here, or no more"),
    }
}

fn unkept(error: crate::store::Error) -> Error {
    match error {
        error @ (crate::store::Error::TooLarge { .. } | crate::store::Error::TooDeep) => {
            Error::invalid("items", error)
        }
        error => unreadable(&error),
    }
}
