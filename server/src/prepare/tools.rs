//! The tools of a request and which of them may be called: one table of rules, for both endpoints that take
//! tools. Both shapes are read, OpenAI's of the chat endpoint (`function` within) and the flat one of responses.

use serde_json::{Map, Value, json};

use crate::error::Error;

/// Number of tools of a request.
///
/// Beyond it: 400, `array_above_max_length`.
pub(crate) const TOOLS_MAX: usize = 512;
/// Size of the name of a tool.
///
/// Beyond it: 400, `invalid_value`.
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
    pub(crate) kind: ToolKind,
    /// The namespace that declares it, if one does: `name` is made of both names then.
    pub(crate) member: Option<Member>,
}

/// What the client declared a tool as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ToolKind {
    Function,
    /// A tool whose input is text. The model is offered a function with one parameter.
    Custom,
}

/// A tool's place in a namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Member {
    pub(crate) namespace: String,
    /// The tool's name within it.
    pub(crate) name: String,
}

/// The types of tools that OpenAI's clients know and that the model cannot be offered, with the reason. The responses
/// endpoint ignores such tools; functions, custom tools and namespaces are offered.
pub(crate) const BUILT_IN: [(&str, &str); 16] = [
    ("web_search", HOSTED),
    ("web_search_2025_08_26", HOSTED),
    ("web_search_preview", HOSTED),
    ("web_search_preview_2025_03_11", HOSTED),
    ("file_search", HOSTED),
    ("code_interpreter", HOSTED),
    ("image_generation", HOSTED),
    ("mcp", HOSTED),
    ("programmatic_tool_calling", HOSTED),
    ("computer", OWN_CALLS),
    ("computer_use", OWN_CALLS),
    ("computer_use_preview", OWN_CALLS),
    ("local_shell", OWN_CALLS),
    ("shell", OWN_CALLS),
    ("apply_patch", OWN_CALLS),
    ("tool_search", ALL_OFFERED),
];

const HOSTED: &str = "this server runs no tools";
const OWN_CALLS: &str = "this server does not generate its type of calls; declare a function instead";
const ALL_OFFERED: &str = "the model is offered every tool of the request at once";

/// Why a tool of this type cannot be offered; `None` if the type is no known built-in one.
pub(crate) fn built_in(kind: &str) -> Option<&'static str> {
    BUILT_IN.iter().find(|(known, _)| *known == kind).map(|(_, reason)| *reason)
}

/// The name by which the model calls a member of a namespace. Codex ends its namespaces with the separator already.
pub(crate) fn joined_name(namespace: &str, name: &str) -> String {
    const SEPARATOR: &str = "__";
    let separator = if namespace.ends_with(SEPARATOR) { "" } else { SEPARATOR };
    format!("{namespace}{separator}{name}")
}

impl Tool {
    /// A function without strict arguments.
    pub(crate) fn function(name: String, description: Option<String>, parameters: Option<Value>) -> Self {
        Self { name, description, parameters, strict: false, kind: ToolKind::Function, member: None }
    }

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
                Some("function" | "custom") | None => required(Self::Named(known(choice, PARAM, tools)?)),
                Some(other) => {
                    let problem = match built_in(other) {
                        Some(reason) => format!("{other:?} cannot be called: {reason}"),
                        None => {
                            format!("{other:?} is neither \"function\" nor \"custom\" nor \"allowed_tools\"")
                        }
                    };
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
    let mut names = Vec::with_capacity(list.len());
    for (index, tool) in list.iter().enumerate() {
        let at = format!("{at}.tools[{index}]");
        let tool = tool.as_object().ok_or_else(|| Error::coded("invalid_type", &at, "is no object"))?;
        // Tools that were ignored cannot be called, and so it does not matter whether they may be.
        if tool.get("type").and_then(Value::as_str).and_then(built_in).is_none() {
            names.push(known(tool, &at, tools)?);
        }
    }
    match (names.is_empty(), is_required) {
        (false, _) => Ok(ToolChoice::Allowed { names, is_required }),
        (true, false) => Ok(ToolChoice::None),
        (true, true) => Err(Error::invalid(format!("{at}.tools"), "names no tool that this server offers")),
    }
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
    let name = match named.get("namespace").and_then(Value::as_str) {
        Some(namespace) => joined_name(namespace, name),
        None => name.clone(),
    };
    if !tools.iter().any(|tool| tool.name == name) {
        return Err(Error::invalid(format!("{at}.name"), format!("{name:?} is none of the tools")));
    }
    Ok(name)
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
        if let Some(problem) = duplicate(&read, &tool) {
            return Err(Error::invalid(format!("tools[{index}].function.name"), problem));
        }
        read.push(tool);
    }
    Ok(read)
}

