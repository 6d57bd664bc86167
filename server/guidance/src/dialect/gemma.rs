//! The arguments of a call in Gemma's notation: keys are written without quotes where possible, and strings are written
//! between `<|"|>` delimiters without escapes.

use std::borrow::Cow;

use serde_json::Value;

use super::arguments::{
    ANY, ANY_NAME, AllowedValues, Alternative, LocatedSchema, Members, Root, WrittenMember,
    additional_members, items, object_members, reject_json_only_keywords, separated, text_of_length,
    unsupported,
};
use crate::FormError;
use crate::lark::{Writer, choice, join};

/// The delimiter before and after a string.
const QUOTE: &str = "<|\"|>";
/// Nesting depth of the schema of a tool in Gemma's call format.
///
/// If exceeded: 400, `invalid_value`, if the tool is strict; otherwise the arguments of the tool are not constrained.
const DEPTH_MAX: usize = 32;

/// Returns an expression for the members of an object, without its braces.
pub(super) fn members(
    writer: &mut Writer<'_>,
    root: &Root<'_>,
    members: &Members<'_>,
) -> Result<String, FormError> {
    members_at_depth(writer, root, members, 0)
}

fn members_at_depth(
    writer: &mut Writer<'_>,
    root: &Root<'_>,
    members: &Members<'_>,
    depth: usize,
) -> Result<String, FormError> {
    let mut written = Vec::with_capacity(members.named.len());
    for member in &members.named {
        let name = writer.literal(&format!("{}:", key(member.name)))?;
        let located = LocatedSchema { schema: member.schema, at: &member.at };
        let expression = join([name, value(writer, root, located, depth)?]);
        written.push(WrittenMember { expression, is_required: member.is_required });
    }
    if let Some((schema, at)) = &members.additional {
        let value = value(writer, root, LocatedSchema { schema, at }, depth)?;
        let name = writer.terminal(ANY_NAME);
        let expression = additional_members(writer, &format!("{name} \":\" {value}"), "\",\"");
        written.push(WrittenMember { expression, is_required: false });
    }
    Ok(separated(writer, &written, "\",\""))
}

fn value(
    writer: &mut Writer<'_>,
    root: &Root<'_>,
    located: LocatedSchema<'_>,
    depth: usize,
) -> Result<String, FormError> {
    if depth > DEPTH_MAX {
        let problem = format!("is nested deeper than {DEPTH_MAX} levels, or refers to itself");
        return Err(FormError::new(located.at, problem));
    }
    let alternatives = root.alternatives(located.schema, located.at)?;
    let mut all = Vec::with_capacity(alternatives.len());
    for one in &alternatives {
        all.push(alternative(writer, root, one, depth)?);
    }
    let body = choice(&all);
    Ok(writer.rule(&body))
}

fn alternative(
    writer: &mut Writer<'_>,
    root: &Root<'_>,
    one: &Alternative<'_>,
    depth: usize,
) -> Result<String, FormError> {
    let Alternative { values, schema, at, .. } = one;
    let name = match values {
        AllowedValues::Listed(values) => {
            let all = values.iter().map(|value| writer.literal(&literal_value(value)));
            return Ok(choice(&all.collect::<Result<Vec<_>, _>>()?));
        }
        AllowedValues::OfType(name) => Some(*name),
        AllowedValues::Unconstrained => None,
    };
    reject_json_only_keywords(schema, at)?;
    match name {
        Some("string") => string(writer, schema, at),
        Some("array") => array(writer, root, LocatedSchema { schema, at }, depth),
        Some("object") => {
            let members = object_members(schema, at)?;
            let members = members_at_depth(writer, root, &members, depth + 1)?;
            Ok(join(["\"{\"".to_owned(), members, "\"}\"".to_owned()]))
        }
        // Numbers, booleans and `null` are written as in JSON.
        Some(name) => writer.json(&one.scalar_schema(name), at),
        None => any(writer),
    }
}

/// Returns an expression for a value whose schema has no constraints: a string, a number, a boolean or `null`.
fn any(writer: &mut Writer<'_>) -> Result<String, FormError> {
    let string = quoted(writer, "/(?s:.*)/")?;
    let word = writer.json(&serde_json::json!({"type": ["number", "boolean", "null"]}), "")?;
    Ok(format!("({string} | {word})"))
}

fn string(writer: &mut Writer<'_>, schema: &Value, at: &str) -> Result<String, FormError> {
    if schema.get("pattern").is_some() {
        return Err(unsupported(at, "pattern"));
    }
    quoted(writer, &text_of_length(schema))
}

/// Returns an expression for a text between quotes. If the quotes are not special tokens, the text ends at the first
/// quote.
fn quoted(writer: &mut Writer<'_>, text: &str) -> Result<String, FormError> {
    let quote = writer.literal(QUOTE)?;
    if quote.starts_with("<[") {
        let text = writer.terminal(text);
        return Ok(format!("{quote} {text} {quote}"));
    }
    let text = writer.terminal(&format!("{text} {quote}"));
    let name = writer.reserve("r");
    writer.define(&format!("{name}[lazy]"), &text);
    Ok(format!("{quote} {name}"))
}

fn array(
    writer: &mut Writer<'_>,
    root: &Root<'_>,
    located: LocatedSchema<'_>,
    depth: usize,
) -> Result<String, FormError> {
    let LocatedSchema { schema, at } = located;
    let located = LocatedSchema { schema: schema.get("items").unwrap_or(&ANY), at: &format!("{at}.items") };
    let item = value(writer, root, located, depth + 1)?;
    let items = items(schema, at, &item, "\",\"")?;
    Ok(join(["\"[\"".to_owned(), items, "\"]\"".to_owned()]))
}

/// Returns a key in the notation that the parser of tool calls reads: a JSON string if the key is empty, begins or ends
/// with whitespace, or contains a reserved character, and otherwise the key without quotes.
fn key(name: &str) -> Cow<'_, str> {
    const RESERVED: [char; 9] = [',', ':', '{', '}', '[', ']', '<', '"', '\n'];
    let is_plain = !name.is_empty() && name.trim() == name && !name.contains(RESERVED);
    if is_plain { Cow::Borrowed(name) } else { Cow::Owned(Value::from(name).to_string()) }
}

/// Returns a value of `const` or `enum` in Gemma's notation.
fn literal_value(value: &Value) -> String {
    match value {
        Value::String(text) => format!("{QUOTE}{text}{QUOTE}"),
        Value::Array(values) => {
            let values: Vec<String> = values.iter().map(literal_value).collect();
            format!("[{}]", values.join(","))
        }
        Value::Object(members) => {
            let members: Vec<String> = members
                .iter()
                .map(|(name, value)| format!("{}:{}", key(name), literal_value(value)))
                .collect();
            format!("{{{}}}", members.join(","))
        }
        value => value.to_string(),
    }
}
