//! The parts of a JSON schema that all notations for arguments other than JSON process in the same way: references,
//! members and alternatives.
//!
//! Where a value is written as in JSON, the same keywords are supported as for JSON. Elsewhere, keywords that cannot be
//! enforced are rejected with their path.

use serde_json::{Map, Value};

use super::type_set::TypeSet;
use crate::FormError;
use crate::lark::{Writer, choice, join};
use crate::limits::ELEMENTS_MAX;

/// Number of consecutive `$ref` references in the schema of a tool, if the call format of the model is not JSON.
///
/// If exceeded: 400, `invalid_value`, if the tool is strict; otherwise the arguments of the tool are not constrained.
const REFERENCES_MAX: usize = 16;
/// Nesting depth of `anyOf` and `oneOf` in the schema of a tool, including those behind references, in Gemma's call
/// format and in those with tags.
///
/// If exceeded: 400, `invalid_value`, if the tool is strict; otherwise the arguments of the tool are not constrained.
const UNION_DEPTH_MAX: usize = 32;

/// A regular expression for the names of members that the schema does not list.
pub(super) const ANY_NAME: &str = "/[A-Za-z_][A-Za-z0-9_]{0,63}/";

/// A terminal for any text with the length that the schema of a string allows.
pub(super) fn text_of_length(schema: &Value) -> String {
    let count = |keyword: &str| schema.get(keyword).and_then(Value::as_f64).map(|count| count as u64);
    let min = count("minLength").unwrap_or(0);
    match count("maxLength") {
        None => format!("/(?s:.{{{min},}})/"),
        Some(max) => format!("/(?s:.{{{min},{}}})/", max.max(min)),
    }
}

/// The schema of all arguments, to which the schemas within it may refer.
pub(super) struct Root<'a> {
    pub(super) schema: &'a Value,
    pub(super) at: &'a str,
}

/// The members of an object.
pub(super) struct Members<'a> {
    pub(super) named: Vec<Member<'a>>,
    /// The schema of members with other names, with its path; `None` if such members are not allowed.
    pub(super) additional: Option<(&'a Value, String)>,
}

/// The expression for a member of an object.
pub(super) struct WrittenMember {
    pub(super) expression: String,
    pub(super) is_required: bool,
}

/// A part of a schema with its path.
#[derive(Clone, Copy)]
pub(super) struct LocatedSchema<'a> {
    pub(super) schema: &'a Value,
    pub(super) at: &'a str,
}

/// A member of an object.
pub(super) struct Member<'a> {
    pub(super) name: &'a str,
    pub(super) schema: &'a Value,
    pub(super) at: String,
    pub(super) is_required: bool,
}

/// The schema to which the references of a schema lead.
pub(super) struct TargetSchema<'a> {
    pub(super) schema: &'a Value,
    pub(super) at: String,
    /// The types that this schema and the schemas with the references allow.
    pub(super) types: TypeSet,
}

/// One of the alternatives of a value.
pub(super) struct Alternative<'a> {
    pub(super) values: AllowedValues<'a>,
    /// Whether the values of other alternatives are excluded (`oneOf`).
    pub(super) is_exclusive: bool,
    /// The schema of the alternative, which has no `$ref`, `anyOf` or `oneOf`.
    pub(super) schema: &'a Value,
    pub(super) at: String,
}