/// What is wrong if another tool has the name of `tool`.
pub(crate) fn duplicate(read: &[Tool], tool: &Tool) -> Option<String> {
    let is_taken = read.iter().any(|other| other.name == tool.name);
    is_taken.then(|| format!("{:?} is the name of another tool, too", tool.name))
}

fn read_one(tool: Map<String, Value>, at: &str) -> Result<Tool, Error> {
    match tool.get("type") {
        Some(Value::String(kind)) if kind == "function" => read_function(tool, at),
        Some(Value::String(kind)) => {
            let problem = format!("{kind:?} is not supported, only \"function\"");
            Err(Error::invalid(format!("{at}.type"), problem))
        }
        Some(_) => Err(Error::coded("invalid_type", format!("{at}.type"), "is no string")),
        None => Err(Error::missing(format!("{at}.type"))),
    }
}

/// Reads a tool of type `function`, in either shape.
///
/// # Errors
/// A member is missing or has the wrong type.
pub(crate) fn read_function(mut tool: Map<String, Value>, at: &str) -> Result<Tool, Error> {
    let (mut function, at) = match tool.remove("function") {
        Some(Value::Object(function)) => (function, format!("{at}.function")),
        Some(_) => {
            return Err(Error::coded("invalid_type", format!("{at}.function"), "is no object"));
        }
        None => (tool, at.to_owned()),
    };
    let name = read_name(&mut function, &at)?;
    let description = optional_text(&mut function, "description", &at)?;
    // Null is the same as absent.
    let mut take = |field: &str| function.remove(field).filter(|value| !value.is_null());
    let wrong =
        |field: &str, problem: &str| Err(Error::coded("invalid_type", format!("{at}.{field}"), problem));
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
    Ok(Tool { strict, ..Tool::function(name, description, parameters) })
}

/// Takes the member `name` of a tool.
pub(crate) fn read_name(tool: &mut Map<String, Value>, at: &str) -> Result<String, Error> {
    let at = format!("{at}.name");
    let name = match tool.remove("name") {
        Some(Value::String(name)) => name,
        None | Some(Value::Null) => return Err(Error::missing(at)),
        Some(_) => return Err(Error::coded("invalid_type", at, "is no string")),
    };
    check_name(&name, &at)?;
    Ok(name)
}

/// Takes a member of a tool that is text if it is there.
pub(crate) fn optional_text(
    tool: &mut Map<String, Value>,
    member: &str,
    at: &str,
) -> Result<Option<String>, Error> {
    match tool.remove(member) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(_) => Err(Error::coded("invalid_type", format!("{at}.{member}"), "is no string")),
    }
}

pub(crate) fn check_name(name: &str, at: &str) -> Result<(), Error> {
    let fits = |letter: char| letter.is_ascii_alphanumeric() || "_-.:/".contains(letter);
    if name.is_empty() || name.len() > NAME_BYTES_MAX || !name.chars().all(fits) {
        let problem = format!(
            "{name:?} is not 1 to {NAME_BYTES_MAX} letters, digits, underscores, dashes, dots, colons and slashes"
        );
        return Err(Error::invalid(at, problem));
    }
    Ok(())
}
