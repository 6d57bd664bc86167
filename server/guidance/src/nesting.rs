//! Limits what the compiler of llguidance recurses over, and provides the stack for it.
//!
//! The compiler calls itself for each reference from a rule to another, for each group, for each `$ref`, and for each
//! property of an object. A stack overflow would end the process.

use std::collections::HashSet;
use std::panic::resume_unwind;
use std::thread;

use serde_json::{Map, Value};

use crate::FormError;
use crate::limits::{GRAMMAR_GROUPS_MAX, PATTERN_PROPERTIES_MAX, PROPERTIES_MAX, REFERENCES_MAX};

/// Size of the stack on which a form is compiled, in bytes. llguidance (1.9) uses up to 4 KB for a rule, a group or a level
/// of JSON. A `$ref` has at most 127 such levels, and up to 320 KB for intersections. Memory is only used as far as the
/// stack grows.
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

/// Rejects a schema with too many parts of the kinds that llguidance recurses over.
pub(crate) fn check_schema(schema: &Value, at: &str) -> Result<(), FormError> {
    let mut parts = Parts::default();
    parts.count(schema);
    let Parts { properties, pattern_properties, references } = parts;
    for (count, max, name) in [
        (properties, PROPERTIES_MAX, "properties"),
        (pattern_properties, PATTERN_PROPERTIES_MAX, "pattern properties"),
        (references.len(), REFERENCES_MAX, "different references"),
    ] {
        if count > max {
            return Err(FormError::new(at, format!("has {count} {name}, which exceeds the limit of {max}")));
        }
    }
    Ok(())
}

/// Rejects a grammar in Lark with too many rules and groups, or with a schema that [`check_schema`] rejects.
pub(crate) fn check_grammar(lark: &str, at: &str) -> Result<(), FormError> {
    // The characters are also counted in literals, because only llguidance knows where these are.
    let groups = lark.bytes().filter(|byte| b":([~".contains(byte)).count();
    if groups > GRAMMAR_GROUPS_MAX {
        return Err(FormError::new(
            at,
            format!("has more than {GRAMMAR_GROUPS_MAX} rules and groups (characters `:`, `(`, `[` and `~`)"),
        ));
    }
    for (start, keyword) in lark.match_indices("%json") {
        let mut values = serde_json::Deserializer::from_str(&lark[start + keyword.len()..]).into_iter();
        // llguidance reports what is not JSON.
        if let Some(Ok(schema)) = values.next() {
            check_schema(&schema, at)?;
        }
    }
    Ok(())
}

/// The parts of a schema that are limited, wherever they are in it.
#[derive(Default)]
struct Parts<'s> {
    properties: usize,
    pattern_properties: usize,
    references: HashSet<&'s str>,
}

impl<'s> Parts<'s> {
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
    }
}

/// The number of keys of all objects in a value.
fn keys(value: &Value) -> usize {
    match value {
        Value::Array(values) => values.iter().map(keys).sum(),
        Value::Object(members) => members.len() + members.values().map(keys).sum::<usize>(),
        _ => 0,
    }
}
