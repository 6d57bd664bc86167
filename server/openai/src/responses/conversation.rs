//! Conversations and lists of items.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::{Item, Object};

/// A conversation, without its items.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Conversation {
    /// Names it.
    pub id: String,
    /// Always [`Object::Conversation`].
    pub object: Object,
    /// When it was created, in seconds since 1970.
    pub created_at: u64,
    /// As the client gave it.
    pub metadata: Map<String, Value>,
}

/// A part of a list of items.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct List {
    /// Always [`Object::List`].
    pub object: Object,
    /// The items.
    pub data: Vec<Item>,
    /// The first one's name.
    pub first_id: Option<String>,
    /// The last one's name: the list goes on after it.
    pub last_id: Option<String>,
    /// Whether it does.
    pub has_more: bool,
}

/// That something is no more.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Deleted {
    /// Its name.
    pub id: String,
    /// What it was.
    pub object: Object,
    /// Always true.
    pub deleted: bool,
}

/// How many tokens a request's prompt has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct InputTokens {
    /// Always [`Object::InputTokens`].
    pub object: Object,
    /// So many.
    pub input_tokens: u64,
}
