//! The stored objects that a request refers to: a response or conversation that it continues, and single items.

use std::sync::Arc;

use serde_json::Value;
use server_openai::responses::{InputItem, Item, Request, TextOrList};

use super::items::{self, InputElement};
use crate::error::Error;

/// Number of references to stored items in a request.
///
/// If exceeded: 400, `array_above_max_length`.
pub(super) const REFERENCES_MAX: usize = 1024;

/// The stored objects that a request refers to.
#[derive(Debug, Default)]
pub(crate) struct References {
    pub(crate) previous: Option<String>,
    pub(crate) conversation: Option<String>,
    pub(crate) items: Vec<ItemReference>,
}

impl References {
    pub(crate) fn is_empty(&self) -> bool {
        self.previous.is_none() && self.conversation.is_none() && self.items.is_empty()
    }
}

/// A reference to a stored item.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ItemReference {
    /// The name of the parameter that contains the reference.
    pub(crate) param: String,
    pub(crate) id: String,
}

impl ItemReference {
    pub(crate) fn not_found(&self) -> Error {
        let Self { param, id } = self;
        let message = format!("{param}: the item {id:?} is not stored; it may have been deleted");
        Error::NotStored { code: "item_not_found", param: Some(param.clone()), message }
    }
}

/// The stored items that a request includes.
#[derive(Debug, Default)]
pub(crate) struct Context {
    /// The items that precede the request's own items, oldest first.
    pub(crate) history: Vec<Arc<Item>>,
    /// The referenced items, in the order of [`References::items`].
    pub(crate) items: Vec<Arc<Item>>,
}

/// Returns the references of a request to stored objects.
///
/// # Errors
/// A reference is malformed, there are too many references, or the request names both a response and a conversation to
/// continue.
pub(crate) fn references(request: &Request) -> Result<References, Error> {
    let conversation = conversation_name(request)?;
    if conversation.is_some() && request.previous_response_id.is_some() {
        let problem = "cannot be combined with previous_response_id";
        return Err(Error::coded("mutually_exclusive_parameters", "conversation", problem));
    }
    let items = match &request.input {
        Some(TextOrList::List(given)) => item_references(given, "input")?,
        _ => Vec::new(),
    };
    Ok(References { previous: request.previous_response_id.clone(), conversation, items })
}

/// Returns the elements of the parameter `at` that refer to stored items.
///
/// # Errors
/// There are too many references.
pub(crate) fn item_references(given: &[InputItem], at: &str) -> Result<Vec<ItemReference>, Error> {
    let references = given.iter().enumerate().filter_map(|(index, item)| {
        let id = items::reference(item)?;
        Some(ItemReference { param: format!("{at}[{index}].id"), id: id.to_owned() })
    });
    let references: Vec<ItemReference> = references.take(REFERENCES_MAX + 1).collect();
    if references.len() > REFERENCES_MAX {
        let problem = format!("has more than {REFERENCES_MAX} references to stored items");
        return Err(Error::coded("array_above_max_length", at, problem));
    }
    Ok(references)
}

/// Returns the ID of the conversation that a request names.
///
/// # Errors
/// The parameter is neither an ID nor an object with an ID.
pub(super) fn conversation_name(request: &Request) -> Result<Option<String>, Error> {
    match &request.conversation {
        None => Ok(None),
        Some(Value::String(id)) => Ok(Some(id.clone())),
        Some(Value::Object(object)) => match object.get("id") {
            Some(Value::String(id)) => Ok(Some(id.clone())),
            Some(_) => Err(Error::coded("invalid_type", "conversation.id", "must be a string")),
            None => Err(Error::missing("conversation.id")),
        },
        Some(_) => Err(Error::coded("invalid_type", "conversation", "must be a string or an object")),
    }
}

/// Replaces the references among the input elements with `referenced`, whose items are in the order of the references.
///
/// # Errors
/// There are fewer referenced items than references.
pub(crate) fn with_referenced(
    given: Vec<InputElement>,
    referenced: Vec<Arc<Item>>,
) -> Result<Vec<Arc<Item>>, Error> {
    let mut referenced = referenced.into_iter();
    let item = |given| match given {
        InputElement::Item(item) => Ok(Arc::new(item)),
        InputElement::Reference(id) => {
            referenced.next().ok_or_else(|| Error::Internal(format!("the item {id:?} was not looked up")))
        }
    };
    given.into_iter().map(item).collect()
}
