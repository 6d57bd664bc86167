//! Reads the form that a request demands: OpenAI's `response_format`, which may contain XGrammar's formats as in OVMS,
//! or one of vLLM's parameters. A request may use only one of them.

use serde_json::{Map, Value};
use server_guidance::{Form, FormError, is_structural_tag_type, structural_tag};
use server_openai::Generation;

use crate::error::Error;

/// A form, and the parameter that demands it.
#[derive(Debug)]
pub(super) struct RequestedForm {
    pub(super) form: Form,
    pub(super) param: String,
}

/// The name of OpenAI's parameter for a form.
const FORMAT: &str = "response_format";

/// The kinds of forms in vLLM.
const KINDS: [&str; 6] = ["json", "regex", "choice", "grammar", "json_object", "structural_tag"];

/// Returns the form that the request demands, if any.
///
/// # Errors
/// The form is invalid, or the request demands more than one form.
pub(super) fn requested(generation: &Generation) -> Result<Option<RequestedForm>, Error> {
    let mut requested_form = None;
    if let Some(map) = &generation.response_format
        && let Some(form) = response_format(map, FORMAT)?
    {
        requested_form = Some(RequestedForm { form, param: FORMAT.to_owned() });
    }
    let mut add = |kind: &str, value: &Value, param: String| {
        if let Some(form) = vllm(kind, value, &param)? {
            if let Some(RequestedForm { param: other, .. }) = &requested_form {
                return Err(Error::invalid(param, format!("cannot be combined with {other}")));
            }
            requested_form = Some(RequestedForm { form, param });
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
    Ok(requested_form)
}

/// Converts an error of a form into the error of the request.
pub(super) fn rejected(invalid: FormError, param: &str) -> Error {
    let FormError { at, problem, is_internal } = invalid;
    if is_internal {
        return Error::FormCheck(problem);
    }
    Error::invalid(if at.is_empty() { param.to_owned() } else { at }, problem)
}

/// Reads a `response_format`; `None` for plain text.
fn response_format(map: &Map<String, Value>, at: &str) -> Result<Option<Form>, Error> {
    let kind = match map.get("type") {
        Some(Value::String(kind)) => kind.as_str(),
        Some(_) => return Err(Error::coded("invalid_type", format!("{at}.type"), "must be a string")),
        None => return Err(Error::missing(format!("{at}.type"))),
    };
    match kind {
        "text" => Ok(None),
        "json_object" => Ok(Some(Form::json_object(at))),
        "json_schema" => json_schema(map, at).map(Some),
        kind if is_structural_tag_type(kind) => {
            structural_tag(map, at).map(Some).map_err(|invalid| rejected(invalid, at))
        }
        kind => {
            let problem = format!(
                "must be text, json_object, json_schema, structural_tag or the type of a structural tag format, not {kind:?}"
            );
            Err(Error::invalid(format!("{at}.type"), problem))
        }
    }
}

/// Reads OpenAI's form: a schema with an optional name, in `json_schema` or, at the responses endpoint, next to the
/// type. A `json_schema` that has neither `schema` nor `name` is the schema itself, as in structural tags.
fn json_schema(map: &Map<String, Value>, at: &str) -> Result<Form, Error> {
    let (named, at) = match map.get("json_schema") {
        None => (map, at.to_owned()),
        Some(Value::Object(inner)) => (inner, format!("{at}.json_schema")),
        Some(_) => {
            return Err(Error::coded("invalid_type", format!("{at}.json_schema"), "must be an object"));
        }
    };
    let field = |name: &str| named.get(name).filter(|value| !value.is_null());
    let is_bare = field("schema").is_none() && field("name").is_none() && map.contains_key("json_schema");
    if is_bare {
        return Ok(Form::Json { schema: Value::Object(named.clone()), at });
    }
    if field("name").is_some_and(|name| !name.is_string()) {
        return Err(Error::coded("invalid_type", format!("{at}.name"), "must be a string"));
    }
    if field("strict").is_some_and(|strict| !strict.is_boolean()) {
        return Err(Error::coded("invalid_type", format!("{at}.strict"), "must be a boolean"));
    }
    match field("schema") {
        Some(schema) => Ok(Form::Json { schema: schema.clone(), at: format!("{at}.schema") }),
        None => Err(Error::missing(format!("{at}.schema"))),
    }
}

/// Reads a parameter of vLLM; `None` if it demands no form.
fn vllm(kind: &str, value: &Value, at: &str) -> Result<Option<Form>, Error> {
    if value.is_null() {
        return Ok(None);
    }
    let text = || {
        let text = value.as_str().map(str::to_owned);
        text.ok_or_else(|| Error::coded("invalid_type", at, "must be a string"))
    };
    Ok(Some(match kind {
        "json" => Form::Json { schema: json_value(value, at)?, at: at.to_owned() },
        "regex" => Form::Regex { pattern: text()?, at: at.to_owned() },
        "grammar" => Form::Grammar { text: text()?, at: at.to_owned() },
        "choice" => choice(value, at)?,
        "json_object" => match value {
            Value::Bool(true) => Form::json_object(at),
            Value::Bool(false) => return Ok(None),
            _ => return Err(Error::coded("invalid_type", at, "must be a boolean")),
        },
        "structural_tag" => {
            let tag = json_value(value, at)?;
            let Value::Object(map) = &tag else {
                return Err(Error::coded("invalid_type", at, "must be an object"));
            };
            structural_tag(map, at).map_err(|invalid| rejected(invalid, at))?
        }
        // These options of vLLM's backends have no effect here.
        "backend" | "disable_fallback" | "_backend" | "_backend_was_auto" => return Ok(None),
        "disable_any_whitespace" | "disable_additional_properties" if *value == Value::Bool(false) => {
            return Ok(None);
        }
        _ => {
            let known = KINDS.join(", ");
            return Err(Error::invalid(at, format!("is not supported; supported constraints: {known}")));
        }
    }))
}

/// Returns the value or, if it is a string, the JSON value in the string.
fn json_value(value: &Value, at: &str) -> Result<Value, Error> {
    match value {
        Value::String(text) => serde_json::from_str(text)
            .map_err(|error| Error::invalid(at, format!("is not valid JSON: {error}"))),
        value => Ok(value.clone()),
    }
}

fn choice(value: &Value, at: &str) -> Result<Form, Error> {
    let Value::Array(values) = value else {
        return Err(Error::coded("invalid_type", at, "must be an array"));
    };
    if values.is_empty() {
        return Err(Error::coded("empty_array", at, "is empty"));
    }
    let text = |(index, value): (usize, &Value)| match value {
        Value::String(text) => Ok(Form::literal(text.as_str())),
        _ => Err(Error::coded("invalid_type", format!("{at}[{index}]"), "must be a string")),
    };
    Ok(Form::Choice(values.iter().enumerate().map(text).collect::<Result<_, _>>()?))
}
