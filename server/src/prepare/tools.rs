//! The tools of a request and the choice of tools that may be called, for the chat and the responses endpoint. Two
//! forms are accepted: the form of OpenAI's chat endpoint with a nested `function`, and the flat form of the responses
//! endpoint.

use serde_json::{Map, Value, json};

use crate::error::Error;

/// Number of tools of a request.
///
/// If exceeded: 400, `array_above_max_length`.
pub(crate) const TOOLS_MAX: usize = 512;
/// Size of the name of a tool.
///
/// If exceeded: 400, `invalid_value`.
pub(crate) const NAME_BYTES_MAX: usize = 128;

/// A tool that is offered to the model.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Tool {
    /// The path, within the request, of the object with the name and the parameters of the tool; error messages contain
    /// it.
    pub(crate) path: String,
    pub(crate) name: String,
    pub(crate) description: Option<String>,
    /// The JSON schema of the arguments, if the tool has one.
    pub(crate) parameters: Option<Value>,
    /// Whether the arguments must match the schema.
    pub(crate) strict: bool,
    pub(crate) kind: ToolKind,
    /// The namespace that declares the tool, and the tool's name within it, if any. `name` contains both names.
    pub(crate) member: Option<Member>,
}

/// The type that the client declared for a tool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ToolKind {
    Function,
    /// The input of the tool is text. The model is offered a function with one parameter.
    Custom,
}

/// The namespace of a tool, and the name of the tool in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Member {
    pub(crate) namespace: String,
    /// The name of the tool within the namespace.
    pub(crate) name: String,
}

/// The types of tools that OpenAI's clients use but that cannot be offered to the model, with the reason for each. The
/// responses endpoint ignores such tools. It offers functions, custom tools and namespaces.
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

const HOSTED: &str = "this server does not run tools";
const OWN_CALLS: &str = "this server does not generate calls of this type; declare a function instead";
const ALL_OFFERED: &str = "the model is offered every tool of the request at once";

/// Returns the reason why a tool of this type cannot be offered; `None` if the type is not a known built-in type.
pub(crate) fn built_in(kind: &str) -> Option<&'static str> {
    BUILT_IN.iter().find(|(known, _)| *known == kind).map(|(_, reason)| *reason)
}

/// Returns the name by which the model calls a member of a namespace. Codex's namespaces already end with the
/// separator.
pub(crate) fn joined_name(namespace: &str, name: &str) -> String {
    const SEPARATOR: &str = "__";
    let separator = if namespace.ends_with(SEPARATOR) { "" } else { SEPARATOR };
    format!("{namespace}{separator}{name}")
}

impl Tool {
    /// Creates a function that is not strict.
    pub(crate) fn function(
        path: String,
        name: String,
        description: Option<String>,
        parameters: Option<Value>,
    ) -> Self {
        Self { path, name, description, parameters, strict: false, kind: ToolKind::Function, member: None }
    }

    /// Returns the tool for templates, in the form of the chat endpoint. `strict` is omitted, so that it does not
    /// change the prompt.
    pub(crate) fn template_value(&self) -> Value {
        let mut function = json!({"name": self.name});
        if let Some(description) = &self.description {
            function["description"] = json!(description);
        }
        // Templates iterate over the properties without checking that they exist.
        function["parameters"] =
            self.parameters.clone().unwrap_or_else(|| json!({"type": "object", "properties": {}}));
        json!({"type": "function", "function": function})
    }
}

/// The choice of the tools that may or must be called.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum ToolChoice {
    /// No tool may be called, and the prompt mentions none.
    None,
    /// The model decides whether to call tools.
    #[default]
    Auto,
    /// At least one tool must be called.
    Required,
    /// This tool must be called.
    Named(String),
    /// Only these tools may be called. At least one must be called if `is_required` is set. The prompt mentions all
    /// tools.
    Allowed { names: Vec<String>, is_required: bool },
}

