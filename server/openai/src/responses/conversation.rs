//! Conversations, lists of items and counts of tokens.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::{Item, Object};

/// A conversation, without its items.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Conversation {
    /// The identifier of the conversation.
    pub id: String,
    /// The object type: always [`Object::Conversation`].
    pub object: Object,
    /// The time when the conversation was created, in seconds since 1970.
    pub created_at: u64,
    /// The metadata that the client attached.
    pub metadata: Map<String, Value>,
}

/// A page of a list of items.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct List {
    /// The object type: always [`Object::List`].
    pub object: Object,
    /// The items of the page.
    pub data: Vec<Item>,
    /// The identifier of the first item.
    pub first_id: Option<String>,
    /// The identifier of the last item, after which the next page begins.
    pub last_id: Option<String>,
    /// Whether there is a next page.
    pub has_more: bool,
}

/// The confirmation that an object was deleted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DeletedObject {
    /// The identifier of the deleted object.
    pub id: String,
    /// The object type: [`Object::ConversationDeleted`] for a conversation, [`Object::Response`] for a response.
    pub object: Object,
    /// Whether the object was deleted: always true.
    pub deleted: bool,
}

/// The number of tokens of the prompt of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct InputTokens {
    /// The object type: always [`Object::InputTokens`].
    pub object: Object,
    /// The number of tokens of the prompt.
    pub input_tokens: u64,
}
