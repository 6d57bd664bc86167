//! The tools of a request and which of them may be called: one table of rules, for both endpoints that take
//! tools. Both shapes are read, OpenAI's of the chat endpoint (`function` within) and the flat one of responses.

use serde_json::{Map, Value, json};

use crate::error::Error;

/// Most tools of a request.
pub(crate) const TOOLS_MAX: usize = 512;
/// Bytes of a tool's name.
pub(crate) const NAME_BYTES_MAX: usize = 128;

/// A tool that the model may be offered.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Tool {
    pub(crate) name: String,
    pub(crate) description: Option<String>,
    /// The JSON schema of its arguments, an object; `None` if it takes any or none.
    pub(crate) parameters: Option<Value>,
    /// Whether arguments have to fit the schema.
    pub(crate) strict: bool,
}

impl Tool {
    /// As templates want it: OpenAI's shape of the chat endpoint. `strict` is not among what the model is told, so
    /// that it makes no other prompt.
    pub(crate) fn shown(&self) -> Value {
        let mut function = json!({"name": self.name});
        if let Some(description) = &self.description {
            function["description"] = json!(description);
        }
        // Templates go through the properties without looking whether there are any.
        function["parameters"] =
            self.parameters.clone().unwrap_or_else(|| json!({"type": "object", "properties": {}}));
        json!({"type": "function", "function": function})
    }
}

/// Which tools may or must be called.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum ToolChoice {
    /// None: the model is not told of any.
    None,
    /// As the model likes.
    #[default]
    Auto,
    /// At least one.
    Required,
    /// This one.
    Named(String),
    /// Some of these, and at least one if it `is_required`. The model is told of all tools.
    Allowed { names: Vec<String>, is_required: bool },
}

impl ToolChoice {
    /// Reads a `tool_choice`.
    ///
    /// # Errors
    /// It is none, or names a tool that is not there.
    pub(crate) fn read(choice: Option<&Value>, tools: &[Tool]) -> Result<Self, Error> {
        const PARAM: &str = "tool_choice";
        let required = |choice: Self| {
            if tools.is_empty() {
                return Err(Error::invalid(PARAM, "asks for a call, but there are no tools"));
            }
            Ok(choice)
        };
        match choice {
            None => Ok(Self::Auto),
            Some(Value::String(mode)) => match mode.as_str() {
                "none" => Ok(Self::None),
                "auto" => Ok(Self::Auto),
                "required" => required(Self::Required),
                other => {
                    let problem = format!("{other:?} is none of none, auto, required, and no object");
                    Err(Error::invalid(PARAM, problem))
                }
            },
            Some(Value::Object(choice)) => match choice.get("type").and_then(Value::as_str) {
                Some("allowed_tools") => allowed(choice, tools),
                Some("function") | None => required(Self::Named(known(choice, PARAM, tools)?)),
                Some(other) => {
                    let problem = format!("{other:?} is neither function nor allowed_tools");
                    Err(Error::invalid("tool_choice.type", problem))
                }
            },
            Some(_) => Err(Error::coded("invalid_type", PARAM, "is neither a string nor an object")),
        }
    }

    /// Whether a tool of this name may be called.
    pub(crate) fn allows(&self, name: &str) -> bool {
        match self {
            Self::None => false,
            Self::Auto | Self::Required => true,
            Self::Named(only) => only == name,
            Self::Allowed { names, .. } => names.iter().any(|known| known == name),
        }
    }

    /// Whether an answer without a call is none.
    pub(crate) fn is_required(&self) -> bool {
        match self {
            Self::None | Self::Auto => false,
            Self::Required | Self::Named(_) => true,
            Self::Allowed { is_required, .. } => *is_required,
        }
    }
}

fn allowed(choice: &Map<String, Value>, tools: &[Tool]) -> Result<ToolChoice, Error> {
    let (choice, at) = match choice.get("allowed_tools") {
        Some(Value::Object(inner)) => (inner, "tool_choice.allowed_tools"),
        Some(_) => return Err(Error::coded("invalid_type", "tool_choice.allowed_tools", "is no object")),
        None => (choice, "tool_choice"),
    };
    let is_required = match choice.get("mode").map(Value::as_str) {
        Some(Some("required")) => true,
        Some(Some("auto")) => false,
        None => return Err(Error::missing(format!("{at}.mode"))),
        Some(_) => return Err(Error::invalid(format!("{at}.mode"), "is neither \"auto\" nor \"required\"")),
    };
    let list = match choice.get("tools") {
        Some(Value::Array(list)) if !list.is_empty() => list,
        Some(Value::Array(_)) => return Err(Error::invalid(format!("{at}.tools"), "is empty")),
        Some(_) => return Err(Error::coded("invalid_type", format!("{at}.tools"), "is no array")),
        None => return Err(Error::missing(format!("{at}.tools"))),
    };
    let name = |(index, tool): (usize, &Value)| {
        let at = format!("{at}.tools[{index}]");
        let tool = tool.as_object().ok_or_else(|| Error::coded("invalid_type", &at, "is no object"))?;
        known(tool, &at, tools)
    };
    let names = list.iter().enumerate().map(name).collect::<Result<_, _>>()?;
    Ok(ToolChoice::Allowed { names, is_required })
}