/// The values that an alternative allows.
pub(super) enum AllowedValues<'a> {
    /// Values of all types.
    Unconstrained,
    /// Values of the type with this name, which the keywords of the schema for this type constrain.
    OfType(&'static str),
    /// Only these values.
    Listed(Vec<&'a Value>),
}

/// The schema that allows every value.
pub(super) static ANY: Value = Value::Bool(true);

/// The keywords that combine schemas or list values.
const COMBINING_KEYWORDS: [&str; 8] = ["$ref", "allOf", "anyOf", "oneOf", "not", "if", "enum", "const"];
/// The keywords that may constrain listed values further.
const BOUNDS: [&str; 4] = ["minimum", "maximum", "minLength", "maxLength"];
/// The keywords that combine schemas, and that are supported only where the value is written as in JSON.
const JSON_ONLY_COMBINING_KEYWORDS: [&str; 3] = ["allOf", "not", "if"];
/// The other keywords that are supported only where the value is written as in JSON.
const JSON_ONLY_KEYWORDS: [&str; 12] = [
    "patternProperties",
    "propertyNames",
    "minProperties",
    "maxProperties",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "unevaluatedProperties",
    "contains",
    "uniqueItems",
    "prefixItems",
    "unevaluatedItems",
];

impl<'a> Root<'a> {
    /// Follows the references of a schema. An `allOf` that only refers to a single schema is a reference, too.
    pub(super) fn resolve(
        &self,
        mut schema: &'a Value,
        mut at: String,
    ) -> Result<TargetSchema<'a>, FormError> {
        let mut types = TypeSet::declared(schema);
        let mut followed = 0;
        loop {
            if let Some(reference) = schema.get("$ref").and_then(Value::as_str) {
                if followed == REFERENCES_MAX {
                    let problem = format!("is part of a chain of more than {REFERENCES_MAX} references");
                    return Err(FormError::new(at, problem));
                }
                followed += 1;
                reject_beside(schema, &at, "$ref")?;
                let target = reference.strip_prefix('#').and_then(|pointer| self.schema.pointer(pointer));
                schema = target.ok_or_else(|| {
                    let problem = format!(
                        "{reference:?} is not a JSON pointer to a part of the schema, such as #/$defs/name"
                    );
                    FormError::new(format!("{at}.$ref"), problem)
                })?;
                at = format!("{}{}", self.at, reference[1..].replace('/', "."));
            } else if let Some([only]) = schema.get("allOf").and_then(Value::as_array).map(Vec::as_slice)
                && beside(schema, "allOf").is_none()
            {
                schema = only;
                at.push_str(".allOf[0]");
            } else {
                return Ok(TargetSchema { schema, at, types });
            }
            types = types.intersection(TypeSet::declared(schema));
        }
    }

    /// The members of the arguments.
    pub(super) fn members(&self) -> Result<Members<'a>, FormError> {
        let TargetSchema { schema, at, types } = self.resolve(self.schema, self.at.to_owned())?;
        reject_json_only_keywords(schema, &at)?;
        for keyword in ["anyOf", "oneOf", "enum", "const"] {
            if schema.get(keyword).is_some() {
                return Err(unsupported(&at, keyword));
            }
        }
        if !types.contains(TypeSet::OBJECT) {
            return Err(FormError::new(format!("{at}.type"), "must be \"object\""));
        }
        object_members(schema, &at)
    }

    /// Returns the alternatives of a value: those of `anyOf` or `oneOf`, its types, or its listed values.
    pub(super) fn alternatives(
        &self,
        schema: &'a Value,
        at: &str,
    ) -> Result<Vec<Alternative<'a>>, FormError> {
        let mut search = AlternativeSearch { root: self, alternatives: Vec::new(), visited: 0 };
        search.add(schema, at.to_owned(), TypeSet::ALL, 0)?;
        if search.alternatives.is_empty() {
            return Err(FormError::new(at, "allows no value"));
        }
        Ok(search.alternatives)
    }
}

/// The search for the alternatives of a value.
struct AlternativeSearch<'r, 'a> {
    root: &'r Root<'a>,
    alternatives: Vec<Alternative<'a>>,
    /// The number of schemas that have been visited.
    visited: usize,
}