impl ToolChoice {
    /// Parses a `tool_choice`.
    ///
    /// # Errors
    /// The value is invalid, names an unknown tool, or requires a call although no tool is offered.
    pub(crate) fn read(choice: Option<&Value>, tools: &[Tool]) -> Result<Self, Error> {
        const PARAM: &str = "tool_choice";
        let required = |choice: Self| {
            if tools.is_empty() {
                return Err(Error::invalid(PARAM, "requires a tool call, but the request has no tools"));
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
                    let problem =
                        format!("must be \"none\", \"auto\", \"required\" or an object, not {other:?}");
                    Err(Error::invalid(PARAM, problem))
                }
            },
            Some(Value::Object(choice)) => match choice.get("type").and_then(Value::as_str) {
                Some("allowed_tools") => allowed(choice, tools),
                Some("function" | "custom") | None => required(Self::Named(known(choice, PARAM, tools)?)),
                Some(other) => {
                    let problem = match built_in(other) {
                        Some(reason) => format!("a tool of type {other:?} cannot be called: {reason}"),
                        None => {
                            format!("must be \"function\", \"custom\" or \"allowed_tools\", not {other:?}")
                        }
                    };
                    Err(Error::invalid("tool_choice.type", problem))
                }
            },
            Some(_) => Err(Error::coded("invalid_type", PARAM, "must be a string or an object")),
        }
    }

    /// Whether a tool with this name may be called.
    pub(crate) fn allows(&self, name: &str) -> bool {
        match self {
            Self::None => false,
            Self::Auto | Self::Required => true,
            Self::Named(only) => only == name,
            Self::Allowed { names, .. } => names.iter().any(|known| known == name),
        }
    }

    /// Whether an answer must contain a call.
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
        Some(_) => {
            return Err(Error::coded("invalid_type", "tool_choice.allowed_tools", "must be an object"));
        }
        None => (choice, "tool_choice"),
    };
    let is_required = match choice.get("mode").map(Value::as_str) {
        Some(Some("required")) => true,
        Some(Some("auto")) => false,
        None => return Err(Error::missing(format!("{at}.mode"))),
        Some(_) => return Err(Error::invalid(format!("{at}.mode"), "must be \"auto\" or \"required\"")),
    };
    let list = match choice.get("tools") {
        Some(Value::Array(list)) if !list.is_empty() => list,
        Some(Value::Array(_)) => return Err(Error::invalid(format!("{at}.tools"), "is empty")),
        Some(_) => return Err(Error::coded("invalid_type", format!("{at}.tools"), "must be an array")),
        None => return Err(Error::missing(format!("{at}.tools"))),
    };
    let mut names = Vec::with_capacity(list.len());
    for (index, tool) in list.iter().enumerate() {
        let at = format!("{at}.tools[{index}]");
        let tool = tool.as_object().ok_or_else(|| Error::coded("invalid_type", &at, "must be an object"))?;
        // Built-in tools are ignored, so they cannot be called.
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

/// Returns the name of the tool that an object refers to in either form. Fails if the request has no such tool.
fn known(named: &Map<String, Value>, at: &str, tools: &[Tool]) -> Result<String, Error> {
    let (named, at) = match named.get("function") {
        Some(Value::Object(function)) => (function, format!("{at}.function")),
        Some(_) => {
            return Err(Error::coded("invalid_type", format!("{at}.function"), "must be an object"));
        }
        None => (named, at.to_owned()),
    };
    let name = match named.get("name") {
        Some(Value::String(name)) => name,
        Some(_) => return Err(Error::coded("invalid_type", format!("{at}.name"), "must be a string")),
        None => return Err(Error::missing(format!("{at}.name"))),
    };
    let name = match named.get("namespace").and_then(Value::as_str) {
        Some(namespace) => joined_name(namespace, name),
        None => name.clone(),
    };
    if !tools.iter().any(|tool| tool.name == name) {
        return Err(Error::invalid(format!("{at}.name"), format!("the request has no tool named {name:?}")));
    }
    Ok(name)
}

/// Parses `tools`.
///
/// # Errors
/// A tool is malformed, there are too many tools, or two of them have the same name.
pub(crate) fn read(tools: Vec<Map<String, Value>>) -> Result<Vec<Tool>, Error> {
    if tools.len() > TOOLS_MAX {
        let problem = format!("has {} tools (limit: {TOOLS_MAX})", tools.len());
        return Err(Error::coded("array_above_max_length", "tools", problem));
    }
    let mut read: Vec<Tool> = Vec::with_capacity(tools.len());
    for (index, tool) in tools.into_iter().enumerate() {
        let tool = read_one(tool, &format!("tools[{index}]"))?;
        if let Some(problem) = duplicate(&read, &tool) {
            return Err(Error::invalid(format!("{}.name", tool.path), problem));
        }
        read.push(tool);
    }
    Ok(read)
}

/// Returns a description of the problem if one of the tools in `read` has the same name as `tool`.
pub(crate) fn duplicate(read: &[Tool], tool: &Tool) -> Option<String> {
    let is_taken = read.iter().any(|other| other.name == tool.name);
    is_taken.then(|| format!("another tool already has the name {:?}", tool.name))
}

fn read_one(tool: Map<String, Value>, at: &str) -> Result<Tool, Error> {
    match tool.get("type") {
        Some(Value::String(kind)) if kind == "function" => read_function(tool, at),
        Some(Value::String(kind)) => {
            let problem = format!("must be \"function\", not {kind:?}");
            Err(Error::invalid(format!("{at}.type"), problem))
        }
        Some(_) => Err(Error::coded("invalid_type", format!("{at}.type"), "must be a string")),
        None => Err(Error::missing(format!("{at}.type"))),
    }
}

/// Parses a tool of type `function` in either form.
///
/// # Errors
/// A member is missing or invalid.
pub(crate) fn read_function(mut tool: Map<String, Value>, at: &str) -> Result<Tool, Error> {
    let (mut function, at) = match tool.remove("function") {
        Some(Value::Object(function)) => (function, format!("{at}.function")),
        Some(_) => {
            return Err(Error::coded("invalid_type", format!("{at}.function"), "must be an object"));
        }
        None => (tool, at.to_owned()),
    };
    let name = read_name(&mut function, &at)?;
    let description = optional_text(&mut function, "description", &at)?;
    // `null` is equivalent to an absent member.
    let mut take = |field: &str| function.remove(field).filter(|value| !value.is_null());
    let wrong =
        |field: &str, problem: &str| Err(Error::coded("invalid_type", format!("{at}.{field}"), problem));
    let parameters = match take("parameters") {
        None => None,
        Some(schema @ Value::Object(_)) => Some(schema),
        Some(_) => return wrong("parameters", "must be an object: a JSON schema is expected"),
    };
    let strict = match take("strict") {
        None => false,
        Some(Value::Bool(strict)) => strict,
        Some(_) => return wrong("strict", "must be a boolean"),
    };
    Ok(Tool { strict, ..Tool::function(at, name, description, parameters) })
}

/// Removes the member `name` of a tool, checks it, and returns it.
pub(crate) fn read_name(tool: &mut Map<String, Value>, at: &str) -> Result<String, Error> {
    let at = format!("{at}.name");
    let name = match tool.remove("name") {
        Some(Value::String(name)) => name,
        None | Some(Value::Null) => return Err(Error::missing(at)),
        Some(_) => return Err(Error::coded("invalid_type", at, "must be a string")),
    };
    check_name(&name, &at)?;
    Ok(name)
}

/// Removes an optional member of a tool and returns its text.
pub(crate) fn optional_text(
    tool: &mut Map<String, Value>,
    member: &str,
    at: &str,
) -> Result<Option<String>, Error> {
    match tool.remove(member) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(_) => Err(Error::coded("invalid_type", format!("{at}.{member}"), "must be a string")),
    }
}

pub(crate) fn check_name(name: &str, at: &str) -> Result<(), Error> {
    let fits = |letter: char| letter.is_ascii_alphanumeric() || "_-.:/".contains(letter);
    if name.is_empty() || name.len() > NAME_BYTES_MAX || !name.chars().all(fits) {
        let problem = format!(
            "must be 1 to {NAME_BYTES_MAX} ASCII letters, digits, underscores, dashes, dots, colons or slashes, not \
             {name:?}"
        );
        return Err(Error::invalid(at, problem));
    }
    Ok(())
}
