//! The format of the text: the responses endpoint has a flat form of the chat endpoint's `response_format`.

use serde_json::{Map, Value, json};
use server_openai::responses::Request;

use crate::error::Error;

/// Returns the requested format of the text, converted to the form of this endpoint. OVMS clients may send it as
/// `response_format`, as to the chat endpoint.
pub(super) fn format(request: &Request) -> Map<String, Value> {
    let plain = || Map::from_iter([("type".to_owned(), json!("text"))]);
    let requested = request.text.as_ref().and_then(|text| text.format.clone());
    requested.or_else(|| request.generation.response_format.clone().map(flat)).unwrap_or_else(plain)
}

/// Converts `{"type": "json_schema", "json_schema": {…}}` to `{"type": "json_schema", …}`. As in chat completions, the
/// inner object may be the schema itself.
fn flat(mut format: Map<String, Value>) -> Map<String, Value> {
    match format.remove("json_schema") {
        Some(Value::Object(named)) if named.contains_key("schema") || named.contains_key("name") => {
            format.extend(named);
        }
        Some(schema) => _ = format.insert("schema".to_owned(), schema),
        None => {}
    }
    format
}

/// Converts a format to the form of the chat endpoint.
pub(super) fn chat_format(format: &Map<String, Value>) -> Map<String, Value> {
    let is_schema = format.get("type").and_then(Value::as_str) == Some("json_schema");
    if !is_schema || format.contains_key("json_schema") {
        return format.clone();
    }
    let mut schema = format.clone();
    schema.remove("type");
    Map::from_iter([
        ("type".to_owned(), json!("json_schema")),
        ("json_schema".to_owned(), Value::Object(schema)),
    ])
}

/// Renames the parameter of an error to its name at this endpoint.
pub(super) fn renamed(error: Error) -> Error {
    const NAMES: [(&str, &str); 2] =
        [("response_format.json_schema", "text.format"), ("response_format", "text.format")];
    let Error::Invalid { code, param, message } = error else { return error };
    let renamed = |text: &str| {
        let (from, to) = NAMES.into_iter().find(|(from, _)| text.starts_with(from))?;
        Some(format!("{to}{}", &text[from.len()..]))
    };
    match renamed(&param) {
        Some(param) => Error::Invalid { code, message: renamed(&message).unwrap_or(message), param },
        None => Error::Invalid { code, param, message },
    }
}
