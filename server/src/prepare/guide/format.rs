//! The form that a request asks for: OpenAI's `response_format`, with XGrammar's formats in it as OVMS takes them, and
//! vLLM's parameters. A request asks in one way or in none.

use serde_json::{Map, Value};
use server_guidance::{Form, is_structural_tag_type, structural_tag};
use server_openai::Generation;

use super::refused;
use crate::error::Error;

/// A form, and the parameter that asks for it.
#[derive(Debug)]
pub(super) struct Wanted {
    pub(super) form: Form,
    pub(super) param: String,
}

/// OpenAI's parameter.
const FORMAT: &str = "response_format";

/// The ways of vLLM.
const KINDS: [&str; 6] = ["json", "regex", "choice", "grammar", "json_object", "structural_tag"];

/// What the request asks for.
///
/// # Errors
/// It is none, or there are two.
pub(super) fn wanted(generation: &Generation) -> Result<Option<Wanted>, Error> {
    let mut wanted = None;
    if let Some(map) = &generation.response_format
        && let Some(form) = response_format(map, FORMAT)?
    {
        wanted = Some(Wanted { form, param: FORMAT.to_owned() });
    }
    let mut add = |kind: &str, value: &Value, param: String| {
        if let Some(form) = vllm(kind, value, &param)? {
            if let Some(Wanted { param: other, .. }) = &wanted {
                return Err(Error::invalid(param, format!("cannot be combined with {other}")));
            }
            wanted = Some(Wanted { form, param });
        }
        Ok(())
    };
    if let Some(outputs) = &generation.structured_outputs {
        for (kind, value) in outputs {
            let param = format!("structured_outputs.{kind}");
            add(kind, value, param)?;
        }
    }
    let earlier = [
        ("json", "guided_json", &generation.guided_json),
        ("regex", "guided_regex", &generation.guided_regex),
        ("choice", "guided_choice", &generation.guided_choice),
        ("grammar", "guided_grammar", &generation.guided_grammar),
        ("json_object", "guided_json_object", &generation.guided_json_object),
        ("structural_tag", "structural_tag", &generation.structural_tag),
    ];
    for (kind, name, value) in earlier {
        if let Some(value) = value {
            add(kind, value, name.to_owned())?;
        }
    }
    Ok(wanted)
}

/// `None` for plain text.
fn response_format(map: &Map<String, Value>, at: &str) -> Result<Option<Form>, Error> {
    let kind = match map.get("type") {
        Some(Value::String(kind)) => kind.as_str(),
        Some(_) => return Err(Error::coded("invalid_type", format!("{at}.type"), "is no string")),
        None => return Err(Error::missing(format!("{at}.type"))),
    };
    match kind {
        "text" => Ok(None),
        "json_object" => Ok(Some(Form::json_object(at))),
        "json_schema" => json_schema(map, at).map(Some),
        kind if is_structural_tag_type(kind) => {
            structural_tag(map, at).map(Some).map_err(|invalid| refused(invalid, at))
        }
        kind => {
            let problem = format!(
                "{kind:?} is none of text, json_object, json_schema, structural_tag, and no format of one"
            );
            Err(Error::invalid(format!("{at}.type"), problem))
        }
    }
}

/// OpenAI's: the schema with a name, in `json_schema` or, as responses have it, beside the type. A `json_schema` that
/// has no `schema` is one, as in structural tags.
fn json_schema(map: &Map<String, Value>, at: &str) -> Result<Form, Error> {
    let (named, at) = match map.get("json_schema") {
        None => (map, at.to_owned()),
        Some(Value::Object(inner)) => (inner, format!("{at}.json_schema")),
        Some(_) => {
            return Err(Error::coded("invalid_type", format!("{at}.json_schema"), "is no object"));
        }
    };
    let field = |name: &str| named.get(name).filter(|value| !value.is_null());
    let is_bare = field("schema").is_none() && field("name").is_none() && map.contains_key("json_schema");
    if is_bare {
        return Ok(Form::Json { schema: Value::Object(named.clone()), at });
    }
    if field("name").is_some_and(|name| !name.is_string()) {
        return Err(Error::coded("invalid_type", format!("{at}.name"), "is no string"));
    }
    if field("strict").is_some_and(|strict| !strict.is_boolean()) {
        return Err(Error::coded("invalid_type", format!("{at}.strict"), "is no boolean"));
    }
    match field("schema") {
        Some(schema) => Ok(Form::Json { schema: schema.clone(), at: format!("{at}.schema") }),
        None => Err(Error::missing(format!("{at}.schema"))),
    }
}

/// `None` for what asks for nothing.
fn vllm(kind: &str, value: &Value, at: &str) -> Result<Option<Form>, Error> {
    if value.is_null() {
        return Ok(None);
    }
    let text = || {
        let text = value.as_str().map(str::to_owned);
        text.ok_or_else(|| Error::coded("invalid_type", at, "is no string"))
    };
    Ok(Some(match kind {
        "json" => Form::Json { schema: object(value, at)?, at: at.to_owned() },
        "regex" => Form::Regex { pattern: text()?, at: at.to_owned() },
        "grammar" => Form::Grammar { text: text()?, at: at.to_owned() },
        "choice" => choice(value, at)?,
        "json_object" => match value {
            Value::Bool(true) => Form::json_object(at),
            Value::Bool(false) => return Ok(None),
            _ => return Err(Error::coded("invalid_type", at, "is no boolean")),
        },
        "structural_tag" => {
            let tag = object(value, at)?;
            let Value::Object(map) = &tag else {
                return Err(Error::coded("invalid_type", at, "is no object"));
            };
            structural_tag(map, at).map_err(|invalid| refused(invalid, at))?
        }
        // They say how, not what, of engines that are not this one's.
        "backend" | "disable_fallback" | "_backend" | "_backend_was_auto" => return Ok(None),
        "disable_any_whitespace" | "disable_additional_properties" if *value == Value::Bool(false) => {
            return Ok(None);
        }
        _ => {
            let known = KINDS.join(", ");
            return Err(Error::invalid(at, format!("is not supported; these are: {known}")));
        }
    }))
}

/// An object, or JSON in a string.
fn object(value: &Value, at: &str) -> Result<Value, Error> {
    match value {
        Value::String(text) => {
            serde_json::from_str(text).map_err(|error| Error::invalid(at, format!("is no JSON: {error}")))
        }
        value => Ok(value.clone()),
    }
}

fn choice(value: &Value, at: &str) -> Result<Form, Error> {
    let Value::Array(values) = value else { return Err(Error::coded("invalid_type", at, "is no array")) };
    if values.is_empty() {
        return Err(Error::coded("empty_array", at, "is empty"));
    }
    let text = |(index, value): (usize, &Value)| match value {
        Value::String(text) => Ok(Form::literal(text.as_str())),
        _ => Err(Error::coded("invalid_type", format!("{at}[{index}]"), "is no string")),
    };
    Ok(Form::Choice(values.iter().enumerate().map(text).collect::<Result<_, _>>()?))
}
