//! The parts of a JSON schema that all notations for arguments other than JSON process in the same way: references,
//! members and alternatives.
//!
//! Where a value is written as in JSON, the same keywords are supported as for JSON. Elsewhere, keywords that cannot be
//! enforced are rejected with their path.

use serde_json::Value;

use crate::FormError;
use crate::lark::{Writer, choice, join};
use crate::limits::ELEMENTS_MAX;

/// Number of consecutive `$ref` references in the schema of a tool, if the call format of the model is not JSON.
///
/// If exceeded: 400, `invalid_value`, if the tool is strict; otherwise the arguments of the tool are not constrained.
const REFERENCES_MAX: usize = 16;

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

/// Keywords that constrain a value, and that are supported only where the value is written as in JSON.
const JSON_ONLY_KEYWORDS: [&str; 17] = [
    "allOf",
    "not",
    "if",
    "then",
    "else",
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
    /// Follows the references of a schema. Returns the schema to which they lead, and its path.
    fn resolve(&self, mut schema: &'a Value, mut at: String) -> Result<(&'a Value, String), FormError> {
        let mut followed = 0;
        while let Some(reference) = schema.get("$ref").and_then(Value::as_str) {
            if followed == REFERENCES_MAX {
                let problem = format!(
                    "is a reference that exceeds the limit of {REFERENCES_MAX} consecutive references"
                );
                return Err(FormError::new(at, problem));
            }
            followed += 1;
            let target = reference.strip_prefix('#').and_then(|pointer| self.schema.pointer(pointer));
            let Some(target) = target else {
                return Err(FormError::new(
                    format!("{at}.$ref"),
                    format!(
                        "{reference:?} is not a JSON pointer to a part of the schema, such as #/$defs/name"
                    ),
                ));
            };
            schema = target;
            at = format!("{}{}", self.at, reference[1..].replace('/', "."));
        }
        Ok((schema, at))
    }

    /// The members of an object with this schema.
    pub(super) fn members(&self, schema: &'a Value, at: &str) -> Result<Members<'a>, FormError> {
        let (schema, at) = self.resolve(schema, at.to_owned())?;
        self.reject_json_only_keywords(schema, &at)?;
        for keyword in ["anyOf", "oneOf", "enum", "const"] {
            if schema.get(keyword).is_some() {
                return Err(unsupported(&at, keyword));
            }
        }
        if schema.get("type").is_some_and(|kind| kind != "object") {
            return Err(FormError::new(format!("{at}.type"), "must be \"object\""));
        }
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
            return Err(FormError::new(
                format!("{at}.required"),
                format!("{name:?} is not one of the properties"),
            ));
        }
        const ANY: &Value = &Value::Bool(true);
        let additional = match schema.get("additionalProperties") {
            Some(Value::Bool(false)) => None,
            Some(schema @ (Value::Object(_) | Value::Bool(true))) => {
                Some((schema, format!("{at}.additionalProperties")))
            }
            // By default, a schema allows additional members. A model rarely writes them on purpose, so allow them only
            // if the schema lists no members.
            _ if named.is_empty() => Some((ANY, at)),
            _ => None,
        };
        Ok(Members { named, additional })
    }

    /// Rejects keywords that are supported only where the value is written as in JSON.
    pub(super) fn reject_json_only_keywords(&self, schema: &Value, at: &str) -> Result<(), FormError> {
        match JSON_ONLY_KEYWORDS.iter().find(|keyword| schema.get(**keyword).is_some()) {
            Some(keyword) => Err(unsupported(at, keyword)),
            None => Ok(()),
        }
    }

    /// Adds the alternatives of a schema, with their paths, to `alternatives`: those of `anyOf`, `oneOf` or a list of
    /// types, or else the schema itself.
    pub(super) fn alternatives(
        &self,
        schema: &'a Value,
        at: &str,
        alternatives: &mut Vec<(Value, String)>,
    ) -> Result<(), FormError> {
        let (schema, at) = self.resolve(schema, at.to_owned())?;
        if alternatives.len() > ELEMENTS_MAX || at.len() > 4096 {
            let problem = format!(
                "is one of more than {ELEMENTS_MAX} alternatives of a value, or its path has more than 4096 bytes"
            );
            return Err(FormError::new(at, problem));
        }
        for keyword in ["anyOf", "oneOf"] {
            if let Some(Value::Array(schemas)) = schema.get(keyword) {
                if let Some(beside) = beside(schema, keyword) {
                    return Err(FormError::new(
                        format!("{at}.{keyword}"),
                        format!("is not supported together with {beside} in the call format of this model"),
                    ));
                }
                let mut each = schemas.iter().enumerate();
                return each.try_for_each(|(index, one)| {
                    self.alternatives(one, &format!("{at}.{keyword}[{index}]"), alternatives)
                });
            }
        }
        match schema.get("type") {
            Some(Value::Array(kinds)) if schema.get("enum").is_none() && schema.get("const").is_none() => {
                for kind in kinds {
                    let mut one = schema.clone();
                    one["type"] = kind.clone();
                    alternatives.push((one, at.clone()));
                }
            }
            _ => alternatives.push((schema.clone(), at)),
        }
        Ok(())
    }
}

/// Returns a keyword of `schema` that is not supported together with `keyword`, if there is one.
fn beside<'s>(schema: &'s Value, keyword: &str) -> Option<&'s str> {
    const SUPPORTED: [&str; 10] = [
        "title",
        "description",
        "default",
        "examples",
        "$defs",
        "definitions",
        "discriminator",
        "deprecated",
        "$comment",
        "type",
    ];
    let keys = schema.as_object()?.keys().map(String::as_str);
    keys.into_iter().find(|key| *key != keyword && !SUPPORTED.contains(key) && !key.starts_with("x-"))
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
