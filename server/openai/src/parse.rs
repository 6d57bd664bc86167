//! Parses request bodies and reports the path of an invalid parameter.

use serde::de::DeserializeOwned;
use serde_json::Value;

/// The reason why a body is not a valid request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestError {
    /// The human-readable description, which begins with the path of the parameter if there is one.
    pub message: String,
    /// The path of the invalid parameter, such as `messages[0].content`. `None` if the body is not a JSON
    /// object.
    pub param: Option<String>,
    /// Whether the parameter is required and missing.
    pub is_missing: bool,
}

/// Parses a body as a JSON object. The parser rejects a nesting depth of 128 or more, so that no body overflows the
/// stack.
///
/// # Errors
/// [`RequestError`] if the body is not a JSON object.
pub fn object(body: &[u8]) -> Result<Value, RequestError> {
    let invalid = |message: String| RequestError { message, param: None, is_missing: false };
    let value: Value = serde_json::from_slice(body)
        .map_err(|error| invalid(format!("failed to parse the request body as JSON: {error}")))?;
    if value.is_object() {
        Ok(value)
    } else {
        Err(invalid("the request body must be a JSON object".to_owned()))
    }
}

/// Deserializes the fields that `T` declares. Ignores all other fields, because another type may declare them.
pub(crate) fn fields<T: DeserializeOwned>(object: &Value) -> Result<T, RequestError> {
    serde_path_to_error::deserialize(object).map_err(|error| {
        let path = error.path().to_string();
        let reason = error.inner().to_string();
        // Serde reports a missing field with the path of the object that lacks it.
        if let Some(field) = reason.strip_prefix("missing field `").and_then(|rest| rest.strip_suffix('`')) {
            let param = if path == "." { field.to_owned() } else { format!("{path}.{field}") };
            return RequestError {
                message: format!("{param}: is missing"),
                param: Some(param),
                is_missing: true,
            };
        }
        let reason = without_rust_types(&reason);
        if path == "." {
            return RequestError { message: reason, param: None, is_missing: false };
        }
        RequestError { message: format!("{path}: {reason}"), param: Some(path), is_missing: false }
    })
}

/// Replaces the names of Rust types, which mean nothing to API clients, in a message from serde.
fn without_rust_types(reason: &str) -> String {
    let Some((value, expected)) = reason.rsplit_once(", expected ") else { return reason.to_owned() };
    let value = ["invalid type: ", "invalid value: "].iter().find_map(|prefix| value.strip_prefix(prefix));
    let Some(value) = value else { return reason.to_owned() };
    let expected = match expected {
        "f32" | "f64" => "a number",
        "u32" => "an integer from 0 to 4294967295",
        "i32" | "i64" => "an integer",
        "a sequence" => "an array",
        "a map" => "an object",
        other if other.starts_with("struct ") => "an object",
        other => other,
    };
    let value = match value {
        "sequence" => "an array",
        "map" => "an object",
        text if text.starts_with("string ") => &text["string ".len()..],
        // Serde writes the kind of the value, followed by the value in backquotes.
        other => other.split_once('`').map_or(other, |(_, value)| value.trim_end_matches('`')),
    };
    format!("{value} is not {expected}")
}
