//! Serves `/conversations`: a conversation collects the items of successive responses.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, Request, State};
use axum::response::{IntoResponse as _, Response};
use serde::Serialize;
use server_openai::responses::{
    Conversation, ConversationRequest, DeletedObject, InputItem, Item, ItemsRequest, Object,
};

use super::responses::{
    Lookup, Page, PagePosition, Selection, conversation, damaged, list, no_conversation, unreadable,
};
use super::stored_objects::{answered, json};
use super::{body, counted};
use crate::app::App;
use crate::dispatches::Dispatch;
use crate::error::Error;
use crate::model::unix_time;
use crate::prepare::responses::{check_metadata, item_references, read_items, with_referenced};
use crate::store::{self, ConversationRecord, Id, ItemIds, Kind, NewItems, StoredRecord, check_ids};
use crate::tenant::Tenant;

/// The name of the endpoint in metrics and logs.
const ENDPOINT: &str = "conversations";
/// Number of items that one request to `/conversations` adds to a conversation, as in OpenAI's API.
///
/// If exceeded: 400, `array_above_max_length`.
const ADDED_MAX: usize = 20;

/// Handles `POST /conversations`.
pub(super) async fn create(State(app): State<App>, request: Request) -> Response {
    answered_with_body(&app, request, |app, tenant, body| {
        let request = ConversationRequest::parse(body)?;
        let metadata = request.metadata.unwrap_or_default();
        check_metadata(&metadata)?;
        if !app.store().is_enabled() {
            let problem = "this server stores no conversations (--max-stored-responses 0)";
            return Err(Error::invalid("conversation", problem));
        }
        let given = check_count(request.items.unwrap_or_default())?;
        let referenced = referenced(app, tenant, &given)?;
        let id = app.store().new_id(Kind::Conversation);
        let conversation = Conversation {
            id: id.to_string(),
            object: Object::Conversation,
            created_at: unix_time(),
            metadata,
        };
        let NewItems { items, generated_ids } = new_items(given, referenced, id.items())?;
        check_ids(std::iter::empty(), &items).map_err(Failure::from)?;
        let record = ConversationRecord { conversation, items, generated_ids };
        app.store().put_conversation(&record, tenant).map_err(Failure::from)?;
        Ok(record.conversation)
    })
    .await
}

/// Handles `GET /conversations/{id}`.
pub(super) async fn retrieve(State(app): State<App>, Path(id): Path<String>, request: Request) -> Response {
    answered(&app, ENDPOINT, request.headers(), async |tenant| {
        json(&app, move |app| conversation(app, tenant, &id)?.head::<Conversation>().map_err(damaged)).await
    })
    .await
}

/// Handles `POST /conversations/{id}`, which replaces the metadata.
pub(super) async fn update(State(app): State<App>, Path(id): Path<String>, request: Request) -> Response {
    answered_with_body(&app, request, move |app, tenant, body| {
        let metadata = ConversationRequest::parse(body)?.metadata;
        let metadata = metadata.ok_or_else(|| Error::missing("metadata"))?;
        check_metadata(&metadata)?;
        let updated = app.store().set_head(parse_id(&id)?, tenant, |stored| {
            let head: Conversation = stored.head().map_err(damaged)?;
            Ok::<_, Failure>(Conversation { metadata, ..head })
        });
        let updated = updated.map_err(|failure| match failure {
            // The items have not changed, so the new metadata is too large.
            Failure::Store(error @ store::Error::TooLarge { .. }) => Error::invalid("metadata", error),
            failure => failure.into(),
        });
        updated?.ok_or_else(|| no_conversation(&id))
    })
    .await
}

/// Handles `DELETE /conversations/{id}`.
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

/// Handles `GET /conversations/{id}/items`.
pub(super) async fn items(State(app): State<App>, Path(id): Path<String>, request: Request) -> Response {
    let uri = request.uri().clone();
    answered(&app, ENDPOINT, request.headers(), async |tenant| {
        let page = Page::of(&uri)?;
        json(&app, move |app| {
            let (data, has_more) = page_of(&conversation(app, tenant, &id)?, &page)?;
            Ok(list(data, has_more))
        })
        .await
    })
    .await
}

