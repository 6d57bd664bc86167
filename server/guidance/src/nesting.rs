//! Limits the parts of forms that make the stack or the memory of llguidance grow, and runs its compiler on a large
//! stack.
//!
//! llguidance's compiler recurses for each reference from one rule to another, for each group, for each `$ref`, and for
//! each property of an object. A stack overflow would abort the process. If a text must match several patterns at the
//! same time, llguidance's lexer considers every combination of their states.

use std::collections::HashSet;
use std::panic::resume_unwind;
use std::thread;

use serde_json::{Map, Value};

use crate::FormError;
use crate::limits::{
    COMBINED_PATTERNS_MAX, CONJUNCTIONS_MAX, GRAMMAR_GROUPS_MAX, PATTERN_PROPERTIES_MAX, PROPERTIES_MAX,
    REFERENCES_MAX,
};

/// Size of the stack on which a form is compiled, in bytes. llguidance (1.9) uses up to 4 KB of stack for a rule, a
/// group or a level of JSON. Each `$ref` adds at most 127 such levels, and up to 320 KB for intersections. Memory is
/// used only for the part of the stack that a compilation reaches.
const STACK_BYTES: usize = 256 << 20;

/// Runs `work` on a stack that suffices for every form within the limits.
///
/// # Errors
/// No thread can be started.
pub(crate) fn on_large_stack<T: Send>(work: impl FnOnce() -> T + Send) -> Result<T, String> {
    thread::scope(|scope| {
        let builder = thread::Builder::new().name("compile".to_owned()).stack_size(STACK_BYTES);
        let thread = builder.spawn_scoped(scope, work).map_err(|error| error.to_string())?;
        Ok(thread.join().unwrap_or_else(|panic| resume_unwind(panic)))
    })
}

/// Rejects a schema with so many properties, references or patterns that llguidance would need too much stack, time or
/// memory.
pub(crate) fn check_schema(schema: &Value, at: &str) -> Result<(), FormError> {
    let mut parts = SchemaCounts::default();
    parts.count(schema);
    let SchemaCounts { properties, pattern_properties, references, patterns, combines } = parts;
    let combined_patterns = if combines { patterns.len() } else { 0 };
    for (count, max, name) in [
        (properties, PROPERTIES_MAX, "properties"),
        (pattern_properties, PATTERN_PROPERTIES_MAX, "pattern properties"),
        (references.len(), REFERENCES_MAX, "different references"),
        (combined_patterns, COMBINED_PATTERNS_MAX, "different patterns alongside combined schemas"),
    ] {
        if count > max {
            return Err(FormError::new(at, format!("has {count} {name}, which exceeds the limit of {max}")));
        }
    }
    Ok(())
}

/// Rejects a grammar in Lark with too many rules and groups, too many `&` operators, or a schema that [`check_schema`]
/// rejects.
pub(crate) fn check_grammar(lark: &str, at: &str) -> Result<(), FormError> {
    // The count includes characters in literals, because only llguidance determines reliably where literals begin and
    // end.
    let groups = lark.bytes().filter(|byte| b":([~".contains(byte)).count();
    if groups > GRAMMAR_GROUPS_MAX {
        return Err(FormError::new(
            at,
            format!(
                "has more than {GRAMMAR_GROUPS_MAX} rules and groups (each `:`, `(`, `[` and `~` in its Lark text \
                 counts as one)"
            ),
        ));
    }
    let count = conjunctions(lark);
    if count > CONJUNCTIONS_MAX {
        let problem = format!("has {count} `&` operators, which exceeds the limit of {CONJUNCTIONS_MAX}");
        return Err(FormError::new(at, problem));
    }
    schemas(lark).try_for_each(|schema| check_schema(&schema, at))
}

/// The JSON schemas in a grammar in Lark. Invalid JSON is skipped, because llguidance reports it.
pub(crate) fn schemas(lark: &str) -> impl Iterator<Item = Value> {
    lark.match_indices("%json").filter_map(|(start, keyword)| {
        serde_json::Deserializer::from_str(&lark[start + keyword.len()..]).into_iter().next()?.ok()
    })
}

