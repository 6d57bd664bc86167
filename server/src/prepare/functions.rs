//! Supports functions, the deprecated form of tools: a request with functions is converted to a request with tools, and
//! its answer is in the deprecated form.

use serde_json::{Map, Value, json};
use server_openai::{ChatRequest, Message};

use crate::error::Error;

/// Converts the functions of a request to tools. Returns whether the request has `functions`.
///
/// # Errors
/// The request also has `tools` or `tool_choice`, or its `function_call` is invalid or is used without `functions`.
pub(super) fn become_tools(request: &mut ChatRequest) -> Result<bool, Error> {
    let choice = request.function_call.take();
    let Some(functions) = request.functions.take() else {
        return match choice {
            Some(_) => Err(Error::invalid("function_call", "requires functions")),
            None => Ok(false),
        };
    };
    if request.tools.is_some() || request.tool_choice.is_some() {
        return Err(Error::invalid(
            "functions",
            "is the deprecated form of tools and cannot be combined with tools or tool_choice",
        ));
    }
    let tool = |function| {
        Map::from_iter([
            ("type".to_owned(), json!("function")),
            ("function".to_owned(), Value::Object(function)),
        ])
    };
    request.tools = Some(functions.into_iter().map(tool).collect());
    request.tool_choice = match choice {
        None => None,
        Some(Value::String(mode)) if mode == "none" || mode == "auto" => Some(json!(mode)),
        Some(Value::Object(name)) => Some(json!({"type": "function", "function": name})),
        Some(_) => {
            return Err(Error::invalid("function_call", "must be \"none\", \"auto\" or an object"));
        }
    };
    // An answer in the deprecated form can have only one call.
    request.parallel_tool_calls = Some(false);
    Ok(true)
}

/// In an error about tools, replaces the name of the parameter with the deprecated name that the request uses.
pub(super) fn renamed(error: Error) -> Error {
    const NAMES: [(&str, &str); 2] = [("tools", "functions"), ("tool_choice", "function_call")];
    let Error::Invalid { code, param, message } = error else { return error };
    let renamed = NAMES.into_iter().find_map(|(tool_name, name)| {
        let place = param.strip_prefix(tool_name)?;
        Some(format!("{name}{}", place.replacen(".function", "", 1)))
    });
    let Some(renamed) = renamed else { return Error::Invalid { code, param, message } };
    let problem = message.strip_prefix(&param).unwrap_or(&message);
    Error::Invalid { code, message: format!("{renamed}{problem}"), param: renamed }
}

/// Converts the function calls in a conversation, and their results, to tool calls and tool results.
///
/// # Errors
/// A call or a result is malformed, or a message has calls in both forms.
pub(super) fn in_messages(messages: &mut [Message]) -> Result<(), Error> {
    let mut called: Option<String> = None;
    for (index, message) in messages.iter_mut().enumerate() {
        if let Some(call) = message.function_call.take() {
            let at = format!("messages[{index}].function_call");
            if message.tool_calls.is_some() {
                return Err(Error::invalid(
                    at,
                    "cannot be combined with tool_calls, of which it is the deprecated form",
                ));
            }
            if !call.get("name").is_some_and(Value::is_string) {
                return Err(Error::missing(format!("{at}.name")));
            }
            let id = format!("call_{index}");
            let call = json!({"id": id, "type": "function", "function": call});
            message.tool_calls = Some(call.as_object().cloned().into_iter().collect());
            called = Some(id);
        }
        if message.role == "function" {
            if message.name.is_none() {
                return Err(Error::missing(format!("messages[{index}].name")));
            }
            "tool".clone_into(&mut message.role);
            message.tool_call_id = called.take();
        }
    }
    Ok(())
}
