//! Prompts to tokens: conversations by way of the chat template.

use serde_json::{Map, Value};
use server_engine::TokenId;
use server_openai::{ChatRequest, Content, ContentPart, Message, Prompt};
use server_text::{RenderError, RenderInput};

use crate::error::Error;
use crate::limits::CHOICES_MAX;
use crate::model::Model;

/// Who may speak. `developer` is what OpenAI calls `system` lately; templates know only the latter.
const ROLES: [&str; 6] = ["system", "developer", "user", "assistant", "tool", "function"];

/// The tokens of a conversation.
pub(super) fn render(request: &ChatRequest, model: &Model) -> Result<Vec<TokenId>, Error> {
    let messages = request.messages.as_deref().ok_or_else(|| Error::invalid("messages", "is missing"))?;
    if messages.is_empty() {
        return Err(Error::invalid("messages", "is empty"));
    }
    let template = model
        .text
        .chat_template
        .as_ref()
        .ok_or_else(|| Error::invalid("messages", "this model has no chat template; use /completions"))?;
    let messages = messages.iter().enumerate().map(message).collect::<Result<Vec<_>, Error>>()?;
    let tools = tools(request)?;
    let documents: Option<Vec<Value>> = request.documents.as_ref().map(|documents| objects(documents));
    for reserved in ["messages", "tools", "documents", "add_generation_prompt"] {
        if request.chat_template_kwargs.as_ref().is_some_and(|extra| extra.contains_key(reserved)) {
            let problem = "is a parameter of its own";
            return Err(Error::invalid(format!("chat_template_kwargs.{reserved}"), problem));
        }
    }
    let input = RenderInput {
        messages: &messages,
        tools: tools.as_deref(),
        documents: documents.as_deref(),
        add_generation_prompt: request.add_generation_prompt.unwrap_or(true),
        extra: request.chat_template_kwargs.as_ref(),
        name: None,
        now: None,
    };
    let text = template.render(&input).map_err(|error| match error {
        RenderError::Refused(reason) => {
            Error::invalid("messages", format!("the chat template refuses the conversation: {reason}"))
        }
        error @ (RenderError::NoTemplate { .. } | RenderError::TooLong) => Error::invalid("messages", error),
        RenderError::Render(source) => {
            Error::invalid("messages", format!("failed to render the chat template: {source}"))
        }
    })?;
    encode(&text, false, "messages", model)
}

/// A message as templates want it.
fn message((index, message): (usize, &Message)) -> Result<Value, Error> {
    let at = |field: &str| format!("messages[{index}].{field}");
    if !ROLES.contains(&message.role.as_str()) {
        let problem = format!("{:?} is none of {}", message.role, ROLES.join(", "));
        return Err(Error::invalid(at("role"), problem));
    }
    if message.content.is_none() && message.role != "assistant" {
        return Err(Error::invalid(at("content"), "is missing"));
    }
    let mut message = message.clone();
    if message.role == "developer" {
        "system".clone_into(&mut message.role);
    }
    // Templates add texts up: they want a string even where there is none.
    message.content = Some(Content::Text(match message.content.take() {
        None => String::new(),
        Some(Content::Text(text)) => text,
        Some(Content::Parts(parts)) => join(&parts, &at("content"))?,
    }));
    match &mut message.tool_calls {
        Some(calls) if calls.is_empty() => message.tool_calls = None,
        Some(calls) => calls.iter_mut().for_each(parse_arguments),
        None => {}
    }
    serde_json::to_value(message).map_err(|error| Error::Internal(error.to_string()))
}

/// The text of a message in parts, a line for each.
fn join(parts: &[ContentPart], at: &str) -> Result<String, Error> {
    let mut texts = Vec::with_capacity(parts.len());
    for (index, part) in parts.iter().enumerate() {
        match (part.r#type.as_str(), &part.text) {
            ("text" | "input_text" | "output_text", Some(text)) => texts.push(text.as_str()),
            ("text" | "input_text" | "output_text", None) => {
                return Err(Error::invalid(format!("{at}[{index}].text"), "is missing"));
            }
            (kind, _) => {
                let problem = format!("a part of type {kind:?} is given, but this model takes only text");
                return Err(Error::invalid(format!("{at}[{index}].type"), problem));
            }
        }
    }
    Ok(texts.join("\n"))
}

/// Clients send the arguments of a call as JSON in a string, templates want the object.
fn parse_arguments(call: &mut Map<String, Value>) {
    let Some(Value::Object(function)) = call.get_mut("function") else { return };
    let Some(Value::String(arguments)) = function.get("arguments") else { return };
    // What is no object is the model's own writing, and stays as it was.
    if let Ok(object @ Value::Object(_)) = serde_json::from_str(arguments) {
        function.insert("arguments".to_owned(), object);
    }
}

/// The tools for the template.
fn tools(request: &ChatRequest) -> Result<Option<Vec<Value>>, Error> {
    let tools = request.tools.as_ref().filter(|tools| !tools.is_empty());
    match &request.tool_choice {
        Some(Value::String(choice)) if choice == "none" => return Ok(None),
        None => {}
        Some(Value::String(choice)) if choice == "auto" => {}
        Some(_) => return Err(Error::invalid("tool_choice", "only \"none\" and \"auto\" are supported")),
    }
    Ok(tools.map(|tools| objects(tools)))
}

fn objects(objects: &[Map<String, Value>]) -> Vec<Value> {
    objects.iter().cloned().map(Value::Object).collect()
}

/// The tokens of plain prompts, and the texts to echo.
pub(super) fn tokenise(
    prompt: Prompt,
    echo: bool,
    model: &Model,
) -> Result<(Vec<Vec<TokenId>>, Vec<String>), Error> {
    let count = match &prompt {
        Prompt::Texts(texts) => texts.len(),
        Prompt::Tokens(prompts) => prompts.len(),
    };
    if count == 0 {
        return Err(Error::invalid("prompt", "is empty"));
    }
    if count > CHOICES_MAX as usize {
        return Err(Error::invalid("prompt", format!("has more than {CHOICES_MAX} prompts")));
    }
    match prompt {
        Prompt::Texts(texts) => {
            let tokens =
                texts.iter().map(|text| encode(text, true, "prompt", model)).collect::<Result<_, _>>()?;
            let echoes = texts.into_iter().map(|text| if echo { text } else { String::new() }).collect();
            Ok((tokens, echoes))
        }
        Prompt::Tokens(prompts) => {
            let text = |tokens: &Vec<TokenId>| model.text.tokenizer.decode(tokens, false);
            let echoes =
                prompts.iter().map(|tokens| if echo { text(tokens) } else { String::new() }).collect();
            Ok((prompts, echoes))
        }
    }
}

fn encode(text: &str, plain: bool, param: &'static str, model: &Model) -> Result<Vec<TokenId>, Error> {
    // Even where a beginning token is added, nothing is no prompt.
    if text.is_empty() {
        return Err(Error::invalid(param, "is empty"));
    }
    model.text.tokenizer.encode(text, plain, true).map_err(|error| Error::invalid(param, error))
}
