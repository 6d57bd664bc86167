//! Checks that JSON schemas are valid before they are compiled, and sets the layout of the JSON.
//!
//! llguidance interprets the keywords and rejects those it does not support.

use serde_json::{Map, Value, json};

use crate::FormError;
use crate::limits::{SCHEMA_BYTES_MAX, SCHEMA_DEPTH_MAX};
use crate::nesting::check_schema;

/// The whitespace that JSON may contain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum JsonWhitespace {
    /// Whitespace between all parts, up to [`SPACE_MAX`] characters in a row.
    Flexible,
    /// At most one space after a comma or colon.
    Compact,
}

/// Number of consecutive whitespace characters outside strings in JSON that follows a schema. Without a limit, a model
/// that gets stuck writes whitespace until it reaches the token limit.
///
/// If exceeded: the model must continue with another character.
const SPACE_MAX: usize = 64;

/// The keyword that configures the layout in llguidance.
const LAYOUT: &str = "x-guidance";

/// The string formats that are enforced. All other formats are treated as annotations, as JSON Schema allows.
const FORMATS: [&str; 10] =
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"];

/// A valid date, with 29 February in leap years only.
macro_rules! day {
    () => {
        r"(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)"
    };
}

/// A time of day with its time zone. Leap seconds are excluded, because they hardly ever occur.
macro_rules! time {
    () => {
        r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
    };
}

/// A host name that is well within the length limits that validators check.
macro_rules! host {
    () => {
        r"[A-Za-z0-9]{1,20}(?:-[A-Za-z0-9]{1,10}){0,2}(?:\.[A-Za-z0-9]{1,20}(?:-[A-Za-z0-9]{1,10}){0,2}){0,4}"
    };
}

/// The local part of an email address, with at most 64 characters, which is the allowed maximum.
macro_rules! mailbox {
    () => {
        r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]{1,40}(?:\.[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]{1,11}){0,2}"
    };
}

/// The formats that this module enforces with its own patterns if the schema has no `pattern`. These patterns exclude
/// invalid dates, seconds and lengths.
const PATTERNS: [(&str, &str); 5] = [
    ("date", concat!("^", day!(), "$")),
    ("time", concat!("^", time!(), "$")),
    ("date-time", concat!("^", day!(), "T", time!(), "$")),
    ("hostname", concat!("^", host!(), "$")),
    ("email", concat!("^", mailbox!(), "@", host!(), "$")),
];

const TYPES: [&str; 7] = ["string", "number", "integer", "boolean", "null", "array", "object"];

/// The kind of value that a keyword has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Schema,
    /// A schema, or a list of schemas.
    SchemaOrList,
    /// A list of at least one schema.
    SchemaList,
    SchemaMap,
    Types,
    /// A list of at least one value of any type.
    Values,
    Names,
    Text,
    Number,
    Count,
}

/// The keywords whose values are checked.
const KEYWORDS: [(&str, Kind); 37] = [
    ("properties", Kind::SchemaMap),
    ("patternProperties", Kind::SchemaMap),
    ("$defs", Kind::SchemaMap),
    ("definitions", Kind::SchemaMap),
    ("dependentSchemas", Kind::SchemaMap),
    ("additionalProperties", Kind::Schema),
    ("unevaluatedProperties", Kind::Schema),
    ("propertyNames", Kind::Schema),
    ("items", Kind::SchemaOrList),
    ("additionalItems", Kind::Schema),
    ("unevaluatedItems", Kind::Schema),
    ("contains", Kind::Schema),
    ("not", Kind::Schema),
    ("if", Kind::Schema),
    ("then", Kind::Schema),
    ("else", Kind::Schema),
    ("prefixItems", Kind::SchemaList),
    ("anyOf", Kind::SchemaList),
    ("allOf", Kind::SchemaList),
    ("oneOf", Kind::SchemaList),
    ("type", Kind::Types),
    ("enum", Kind::Values),
    ("required", Kind::Names),
    ("pattern", Kind::Text),
    ("format", Kind::Text),
    ("$ref", Kind::Text),
    ("minimum", Kind::Number),
    ("maximum", Kind::Number),
    ("multipleOf", Kind::Number),
    ("minLength", Kind::Count),
    ("maxLength", Kind::Count),
    ("minItems", Kind::Count),
    ("maxItems", Kind::Count),
    ("minProperties", Kind::Count),
    ("maxProperties", Kind::Count),
    ("minContains", Kind::Count),
    ("maxContains", Kind::Count),
];