/// The name of a tool that is there, from an object that names it in either shape.
fn known(named: &Map<String, Value>, at: &str, tools: &[Tool]) -> Result<String, Error> {
    let (named, at) = match named.get("function") {
        Some(Value::Object(function)) => (function, format!("{at}.function")),
        Some(_) => {
            return Err(Error::coded("invalid_type", format!("{at}.function"), "is no object"));
        }
        None => (named, at.to_owned()),
    };
    let name = match named.get("name") {
        Some(Value::String(name)) => name,
        Some(_) => return Err(Error::coded("invalid_type", format!("{at}.name"), "is no string")),
        None => return Err(Error::missing(format!("{at}.name"))),
    };
    if !tools.iter().any(|tool| tool.name == *name) {
        return Err(Error::invalid(format!("{at}.name"), format!("{name:?} is none of the tools")));
    }
    Ok(name.clone())
}

/// Reads `tools`.
///
/// # Errors
/// One of them is none, or there are too many, or two have one name.
pub(crate) fn read(tools: Vec<Map<String, Value>>) -> Result<Vec<Tool>, Error> {
    if tools.len() > TOOLS_MAX {
        let problem = format!("has {} tools, more than {TOOLS_MAX}", tools.len());
        return Err(Error::coded("array_above_max_length", "tools", problem));
    }
    let mut read: Vec<Tool> = Vec::with_capacity(tools.len());
    for (index, tool) in tools.into_iter().enumerate() {
        let tool = read_one(tool, &format!("tools[{index}]"))?;
        if read.iter().any(|other| other.name == tool.name) {
            let problem = format!("{:?} is the name of another tool, too", tool.name);
            return Err(Error::invalid(format!("tools[{index}].function.name"), problem));
        }
        read.push(tool);
    }
    Ok(read)
}

fn read_one(mut tool: Map<String, Value>, at: &str) -> Result<Tool, Error> {
    match tool.get("type") {
        Some(Value::String(kind)) if kind == "function" => {}
        Some(Value::String(kind)) => {
            let problem = format!("{kind:?} is not supported, only \"function\"");
            return Err(Error::invalid(format!("{at}.type"), problem));
        }
        Some(_) => return Err(Error::coded("invalid_type", format!("{at}.type"), "is no string")),
        None => return Err(Error::missing(format!("{at}.type"))),
    }
    let (mut function, at) = match tool.remove("function") {
        Some(Value::Object(function)) => (function, format!("{at}.function")),
        Some(_) => {
            return Err(Error::coded("invalid_type", format!("{at}.function"), "is no object"));
        }
        None => (tool, at.to_owned()),
    };
    // Null is the same as absent.
    let mut take = |field: &str| function.remove(field).filter(|value| !value.is_null());
    let wrong =
        |field: &str, problem: &str| Err(Error::coded("invalid_type", format!("{at}.{field}"), problem));
    let name = match take("name") {
        Some(Value::String(name)) => check_name(name, &format!("{at}.name"))?,
        Some(_) => return wrong("name", "is no string"),
        None => return Err(Error::missing(format!("{at}.name"))),
    };
    let description = match take("description") {
        None => None,
        Some(Value::String(text)) => Some(text),
        Some(_) => return wrong("description", "is no string"),
    };
    let parameters = match take("parameters") {
        None => None,
        Some(schema @ Value::Object(_)) => Some(schema),
        Some(_) => return wrong("parameters", "is no object: a JSON schema is expected"),
    };
    let strict = match take("strict") {
        None => false,
        Some(Value::Bool(strict)) => strict,
        Some(_) => return wrong("strict", "is no boolean"),
    };
    Ok(Tool { name, description, parameters, strict })
}

fn check_name(name: String, at: &str) -> Result<String, Error> {
    let fits = |letter: char| letter.is_ascii_alphanumeric() || "_-.:/".contains(letter);
    if name.is_empty() || name.len() > NAME_BYTES_MAX || !name.chars().all(fits) {
        let problem = format!(
            "{name:?} is not 1 to {NAME_BYTES_MAX} letters, digits, underscores, dashes, dots, colons and slashes"
        );
        return Err(Error::invalid(at, problem));
    }
    Ok(name)
}
