//! The template engine, configured to behave like Jinja in `transformers`.

use minijinja::{
    AutoEscape, Environment, Error, ErrorKind, Output, State, Value,
    syntax::SyntaxConfig,
    value::{ValueKind, from_args},
};

use super::{functions, limits, python};

pub(super) fn new() -> Environment<'static> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    environment.set_syntax(syntax.expect("invariant: only whitespace control differs from the default"));
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_fuel(Some(limits::STEPS_MAX));
    environment.set_recursion_limit(limits::RECURSION_MAX);
    environment.set_formatter(format);
    environment.set_unknown_method_callback(method);
    environment.add_function("raise_exception", functions::raise_exception);
    environment.add_function("strftime_now", functions::strftime_now);
    environment.add_filter("tojson", functions::tojson);
    environment.add_filter("string", |value: &Value| python::str(value));
    environment.add_filter("join", functions::join);
    environment.add_filter("format", functions::printf);
    environment.add_filter("indent", functions::indented);
    environment.add_test("iterable", |value: &Value| {
        is_sequence(value) || matches!(value.kind(), ValueKind::Iterable | ValueKind::Undefined)
    });
    environment.add_test("sequence", is_sequence);
    environment
}

/// Whether a value is a sequence in Python's Jinja: strings and dictionaries are sequences too, and `None` is not.
/// Unlike in Jinja, ranges and undefined values are not sequences.
fn is_sequence(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::String | ValueKind::Seq | ValueKind::Map)
}

/// Prints values as Python does.
fn format(output: &mut Output<'_>, _: &mut State<'_, '_>, value: &Value) -> Result<(), Error> {
    let written = match value.as_str() {
        Some(text) => output.write_str(text),
        None => output.write_str(&python::str(value)),
    };
    written.map_err(|error| Error::new(ErrorKind::WriteFailure, "failed to write").with_source(error))
}

/// Implements methods of Python strings, dictionaries and lists.
fn method(state: &mut State<'_, '_>, value: &Value, name: &str, arguments: &[Value]) -> Result<Value, Error> {
    match (value.as_str(), name) {
        (Some(text), "removeprefix") => {
            let (prefix,): (&str,) = from_args(arguments)?;
            Ok(text.strip_prefix(prefix).unwrap_or(text).into())
        }
        (Some(text), "removesuffix") => {
            let (suffix,): (&str,) = from_args(arguments)?;
            Ok(text.strip_suffix(suffix).unwrap_or(text).into())
        }
        (Some(text), "partition") => {
            let (separator,): (&str,) = from_args(arguments)?;
            let (before, after) = text.split_once(separator).unzip();
            let found = if before.is_some() { separator } else { "" };
            Ok([before.unwrap_or(text), found, after.unwrap_or_default()]
                .map(str::to_owned)
                .into_iter()
                .collect())
        }
        (Some(text), "format") => {
            functions::check_widths(text)?;
            minijinja_contrib::pycompat::unknown_method_callback(state, value, name, arguments)
        }
        (Some(text), "rsplit") => {
            let (separator, count): (&str, Option<usize>) = from_args(arguments)?;
            let mut parts: Vec<&str> = match count {
                Some(count) => text.rsplitn(count + 1, separator).collect(),
                None => text.rsplit(separator).collect(),
            };
            parts.reverse();
            Ok(parts.into_iter().map(str::to_owned).collect())
        }
        _ => minijinja_contrib::pycompat::unknown_method_callback(state, value, name, arguments),
    }
}

/// Replaces the tags `{% generation %}` and `{% endgeneration %}`, which mark training targets and print nothing, with
/// tags that have no effect. Whitespace control is preserved.
pub(super) fn without_generation_tags(source: &str) -> String {
    let mut result = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        result.push_str(before);
        // Begin the search after the opening delimiter, because in `{%}` the two delimiters share a character.
        let Some(end) = tag[2..].find("%}") else {
            rest = tag;
            break;
        };
        let (tag, after) = tag.split_at(2 + end + 2);
        let inner = &tag[2..tag.len() - 2];
        let signs: &[char] = &['-', '+'];
        let replacement = match inner.trim_matches(signs).trim() {
            "generation" => "if true",
            "endgeneration" => "endif",
            _ => "",
        };
        if replacement.is_empty() {
            result.push_str(tag);
        } else {
            let before = if inner.starts_with(signs) { &inner[..1] } else { "" };
            let after = if inner.ends_with(signs) { &inner[inner.len() - 1..] } else { "" };
            result.push_str(&format!("{{%{before} {replacement} {after}%}}"));
        }
        rest = after;
    }
    result.push_str(rest);
    result
}
