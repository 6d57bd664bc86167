//! Functions: what tools were called before there were tools. A request that speaks of them becomes one that speaks of
//! tools, and its answer is told in the former shape.

use serde_json::{Map, Value, json};
use server_openai::{ChatRequest, Message};

use crate::error::Error;

/// Turns the functions of a request into tools. True if it has any.
///
/// # Errors
/// It has tools too, or what it says of functions is not understood.
pub(super) fn become_tools(request: &mut ChatRequest) -> Result<bool, Error> {
    let choice = request.function_call.take();
    let Some(functions) = request.functions.take() else {
        return match choice {
            Some(_) => Err(Error::invalid("function_call", "is given, but there are no functions")),
            None => Ok(false),
        };
    };
    if request.tools.is_some() || request.tool_choice.is_some() {
        return Err(Error::invalid(
            "functions",
            "cannot be combined with tools, of which they are a former name",
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
        Some(_) => return Err(Error::invalid("function_call", "is neither none nor auto nor an object")),
    };
    // There is room for one call in an answer.
    request.parallel_tool_calls = Some(false);
    Ok(true)
}

/// An error of the tools that they became, in the words of the request.
pub(super) fn said_of_functions(error: Error) -> Error {
    let Error::Invalid { code, param, message } = error else { return error };
    let problem = message.strip_prefix(&param).unwrap_or(&message);
    let renamed = match param.strip_prefix("tools") {
        Some(place) => format!("functions{}", place.replacen(".function", "", 1)),
        None => param.replacen("tool_choice", "function_call", 1).replacen(".function", "", 1),
    };
    Error::Invalid { code, message: format!("{renamed}{problem}"), param: renamed }
}

/// Turns calls of functions in a conversation, and what came of them, into those of tools.
///
/// # Errors
/// A call is none, or a result is nobody's.
pub(super) fn in_messages(messages: &mut [Message]) -> Result<(), Error> {
    let mut called: Option<String> = None;
    for (index, message) in messages.iter_mut().enumerate() {
        if let Some(call) = message.function_call.take() {
            let at = format!("messages[{index}].function_call");
            if message.tool_calls.is_some() {
                return Err(Error::invalid(
                    at,
                    "cannot be combined with tool_calls, of which it is a former name",
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
