//! The tools of a request to the responses endpoint. OpenAI's clients declare many types of tools, some of which OpenAI
//! runs itself. The model is offered functions: a custom tool becomes a function with one text parameter, and each
//! member of a namespace becomes a function. [`CallNames`] translates the calls back. Tools that cannot be offered are
//! ignored, with a warning in the response.

use std::collections::HashMap;

use serde_json::{Map, Value, json};
use server_openai::responses::Warning;

use crate::error::{Error, shortened};
use crate::prepare::tools::{
    Member, TOOLS_MAX, Tool, ToolKind, built_in, check_name, duplicate, joined_name, optional_text,
    read_function, read_name,
};

/// The parameter of the function that replaces a custom tool.
pub(crate) const INPUT: &str = "input";

/// Length of the type of an ignored tool in a warning, in characters.
///
/// If exceeded: the type is truncated and ends with `…`.
const TYPE_SHOWN_MAX: usize = 64;

#[derive(Debug, Default)]
pub(super) struct RequestTools {
    /// The tools that are offered to the model.
    pub(super) offered: Vec<Tool>,
    /// The tools as the response repeats them.
    pub(super) shown: Vec<Value>,
    pub(super) warnings: Vec<Warning>,
}

/// Maps the names that the model uses for tools to the form in which calls of these tools are reported to the client.
/// Plain functions are not listed.
#[derive(Clone, Debug, Default)]
pub(crate) struct CallNames(HashMap<String, CallName>);

/// The form in which the calls of a tool are reported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CallName {
    pub(crate) namespace: Option<String>,
    pub(crate) name: String,
    pub(crate) kind: ToolKind,
}

impl CallNames {
    pub(super) fn of(tools: &[Tool]) -> Self {
        let differs = |tool: &&Tool| tool.member.is_some() || tool.kind == ToolKind::Custom;
        let entry = |tool: &Tool| {
            let (namespace, name) = match &tool.member {
                Some(Member { namespace, name }) => (Some(namespace.clone()), name.clone()),
                None => (None, tool.name.clone()),
            };
            (tool.name.clone(), CallName { namespace, name, kind: tool.kind })
        };
        Self(tools.iter().filter(differs).map(entry).collect())
    }

    /// Returns the names for a request that has been validated.
    #[cfg(test)]
    pub(crate) fn of_request(request: &Value) -> Self {
        let tools = request["tools"].as_array().into_iter().flatten();
        let tools = tools.map(|tool| tool.as_object().cloned().unwrap_or_default()).collect();
        Self::of(&RequestTools::read(tools).expect("the request is well-formed").offered)
    }

    /// Returns the form in which calls of a tool are reported. `name` is the name that the model uses for the tool.
    pub(crate) fn reported(&self, name: String) -> CallName {
        match self.0.get(&name) {
            Some(reported) => reported.clone(),
            None => CallName { namespace: None, name, kind: ToolKind::Function },
        }
    }
}

impl RequestTools {
    /// Parses `tools`.
    ///
    /// # Errors
    /// A tool is malformed, there are too many tools, or two of them have the same name.
    pub(super) fn read(given: Vec<Map<String, Value>>) -> Result<Self, Error> {
        let mut tools = Self::default();
        tools.admit(given.len())?;
        for (index, tool) in given.into_iter().enumerate() {
            let param = format!("tools[{index}]");
            match kind(&tool, &param)? {
                "namespace" => tools.namespace(tool, &param)?,
                _ => {
                    if let Some(shown) = tools.tool(tool, None, &param)? {
                        tools.shown.push(shown);
                    }
                }
            }
        }
        Ok(tools)
    }

    /// Checks that `more` tools in addition to those accepted so far do not exceed the limit.
    fn admit(&self, more: usize) -> Result<(), Error> {
        if self.offered.len() + more > TOOLS_MAX {
            let problem = format!("has more than {TOOLS_MAX} tools, including the members of namespaces");
            return Err(Error::coded("array_above_max_length", "tools", problem));
        }
        Ok(())
    }

    fn namespace(&mut self, mut given: Map<String, Value>, param: &str) -> Result<(), Error> {
        let name = read_name(&mut given, param)?;
        let description = optional_text(&mut given, "description", param)?;
        let members = match given.remove("tools") {
            Some(Value::Array(members)) => members,
            Some(_) => {
                return Err(Error::coded("invalid_type", format!("{param}.tools"), "must be an array"));
            }
            None => return Err(Error::missing(format!("{param}.tools"))),
        };
        self.admit(members.len())?;
        let mut shown = Vec::with_capacity(members.len());
        for (index, member) in members.into_iter().enumerate() {
            let param = format!("{param}.tools[{index}]");
            let Value::Object(mut member) = member else {
                return Err(Error::coded("invalid_type", param, "must be an object"));
            };
            if kind(&member, &param)? == "namespace" {
                return Err(Error::invalid(
                    format!("{param}.type"),
                    "a namespace cannot contain a namespace",
                ));
            }
            // The model does not see namespaces, so a tool without a description gets the description of its namespace.
            if member.get("description").is_none_or(Value::is_null)
                && let Some(description) = &description
            {
                member.insert("description".to_owned(), json!(description));
            }
            shown.extend(self.tool(member, Some(&name), &param)?);
        }
        self.shown
            .push(json!({"type": "namespace", "name": name, "description": description, "tools": shown}));
        Ok(())
    }