impl<'a> AlternativeSearch<'_, 'a> {
    /// Adds the alternatives of a schema that have one of `types`. `depth` is the number of unions around the schema.
    fn add(&mut self, schema: &'a Value, at: String, types: TypeSet, depth: usize) -> Result<(), FormError> {
        let TargetSchema { schema, at, types: declared } = self.root.resolve(schema, at)?;
        let types = types.intersection(declared);
        if depth > UNION_DEPTH_MAX {
            let problem = format!(
                "is an alternative that is nested deeper than {UNION_DEPTH_MAX} levels, or refers to itself"
            );
            return Err(FormError::new(at, problem));
        }
        self.visited += 1;
        if self.visited > ELEMENTS_MAX {
            let problem = format!("is one of more than {ELEMENTS_MAX} alternatives of a value");
            return Err(FormError::new(at, problem));
        }
        for keyword in ["anyOf", "oneOf"] {
            if let Some(Value::Array(schemas)) = schema.get(keyword) {
                reject_beside(schema, &at, keyword)?;
                let first = self.alternatives.len();
                for (index, one) in schemas.iter().enumerate() {
                    self.add(one, format!("{at}.{keyword}[{index}]"), types, depth + 1)?;
                }
                for one in &mut self.alternatives[first..] {
                    one.is_exclusive |= keyword == "oneOf";
                }
                return Ok(());
            }
        }
        if let Some((keyword, mut values)) = listed_values(schema) {
            reject_beside(schema, &at, keyword)?;
            values
                .retain(|value| types.contains(TypeSet::of_value(value)) && is_within_bounds(value, schema));
            if !values.is_empty() {
                self.push(AllowedValues::Listed(values), schema, at);
            }
            return Ok(());
        }
        if *schema == Value::Bool(false) {
            return Ok(());
        }
        let implied = TypeSet::implied(schema);
        let types = if types != TypeSet::ALL {
            types
        } else if implied.is_empty() {
            self.push(AllowedValues::Unconstrained, schema, at);
            return Ok(());
        } else {
            // JSON Schema would also allow all values to which the keywords do not apply, but the author of a schema
            // with `properties` or `minimum` rarely means that.
            implied
        };
        for name in types.names() {
            self.push(AllowedValues::OfType(name), schema, at.clone());
        }
        Ok(())
    }

    fn push(&mut self, values: AllowedValues<'a>, schema: &'a Value, at: String) {
        self.alternatives.push(Alternative { values, is_exclusive: false, schema, at });
    }
}

impl Alternative<'_> {
    /// The schema of the values of a scalar type.
    pub(super) fn scalar_schema(&self, name: &str) -> Value {
        let mut schema = Map::new();
        schema.insert("type".to_owned(), Value::from(name));
        for keyword in TypeSet::named(name).keywords() {
            if let Some(value) = self.schema.get(keyword) {
                schema.insert(keyword.to_owned(), value.clone());
            }
        }
        Value::Object(schema)
    }
}

/// Returns the values that `enum` or `const` lists, with this keyword; `None` if the schema has neither.
fn listed_values(schema: &Value) -> Option<(&'static str, Vec<&Value>)> {
    let listed = schema.get("enum").and_then(Value::as_array);
    match (schema.get("const"), listed) {
        (None, None) => None,
        (None, Some(values)) => Some(("enum", values.iter().collect())),
        (Some(value), Some(values)) if !values.contains(value) => Some(("const", Vec::new())),
        (Some(value), _) => Some(("const", vec![value])),
    }
}

/// Whether a listed value satisfies those of the [`BOUNDS`] that apply to its type.
fn is_within_bounds(value: &Value, schema: &Value) -> bool {
    let (size, min, max) = match value {
        Value::Number(number) => (number.as_f64(), "minimum", "maximum"),
        Value::String(text) => (Some(text.chars().count() as f64), "minLength", "maxLength"),
        _ => return true,
    };
    let bound = |keyword: &str| schema.get(keyword).and_then(Value::as_f64);
    size.is_none_or(|size| {
        bound(min).is_none_or(|min| min <= size) && bound(max).is_none_or(|max| size <= max)
    })
}

/// The members of an object whose schema has no reference and no alternatives.
pub(super) fn object_members<'a>(schema: &'a Value, at: &str) -> Result<Members<'a>, FormError> {
    let required: Vec<&str> = match schema.get("required") {
        Some(Value::Array(names)) => names.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    };
    let mut named = Vec::new();
    if let Some(Value::Object(properties)) = schema.get("properties") {
        named.extend(properties.iter().map(|(name, schema)| Member {
            name,
            schema,
            at: format!("{at}.properties.{name}"),
            is_required: required.contains(&name.as_str()),
        }));
    }
    if let Some(name) = required.iter().find(|name| !named.iter().any(|member| member.name == **name)) {
        let problem = format!("{name:?} is not one of the properties");
        return Err(FormError::new(format!("{at}.required"), problem));
    }
    let additional = match schema.get("additionalProperties") {
        Some(Value::Bool(false)) => None,
        Some(schema @ (Value::Object(_) | Value::Bool(true))) => {
            Some((schema, format!("{at}.additionalProperties")))
        }
        // By default, a schema allows other members. A model rarely writes them on purpose, so allow them only if
        // the schema lists no members.
        _ if named.is_empty() => Some((&ANY, at.to_owned())),
        _ => None,
    };
    Ok(Members { named, additional })
}