/// Handles `POST /conversations/{id}/items`.
pub(super) async fn add(State(app): State<App>, Path(id): Path<String>, request: Request) -> Response {
    answered_with_body(&app, request, move |app, tenant, body| {
        let items = ItemsRequest::parse(body)?.items;
        let given = check_count(items.ok_or_else(|| Error::missing("items"))?)?;
        let parsed = parse_id(&id)?;
        let referenced = referenced(app, tenant, &given)?;
        let added = app.store().append(parsed, tenant, |stored| {
            let new = new_items(given, referenced, parsed.items_after(stored.counts().generated_ids))?;
            stored.check_new_ids(&new.items)?;
            Ok::<_, Failure>(new)
        });
        let added = added?.ok_or_else(|| no_conversation(&id))?;
        Ok(list(added.into_iter().map(Arc::unwrap_or_clone).collect(), false))
    })
    .await
}

/// Handles `GET /conversations/{id}/items/{item}`.
pub(super) async fn item(
    State(app): State<App>,
    Path((id, item)): Path<(String, String)>,
    request: Request,
) -> Response {
    answered(&app, ENDPOINT, request.headers(), async |tenant| {
        json(&app, move |app| {
            for stored in conversation(app, tenant, &id)?.input() {
                let stored = stored.map_err(damaged)?;
                if stored.id == item {
                    return stored.parse().map_err(damaged);
                }
            }
            Err(no_item(&item))
        })
        .await
    })
    .await
}

/// Handles `DELETE /conversations/{id}/items/{item}`, which returns the conversation.
pub(super) async fn remove(
    State(app): State<App>,
    Path((id, item)): Path<(String, String)>,
    request: Request,
) -> Response {
    answered(&app, ENDPOINT, request.headers(), async |tenant| {
        json(&app, move |app| {
            let removed = app.store().remove_item(parse_id(&id)?, tenant, |stored| {
                for (number, stored_item) in stored.input().enumerate() {
                    if stored_item.map_err(damaged)?.id == item {
                        let head: Conversation = stored.head().map_err(damaged)?;
                        return Ok::<_, Failure>((number, head));
                    }
                }
                Err(no_item(&item).into())
            });
            removed?.ok_or_else(|| no_conversation(&id))
        })
        .await
    })
    .await
}

/// The reason why an operation on the store failed.
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
            Failure::Store(
                error @ (store::Error::TooLarge { .. }
                | store::Error::DuplicateItem { .. }
                | store::Error::TooDeep),
            ) => Self::invalid("items", error),
            Failure::Store(error) => unreadable(&error),
        }
    }
}

