//! Constrains the arguments of calls in notations other than JSON to the values that a JSON schema allows.

mod arguments;
mod gemma;
mod python;
mod tags;
mod type_set;

use serde_json::Value;

use crate::lark::Writer;
use crate::schema::{self, JsonWhitespace};
use crate::{Dialect, FormError};
use arguments::Root;

/// Returns an expression for the arguments that are valid under `schema`.
pub(crate) fn arguments(
    writer: &mut Writer<'_>,
    dialect: Dialect,
    schema: &Value,
    at: &str,
) -> Result<String, FormError> {
    // The prepared schema is not used. This call only reports an invalid schema with the same messages as for JSON.
    schema::prepare(schema, at, JsonWhitespace::Compact)?;
    let root = Root { schema, at };
    let members = root.members()?;
    match dialect {
        Dialect::Python => python::members(writer, &root, &members),
        Dialect::Gemma => gemma::members(writer, &root, &members),
        Dialect::Qwen | Dialect::MiniCpm => tags::parameters(writer, &root, &members, dialect),
    }
}
