//! `/conversations`: a conversation collects the items of successive responses.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, Request, State};
use axum::response::{IntoResponse, Response};
use server_openai::responses::{
    Conversation, ConversationRequest, DeletedObject, InputItem, Item, ItemsRequest, Object,
};

use super::responses::{
    Lookup, Offer, Page, Selection, conversation, damaged, list, no_conversation, unreadable,
};
use super::stored_objects::answered;
use super::{body, counted};
use crate::app::App;
use crate::dispatches::Dispatch;
use crate::error::Error;
use crate::model::unix_time;
use crate::prepare::responses::{check_metadata, item_references, read_items, with_referenced};
use crate::store::{self, ConversationRecord, Id, ItemIds, Kind, NewItems, StoredRecord};
use crate::tenant::Tenant;

/// The name of the endpoint in metrics and logs.
const ENDPOINT: &str = "conversations";
/// Number of items that one request adds to a conversation, as in OpenAI's API.
///
/// Beyond it: 400, `array_above_max_length`.
const ADDED_MAX: usize = 20;

/// `POST /conversations`.
pub(super) async fn create(State(app): State<App>, request: Request) -> Response {
    answered_with_body(&app, request, ConversationRequest::parse, async |tenant, request| {
        let metadata = request.metadata.unwrap_or_default();
        check_metadata(&metadata)?;
        if !app.store().is_enabled() {
            let problem = "this server stores no conversations (--max-stored-responses 0)";
            return Err(Error::invalid("conversation", problem));
        }
        let given = check_count(request.items.unwrap_or_default())?;
        let id = app.store().new_id(Kind::Conversation);
        let conversation = Conversation {
            id: id.to_string(),
            object: Object::Conversation,
            created_at: unix_time(),
            metadata,
        };
        let owned = app.clone();
        let stored = app.store().run(move |store| {
            let referenced = referenced(&owned, tenant, &given)?;
            let NewItems { items, generated_ids } = new_items(given, referenced, id.items())?;
            let record = ConversationRecord { conversation, items, generated_ids };
            store.put_conversation(&record, tenant).map_err(Failure::from)?;
            Ok::<_, Failure>(record.conversation)
        });
        Ok(Json(stored.await?).into_response())
    })
    .await
}

/// `GET /conversations/{id}`.
pub(super) async fn retrieve(State(app): State<App>, Path(id): Path<String>, request: Request) -> Response {
    answered(&app, ENDPOINT, request.headers(), async |tenant| {
        let conversation = read(&app, tenant, id, |stored| stored.head::<Conversation>().map_err(damaged));
        Ok(Json(conversation.await?).into_response())
    })
    .await
}

/// `POST /conversations/{id}` replaces the metadata.
pub(super) async fn update(State(app): State<App>, Path(id): Path<String>, request: Request) -> Response {
    answered_with_body(&app, request, ConversationRequest::parse, async |tenant, request| {
        let metadata = request.metadata.ok_or_else(|| Error::missing("metadata"))?;
        check_metadata(&metadata)?;
        let parsed = parse_id(&id)?;
        let updated = app.store().run(move |store| {
            store.set_head(parsed, tenant, |stored| {
                let head: Conversation = stored.head().map_err(damaged)?;
                Ok::<_, Failure>(Conversation { metadata, ..head })
            })
        });
        Ok(Json(updated.await?.ok_or_else(|| no_conversation(&id))?).into_response())
    })
    .await
}

/// `DELETE /conversations/{id}`.
pub(super) async fn delete(State(app): State<App>, Path(id): Path<String>, request: Request) -> Response {
    answered(&app, ENDPOINT, request.headers(), async |tenant| {
        let parsed = parse_id(&id)?;
        if !app.store().run(move |store| store.remove(parsed, tenant)).await {
            return Err(no_conversation(&id));
        }
        let deleted = DeletedObject { id, object: Object::ConversationDeleted, deleted: true };
        Ok(Json(deleted).into_response())
    })
    .await
}

/// `GET /conversations/{id}/items`.
pub(super) async fn items(State(app): State<App>, Path(id): Path<String>, request: Request) -> Response {
    let uri = request.uri().clone();
    answered(&app, ENDPOINT, request.headers(), async |tenant| {
        let page = Page::of(&uri)?;
        let (data, has_more) = read(&app, tenant, id, move |stored| page_of(stored, &page)).await?;
        Ok(Json(list(data, has_more)).into_response())
    })
    .await
}

/// `POST /conversations/{id}/items`.
pub(super) async fn add(State(app): State<App>, Path(id): Path<String>, request: Request) -> Response {
    answered_with_body(&app, request, ItemsRequest::parse, async |tenant, request| {
        let given = check_count(request.items.ok_or_else(|| Error::missing("items"))?)?;
        let parsed = parse_id(&id)?;
        let owned = app.clone();
        let added = app.store().run(move |store| {
            let referenced = referenced(&owned, tenant, &given)?;
            store.append(parsed, tenant, |tally| {
                Ok::<_, Failure>(new_items(given, referenced, parsed.items_after(tally.generated_ids))?)
            })
        });
        let added = added.await?.ok_or_else(|| no_conversation(&id))?;
        Ok(Json(list(added.into_iter().map(Arc::unwrap_or_clone).collect(), false)).into_response())
    })
    .await
}

