//! The arguments of a call as tags: strings without quotes, everything else as JSON.

use serde_json::Value;

use super::arguments::{
    ANY_NAME, AllowedValues, Alternative, Member, Members, Root, additional_members,
    reject_json_only_combining_keywords, text_of_length,
};
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
    let alternatives = root.alternatives(member.schema, &member.at)?;
    for Alternative { schema, at, .. } in alternatives.iter().filter(|one| is_text(one)) {
        reject_json_only_combining_keywords(schema, at)?;
    }
    // The alternative that allows any text includes all other alternatives.
    if alternatives.iter().any(is_any_text) {
        return writer.until(end);
    }
    let mut written = Vec::with_capacity(alternatives.len());
    for one in &alternatives {
        written.push(alternative(writer, root, one, end)?);
    }
    Ok(choice(&written))
}

fn alternative(
    writer: &mut Writer<'_>,
    root: &Root<'_>,
    one: &Alternative<'_>,
    end: &str,
) -> Result<String, FormError> {
    let Alternative { values, schema, at, .. } = one;
    match values {
        AllowedValues::Listed(values) => {
            let mut written = Vec::with_capacity(values.len());
            for value in values {
                let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
                written.push(writer.literal(&format!("{text}{end}"))?);
            }
            Ok(choice(&written))
        }
        AllowedValues::Unconstrained | AllowedValues::OfType("string") => bounded_text(writer, schema, end),
        AllowedValues::OfType(name) => {
            let mut typed = schema.as_object().cloned().unwrap_or_default();
            typed.insert("type".to_owned(), Value::from(*name));
            let typed = schema::with_definitions(&Value::Object(typed), root.schema);
            let value = writer.json(&typed, at)?;
            let end = writer.literal(end)?;
            Ok(join([value, end]))
        }
    }
}

/// Whether the values of an alternative are texts.
fn is_text(one: &Alternative<'_>) -> bool {
    matches!(one.values, AllowedValues::Unconstrained | AllowedValues::OfType("string"))
}

/// Whether an alternative allows any text. The keyword `format` is ignored, because it is not enforced in this notation.
fn is_any_text(one: &Alternative<'_>) -> bool {
    let constraints = ["pattern", "minLength", "maxLength"];
    is_text(one) && constraints.iter().all(|keyword| one.schema.get(keyword).is_none())
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
