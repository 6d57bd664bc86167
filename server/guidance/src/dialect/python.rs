//! The arguments of a call as Python keyword arguments. Values are written as Python literals: as in JSON, except for
//! `True`, `False` and `None`. A value whose schema has keywords that are supported only in JSON is completely written
//! as in JSON, which the parser of tool calls reads, too.

use std::collections::HashMap;

use serde_json::{Value, json};

use super::arguments::{
    ANY, ANY_NAME, AllowedValues, Alternative, Members, Root, TargetSchema, WrittenMember,
    additional_members, items, object_members, reject_json_only_keywords, separated,
};
use super::type_set::TypeSet;
use crate::FormError;
use crate::lark::{Writer, choice, join};
use crate::schema;

/// Nesting depth of lists and dictionaries in the schema of a tool in LFM2's call format.
///
/// If exceeded: the values at this depth are written as in JSON.
const DEPTH_MAX: usize = 32;

/// The separators in lists and dictionaries, as in JSON.
const COMMA: &str = "/, ?/";
const COLON: &str = "/: ?/";

/// Returns an expression for the arguments between the parentheses of a call.
pub(super) fn members<'v>(
    writer: &mut Writer<'_>,
    root: &Root<'v>,
    members: &Members<'v>,
) -> Result<String, FormError> {
    let mut arguments = ArgumentWriter { writer, root, rules: HashMap::new() };
    let mut written = Vec::with_capacity(members.named.len());
    for member in &members.named {
        if !is_argument_name(member.name) {
            let problem = "is not supported in the call format of this model: the name of an argument may contain letters, \
                           digits and _.-:/$@, and it must begin with a letter, a digit, _, $ or @";
            return Err(FormError::new(&member.at, problem));
        }
        let name = arguments.writer.literal(&format!("{}=", member.name))?;
        let expression = join([name, arguments.value(member.schema, &member.at, 0)?]);
        written.push(WrittenMember { expression, is_required: member.is_required });
    }
    if let Some((schema, at)) = &members.additional {
        let value = arguments.value(schema, at, 0)?;
        let one = format!("{ANY_NAME} \"=\" {value}");
        let expression = additional_members(arguments.writer, &one, "\", \"");
        written.push(WrittenMember { expression, is_required: false });
    }
    Ok(separated(arguments.writer, &written, "\", \""))
}

/// Whether `name` can be the name of an argument. The parser of tool calls accepts more names than Python does.
fn is_argument_name(name: &str) -> bool {
    let begins = |letter: char| letter.is_alphanumeric() || "_$@".contains(letter);
    name.starts_with(begins) && name.chars().all(|letter| begins(letter) || ".-:/".contains(letter))
}

/// Writes the values of arguments.
struct ArgumentWriter<'p, 'v, 'w> {
    writer: &'p mut Writer<'w>,
    root: &'p Root<'v>,
    /// The rule of each schema for values of certain types. A schema can refer to itself through its rule.
    rules: HashMap<(*const Value, TypeSet), String>,
}

impl<'v> ArgumentWriter<'_, 'v, '_> {
    /// Returns a grammar expression for the values that `schema` allows. `depth` is the number of lists and
    /// dictionaries around the value.
    fn value(&mut self, schema: &'v Value, at: &str, depth: usize) -> Result<String, FormError> {
        let Ok(TargetSchema { schema: target, types, .. }) = self.root.resolve(schema, at.to_owned()) else {
            return self.json(schema, at);
        };
        let key = (std::ptr::from_ref(target), types);
        if let Some(rule) = self.rules.get(&key) {
            return Ok(rule.clone());
        }
        let rule = self.writer.reserve("r");
        self.rules.insert(key, rule.clone());
        let body = match self.root.alternatives(schema, at) {
            Ok(alternatives) if depth <= DEPTH_MAX && alternatives.iter().all(is_supported) => {
                let mut all = Vec::with_capacity(alternatives.len());
                for one in &alternatives {
                    all.push(self.alternative(one, depth)?);
                }
                choice(&all)
            }
            _ => self.json(schema, at)?,
        };
        self.writer.define(&rule, &body);
        Ok(rule)
    }

    fn json(&mut self, schema: &Value, at: &str) -> Result<String, FormError> {
        self.writer.json(&schema::with_definitions(schema, self.root.schema), at)
    }