/// `GET /conversations/{id}/items/{item}`.
pub(super) async fn item(
    State(app): State<App>,
    Path((id, item)): Path<(String, String)>,
    request: Request,
) -> Response {
    answered(&app, ENDPOINT, request.headers(), async |tenant| {
        let found = read(&app, tenant, id, move |stored| {
            for stored in stored.input() {
                let stored = stored.map_err(damaged)?;
                if stored.id == item {
                    return stored.parse().map_err(damaged);
                }
            }
            Err(no_item(&item))
        });
        Ok(Json(found.await?).into_response())
    })
    .await
}

/// `DELETE /conversations/{id}/items/{item}` returns the conversation.
pub(super) async fn remove(
    State(app): State<App>,
    Path((id, item)): Path<(String, String)>,
    request: Request,
) -> Response {
    answered(&app, ENDPOINT, request.headers(), async |tenant| {
        let parsed = parse_id(&id)?;
        let removed = app.store().run(move |store| {
            store.remove_item(parsed, tenant, |stored| {
                for (number, stored_item) in stored.input().enumerate() {
                    if stored_item.map_err(damaged)?.id == item {
                        let head: Conversation = stored.head().map_err(damaged)?;
                        return Ok::<_, Failure>((number, head));
                    }
                }
                Err(no_item(&item).into())
            })
        });
        Ok(Json(removed.await?.ok_or_else(|| no_conversation(&id))?).into_response())
    })
    .await
}

/// Why an operation on the store failed.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error(transparent)]
    Store(#[from] store::Error),
    #[error(transparent)]
    Request(#[from] Error),
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Request(error) => error,
            Failure::Store(error @ store::Error::Full { .. }) => {
                Self::coded("array_above_max_length", "items", error)
            }
            Failure::Store(error @ (store::Error::TooLarge { .. } | store::Error::TooDeep)) => {
                Self::invalid("items", error)
            }
            Failure::Store(error) => unreadable(&error),
        }
    }
}

/// Answers a request whose body is read with `parse`. The body arrives before the request is admitted, so that slow clients
/// do not exclude others.
async fn answered_with_body<T, E: Into<Error>>(
    app: &App,
    request: Request,
    parse: fn(&[u8]) -> Result<T, E>,
    work: impl AsyncFnOnce(Tenant, T) -> Result<Response, Error>,
) -> Response {
    let headers = request.headers().clone();
    let read = async { parse(&body::read(app, request).await?).map_err(Into::into) };
    match read.await {
        Ok(read) => answered(app, ENDPOINT, &headers, async |tenant| work(tenant, read).await).await,
        Err(error) => counted::answered(app, ENDPOINT, Dispatch::of(&headers), Err(error)),
    }
}

fn check_count(given: Vec<InputItem>) -> Result<Vec<InputItem>, Error> {
    if given.len() > ADDED_MAX {
        let problem = format!("has {} items (limit: {ADDED_MAX} in one request)", given.len());
        return Err(Error::coded("array_above_max_length", "items", problem));
    }
    Ok(given)
}

/// Returns the stored items that the elements refer to.
fn referenced(app: &App, tenant: Tenant, given: &[InputItem]) -> Result<Vec<Arc<Item>>, Error> {
    Lookup::new(app, tenant).referenced(&item_references(given, "items")?)
}

/// Returns the items to store, with the referenced items in their places.
fn new_items(given: Vec<InputItem>, referenced: Vec<Arc<Item>>, mut ids: ItemIds) -> Result<NewItems, Error> {
    let items = with_referenced(read_items(given, "items", &mut ids)?, referenced)?;
    Ok(NewItems { items, generated_ids: ids.count() })
}

/// Returns a page of a conversation's items.
fn page_of(stored: &StoredRecord, page: &Page) -> Result<(Vec<Item>, bool), Error> {
    let mut items = stored.input().collect::<Result<Vec<_>, _>>().map_err(damaged)?;
    if page.is_descending() {
        items.reverse();
    }
    let (mut selection, mut data) = (Selection::new(page), Vec::new());
    for item in items {
        match selection.offer(&item.id, item.bytes()) {
            Offer::Skip => {}
            Offer::Take => data.push(item.parse().map_err(damaged)?),
            Offer::End => break,
        }
    }
    Ok((data, selection.finish()?))
}

/// Reads a part of a conversation.
async fn read<T: Send + 'static>(
    app: &App,
    tenant: Tenant,
    id: String,
    of: impl FnOnce(&StoredRecord) -> Result<T, Error> + Send + 'static,
) -> Result<T, Error> {
    let owned = app.clone();
    app.store().run(move |_| of(&conversation(&owned, tenant, &id)?)).await
}

fn parse_id(id: &str) -> Result<Id, Error> {
    Id::parse(id).filter(|id| id.kind() == Kind::Conversation).ok_or_else(|| no_conversation(id))
}

fn no_item(id: &str) -> Error {
    Error::NotStored {
        code: "item_not_found",
        param: Some("item_id".to_owned()),
        message: format!("the item {id:?} is not stored, or no longer"),
    }
}
