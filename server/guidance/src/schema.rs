//! JSON schemas before they are compiled: whether they are any, where they are not, and how the JSON is laid out.
//!
//! What a keyword means is llguidance's business, which refuses those that it cannot follow.

use serde_json::{Map, Value, json};

use crate::Invalid;
use crate::limits::{SCHEMA_BYTES_MAX, SCHEMA_DEPTH_MAX};

/// How JSON is laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Layout {
    /// With space between its parts, up to [`SPACE_MAX`] characters at a place.
    Free,
    /// With at most a space after a comma or colon.
    Tight,
}

/// Number of consecutive whitespace characters in JSON that follows a schema. Without a limit, a model that has lost
/// its way writes whitespace until its tokens are used up.
///
/// Beyond it: the model must continue with another character.
const SPACE_MAX: usize = 64;

/// The keyword by which llguidance is told how to lay out.
const LAYOUT: &str = "x-guidance";

/// Formats of strings that are enforced. JSON Schema makes of all others a remark.
const FORMATS: [&str; 10] =
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"];

/// A day that there is, 29 February in leap years.
macro_rules! day {
    () => {
        r"(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)"
    };
}

/// A time without leap seconds, since there are hardly any.
macro_rules! time {
    () => {
        r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
    };
}

/// A name of a host that every reader takes for one.
macro_rules! host {
    () => {
        r"[A-Za-z0-9]{1,20}(?:-[A-Za-z0-9]{1,10}){0,2}(?:\.[A-Za-z0-9]{1,20}(?:-[A-Za-z0-9]{1,10}){0,2}){0,4}"
    };
}

/// A mailbox of at most the 64 characters that it may have.
macro_rules! mailbox {
    () => {
        r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]{1,40}(?:\.[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]{1,11}){0,2}"
    };
}

/// Formats that are enforced by patterns of our own, which admit no day, no second and no length that there is not.
const PATTERNS: [(&str, &str); 5] = [
    ("date", concat!("^", day!(), "$")),
    ("time", concat!("^", time!(), "$")),
    ("date-time", concat!("^", day!(), "T", time!(), "$")),
    ("hostname", concat!("^", host!(), "$")),
    ("email", concat!("^", mailbox!(), "@", host!(), "$")),
];

const TYPES: [&str; 7] = ["string", "number", "integer", "boolean", "null", "array", "object"];

/// What the value of a keyword is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Schema,
    /// One, or a list of them.
    SchemaOrList,
    /// A list of them, with at least one.
    SchemaList,
    SchemaMap,
    Types,
    /// A list of any values, with at least one.
    Values,
    Names,
    Text,
    Number,
    Count,
}

/// The keywords whose values are looked at.
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

/// The schema as it is compiled.
///
/// # Errors
/// It is none, or too large, and where.
pub(crate) fn prepare(schema: &Value, at: &str, layout: Layout) -> Result<Value, Invalid> {
    let mut schema = match schema {
        Value::Bool(true) => json!({}),
        Value::Bool(false) => return Err(Invalid::new(at, "allows no value")),
        Value::Object(_) => schema.clone(),
        _ => return Err(Invalid::new(at, "is neither an object nor a boolean")),
    };
    check(&mut schema, at, 0)?;
    let bytes = schema.to_string().len();
    if bytes > SCHEMA_BYTES_MAX {
        return Err(Invalid::new(at, format!("has {bytes} bytes, more than {SCHEMA_BYTES_MAX}")));
    }
    if let Value::Object(schema) = &mut schema {
        schema.insert(LAYOUT.to_owned(), layout.options());
    }
    Ok(schema)
}

impl Layout {
    fn options(self) -> Value {
        match self {
            Self::Free => json!({"whitespace_pattern": format!("[\\x20\\x0A\\x0D\\x09]{{1,{SPACE_MAX}}}")}),
            Self::Tight => json!({
                "whitespace_flexible": false,
                "item_separator": ", ?",
                "key_separator": ": ?",
            }),
        }
    }
}