/// The number of `&` operators in a grammar in Lark.
pub(crate) fn conjunctions(lark: &str) -> usize {
    let mut count = 0;
    let mut rest = lark.as_bytes();
    while let [first, after @ ..] = rest {
        let skipped = match first {
            b'"' => quoted(after, b'"'),
            b'#' => line(after),
            b'/' if after.first() == Some(&b'/') => line(after),
            b'/' => quoted(after, b'/'),
            b'<' => after.iter().position(|byte| b"<> \t\r\n".contains(byte)).unwrap_or(0),
            b'&' => {
                count += 1;
                0
            }
            _ => 0,
        };
        rest = &after[skipped..];
    }
    count
}

/// The length in bytes of the rest of a string or a regular expression, including the closing delimiter `end`.
fn quoted(text: &[u8], end: u8) -> usize {
    let mut is_escaped = false;
    let is_end = |byte: &u8| {
        let is_end = *byte == end && !is_escaped;
        is_escaped = *byte == b'\\' && !is_escaped;
        is_end
    };
    text.iter().position(is_end).map_or(text.len(), |position| position + 1)
}

/// The length in bytes of the rest of a line, without the newline.
fn line(text: &[u8]) -> usize {
    text.iter().position(|byte| *byte == b'\n').unwrap_or(text.len())
}

/// The counts of the limited parts of a schema, at any depth.
#[derive(Default)]
struct SchemaCounts<'s> {
    properties: usize,
    pattern_properties: usize,
    references: HashSet<&'s str>,
    patterns: HashSet<&'s str>,
    /// Whether a value may have to be valid under several schemas.
    combines: bool,
}

impl<'s> SchemaCounts<'s> {
    fn count(&mut self, value: &'s Value) {
        match value {
            Value::Array(values) => values.iter().for_each(|value| self.count(value)),
            Value::Object(members) => {
                self.count_keywords(members);
                members.values().for_each(|value| self.count(value));
            }
            _ => {}
        }
    }

    fn count_keywords(&mut self, schema: &'s Map<String, Value>) {
        let object = |keyword| schema.get(keyword).and_then(Value::as_object);
        let properties = object("properties");
        self.properties += properties.map_or(0, Map::len);
        self.pattern_properties += object("patternProperties").map_or(0, Map::len);
        if let Some(Value::Array(names)) = schema.get("required") {
            let is_property = |name: &&Value| {
                name.as_str().is_some_and(|name| properties.is_some_and(|map| map.contains_key(name)))
            };
            self.properties += names.iter().filter(|name| !is_property(name)).count();
        }
        self.properties +=
            ["enum", "const"].iter().filter_map(|name| schema.get(*name)).map(keys).sum::<usize>();
        if let Some(Value::String(target)) = schema.get("$ref") {
            self.references.insert(target);
        }
        if let Some(Value::String(pattern)) = schema.get("pattern") {
            self.patterns.insert(pattern);
        }
        let count =
            |keywords: &[&str]| keywords.iter().filter(|keyword| schema.contains_key(**keyword)).count();
        let applied = count(&["$ref", "anyOf", "oneOf"]);
        self.combines |=
            schema.contains_key("allOf") || applied > 1 || (applied == 1 && count(&CONSTRAINTS) > 0);
    }
}

/// Keywords that can contain patterns. A value must match these in addition to the patterns of a `$ref`, `anyOf` or
/// `oneOf` in the same schema.
const CONSTRAINTS: [&str; 7] = [
    "pattern",
    "properties",
    "patternProperties",
    "additionalProperties",
    "propertyNames",
    "items",
    "prefixItems",
];

/// The number of keys of all objects in a value.
fn keys(value: &Value) -> usize {
    match value {
        Value::Array(values) => values.iter().map(keys).sum(),
        Value::Object(members) => members.len() + members.values().map(keys).sum::<usize>(),
        _ => 0,
    }
}
