//! What a request refers to that a replica keeps: responses, conversations and items. Their names say which one
//! keeps them (`resp_` and 48 hexadecimal digits, of which the first 16 are the keeper), and replicas say which one
//! they are, so a router need not remember anything, and any router will do.

use std::borrow::Cow;
use std::sync::Arc;

use memchr::memmem;
use serde::Deserialize;

use super::fields::{Fields, text};
use crate::app::App;
use crate::error::Error;
use crate::fleet::Fleet;
use crate::replicas::Replica;

/// Digits of a name, behind its prefix,
const DIGITS: usize = 48;
/// and those of them that are the keeper.
const KEEPER_DIGITS: usize = 16;
/// Length of the ID of a stored object that an error message repeats, in characters.
///
/// Beyond it: the ID is truncated.
const SHOWN_MAX: usize = 128;

/// A name in a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Named<'a> {
    id: Cow<'a, str>,
    /// The parameter.
    param: &'static str,
    code: &'static str,
}

/// What a request refers to, by its path or by its body: of several things the first, since one replica has to have
/// all of them.
pub(super) fn named<'a>(path: &'a str, fields: &Fields<'a>) -> Option<Named<'a>> {
    let (_, rest) = path.strip_prefix('/')?.split_once('/')?;
    let (collection, rest) = rest.split_once('/').unwrap_or((rest, ""));
    let id = rest.split('/').next().unwrap_or_default();
    let name = |id, param, code| Some(Named { id, param, code });
    match collection {
        "responses" if !id.is_empty() && id != "input_tokens" => {
            name(Cow::Borrowed(id), "response_id", "response_not_found")
        }
        "conversations" if !id.is_empty() => {
            name(Cow::Borrowed(id), "conversation_id", "conversation_not_found")
        }
        "responses" => {
            if let Some(id) = fields.previous.clone() {
                return name(id, "previous_response_id", "previous_response_not_found");
            }
            if let Some(id) = fields.conversation.and_then(conversation) {
                return name(id, "conversation", "conversation_not_found");
            }
            name(reference(fields.prompt)?, "input", "item_not_found")
        }
        _ => None,
    }
}

/// A name, or an object that has one.
fn conversation(value: &[u8]) -> Option<Cow<'_, str>> {
    #[derive(Deserialize)]
    struct Object {
        id: String,
    }
    if value.starts_with(b"{") {
        return serde_json::from_slice(value).ok().map(|Object { id }| Cow::Owned(id));
    }
    text(value)
}

/// The first item that an input refers to: `input` is without the bracket that ends it.
fn reference(input: &[u8]) -> Option<Cow<'_, str>> {
    #[derive(Deserialize)]
    struct Item {
        r#type: Option<String>,
        id: Option<String>,
    }
    // Nearly always there is none, and the input need not be read.
    memmem::find(input, b"item_reference")?;
    let whole = [input, b"]"].concat();
    let items: Vec<Item> = serde_json::from_slice(&whole).ok()?;
    let found = items.into_iter().find(|item| item.r#type.as_deref() == Some("item_reference"));
    found.and_then(|item| item.id).map(Cow::Owned)
}

/// The number of whoever keeps what has this name.
fn keeper(id: &str) -> Option<u64> {
    let (_, digits) = id.split_once('_')?;
    let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    if digits.len() != DIGITS || !digits.bytes().all(is_digit) {
        return None;
    }
    u64::from_str_radix(&digits[..KEEPER_DIGITS], 16).ok()
}

/// The replica that keeps it, among those of the model if the request names one.
///
/// # Errors
/// There is none, or it is not known in time.
pub(super) async fn find(
    app: &App,
    named: Named<'_>,
    model: Option<&str>,
) -> Result<(Arc<Fleet>, Arc<Replica>), Error> {
    let replicas = &app.dispatch().replicas;
    let found = match keeper(&named.id) {
        Some(keeper) => app.dispatch().await_keeper(keeper).await?,
        None => None,
    };
    let fleet = match (&found, model) {
        (Some(_), Some(model)) => replicas.fleet(model),
        (Some(replica), None) => replicas.fleet_of(replica),
        (None, _) => None,
    };
    let serves = |fleet: &Arc<Fleet>, replica: &Arc<Replica>| {
        fleet.replicas().iter().any(|other| Arc::ptr_eq(other, replica))
    };
    match (fleet, found) {
        (Some(fleet), Some(replica)) if serves(&fleet, &replica) => Ok((fleet, replica)),
        _ => {
            let Named { id, param, code } = named;
            Err(Error::NotKept { param, code, id: id.chars().take(SHOWN_MAX).collect() })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::fields;
    use super::*;

    const ID: &str = "resp_00000000000000ff0123456789abcdef0123456700000000";

    fn found(path: &str, body: &str) -> Option<(String, &'static str)> {
        let fields = fields::read(body.as_bytes()).unwrap();
        named(path, &fields).map(|named| (named.id.into_owned(), named.param))
    }

    #[test]
    fn names_are_found_in_paths_and_in_bodies() {
        let path = |path: &str| found(path, "{}");
        let at = |id: &str, param| Some((id.to_owned(), param));
        assert_eq!(path("/v3/responses/resp_1"), at("resp_1", "response_id"));
        assert_eq!(path("/v1/responses/resp_1/cancel"), at("resp_1", "response_id"));
        assert_eq!(path("/v3/conversations/conv_1/items/msg_1"), at("conv_1", "conversation_id"));
        for none in
            ["/v3/responses", "/v3/responses/", "/v3/responses/input_tokens", "/v3/conversations", "/v3/x/y"]
        {
            assert_eq!(path(none), None, "{none}");
        }
        let body = |body: &str| found("/v3/responses", body);
        assert_eq!(body(r#"{"previous_response_id":"resp_\u0031"}"#), at("resp_1", "previous_response_id"));
        assert_eq!(body(r#"{"conversation":"conv_1"}"#), at("conv_1", "conversation"));
        assert_eq!(body(r#"{"conversation":{"id":"conv_1"}}"#), at("conv_1", "conversation"));
        assert_eq!(
            body(r#"{"previous_response_id":null,"conversation":null,"input":"item_reference"}"#),
            None
        );
        let items = r#"{"input":[{"role":"user","content":"[item_reference]"},{"type":"item_reference","id":"msg_1"}]}"#;
        assert_eq!(body(items), at("msg_1", "input"));
        assert_eq!(found("/v3/chat/completions", r#"{"previous_response_id":"resp_1"}"#), None);
    }

    #[test]
    fn a_name_says_who_keeps_it_if_it_is_one() {
        assert_eq!(keeper(ID), Some(255));
        assert_eq!(keeper(&ID.replace("resp", "msg")), Some(255));
        for none in ["", "resp_1", &ID[1..ID.len() - 1], &ID.to_uppercase(), &format!("{ID}0")] {
            assert_eq!(keeper(none), None, "{none}");
        }
    }
}