    /// Parses a tool that is not a namespace. Returns the tool as the response repeats it, or `None` if it is ignored.
    fn tool(
        &mut self,
        given: Map<String, Value>,
        namespace: Option<&str>,
        param: &str,
    ) -> Result<Option<Value>, Error> {
        let (mut tool, shown) = match kind(&given, param)? {
            "function" => {
                // A function may also be declared in the form of the chat endpoint.
                let tool = read_function(given, param)?;
                let shown = shown(&tool);
                (tool, shown)
            }
            "custom" => self.custom(given, param)?,
            other => {
                let reason = built_in(other).unwrap_or("this server does not know this type");
                let other = shortened(other.to_owned(), TYPE_SHOWN_MAX);
                self.warn(
                    "unsupported_tool",
                    param,
                    format!("the tool of type {other:?} is ignored: {reason}"),
                );
                return Ok(None);
            }
        };
        if let Some(namespace) = namespace {
            let name = joined_name(namespace, &tool.name);
            check_name(&name, &format!("{}.name", tool.path))?;
            let member =
                Member { namespace: namespace.to_owned(), name: std::mem::replace(&mut tool.name, name) };
            tool.member = Some(member);
        }
        if let Some(problem) = duplicate(&self.offered, &tool) {
            return Err(Error::invalid(format!("{}.name", tool.path), problem));
        }
        self.admit(1)?;
        self.offered.push(tool);
        Ok(Some(shown))
    }

    /// Returns a custom tool as a function with one parameter, and as the response repeats it.
    fn custom(&mut self, mut given: Map<String, Value>, param: &str) -> Result<(Tool, Value), Error> {
        let name = read_name(&mut given, param)?;
        let mut description = optional_text(&mut given, "description", param)?;
        let format = given.remove("format").filter(|format| !format.is_null());
        let mut shown = json!({"type": "custom", "name": name});
        if let Some(description) = &description {
            shown["description"] = json!(description);
        }
        if let Some(format) = &format {
            shown["format"] = format.clone();
            if let Some(grammar) = grammar(format, &format!("{param}.format"))? {
                let text = description.get_or_insert_default();
                if !text.is_empty() {
                    text.push_str("\n\n");
                }
                text.push_str(&grammar);
                let problem = "the model sees the grammar, but the tool's input is not constrained by it";
                self.warn("unsupported_format", &format!("{param}.format"), problem.to_owned());
            }
        }
        let parameters = json!({
            "type": "object",
            "properties": {INPUT: {"type": "string", "description": "The input of the tool, as plain text."}},
            "required": [INPUT],
            "additionalProperties": false,
        });
        let tool = Tool::function(param.to_owned(), name, description, Some(parameters));
        let tool = Tool { kind: ToolKind::Custom, ..tool };
        Ok((tool, shown))
    }

    fn warn(&mut self, code: &str, param: &str, message: String) {
        self.warnings.push(Warning { code: code.to_owned(), param: param.to_owned(), message });
    }
}

/// Returns a function as the response repeats it.
fn shown(tool: &Tool) -> Value {
    json!({
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict,
    })
}

fn kind<'a>(tool: &'a Map<String, Value>, param: &str) -> Result<&'a str, Error> {
    match tool.get("type") {
        Some(Value::String(kind)) => Ok(kind),
        Some(_) => Err(Error::coded("invalid_type", format!("{param}.type"), "must be a string")),
        None => Err(Error::missing(format!("{param}.type"))),
    }
}

/// Returns the text that describes the grammar of a custom tool's input to the model; `None` if the input may be any
/// text.
fn grammar(format: &Value, param: &str) -> Result<Option<String>, Error> {
    let Value::Object(format) = format else {
        return Err(Error::coded("invalid_type", param, "must be an object"));
    };
    let text = |member: &str| match format.get(member) {
        Some(Value::String(text)) => Ok(text.as_str()),
        Some(_) => Err(Error::coded("invalid_type", format!("{param}.{member}"), "must be a string")),
        None => Err(Error::missing(format!("{param}.{member}"))),
    };
    match text("type")? {
        "text" => Ok(None),
        "grammar" => {
            let syntax = text("syntax")?;
            if !matches!(syntax, "lark" | "regex") {
                let problem = format!("must be \"lark\" or \"regex\", not {syntax:?}");
                return Err(Error::invalid(format!("{param}.syntax"), problem));
            }
            let name = if syntax == "lark" { "Lark grammar" } else { "regular expression" };
            Ok(Some(format!("The input must match this {name}:\n{}", text("definition")?)))
        }
        other => {
            let problem = format!("must be \"text\" or \"grammar\", not {other:?}");
            Err(Error::invalid(format!("{param}.type"), problem))
        }
    }
}

/// Returns the input of a custom tool from the arguments of its function. If the arguments were cut off, returns the
/// part of the input that they contain. If they contain no input, returns their whole text, so that no output is lost.
pub(crate) fn custom_input(arguments: &str) -> String {
    let input = |text: &str| match serde_json::from_str::<Value>(text).ok()?.get_mut(INPUT)?.take() {
        Value::String(input) => Some(input),
        _ => None,
    };
    // The longest incomplete escape sequence is a surrogate pair without its last digit.
    const ESCAPE_BYTES_MAX: usize = 11;
    let shortened = |cut: usize| arguments.get(..arguments.len().checked_sub(cut)?);
    input(arguments)
        .or_else(|| {
            let mut cuts = (0..=ESCAPE_BYTES_MAX).filter_map(shortened);
            cuts.find_map(|text| input(&format!("{text}\"}}")))
        })
        .unwrap_or_else(|| arguments.to_owned())
}

#[cfg(test)]
mod tests;
