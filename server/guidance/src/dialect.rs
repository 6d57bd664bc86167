//! Arguments of calls that are not written as JSON: what a JSON schema says of them, in the way a model writes.
//!
//! Where a value is written as in JSON, the whole of JSON Schema counts. Where it is not, what cannot be said is
//! refused with its place.

mod gemma;
mod tags;

use serde_json::Value;

use crate::Invalid;
use crate::lark::{Writer, choice, join};
use crate::schema;

/// How the arguments of a call are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// `a="x", b=1`: between the parentheses of a Python call.
    Python,
    /// `a:<|"|>x<|"|>,b:1`: between the braces of Gemma's.
    Gemma,
    /// `<parameter=a>\nx\n</parameter>\n`, repeated.
    Qwen,
    /// `<param name="a">x</param>`, repeated.
    MiniCpm,
}

/// Number of consecutive `$ref` references in the schema of a tool.
///
/// Beyond it: 400, `invalid_value`, if the tool is strict; otherwise the arguments of the tool are not constrained.
const REFERENCES_MAX: usize = 16;

/// A name that is not in the schema.
const ANY_NAME: &str = "/[A-Za-z_][A-Za-z0-9_]{0,63}/";

/// The arguments that fit `schema`.
pub(crate) fn value(
    writer: &mut Writer<'_>,
    dialect: Dialect,
    schema: &Value,
    at: &str,
) -> Result<String, Invalid> {
    // It is looked at for what is no schema at all, with the same words as elsewhere.
    schema::prepare(schema, at, schema::Layout::Tight)?;
    let root = Root { schema, at };
    let members = root.members(schema, at)?;
    let written = match dialect {
        Dialect::Python => {
            let mut written = Vec::with_capacity(members.named.len());
            for member in &members.named {
                let name = writer.literal(&format!("{}=", member.name))?;
                written.push((join([name, python(writer, &root, member)?]), member.is_required));
            }
            if let Some((schema, at)) = &members.others {
                let other = python_value(writer, &root, schema, at)?;
                written.push((others(writer, &format!("{ANY_NAME} \"=\" {other}"), "\", \""), false));
            }
            separated(writer, &written, "\", \"")
        }
        Dialect::Gemma => gemma::members(writer, &root, &members)?,
        Dialect::Qwen | Dialect::MiniCpm => tags::parameters(writer, &root, &members, dialect)?,
    };
    Ok(written)
}

/// The schema of all arguments, which others within it refer to.
pub(super) struct Root<'a> {
    schema: &'a Value,
    at: &'a str,
}

/// What an object consists of.
pub(super) struct Members<'a> {
    named: Vec<Member<'a>>,
    /// What members with other names are, if there may be any.
    others: Option<(&'a Value, String)>,
}

pub(super) struct Member<'a> {
    name: &'a str,
    schema: &'a Value,
    at: String,
    is_required: bool,
}

