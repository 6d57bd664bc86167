//! The arguments of a call as Python keyword arguments. Values are written as in JSON, except for arguments whose
//! schema has the type `boolean`, without `enum` and `const`, or the type `null`: these are written as `True`, `False`
//! and `None`.

use serde_json::Value;

use super::arguments::{ANY_NAME, Members, Root, WrittenMember, additional_members, separated};
use crate::FormError;
use crate::lark::{Writer, join};
use crate::schema;

/// Returns an expression for the arguments between the parentheses of a call.
pub(super) fn members(
    writer: &mut Writer<'_>,
    root: &Root<'_>,
    members: &Members<'_>,
) -> Result<String, FormError> {
    let mut written = Vec::with_capacity(members.named.len());
    for member in &members.named {
        if !is_argument_name(member.name) {
            let problem = "is not supported in the call format of this model: the name of an argument may contain letters, \
                           digits and _.-:/$@, and it must begin with a letter, a digit, _, $ or @";
            return Err(FormError::new(&member.at, problem));
        }
        let name = writer.literal(&format!("{}=", member.name))?;
        let expression = join([name, value(writer, root, member.schema, &member.at)?]);
        written.push(WrittenMember { expression, is_required: member.is_required });
    }
    if let Some((schema, at)) = &members.additional {
        let value = value(writer, root, schema, at)?;
        let expression = additional_members(writer, &format!("{ANY_NAME} \"=\" {value}"), "\", \"");
        written.push(WrittenMember { expression, is_required: false });
    }
    Ok(separated(writer, &written, "\", \""))
}

/// Whether `name` can be the name of an argument. The parser of tool calls accepts more names than Python does.
fn is_argument_name(name: &str) -> bool {
    let begins = |letter: char| letter.is_alphanumeric() || "_$@".contains(letter);
    name.starts_with(begins) && name.chars().all(|letter| begins(letter) || ".-:/".contains(letter))
}

fn value(writer: &mut Writer<'_>, root: &Root<'_>, schema: &Value, at: &str) -> Result<String, FormError> {
    match schema.get("type").and_then(Value::as_str) {
        Some("boolean") if schema.get("enum").is_none() && schema.get("const").is_none() => {
            Ok("(\"True\" | \"False\")".to_owned())
        }
        Some("null") => Ok("\"None\"".to_owned()),
        _ => writer.json(&schema::with_definitions(schema, root.schema), at),
    }
}