/// Returns a keyword that constrains the values of a schema in addition to `keyword` and `type`, if there is one.
fn beside(schema: &Value, keyword: &str) -> Option<&'static str> {
    let is_included = |other: &str| match keyword {
        "enum" | "const" => ["enum", "const", "format"].contains(&other) || BOUNDS.contains(&other),
        _ => other == keyword,
    };
    let mut keywords = COMBINING_KEYWORDS.into_iter().chain(TypeSet::ALL.keywords());
    keywords.find(|other| schema.get(*other).is_some() && !is_included(other))
}

fn reject_beside(schema: &Value, at: &str, keyword: &str) -> Result<(), FormError> {
    match beside(schema, keyword) {
        None => Ok(()),
        Some(other) => {
            let problem = format!("is not supported together with {other} in the call format of this model");
            Err(FormError::new(format!("{at}.{keyword}"), problem))
        }
    }
}

/// Rejects the keywords that combine schemas and are supported only where the value is written as in JSON.
pub(super) fn reject_json_only_combining_keywords(schema: &Value, at: &str) -> Result<(), FormError> {
    reject_keywords(schema, at, &JSON_ONLY_COMBINING_KEYWORDS)
}

/// Rejects all keywords that are supported only where the value is written as in JSON.
pub(super) fn reject_json_only_keywords(schema: &Value, at: &str) -> Result<(), FormError> {
    reject_json_only_combining_keywords(schema, at)?;
    reject_keywords(schema, at, &JSON_ONLY_KEYWORDS)?;
    // A list of schemas for the first items, as in older versions of JSON Schema.
    match schema.get("items") {
        Some(Value::Array(_)) => Err(unsupported(at, "items")),
        _ => Ok(()),
    }
}

fn reject_keywords(schema: &Value, at: &str, keywords: &[&str]) -> Result<(), FormError> {
    match keywords.iter().find(|keyword| schema.get(**keyword).is_some()) {
        Some(keyword) => Err(unsupported(at, keyword)),
        None => Ok(()),
    }
}

/// The error about a keyword that is not supported.
pub(super) fn unsupported(at: &str, keyword: &str) -> FormError {
    let problem = "is not supported in the call format of this model";
    FormError::new(format!("{at}.{keyword}"), problem)
}

/// Returns an expression for one or more members whose names the schema does not list.
pub(super) fn additional_members(writer: &mut Writer<'_>, one: &str, separator: &str) -> String {
    let one = writer.rule(one);
    if separator.is_empty() { format!("{one}+") } else { format!("{one} ({separator} {one})*") }
}

/// Returns an expression for as many items as the schema of an array allows, separated by `separator`.
pub(super) fn items(schema: &Value, at: &str, item: &str, separator: &str) -> Result<String, FormError> {
    let count = |keyword: &str| schema.get(keyword).and_then(Value::as_f64).map(|count| count as u32);
    let (min, max) = (count("minItems").unwrap_or(0), count("maxItems"));
    if max.is_some_and(|max| max < min) {
        return Err(FormError::new(format!("{at}.maxItems"), "must not be less than minItems"));
    }
    let more = |min: u32, max: Option<u32>| match max {
        None => format!("({separator} {item}){{{min},}}"),
        Some(max) => format!("({separator} {item}){{{min},{max}}}"),
    };
    let some = match max {
        Some(0) => String::new(),
        Some(1) => item.to_owned(),
        max => format!("{item} {}", more(min.saturating_sub(1), max.map(|max| max - 1))),
    };
    Ok(if min == 0 && !some.is_empty() { format!("({some})?") } else { some })
}

/// Returns an expression for items in order, separated by `separator`; items that are not required may be missing.
pub(super) fn separated(writer: &mut Writer<'_>, items: &[WrittenMember], separator: &str) -> String {
    // Build the expression for the text that may follow each item, from the last item to the first.
    let mut tails = vec![String::new(); items.len() + 1];
    for (index, WrittenMember { expression: item, is_required }) in items.iter().enumerate().rev() {
        let piece = format!("{separator} {item}");
        let piece = if *is_required { piece } else { format!("({piece})?") };
        let body = join([piece, tails[index + 1].clone()]);
        tails[index] = writer.rule(&body);
    }
    let mut heads = Vec::new();
    for (index, WrittenMember { expression: item, is_required }) in items.iter().enumerate() {
        heads.push(join([item.clone(), tails[index + 1].clone()]));
        if *is_required {
            return choice(&heads);
        }
    }
    heads.push(String::new());
    choice(&heads)
}