    fn alternative(&mut self, one: &Alternative<'v>, depth: usize) -> Result<String, FormError> {
        match &one.values {
            AllowedValues::Listed(values) => self.listed(values, &one.at),
            AllowedValues::OfType(name) => self.of_type(one, name, depth),
            AllowedValues::Unconstrained => {
                let all = TypeSet::ALL.names().map(|name| self.of_type(one, name, depth));
                Ok(choice(&all.collect::<Result<Vec<_>, _>>()?))
            }
        }
    }

    fn listed(&mut self, values: &[&Value], at: &str) -> Result<String, FormError> {
        let is_json = |value: &&Value| value.is_string() || value.is_number();
        let (json, python): (Vec<&Value>, Vec<&Value>) = values.iter().copied().partition(is_json);
        let mut all = Vec::with_capacity(python.len() + 1);
        if !json.is_empty() {
            all.push(self.writer.json(&json!({"enum": json}), at)?);
        }
        for value in python {
            all.push(self.writer.literal(&literal(value))?);
        }
        Ok(choice(&all))
    }

    fn of_type(&mut self, one: &Alternative<'v>, name: &str, depth: usize) -> Result<String, FormError> {
        match name {
            "boolean" => Ok("(\"True\" | \"False\")".to_owned()),
            "null" => Ok("\"None\"".to_owned()),
            "array" => self.list(one, depth + 1),
            "object" => self.dictionary(one, depth + 1),
            _ => self.writer.json(&one.scalar_schema(name), &one.at),
        }
    }

    fn list(&mut self, one: &Alternative<'v>, depth: usize) -> Result<String, FormError> {
        let Alternative { schema, at, .. } = one;
        let item = self.value(schema.get("items").unwrap_or(&ANY), &format!("{at}.items"), depth)?;
        let items = items(schema, at, &item, COMMA)?;
        Ok(join(["\"[\"".to_owned(), items, "\"]\"".to_owned()]))
    }

    fn dictionary(&mut self, one: &Alternative<'v>, depth: usize) -> Result<String, FormError> {
        let members = object_members(one.schema, &one.at)?;
        let mut written = Vec::with_capacity(members.named.len());
        for member in &members.named {
            let name = self.writer.literal(&Value::from(member.name).to_string())?;
            let value = self.value(member.schema, &member.at, depth)?;
            let expression = format!("{name} {COLON} {value}");
            written.push(WrittenMember { expression, is_required: member.is_required });
        }
        if let Some((schema, at)) = &members.additional {
            let name = self.writer.json(&json!({"type": "string"}), at)?;
            let value = self.value(schema, at, depth)?;
            let expression = additional_members(self.writer, &format!("{name} {COLON} {value}"), COMMA);
            written.push(WrittenMember { expression, is_required: false });
        }
        let members = separated(self.writer, &written, COMMA);
        Ok(join(["\"{\"".to_owned(), members, "\"}\"".to_owned()]))
    }
}

/// Whether all keywords of an alternative are supported outside of JSON.
fn is_supported(one: &Alternative<'_>) -> bool {
    let has_supported_keywords = || reject_json_only_keywords(one.schema, &one.at).is_ok();
    // The names of other members would have to exclude those of the named members.
    let has_supported_members = || {
        object_members(one.schema, &one.at)
            .is_ok_and(|members| members.named.is_empty() || members.additional.is_none())
    };
    !one.is_exclusive
        && match one.values {
            AllowedValues::Listed(_) => true,
            AllowedValues::OfType("object") => has_supported_keywords() && has_supported_members(),
            AllowedValues::OfType(_) | AllowedValues::Unconstrained => has_supported_keywords(),
        }
}

/// Returns a listed value as a Python literal.
fn literal(value: &Value) -> String {
    match value {
        Value::Null => "None".to_owned(),
        Value::Bool(true) => "True".to_owned(),
        Value::Bool(false) => "False".to_owned(),
        Value::Array(values) => {
            let values: Vec<String> = values.iter().map(literal).collect();
            format!("[{}]", values.join(", "))
        }
        Value::Object(members) => {
            let member = |(name, value): (&String, &Value)| {
                format!("{}: {}", Value::from(name.as_str()), literal(value))
            };
            let members: Vec<String> = members.iter().map(member).collect();
            format!("{{{}}}", members.join(", "))
        }
        Value::Number(_) | Value::String(_) => value.to_string(),
    }
}
