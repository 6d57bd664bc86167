//! Requests that refer to objects stored by a replica: responses, conversations and items. The ID of an object (a
//! prefix such as `resp_` and 48 hexadecimal digits) contains the ID of its store in the first 16 digits, and replicas
//! report the IDs of their stores. Routers therefore store no state about objects, and any router can find any object.

use std::borrow::Cow;
use std::sync::Arc;

use memchr::memmem;
use serde::de::{Error as _, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer as _};

use super::fields::{Fields, text};
use crate::app::App;
use crate::error::Error;
use crate::queue::QueuedRequest;
use crate::replica::Replica;
use crate::served_model::ServedModel;

/// Number of hexadecimal digits of an ID after its prefix.
const DIGITS: usize = 48;
/// Number of leading digits that are the ID of the store.
const STORE_DIGITS: usize = 16;
/// Length of the ID of a stored object in an error message, in characters.
///
/// If exceeded: the ID is truncated.
const SHOWN_MAX: usize = 128;

/// The object that a request refers to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ObjectReference<'a> {
    id: Cow<'a, str>,
    /// The parameter that contains the ID.
    param: &'static str,
    code: &'static str,
}

/// The object that a request refers to in its path or its body. If a request refers to several objects, one of them is
/// sufficient, because the same replica must have all of them.
pub(super) fn referenced<'a>(path: &'a str, fields: &Fields<'a>) -> Option<ObjectReference<'a>> {
    let (_, rest) = path.strip_prefix('/')?.split_once('/')?;
    let (collection, rest) = rest.split_once('/').unwrap_or((rest, ""));
    let id = rest.split('/').next().unwrap_or_default();
    let reference = |id, param, code| Some(ObjectReference { id, param, code });
    match collection {
        "responses" if !id.is_empty() && id != "input_tokens" => {
            reference(Cow::Borrowed(id), "response_id", "response_not_found")
        }
        "conversations" if !id.is_empty() => {
            reference(Cow::Borrowed(id), "conversation_id", "conversation_not_found")
        }
        "responses" => {
            if let Some(id) = fields.previous_response_id.clone() {
                return reference(id, "previous_response_id", "previous_response_not_found");
            }
            if let Some(id) = fields.conversation.and_then(conversation_id) {
                return reference(id, "conversation", "conversation_not_found");
            }
            reference(item_reference(fields.prompt)?, "input", "item_not_found")
        }
        _ => None,
    }
}

/// The ID of a conversation, which is given as a string or as an object with an ID.
fn conversation_id(value: &[u8]) -> Option<Cow<'_, str>> {
    #[derive(Deserialize)]
    struct Object {
        id: String,
    }
    if value.starts_with(b"{") {
        return serde_json::from_slice(value).ok().map(|Object { id }| Cow::Owned(id));
    }
    text(value)
}

/// The ID of the first item that an input refers to. `input` lacks its closing bracket.
fn item_reference(input: &[u8]) -> Option<Cow<'_, str>> {
    // Most inputs refer to no item and need not be parsed.
    memmem::find(input, b"item_reference")?;
    let mut found = FirstReference(None);
    // The result is an error, because parsing stops at the reference or at the missing bracket.
    let _ = serde_json::Deserializer::from_slice(input).deserialize_seq(&mut found);
    found.0.map(Cow::Owned)
}

/// Finds the first reference among the items of an input. Only one item is in memory at a time.
struct FirstReference(Option<String>);

impl<'de> Visitor<'de> for &mut FirstReference {
    type Value = ();

    fn expecting(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("items")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        #[derive(Deserialize)]
        struct Item {
            r#type: Option<String>,
            id: Option<String>,
        }
        while let Some(item) = items.next_element::<Item>()? {
            if item.r#type.as_deref() == Some("item_reference") {
                self.0 = item.id;
                return Err(A::Error::custom("the reference is found"));
            }
        }
        Ok(())
    }
}

/// Returns the store ID that the ID of an object contains, or `None` if the ID of the object is malformed.
fn store_id(id: &str) -> Option<u64> {
    let (_, digits) = id.split_once('_')?;
    let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    if digits.len() != DIGITS || !digits.bytes().all(is_digit) {
        return None;
    }
    u64::from_str_radix(&digits[..STORE_DIGITS], 16).ok()
}

