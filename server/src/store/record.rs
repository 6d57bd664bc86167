//! What is kept of a response and of a conversation.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use server_openai::responses::{Conversation, Item, Response};

use super::id::Kind;

/// Something that is kept.
pub(crate) trait Record: Serialize + DeserializeOwned {
    /// What it is.
    const KIND: Kind;

    /// Under what it is kept.
    fn name(&self) -> &str;

    /// What it follows.
    fn previous(&self) -> Option<&str> {
        None
    }
}

/// A response, with what it was made from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct ResponseRecord {
    pub(crate) response: Response,
    /// What its request added to the conversation.
    pub(crate) input: Vec<Item>,
    /// The events of its stream, if that may be read again: each as it was sent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) events: Option<Vec<String>>,
}

/// A conversation, with all that is in it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct ConversationRecord {
    pub(crate) conversation: Conversation,
    pub(crate) items: Vec<Item>,
    /// Names that were given to items.
    pub(crate) named: u32,
}

impl Record for ResponseRecord {
    const KIND: Kind = Kind::Response;

    fn name(&self) -> &str {
        &self.response.id
    }

    fn previous(&self) -> Option<&str> {
        self.response.previous_response_id.as_deref()
    }
}

impl Record for ConversationRecord {
    const KIND: Kind = Kind::Conversation;

    fn name(&self) -> &str {
        &self.conversation.id
    }
}