/// Answers a request that has a body. `work` parses the body on a thread of the store. The request is admitted only
/// after its body has arrived, so that slow uploads do not count toward the limit on concurrent requests.
async fn answered_with_body<T: Serialize>(
    app: &App,
    request: Request,
    work: impl FnOnce(&App, Tenant, &[u8]) -> Result<T, Error> + Send + 'static,
) -> Response {
    let headers = request.headers().clone();
    match body::read(app, request).await {
        Ok(body) => {
            answered(app, ENDPOINT, &headers, async |tenant| {
                json(app, move |app| work(app, tenant, &body)).await
            })
            .await
        }
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

/// Returns the stored items that `given` refers to.
fn referenced(app: &App, tenant: Tenant, given: &[InputItem]) -> Result<Vec<Arc<Item>>, Error> {
    Lookup::new(app, tenant).referenced(&item_references(given, "items")?)
}

/// Returns the items to store, in which references are replaced with the referenced items.
fn new_items(given: Vec<InputItem>, referenced: Vec<Arc<Item>>, mut ids: ItemIds) -> Result<NewItems, Error> {
    let items = with_referenced(read_items(given, "items", &mut ids)?, referenced)?;
    Ok(NewItems { items, generated_ids: ids.count() })
}

/// Returns a page of a conversation's items, and whether more items follow.
fn page_of(stored: &StoredRecord, page: &Page) -> Result<(Vec<Item>, bool), Error> {
    let mut items = stored.input().collect::<Result<Vec<_>, _>>().map_err(damaged)?;
    if page.is_descending() {
        items.reverse();
    }
    let (mut selection, mut data) = (Selection::new(page), Vec::new());
    for item in items {
        match selection.add(&item.id, item.bytes()) {
            PagePosition::Skipped => {}
            PagePosition::OnPage => data.push(item.parse().map_err(damaged)?),
            PagePosition::After => break,
        }
    }
    Ok((data, selection.finish()?))
}

fn parse_id(id: &str) -> Result<Id, Error> {
    Id::parse(id).filter(|id| id.kind() == Kind::Conversation).ok_or_else(|| no_conversation(id))
}

fn no_item(id: &str) -> Error {
    Error::NotStored {
        code: "item_not_found",
        param: Some("item_id".to_owned()),
        message: format!("the conversation has no item {id:?}; it may have been deleted"),
    }
}

#[cfg(test)]
mod tests {
    use axum::body::{Body, to_bytes};
    use serde_json::{Map, Value, json};

    use super::*;
    use crate::limits::HttpLimits;
    use crate::metrics::Metrics;
    use crate::store::StoreConfig;

    /// Stores a conversation with these items.
    fn put(app: &App, items: Vec<Arc<Item>>) -> Id {
        let id = app.store().new_id(Kind::Conversation);
        let conversation = Conversation {
            id: id.to_string(),
            object: Object::Conversation,
            created_at: 1,
            metadata: Map::new(),
        };
        let record = ConversationRecord { conversation, items, generated_ids: 0 };
        app.store().put_conversation(&record, Tenant::default()).unwrap();
        id
    }

    #[tokio::test]
    async fn an_error_about_metadata_that_the_store_has_no_room_for_names_the_metadata() {
        let config = StoreConfig { max_stored_bytes: 400, ..StoreConfig::default() };
        let app = App::with_store(HttpLimits::default(), Metrics::new("m", "test"), &config).unwrap();
        let id = put(&app, Vec::new()).to_string();
        let status_and_param = async |length: usize| {
            let body = json!({"metadata": {"a": "x".repeat(length)}}).to_string();
            let request = axum::http::Request::post("/").body(Body::from(body)).unwrap();
            let response = update(State(app.clone()), Path(id.clone()), request).await;
            let status = response.status().as_u16();
            let body = to_bytes(response.into_body(), usize::MAX).await.unwrap();
            let answer: Value = serde_json::from_slice(&body).unwrap();
            (status, answer["error"]["param"].clone())
        };
        assert_eq!(status_and_param(10).await, (200, Value::Null));
        assert_eq!(status_and_param(500).await, (400, json!("metadata")));
    }

    /// Earlier versions did not check that the items of a conversation have different IDs.
    #[test]
    fn a_conversation_that_was_stored_with_duplicate_ids_is_listed_on_a_limited_number_of_pages() {
        let item = |id: &str| {
            let item = json!({"type": "message", "id": id, "status": "completed", "role": "user",
                "content": [{"type": "input_text", "text": "x"}]});
            Arc::new(serde_json::from_value::<Item>(item).unwrap())
        };
        let app = App::new(HttpLimits::default(), Metrics::new("m", "test"));
        let id = put(&app, ["msg_a", "msg_b", "msg_a", "msg_c", "msg_b"].map(item).into());
        let stored = app.store().get(id, Tenant::default()).unwrap().unwrap();
        for (order, expected) in [("asc", ["msg_a", "msg_b", "msg_c"]), ("desc", ["msg_b", "msg_c", "msg_a"])]
        {
            let (mut listed, mut after) = (Vec::new(), String::new());
            for number in 1..=expected.len() {
                let uri = format!("/v1/x?order={order}&limit=1{after}").parse().unwrap();
                let (data, has_more) = page_of(&stored, &Page::of(&uri).unwrap()).unwrap();
                assert_eq!(has_more, number < expected.len(), "{order}, page {number}");
                after = format!("&after={}", data[0].id());
                listed.push(data[0].id().to_owned());
            }
            assert_eq!(listed, expected);
        }
    }
}