/// Finds the replica that stores an object. If the request names a model, the replica must serve this model.
///
/// # Errors
/// No replica stores the object, or not every replica has reported its store in time.
pub(super) async fn locate(
    app: &App,
    object: ObjectReference<'_>,
    model: Option<&str>,
    queued: QueuedRequest,
) -> Result<(Arc<ServedModel>, Arc<Replica>), Error> {
    let replicas = &app.dispatcher().replicas;
    let replica = match store_id(&object.id) {
        Some(store_id) => app.dispatcher().await_store(store_id, queued).await?,
        None => None,
    };
    let served_model = match (&replica, model) {
        (Some(_), Some(model)) => replicas.served_model(model),
        (Some(replica), None) => replicas.served_model_of(replica),
        (None, _) => None,
    };
    match (served_model, replica) {
        (Some(served_model), Some(replica)) if served_model.contains(&replica) => Ok((served_model, replica)),
        _ => {
            let ObjectReference { id, param, code } = object;
            Err(Error::ObjectNotFound { param, code, id: id.chars().take(SHOWN_MAX).collect() })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::fields;
    use super::*;
    use crate::endpoint::Endpoint;

    const ID: &str = "resp_00000000000000ff0123456789abcdef0123456700000000";

    fn reference_of(path: &str, body: &str) -> Option<(String, &'static str)> {
        let fields = fields::read(body.as_bytes(), Endpoint::from_path(path).unwrap()).unwrap();
        referenced(path, &fields).map(|object| (object.id.into_owned(), object.param))
    }

    #[test]
    fn objects_are_referenced_in_paths_and_in_bodies() {
        let path = |path: &str| reference_of(path, "{}");
        let at = |id: &str, param| Some((id.to_owned(), param));
        assert_eq!(path("/v3/responses/resp_1"), at("resp_1", "response_id"));
        assert_eq!(path("/v1/responses/resp_1/cancel"), at("resp_1", "response_id"));
        assert_eq!(path("/v3/conversations/conv_1/items/msg_1"), at("conv_1", "conversation_id"));
        for none in
            ["/v3/responses", "/v3/responses/", "/v3/responses/input_tokens", "/v3/conversations", "/v3/x/y"]
        {
            assert_eq!(path(none), None, "{none}");
        }
        let body = |body: &str| reference_of("/v3/responses", body);
        assert_eq!(body(r#"{"previous_response_id":"resp_\u0031"}"#), at("resp_1", "previous_response_id"));
        assert_eq!(body(r#"{"conversation":"conv_1"}"#), at("conv_1", "conversation"));
        assert_eq!(body(r#"{"conversation":{"id":"conv_1"}}"#), at("conv_1", "conversation"));
        assert_eq!(
            body(r#"{"previous_response_id":null,"conversation":null,"input":"item_reference"}"#),
            None
        );
        let items = r#"{"input":[{"role":"user","content":"[item_reference]"},{"type":"item_reference","id":"msg_1"}]}"#;
        assert_eq!(body(items), at("msg_1", "input"));
        let many =
            format!(r#"{{"input":[{}{{"type":"item_reference","id":"msg_1"}},7]}}"#, "{},".repeat(100_000));
        assert_eq!(body(&many), at("msg_1", "input"));
        assert_eq!(body(r#"{"input":[7,{"type":"item_reference","id":"msg_1"}]}"#), None);
        assert_eq!(reference_of("/v3/chat/completions", r#"{"previous_response_id":"resp_1"}"#), None);
    }

    #[test]
    fn an_id_names_its_store_if_it_is_valid() {
        assert_eq!(store_id(ID), Some(255));
        assert_eq!(store_id(&ID.replace("resp", "msg")), Some(255));
        for none in ["", "resp_1", &ID[1..ID.len() - 1], &ID.to_uppercase(), &format!("{ID}0")] {
            assert_eq!(store_id(none), None, "{none}");
        }
    }
}
