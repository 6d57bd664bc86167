//! From a body to a request, with the path of what is wrong.

use serde::de::DeserializeOwned;
use serde_json::Value;

/// Why a body is not a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Malformed {
    /// For people; begins with the parameter's name if there is one.
    pub message: String,
    /// The parameter at fault, as a path: `messages[0].content`. None if the body is no JSON object at all.
    pub param: Option<String>,
    /// Whether it has to be there and is not.
    pub is_missing: bool,
}

/// Reads a body as a JSON object. Depth is limited by the reader (to 128), so that no body overflows the
/// stack.
///
/// # Errors
/// It is none.
pub fn object(body: &[u8]) -> Result<Value, Malformed> {
    let malformed = |message: String| Malformed { message, param: None, is_missing: false };
    let value: Value = serde_json::from_slice(body)
        .map_err(|error| malformed(format!("the request body is not valid JSON: {error}")))?;
    if value.is_object() {
        Ok(value)
    } else {
        Err(malformed("the request body must be a JSON object".to_owned()))
    }
}

/// Reads the fields that `T` has from a request; others are for other types to read.
pub(crate) fn fields<T: DeserializeOwned>(object: &Value) -> Result<T, Malformed> {
    serde_path_to_error::deserialize(object).map_err(|error| {
        let path = error.path().to_string();
        let reason = error.inner().to_string();
        // Serde reports a missing field at the object that lacks it.
        if let Some(field) = reason.strip_prefix("missing field `").and_then(|rest| rest.strip_suffix('`')) {
            let param = if path == "." { field.to_owned() } else { format!("{path}.{field}") };
            return Malformed {
                message: format!("{param}: is missing"),
                param: Some(param),
                is_missing: true,
            };
        }
        let reason = plain(&reason);
        if path == "." {
            return Malformed { message: reason, param: None, is_missing: false };
        }
        Malformed { message: format!("{path}: {reason}"), param: Some(path), is_missing: false }
    })
}

/// Serde names Rust's types, which mean nothing to who reads the message.
fn plain(reason: &str) -> String {
    let Some((found, expected)) = reason.rsplit_once(", expected ") else { return reason.to_owned() };
    let found = ["invalid type: ", "invalid value: "].iter().find_map(|prefix| found.strip_prefix(prefix));
    let Some(found) = found else { return reason.to_owned() };
    let expected = match expected {
        "f32" | "f64" => "a number",
        "u32" => "an integer from 0 to 4294967295",
        "i32" | "i64" => "an integer",
        "a sequence" => "an array",
        "a map" => "an object",
        other if other.starts_with("struct ") => "an object",
        other => other,
    };
    let found = match found {
        "sequence" => "an array",
        "map" => "an object",
        text if text.starts_with("string ") => &text["string ".len()..],
        // Its kind, and itself in quotes.
        other => other.split_once('`').map_or(other, |(_, value)| value.trim_end_matches('`')),
    };
    format!("{found} is not {expected}")
}
