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
}

/// Reads a body as a JSON object. Depth is limited by the reader (to 128), so that no body overflows the
/// stack.
///
/// # Errors
/// It is none.
pub fn object(body: &[u8]) -> Result<Value, Malformed> {
    let malformed = |message: String| Malformed { message, param: None };
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
        let reason = plain(&error.inner().to_string());
        if path == "." {
            // Serde reports a missing field at the object that lacks it.
            let param = missing_field(&reason);
            return Malformed { message: reason, param };
        }
        let param = match missing_field(&reason) {
            Some(field) => format!("{path}.{field}"),
            None => path,
        };
        Malformed { message: format!("{param}: {reason}"), param: Some(param) }
    })
}

fn missing_field(reason: &str) -> Option<String> {
    reason.strip_prefix("missing field `")?.strip_suffix('`').map(str::to_owned)
}

/// Serde names Rust's types, which mean nothing to who reads the message.
fn plain(reason: &str) -> String {
    let Some((found, expected)) = reason.rsplit_once("expected ") else { return reason.to_owned() };
    let expected = match expected {
        "f32" | "f64" => "a number",
        "u32" => "an integer from 0 to 4294967295",
        "i32" | "i64" => "an integer",
        "a sequence" => "an array",
        "a map" => "an object",
        other if other.starts_with("struct ") => "an object",
        other => other,
    };
    format!("{found}expected {expected}")
}
