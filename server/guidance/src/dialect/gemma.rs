//! Gemma's way to write objects: bare keys, strings between tokens of their own, as they are.

use serde_json::Value;

use super::{ANY_NAME, Members, Root, others, separated, unsupported};
use crate::Invalid;
use crate::lark::{Writer, choice, join};
use crate::schema;

/// What is on both sides of a string.
const QUOTE: &str = "<|\"|>";
/// Nesting depth of the schema of a tool in Gemma's call format.
///
/// Beyond it: 400, `invalid_value`, if the tool is strict; otherwise the arguments of the tool are not constrained.
const DEPTH_MAX: usize = 32;

/// The members of an object, between its braces.
pub(super) fn members(
    writer: &mut Writer<'_>,
    root: &Root<'_>,
    members: &Members<'_>,
) -> Result<String, Invalid> {
    written(writer, root, members, 0)
}

fn written(
    writer: &mut Writer<'_>,
    root: &Root<'_>,
    members: &Members<'_>,
    depth: usize,
) -> Result<String, Invalid> {
    let mut all = Vec::with_capacity(members.named.len());
    for member in &members.named {
        let name = writer.literal(&format!("{}:", member.name))?;
        let value = value(writer, root, (member.schema, &member.at), depth)?;
        all.push((join([name, value]), member.is_required));
    }
    if let Some((schema, at)) = &members.others {
        let value = value(writer, root, (schema, at), depth)?;
        let name = writer.terminal(ANY_NAME);
        all.push((others(writer, &format!("{name} \":\" {value}"), "\",\""), false));
    }
    Ok(separated(writer, &all, "\",\""))
}

fn value(
    writer: &mut Writer<'_>,
    root: &Root<'_>,
    (schema, at): (&Value, &str),
    depth: usize,
) -> Result<String, Invalid> {
    if depth > DEPTH_MAX {
        return Err(Invalid::new(at, format!("nests deeper than {DEPTH_MAX}, or refers to itself")));
    }
    let mut alternatives = Vec::new();
    root.alternatives(schema, at, &mut alternatives)?;
    let mut all = Vec::with_capacity(alternatives.len());
    for (schema, at) in &alternatives {
        all.push(alternative(writer, root, (schema, at), depth)?);
    }
    let body = choice(&all);
    Ok(writer.rule(&body))
}

fn alternative(
    writer: &mut Writer<'_>,
    root: &Root<'_>,
    (schema, at): (&Value, &str),
    depth: usize,
) -> Result<String, Invalid> {
    if let Some(value) = schema.get("const") {
        return writer.literal(&plain(value));
    }
    if let Some(Value::Array(values)) = schema.get("enum") {
        let all = values.iter().map(|value| writer.literal(&plain(value)));
        return Ok(choice(&all.collect::<Result<Vec<_>, _>>()?));
    }
    root.refuse_saying(schema, at)?;
    match schema.get("type").and_then(Value::as_str) {
        Some("string") => string(writer, schema, at),
        Some("array") => array(writer, root, (schema, at), depth),
        Some("object") => {
            // It is cloned for an alternative of its own: what it refers to is in the root.
            let inner = Root { schema: root.schema, at: root.at };
            let owned = schema.clone();
            let members = Root { schema: &owned, at }.members(&owned, at)?;
            let members = written(writer, &inner, &members, depth + 1)?;
            Ok(join(["\"{\"".to_owned(), members, "\"}\"".to_owned()]))
        }
        // Words and numbers are as in JSON.
        Some(_) => writer.json(&schema::by_itself(schema, root.schema), at),
        None => any(writer),
    }
}

/// A value without a schema: a string, or a number or word of JSON.
fn any(writer: &mut Writer<'_>) -> Result<String, Invalid> {
    let string = quoted(writer, "/(?s:.*)/")?;
    let word = writer.json(&serde_json::json!({"type": ["number", "boolean", "null"]}), "")?;
    Ok(format!("({string} | {word})"))
}

fn string(writer: &mut Writer<'_>, schema: &Value, at: &str) -> Result<String, Invalid> {
    if schema.get("pattern").is_some() {
        return Err(unsupported(at, "pattern"));
    }
    let count = |keyword: &str| schema.get(keyword).and_then(Value::as_f64).map(|count| count as u64);
    let min = count("minLength").unwrap_or(0);
    let text = match count("maxLength") {
        None => format!("/(?s:.{{{min},}})/"),
        Some(max) => format!("/(?s:.{{{min},{}}})/", max.max(min)),
    };
    quoted(writer, &text)
}

/// A text between quotes. Where these are no tokens of their own, it ends with the first.
fn quoted(writer: &mut Writer<'_>, text: &str) -> Result<String, Invalid> {
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
    (schema, at): (&Value, &str),
    depth: usize,
) -> Result<String, Invalid> {
    const ANY: &Value = &Value::Bool(true);
    let items = schema.get("items").unwrap_or(ANY);
    let item = value(writer, root, (items, &format!("{at}.items")), depth + 1)?;
    let count = |keyword: &str| schema.get(keyword).and_then(Value::as_f64).map(|count| count as u32);
    let (min, max) = (count("minItems").unwrap_or(0), count("maxItems"));
    if max.is_some_and(|max| max < min) {
        return Err(Invalid::new(format!("{at}.maxItems"), "is less than minItems"));
    }
    let more = |min: u32, max: Option<u32>| match max {
        None => format!("(\",\" {item}){{{min},}}"),
        Some(max) => format!("(\",\" {item}){{{min},{max}}}"),
    };
    let some = match max {
        Some(0) => String::new(),
        Some(1) => item.clone(),
        max => format!("{item} {}", more(min.saturating_sub(1), max.map(|max| max - 1))),
    };
    let body = if min == 0 && !some.is_empty() { format!("({some})?") } else { some };
    Ok(join(["\"[\"".to_owned(), body, "\"]\"".to_owned()]))
}

/// A value as it is written where only it may stand.
fn plain(value: &Value) -> String {
    match value {
        Value::String(text) => format!("{QUOTE}{text}{QUOTE}"),
        Value::Array(values) => {
            let values: Vec<String> = values.iter().map(plain).collect();
            format!("[{}]", values.join(","))
        }
        Value::Object(members) => {
            let members: Vec<String> =
                members.iter().map(|(name, value)| format!("{name}:{}", plain(value))).collect();
            format!("{{{}}}", members.join(","))
        }
        value => value.to_string(),
    }
}
