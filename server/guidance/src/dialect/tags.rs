//! The arguments of a call as tags: strings without quotes, everything else as JSON.

use serde_json::Value;

use super::arguments::{ANY_NAME, LocatedSchema, Member, Members, Root, additional_members, text_of_length};
use crate::lark::{Writer, choice, escape_regex, join, quote, quote_regex};
use crate::schema;
use crate::{Dialect, FormError};

/// Returns an expression for the parameters of a call.
pub(super) fn parameters(
    writer: &mut Writer<'_>,
    root: &Root<'_>,
    members: &Members<'_>,
    dialect: Dialect,
) -> Result<String, FormError> {
    let mut written = Vec::with_capacity(members.named.len());
    for member in &members.named {
        let begin = writer.literal(&dialect.begin(member.name))?;
        let one = join([begin, value(writer, root, member, dialect.end())?]);
        written.push(if member.is_required { one } else { format!("({one})?") });
    }
    if let Some((schema, at)) = &members.additional {
        let (before, after) = dialect.begin_parts();
        let (before, after) = (writer.literal(before)?, writer.literal(after)?);
        let member = Member { name: "", schema, at: at.clone(), is_required: false };
        let value = value(writer, root, &member, dialect.end())?;
        let name = writer.terminal(ANY_NAME);
        let one = join([before, name, after, value]);
        written.push(format!("({})?", additional_members(writer, &one, "")));
    }
    Ok(join(written))
}

impl Dialect {
    /// The text before and after the name in the tag that begins a parameter.
    fn begin_parts(self) -> (&'static str, &'static str) {
        match self {
            Self::MiniCpm => ("<param name=\"", "\">"),
            _ => ("<parameter=", ">\n"),
        }
    }

    fn begin(self, name: &str) -> String {
        let (before, after) = self.begin_parts();
        format!("{before}{name}{after}")
    }

    fn end(self) -> &'static str {
        match self {
            Self::MiniCpm => "</param>",
            _ => "\n</parameter>\n",
        }
    }
}

/// Returns an expression for a value and the tag that ends it.
fn value(
    writer: &mut Writer<'_>,
    root: &Root<'_>,
    member: &Member<'_>,
    end: &str,
) -> Result<String, FormError> {
    if member.schema.is_boolean() {
        return writer.until(end);
    }
    let mut alternatives = Vec::new();
    root.alternatives(member.schema, &member.at, &mut alternatives)?;
    // The alternative that allows any text includes all other alternatives.
    if alternatives.iter().any(|(schema, _)| is_any_text(schema)) {
        return writer.until(end);
    }
    let mut written = Vec::with_capacity(alternatives.len());
    for (schema, at) in &alternatives {
        written.push(alternative(writer, root, LocatedSchema { schema, at }, end)?);
    }
    Ok(choice(&written))
}

fn alternative(
    writer: &mut Writer<'_>,
    root: &Root<'_>,
    located: LocatedSchema<'_>,
    end: &str,
) -> Result<String, FormError> {
    let LocatedSchema { schema, at } = located;
    let values = match (schema.get("const"), schema.get("enum")) {
        (Some(value), _) => Some(std::slice::from_ref(value)),
        (None, Some(Value::Array(values))) => Some(&values[..]),
        _ => None,
    };
    if let Some(values) = values {
        let mut written = Vec::with_capacity(values.len());
        for value in values {
            let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            written.push(writer.literal(&format!("{text}{end}"))?);
        }
        return Ok(choice(&written));
    }
    if schema.get("type").is_some_and(|kind| kind == "string") {
        return bounded_text(writer, schema, end);
    }
    let value = writer.json(&schema::with_definitions(schema, root.schema), at)?;
    let end = writer.literal(end)?;
    Ok(join([value, end]))
}

/// Whether the schema allows any text. The keyword `format` is ignored, because it is not enforced in this notation.
fn is_any_text(schema: &Value) -> bool {
    let kind = schema.get("type").and_then(Value::as_str);
    let constraints = ["enum", "const", "pattern", "minLength", "maxLength"];
    let is_text = match kind {
        Some(kind) => kind == "string",
        None => !["properties", "items", "additionalProperties"].iter().any(|key| schema.get(key).is_some()),
    };
    is_text && constraints.iter().all(|keyword| schema.get(keyword).is_none())
}

/// Returns an expression for a text that satisfies the length limits and the pattern of `schema`, followed by its end
/// tag. If the end tag contains no special token, the text and the tag are one terminal, which ends at the first end
/// tag.
fn bounded_text(writer: &mut Writer<'_>, schema: &Value, end: &str) -> Result<String, FormError> {
    let mut parts = vec![text_of_length(schema)];
    if let Some(pattern) = schema.get("pattern").and_then(Value::as_str) {
        let (open, pattern) = match pattern.strip_prefix('^') {
            Some(rest) => ("", rest),
            None => ("(?s:.*)", pattern),
        };
        let (pattern, close) = match pattern.strip_suffix('$') {
            Some(rest) if !rest.ends_with('\\') => (rest, ""),
            _ => (pattern, "(?s:.*)"),
        };
        parts.push(format!("/{open}(?:{}){close}/", quote_regex(pattern)));
    }
    let text = writer.terminal(&parts.join(" & "));
    let whole = match writer.literal(end)? == quote(end) {
        true => writer.terminal(&format!("{text} /{}/", escape_regex(end))),
        // The end tag contains a special token, which no text contains.
        false => {
            let end = writer.literal(end)?;
            return Ok(join([text, end]));
        }
    };
    let name = writer.reserve("r");
    writer.define(&format!("{name}[lazy]"), &whole);
    Ok(name)
}