/// Prepares a schema for compilation.
///
/// # Errors
/// The schema is invalid or too large; the error contains the path of the invalid part.
pub(crate) fn prepare(schema: &Value, at: &str, whitespace: JsonWhitespace) -> Result<Value, FormError> {
    let mut schema = match schema {
        Value::Bool(true) => json!({}),
        Value::Bool(false) => return Err(FormError::new(at, "allows no value")),
        Value::Object(_) => schema.clone(),
        _ => return Err(FormError::new(at, "must be an object or a boolean")),
    };
    check_schema(&schema, at)?;
    check(&mut schema, at, 0)?;
    let bytes = schema.to_string().len();
    if bytes > SCHEMA_BYTES_MAX {
        return Err(FormError::new(
            at,
            format!("has {bytes} bytes without whitespace, which exceeds the limit of {SCHEMA_BYTES_MAX}"),
        ));
    }
    if let Value::Object(schema) = &mut schema {
        schema.insert(LAYOUT.to_owned(), whitespace.options());
    }
    Ok(schema)
}

impl JsonWhitespace {
    fn options(self) -> Value {
        match self {
            Self::Flexible => {
                json!({"whitespace_pattern": format!("[\\x20\\x0A\\x0D\\x09]{{1,{SPACE_MAX}}}")})
            }
            Self::Compact => json!({
                "whitespace_flexible": false,
                "item_separator": ", ?",
                "key_separator": ": ?",
            }),
        }
    }
}

/// Checks a schema, removes formats that are annotations, and rewrites patterns and the formats in [`PATTERNS`] for
/// llguidance.
fn check(schema: &mut Value, at: &str, depth: usize) -> Result<(), FormError> {
    if depth > SCHEMA_DEPTH_MAX {
        return Err(FormError::new(at, format!("is nested deeper than {SCHEMA_DEPTH_MAX} levels")));
    }
    let schema = match schema {
        Value::Bool(_) => return Ok(()),
        Value::Object(schema) => schema,
        _ => return Err(FormError::new(at, "must be an object or a boolean")),
    };
    for (keyword, kind) in KEYWORDS {
        if let Some(value) = schema.get_mut(keyword) {
            check_keyword(kind, value, &format!("{at}.{keyword}"), depth)?;
        }
    }
    let is_enforced = |format: &Value| format.as_str().is_some_and(|format| FORMATS.contains(&format));
    if schema.get("format").is_some_and(|format| !is_enforced(format)) {
        schema.remove("format");
    }
    let pattern = schema.get("format").and_then(|format| PATTERNS.iter().find(|(name, _)| format == name));
    if let Some((_, pattern)) = pattern
        && !schema.contains_key("pattern")
    {
        schema.remove("format");
        schema.insert("pattern".to_owned(), Value::from(*pattern));
    }
    if let Some(Value::String(pattern)) = schema.get_mut("pattern") {
        *pattern = quotable(pattern);
    }
    if let Some(Value::Object(patterns)) = schema.get_mut("patternProperties") {
        *patterns =
            std::mem::take(patterns).into_iter().map(|(name, inner)| (quotable(&name), inner)).collect();
    }
    schema.remove(LAYOUT);
    Ok(())
}

/// Excludes the character NUL from those classes of a pattern that may contain all control characters.
///
/// When llguidance (1.9) applies a pattern to a JSON string, it treats a class that contains all control characters as
/// if the class also contained the quotation mark and the backslash: `[^"]` then matches `\"`. Classes without NUL are
/// not affected.
fn quotable(pattern: &str) -> String {
    let mut quotable = String::with_capacity(pattern.len());
    let mut rest = pattern;
    while let Some(letter) = rest.chars().next() {
        let length = match letter {
            '\\' => 1 + rest[1..].chars().next().map_or(0, char::len_utf8),
            '[' => class_length(rest),
            letter => letter.len_utf8(),
        };
        let (part, after) = rest.split_at(length);
        let may_have_all = ["[^", "\\x", "\\u", "\\0", "\\p", "\\P"].iter().any(|sign| part.contains(sign));
        if letter == '[' && part.len() > 1 && may_have_all {
            quotable.push_str(&format!("[{part}&&[^\\x00]]"));
        } else {
            quotable.push_str(part);
        }
        rest = after;
    }
    quotable
}