/// Looks through a schema, and takes out what means nothing.
fn check(schema: &mut Value, at: &str, depth: usize) -> Result<(), Invalid> {
    if depth > SCHEMA_DEPTH_MAX {
        return Err(Invalid::new(at, format!("nests deeper than {SCHEMA_DEPTH_MAX}")));
    }
    let schema = match schema {
        Value::Bool(_) => return Ok(()),
        Value::Object(schema) => schema,
        _ => return Err(Invalid::new(at, "is neither an object nor a boolean")),
    };
    for (keyword, kind) in KEYWORDS {
        if let Some(value) = schema.get_mut(keyword) {
            check_keyword(kind, value, &format!("{at}.{keyword}"), depth)?;
        }
    }
    let known = |format: &Value| format.as_str().is_some_and(|format| FORMATS.contains(&format));
    if schema.get("format").is_some_and(|format| !known(format)) {
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

/// A pattern whose classes are without the character NUL.
///
/// A class with all control characters is written in JSON by llguidance (1.9) as if it had the quotation mark and the
/// backslash as well: `[^"]` admits `\"`. One without NUL is written exactly.
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

/// The bytes of the class that `text` begins with, or 1 if it has no end.
fn class_length(text: &str) -> usize {
    let mut depth = 0;
    let mut letters = text.char_indices().peekable();
    while let Some((at, letter)) = letters.next() {
        match letter {
            '\\' => drop(letters.next()),
            '[' => {
                depth += 1;
                letters.next_if(|(_, letter)| *letter == '^');
                // In the first place it is no end.
                letters.next_if(|(_, letter)| *letter == ']');
            }
            ']' if depth == 1 => return at + 1,
            ']' => depth -= 1,
            _ => {}
        }
    }
    1
}

fn check_keyword(kind: Kind, value: &mut Value, at: &str, depth: usize) -> Result<(), Invalid> {
    let wrong = |problem: &str| Err(Invalid::new(at, problem));
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
        (Kind::SchemaList, _) => wrong("is no array of schemas"),
        (Kind::SchemaMap, _) => wrong("is no object of schemas"),
        (Kind::Types, _) => wrong("is neither a string nor an array of strings"),
        (Kind::Values, _) => wrong("is no array of at least one value"),
        (Kind::Names, _) => wrong("is no array of strings"),
        (Kind::Text, _) => wrong("is no string"),
        (Kind::Number, _) => wrong("is no number"),
        (Kind::Count, _) => wrong("is no integer from 0"),
    }
}

fn is_count(count: f64) -> bool {
    count >= 0.0 && count.fract() == 0.0
}

fn check_type(name: &str, at: &str) -> Result<(), Invalid> {
    if TYPES.contains(&name) {
        return Ok(());
    }
    Err(Invalid::new(at, format!("{name:?} is none of {}", TYPES.join(", "))))
}

/// The schemas within a schema, directly, with their paths from it.
pub(crate) fn within(schema: &Value) -> Vec<(String, &Value)> {
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

/// A schema within `root` for itself: with the definitions that it may refer to.
pub(crate) fn by_itself(schema: &Value, root: &Value) -> Value {
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
    fn what_is_no_schema_is_told_with_its_place() {
        for (schema, place, problem) in [
            (json!(7), "s", "is neither an object nor a boolean"),
            (json!(false), "s", "allows no value"),
            (
                json!({"type": "text"}),
                "s.type",
                "\"text\" is none of string, number, integer, boolean, null, array, object",
            ),
            (json!({"type": []}), "s.type", "is empty"),
            (
                json!({"properties": {"a": {"items": {"type": 3}}}}),
                "s.properties.a.items.type",
                "is neither a string nor an array of strings",
            ),
            (json!({"anyOf": [{}, {"enum": []}]}), "s.anyOf[1].enum", "is no array of at least one value"),
            (json!({"oneOf": {}}), "s.oneOf", "is no array of schemas"),
            (json!({"properties": []}), "s.properties", "is no object of schemas"),
            (json!({"required": [1]}), "s.required", "is no array of strings"),
            (json!({"$defs": {"x": {"minLength": -1}}}), "s.$defs.x.minLength", "is no integer from 0"),
            (json!({"minimum": "1"}), "s.minimum", "is no number"),
            (json!({"pattern": 1}), "s.pattern", "is no string"),
        ] {
            let invalid = prepare(&schema, "s", Layout::Free).unwrap_err();
            assert_eq!((invalid.at.as_str(), invalid.problem.as_str()), (place, problem), "{schema}");
        }
        let mut deep = json!({});
        for _ in 0..=SCHEMA_DEPTH_MAX {
            deep = json!({"items": deep});
        }
        assert!(prepare(&deep, "s", Layout::Free).unwrap_err().problem.starts_with("nests deeper"));
        let large = json!({"enum": ["x".repeat(SCHEMA_BYTES_MAX)]});
        assert!(prepare(&large, "s", Layout::Free).unwrap_err().problem.contains("bytes, more than"));
    }

    #[test]
    fn classes_that_may_have_all_control_characters_are_without_one() {
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
    fn formats_that_are_remarks_are_left_out_and_properties_of_that_name_stay() {
        let schema = json!({
            "properties": {"format": {"type": "string", "format": "binary"}, "d": {"format": "uuid"}},
        });
        let prepared = prepare(&schema, "s", Layout::Tight).unwrap();
        assert_eq!(prepared["properties"], json!({"format": {"type": "string"}, "d": {"format": "uuid"}}));
    }
}
