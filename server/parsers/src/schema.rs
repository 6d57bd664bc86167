//! The tools of a request: their names, and the types of their parameters.

use std::collections::HashMap;

use serde_json::Value;

/// The tools that a request offered.
#[derive(Debug, Default)]
pub struct Tools {
    tools: HashMap<String, HashMap<String, Types>>,
}

impl Tools {
    /// Creates a list of tools by name, each with the JSON schema of its parameters if it has one.
    pub fn new<'a>(tools: impl IntoIterator<Item = (&'a str, Option<&'a Value>)>) -> Self {
        let tools = tools
            .into_iter()
            .map(|(name, schema)| (name.to_owned(), schema.map(parameters).unwrap_or_default()))
            .collect();
        Self { tools }
    }

    /// Whether the request offers no tools.
    pub fn is_empty(&self) -> bool {
        self.tools.is_empty()
    }

    /// Returns the types that a parameter may have. They are unknown ([`Types::is_unknown`]) for a parameter that the
    /// schema does not list.
    pub(crate) fn types(&self, tool: &str, parameter: &str) -> Types {
        self.tools.get(tool).and_then(|parameters| parameters.get(parameter)).copied().unwrap_or_default()
    }
}

/// The types that a value may have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Types {
    pub(crate) text: bool,
    pub(crate) integer: bool,
    pub(crate) number: bool,
    pub(crate) boolean: bool,
    pub(crate) null: bool,
    pub(crate) object: bool,
    pub(crate) array: bool,
}

impl Types {
    /// Whether the type is unknown.
    pub(crate) fn is_unknown(self) -> bool {
        self == Self::default()
    }

    /// Whether only strings are allowed, or the type is unknown.
    pub(crate) fn is_text_only(self) -> bool {
        self.is_unknown() || self == Self { text: true, ..Self::default() }
    }

    fn add_name(&mut self, name: &str) {
        match name {
            "string" => self.text = true,
            "integer" => self.integer = true,
            "number" => self.number = true,
            "boolean" => self.boolean = true,
            "null" => self.null = true,
            "object" => self.object = true,
            "array" => self.array = true,
            _ => {}
        }
    }

    fn add_value(&mut self, value: &Value) {
        self.add_name(match value {
            Value::Null => "null",
            Value::Bool(_) => "boolean",
            Value::Number(number) if number.is_f64() => "number",
            Value::Number(_) => "integer",
            Value::String(_) => "string",
            Value::Array(_) => "array",
            Value::Object(_) => "object",
        });
    }
}

/// Largest number of schemas to inspect for a parameter, through references and unions. Further schemas are ignored.
const SCHEMAS_MAX: usize = 64;

fn parameters(schema: &Value) -> HashMap<String, Types> {
    let Some(properties) = schema.get("properties").and_then(Value::as_object) else {
        return HashMap::new();
    };
    let types = |property| {
        let (mut types, mut left) = (Types::default(), SCHEMAS_MAX);
        add(&mut types, property, schema, &mut left);
        types
    };
    properties.iter().map(|(name, property)| (name.clone(), types(property))).collect()
}

fn add(types: &mut Types, schema: &Value, root: &Value, left: &mut usize) {
    if *left == 0 {
        return;
    }
    *left -= 1;
    match schema.get("type") {
        Some(Value::String(name)) => types.add_name(name),
        Some(Value::Array(names)) => {
            names.iter().filter_map(Value::as_str).for_each(|name| types.add_name(name));
        }
        _ => add_untyped(types, schema, root, left),
    }
}

/// Adds the types that a schema without the keyword `type` implies.
fn add_untyped(types: &mut Types, schema: &Value, root: &Value, left: &mut usize) {
    if let Some(target) = schema.get("$ref").and_then(Value::as_str)
        && let Some(target) = target.strip_prefix('#').and_then(|pointer| root.pointer(pointer))
    {
        add(types, target, root, left);
    }
    for union in ["anyOf", "oneOf", "allOf"] {
        let members = schema.get(union).and_then(Value::as_array);
        members.into_iter().flatten().for_each(|member| add(types, member, root, left));
    }
    let values = schema.get("enum").and_then(Value::as_array).into_iter().flatten();
    values.chain(schema.get("const")).for_each(|value| types.add_value(value));
    let has_any = |keywords: &[&str]| keywords.iter().any(|keyword| schema.get(*keyword).is_some());
    if types.is_unknown() || !has_any(&["$ref", "anyOf", "oneOf", "allOf", "enum", "const"]) {
        for (name, keywords) in KEYWORDS {
            if has_any(keywords) {
                types.add_name(name);
            }
        }
    }
}

/// The types that a schema implies by keywords that constrain only values of this type.
const KEYWORDS: [(&str, &[&str]); 4] = [
    ("object", &["properties", "patternProperties", "additionalProperties", "required"]),
    ("array", &["items", "prefixItems", "minItems", "maxItems"]),
    ("number", &["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"]),
    ("string", &["minLength", "maxLength", "pattern", "format"]),
];

#[cfg(test)]
mod tests;