/// The length of the class at the start of `text`, in bytes, or 1 if the class is not closed.
fn class_length(text: &str) -> usize {
    let mut depth = 0;
    let mut letters = text.char_indices().peekable();
    while let Some((at, letter)) = letters.next() {
        match letter {
            '\\' => drop(letters.next()),
            '[' => {
                depth += 1;
                letters.next_if(|(_, letter)| *letter == '^');
                // A closing bracket in the first position does not close the class.
                letters.next_if(|(_, letter)| *letter == ']');
            }
            ']' if depth == 1 => return at + 1,
            ']' => depth -= 1,
            _ => {}
        }
    }
    1
}

fn check_keyword(kind: Kind, value: &mut Value, at: &str, depth: usize) -> Result<(), FormError> {
    let wrong = |problem: &str| Err(FormError::new(at, problem));
    match (kind, value) {
        (Kind::SchemaOrList | Kind::SchemaList, Value::Array(schemas)) => {
            if schemas.is_empty() && kind == Kind::SchemaList {
                return wrong("is empty");
            }
            let mut each = schemas.iter_mut().enumerate();
            each.try_for_each(|(index, schema)| check(schema, &format!("{at}[{index}]"), depth + 1))
        }
        (Kind::Schema | Kind::SchemaOrList, schema) => check(schema, at, depth + 1),
        (Kind::SchemaMap, Value::Object(schemas)) => {
            let mut each = schemas.iter_mut();
            each.try_for_each(|(name, schema)| check(schema, &format!("{at}.{name}"), depth + 1))
        }
        (Kind::Types, Value::String(name)) => check_type(name, at),
        (Kind::Types, Value::Array(names)) => {
            if names.is_empty() {
                return wrong("is empty");
            }
            names.iter().try_for_each(|name| check_type(name.as_str().unwrap_or_default(), at))
        }
        (Kind::Values, Value::Array(values)) if !values.is_empty() => Ok(()),
        (Kind::Names, Value::Array(names)) if names.iter().all(Value::is_string) => Ok(()),
        (Kind::Text, Value::String(_)) => Ok(()),
        (Kind::Number, Value::Number(_)) => Ok(()),
        (Kind::Count, Value::Number(count)) if count.as_f64().is_some_and(is_count) => Ok(()),
        (Kind::SchemaList, _) => wrong("must be an array of schemas"),
        (Kind::SchemaMap, _) => wrong("must be an object of schemas"),
        (Kind::Types, _) => wrong("must be a string or an array of strings"),
        (Kind::Values, _) => wrong("must be an array of at least one value"),
        (Kind::Names, _) => wrong("must be an array of strings"),
        (Kind::Text, _) => wrong("must be a string"),
        (Kind::Number, _) => wrong("must be a number"),
        (Kind::Count, _) => wrong("must be a non-negative integer"),
    }
}

fn is_count(count: f64) -> bool {
    count >= 0.0 && count.fract() == 0.0
}

fn check_type(name: &str, at: &str) -> Result<(), FormError> {
    if TYPES.contains(&name) {
        return Ok(());
    }
    Err(FormError::new(at, format!("{name:?} is not one of {}", TYPES.join(", "))))
}

/// The schemas directly within a schema, with their paths relative to it.
pub(crate) fn subschemas(schema: &Value) -> Vec<(String, &Value)> {
    let Value::Object(schema) = schema else { return Vec::new() };
    let mut found = Vec::new();
    for (keyword, kind) in KEYWORDS {
        match (kind, schema.get(keyword)) {
            (Kind::Schema | Kind::SchemaOrList, Some(inner @ Value::Object(_))) => {
                found.push((format!(".{keyword}"), inner));
            }
            (Kind::SchemaOrList | Kind::SchemaList, Some(Value::Array(list))) => {
                let each = list.iter().enumerate();
                found.extend(each.map(|(index, inner)| (format!(".{keyword}[{index}]"), inner)));
            }
            (Kind::SchemaMap, Some(Value::Object(map))) => {
                found.extend(map.iter().map(|(name, inner)| (format!(".{keyword}.{name}"), inner)));
            }
            _ => {}
        }
    }
    found
}

