//! What a request refers to, looked up: the responses it follows, the conversation it is in, items by their names.
//! What is gone is told by name.

use server_openai::responses::Item;

use crate::app::App;
use crate::error::Error;
use crate::prepare::responses::{Context, References};
use crate::store::{self, CHAIN_MAX, ConversationRecord, Id, Kind, ResponseRecord};

/// Looks up what a request refers to. It may wait for the disk.
pub(super) fn find(app: &App, references: &References) -> Result<Context, Error> {
    let mut history = Vec::new();
    if let Some(previous) = &references.previous {
        history = followed(app, previous)?;
    }
    if let Some(conversation) = &references.conversation {
        history = read_conversation(app, conversation)?.items;
    }
    let items = references
        .items
        .iter()
        .map(|(index, id)| {
            let known = history.iter().find(|item| item.id() == id).cloned();
            let found = known.map_or_else(|| item(app, id), |item| Ok(Some(item)))?;
            found.ok_or_else(|| Error::NotKept {
                code: "item_not_found",
                param: Some(format!("input[{index}].id")),
                message: format!("input[{index}].id: the item {id:?} is not kept here, or no more"),
            })
        })
        .collect::<Result<_, _>>()?;
    Ok(Context { history, items })
}

/// All that was said up to the end of this response, oldest first.
fn followed(app: &App, name: &str) -> Result<Vec<Item>, Error> {
    let lost = |id: &str| Error::NotKept {
        code: "previous_response_not_found",
        param: Some("previous_response_id".to_owned()),
        message: if id == name {
            format!("previous_response_id: the response {id:?} is not kept here, or no more")
        } else {
            format!("previous_response_id: {name:?} follows {id:?}, which is not kept any more")
        },
    };
    let records = chain(app, name)?.map_err(|id| lost(&id))?;
    if records.first().is_some_and(|record| !record.response.status.is_final()) {
        let problem = format!("the response {name:?} is still being made");
        return Err(Error::invalid("previous_response_id", problem));
    }
    let mut history = Vec::new();
    for record in records.into_iter().rev() {
        history.extend(record.input);
        history.extend(record.response.output);
    }
    Ok(history)
}

/// This response and those that it follows, from the latest to the first. If one is lost: its name.
pub(super) fn chain(app: &App, name: &str) -> Result<Result<Vec<ResponseRecord>, String>, Error> {
    let mut records: Vec<ResponseRecord> = Vec::new();
    let mut next = Some(name.to_owned());
    while let Some(id) = next {
        if records.len() == CHAIN_MAX {
            let problem =
                format!("{name:?} follows more than {CHAIN_MAX} responses; begin anew with what matters");
            return Err(Error::invalid("previous_response_id", problem));
        }
        let Some(record) = response(app, &id)? else { return Ok(Err(id)) };
        next = record.response.previous_response_id.clone();
        records.push(record);
    }
    Ok(Ok(records))
}

/// A response that is kept or being made.
pub(super) fn response(app: &App, name: &str) -> Result<Option<ResponseRecord>, Error> {
    if let Some(live) = app.background().find(name) {
        return Ok(Some(live.record()));
    }
    let Some(id) = Id::parse(name).filter(|id| id.kind() == Kind::Response) else { return Ok(None) };
    app.store().get(id).map_err(|error| unreadable(&error))
}

/// A conversation that is kept.
pub(in crate::routes) fn read_conversation(app: &App, name: &str) -> Result<ConversationRecord, Error> {
    let id = Id::parse(name).filter(|id| id.kind() == Kind::Conversation);
    let found = id.map(|id| app.store().get(id)).transpose().map_err(|error| unreadable(&error))?.flatten();
    found.ok_or_else(|| no_conversation(name))
}

pub(in crate::routes) fn no_conversation(name: &str) -> Error {
    Error::NotKept {
        code: "conversation_not_found",
        param: Some("conversation".to_owned()),
        message: format!("conversation: {name:?} is not kept here, or no more"),
    }
}

/// An item by its name, which says what it belongs to.
pub(in crate::routes) fn item(app: &App, name: &str) -> Result<Option<Item>, Error> {
    let Some(id) = Id::parse(name).filter(|id| id.kind() == Kind::Item) else { return Ok(None) };
    let is_it = |item: &Item| item.id() == name;
    if let Some(record) = response(app, &id.owner(Kind::Response).to_string())? {
        return Ok(record.response.output.into_iter().chain(record.input).find(is_it));
    }
    let conversation: Option<ConversationRecord> =
        app.store().get(id.owner(Kind::Conversation)).map_err(|error| unreadable(&error))?;
    Ok(conversation.and_then(|record| record.items.into_iter().find(is_it)))
}

/// What is kept cannot be read.
pub(in crate::routes) fn unreadable(error: &store::Error) -> Error {
    tracing::error!(error = error as &dyn std::error::Error, "failed to read what is kept");
    Error::Internal("failed to read what is kept".to_owned())
}