/// Keywords that say something of what a value may be.
const SAYING: [&str; 17] = [
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
    /// What a schema refers to, if it refers to one.
    fn resolve(&self, mut schema: &'a Value, mut at: String) -> Result<(&'a Value, String), Invalid> {
        for _ in 0..REFERENCES_MAX {
            let Some(reference) = schema.get("$ref").and_then(Value::as_str) else { return Ok((schema, at)) };
            let found = reference.strip_prefix('#').and_then(|pointer| self.schema.pointer(pointer));
            let Some(found) = found else {
                return Err(Invalid::new(
                    format!("{at}.$ref"),
                    format!("{reference:?} is not in this schema"),
                ));
            };
            schema = found;
            at = format!("{}{}", self.at, reference[1..].replace('/', "."));
        }
        Err(Invalid::new(at, format!("refers from schema to schema more than {REFERENCES_MAX} times")))
    }

    /// What an object of this schema consists of.
    fn members(&self, schema: &'a Value, at: &str) -> Result<Members<'a>, Invalid> {
        let (schema, at) = self.resolve(schema, at.to_owned())?;
        self.refuse_saying(schema, &at)?;
        for keyword in ["anyOf", "oneOf", "enum", "const"] {
            if schema.get(keyword).is_some() {
                return Err(unsupported(&at, keyword));
            }
        }
        if schema.get("type").is_some_and(|kind| kind != "object") {
            return Err(Invalid::new(format!("{at}.type"), "is not \"object\""));
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
            return Err(Invalid::new(
                format!("{at}.required"),
                format!("{name:?} is none of the properties"),
            ));
        }
        const ANY: &Value = &Value::Bool(true);
        let others = match schema.get("additionalProperties") {
            Some(Value::Bool(false)) => None,
            Some(schema @ Value::Object(_)) => Some((schema, format!("{at}.additionalProperties"))),
            // Of an object with properties those are wanted; others may come, but are not asked for.
            _ if named.is_empty() => Some((ANY, at)),
            _ => None,
        };
        Ok(Members { named, others })
    }

    /// Refuses what cannot be written otherwise than in JSON.
    fn refuse_saying(&self, schema: &Value, at: &str) -> Result<(), Invalid> {
        match SAYING.iter().find(|keyword| schema.get(**keyword).is_some()) {
            Some(keyword) => Err(unsupported(at, keyword)),
            None => Ok(()),
        }
    }

    /// The schemas that a value may fit, one of them: of `anyOf`, `oneOf` and several types.
    fn alternatives(
        &self,
        schema: &'a Value,
        at: &str,
        found: &mut Vec<(Value, String)>,
    ) -> Result<(), Invalid> {
        let (schema, at) = self.resolve(schema, at.to_owned())?;
        if found.len() > crate::limits::ELEMENTS_MAX || at.len() > 4096 {
            return Err(Invalid::new(at, "has too many alternatives"));
        }
        for keyword in ["anyOf", "oneOf"] {
            if let Some(Value::Array(schemas)) = schema.get(keyword) {
                if let Some(beside) = beside(schema, keyword) {
                    return Err(Invalid::new(
                        format!("{at}.{keyword}"),
                        format!("is not supported beside {beside} in calls as this model writes them"),
                    ));
                }
                let mut each = schemas.iter().enumerate();
                return each.try_for_each(|(index, one)| {
                    self.alternatives(one, &format!("{at}.{keyword}[{index}]"), found)
                });
            }
        }
        match schema.get("type") {
            Some(Value::Array(kinds)) if schema.get("enum").is_none() && schema.get("const").is_none() => {
                for kind in kinds {
                    let mut one = schema.clone();
                    one["type"] = kind.clone();
                    found.push((one, at.clone()));
                }
            }
            _ => found.push((schema.clone(), at)),
        }
        Ok(())
    }
}

/// A keyword of `schema` that says something beside `keyword`.
fn beside<'s>(schema: &'s Value, keyword: &str) -> Option<&'s str> {
    const SILENT: [&str; 10] = [
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
    keys.into_iter().find(|key| *key != keyword && !SILENT.contains(key) && !key.starts_with("x-"))
}

fn unsupported(at: &str, keyword: &str) -> Invalid {
    let problem = "is not supported in calls as this model writes them";
    Invalid::new(format!("{at}.{keyword}"), problem)
}

/// A value in Python: as in JSON, but for words that stand alone.
fn python(writer: &mut Writer<'_>, root: &Root<'_>, member: &Member<'_>) -> Result<String, Invalid> {
    python_value(writer, root, member.schema, &member.at)
}

fn python_value(
    writer: &mut Writer<'_>,
    root: &Root<'_>,
    schema: &Value,
    at: &str,
) -> Result<String, Invalid> {
    match schema.get("type").and_then(Value::as_str) {
        Some("boolean") if schema.get("enum").is_none() && schema.get("const").is_none() => {
            Ok("(\"True\" | \"False\")".to_owned())
        }
        Some("null") => Ok("\"None\"".to_owned()),
        _ => writer.json(&schema::by_itself(schema, root.schema), at),
    }
}

/// Members of other names, any number of them, at least one.
fn others(writer: &mut Writer<'_>, one: &str, separator: &str) -> String {
    let one = writer.rule(one);
    if separator.is_empty() { format!("{one}+") } else { format!("{one} ({separator} {one})*") }
}

/// Items in their order with `separator` between them; those that are not required may be missing.
fn separated(writer: &mut Writer<'_>, items: &[(String, bool)], separator: &str) -> String {
    // From the last on: what may follow an item.
    let mut tails = vec![String::new(); items.len() + 1];
    for (index, (item, is_required)) in items.iter().enumerate().rev() {
        let piece = format!("{separator} {item}");
        let piece = if *is_required { piece } else { format!("({piece})?") };
        let body = join([piece, tails[index + 1].clone()]);
        tails[index] = writer.rule(&body);
    }
    let mut heads = Vec::new();
    for (index, (item, is_required)) in items.iter().enumerate() {
        heads.push(join([item.clone(), tails[index + 1].clone()]));
        if *is_required {
            return choice(&heads);
        }
    }
    heads.push(String::new());
    choice(&heads)
}