/// Makes a schema within `root` self-contained by adding the definitions that the schema may refer to.
pub(crate) fn with_definitions(schema: &Value, root: &Value) -> Value {
    let (Value::Object(schema), Value::Object(root)) = (schema, root) else { return schema.clone() };
    let mut whole: Map<String, Value> = schema.clone();
    for definitions in ["$defs", "definitions"] {
        if let Some(map) = root.get(definitions)
            && !whole.contains_key(definitions)
        {
            whole.insert(definitions.to_owned(), map.clone());
        }
    }
    Value::Object(whole)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_have_the_path_of_an_invalid_part() {
        for (schema, place, problem) in [
            (json!(7), "s", "must be an object or a boolean"),
            (json!(false), "s", "allows no value"),
            (
                json!({"type": "text"}),
                "s.type",
                "\"text\" is not one of string, number, integer, boolean, null, array, object",
            ),
            (json!({"type": []}), "s.type", "is empty"),
            (
                json!({"properties": {"a": {"items": {"type": 3}}}}),
                "s.properties.a.items.type",
                "must be a string or an array of strings",
            ),
            (
                json!({"anyOf": [{}, {"enum": []}]}),
                "s.anyOf[1].enum",
                "must be an array of at least one value",
            ),
            (json!({"oneOf": {}}), "s.oneOf", "must be an array of schemas"),
            (json!({"properties": []}), "s.properties", "must be an object of schemas"),
            (json!({"required": [1]}), "s.required", "must be an array of strings"),
            (
                json!({"$defs": {"x": {"minLength": -1}}}),
                "s.$defs.x.minLength",
                "must be a non-negative integer",
            ),
            (json!({"minimum": "1"}), "s.minimum", "must be a number"),
            (json!({"pattern": 1}), "s.pattern", "must be a string"),
        ] {
            let invalid = prepare(&schema, "s", JsonWhitespace::Flexible).unwrap_err();
            assert_eq!((invalid.at.as_str(), invalid.problem.as_str()), (place, problem), "{schema}");
        }
        let mut deep = json!({});
        for _ in 0..=SCHEMA_DEPTH_MAX {
            deep = json!({"items": deep});
        }
        assert!(
            prepare(&deep, "s", JsonWhitespace::Flexible)
                .unwrap_err()
                .problem
                .starts_with("is nested deeper")
        );
        let large = json!({"enum": ["x".repeat(SCHEMA_BYTES_MAX)]});
        assert!(
            prepare(&large, "s", JsonWhitespace::Flexible).unwrap_err().problem.contains("exceeds the limit")
        );
    }

    #[test]
    fn classes_that_may_contain_all_control_characters_exclude_nul() {
        for (pattern, expected) in [
            ("^[a-z]+\\[^x]$", "^[a-z]+\\[^x]$"),
            ("^[^\"]*$", "^[[^\"]&&[^\\x00]]*$"),
            ("[^]\\]]x[\\x00-y]", "[[^]\\]]&&[^\\x00]]x[[\\x00-y]&&[^\\x00]]"),
            ("[[^a]b]", "[[[^a]b]&&[^\\x00]]"),
            ("[^open", "[^open"),
        ] {
            assert_eq!(quotable(pattern), expected, "{pattern}");
        }
    }

    #[test]
    fn formats_that_are_annotations_are_removed_and_properties_named_format_stay() {
        let schema = json!({
            "properties": {"format": {"type": "string", "format": "binary"}, "d": {"format": "uuid"}},
        });
        let prepared = prepare(&schema, "s", JsonWhitespace::Compact).unwrap();
        assert_eq!(prepared["properties"], json!({"format": {"type": "string"}, "d": {"format": "uuid"}}));
    }
}
