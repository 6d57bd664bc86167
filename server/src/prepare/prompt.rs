//! Renders a conversation to a prompt with the chat template. If the template does not render tools
//! ([`server_text::TemplateFeatures`]), the tools are described in the text of a message.

mod continued;
mod messages;
mod tools_as_text;

use serde_json::{Map, Value, json};
use server_engine::TokenId;
use server_parsers::ReasoningFormat;
use server_text::{ChatTemplate, RenderError, RenderInput, ToolsLocation};

use super::conversation::{Conversation, Effort};
use super::encode::{Encoder, SpecialTokens};
use super::images::{self, ConversationImage};
use super::media::Media;
use crate::error::Error;
use crate::model::Model;

/// Variables of a template that are set by other parameters or by the model.
const RESERVED: [&str; 6] =
    ["messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token"];

/// Number of messages of a conversation. Some templates iterate over all messages for each message.
///
/// If exceeded: 400, `array_above_max_length`.
const MESSAGES_MAX: usize = 4096;

/// Number of bytes at the end of a prompt in which a tag may open reasoning.
const END_BYTES: usize = 256;

/// A rendered and tokenized prompt.
pub(super) struct RenderedPrompt {
    pub(super) tokens: Vec<TokenId>,
    /// The images, whose tokens are in `tokens`.
    pub(super) images: Vec<ConversationImage>,
    /// The end of the text of the prompt.
    pub(super) end: String,
}

/// Renders and tokenizes a conversation. `tokens_max` is the [`Encoder`]'s limit.
pub(super) fn render(
    conversation: &Conversation,
    model: &Model,
    media: &Media,
    tokens_max: Option<u32>,
) -> Result<RenderedPrompt, Error> {
    let param = conversation.param;
    if conversation.messages.is_empty() {
        return Err(Error::coded("empty_array", param, "is empty"));
    }
    let messages = conversation.messages.len();
    if messages > MESSAGES_MAX {
        let problem = format!("has {messages} messages (limit: {MESSAGES_MAX})");
        return Err(Error::coded("array_above_max_length", param, problem));
    }
    let template = model
        .text
        .chat_template
        .as_ref()
        .ok_or_else(|| Error::invalid(param, "this model has no chat template; use /completions"))?;
    for reserved in RESERVED {
        if conversation.variables.contains_key(reserved) {
            let problem = "cannot be set here: another parameter or the model sets it";
            return Err(Error::invalid(format!("chat_template_kwargs.{reserved}"), problem));
        }
    }
    let images = match &model.images {
        Some(reader) => images::read(&conversation.messages, param, reader, media)?,
        None => images::reject(&conversation.messages, param)?,
    };
    let render = |conversation: &Conversation| {
        text(conversation, template, model).map_err(|failure| failure.into_error(param))
    };
    let text = match conversation.continues {
        true => continued::render(conversation, render)?,
        false => render(conversation)?,
    };
    let start = (text.len().saturating_sub(END_BYTES)..).find(|&at| text.is_char_boundary(at));
    let end = text[start.unwrap_or(text.len())..].to_owned();
    let encoder = Encoder { model, param, tokens_max, image_tokens: images::num_tokens(&images) };
    let Some(reader) = &model.images else {
        return Ok(RenderedPrompt { tokens: encoder.prompt(&text, SpecialTokens::Absent)?, images, end });
    };
    let text = images::expand(&text, &images, param, reader, tokens_max)?;
    // Templates of vision-language models often omit the BOS token. In this case, the tokenizer adds it, as in
    // transformers.
    let tokenizer = &model.text.tokenizer;
    let has_start = tokenizer.bos().is_none_or(|start| text.starts_with(&tokenizer.token_text(start)));
    let tokens = encoder.prompt(&text, SpecialTokens::added_if(!has_start))?;
    Ok(RenderedPrompt { tokens, images, end })
}

/// The reason why a conversation could not be rendered.
enum RenderFailure {
    Conversation(Error),
    Render(RenderError),
}

impl RenderFailure {
    /// Converts the reason to the error of the request. `param` is the name of the parameter with the messages.
    fn into_error(self, param: &str) -> Error {
        match self {
            Self::Conversation(error) => error,
            Self::Render(RenderError::Refused(reason)) => {
                Error::invalid(param, format!("the chat template rejects the conversation: {reason}"))
            }
            Self::Render(
                error @ (RenderError::NoTemplate { .. } | RenderError::TooLong | RenderError::Engine),
            ) => Error::invalid(param, error),
            Self::Render(RenderError::Render(source)) => {
                Error::invalid(param, format!("failed to render the chat template: {source}"))
            }
        }
    }
}

impl From<Error> for RenderFailure {
    fn from(error: Error) -> Self {
        Self::Conversation(error)
    }
}

fn text(
    conversation: &Conversation,
    template: &ChatTemplate,
    model: &Model,
) -> Result<String, RenderFailure> {
    let mut messages = messages::for_template(conversation, model)?;
    let variables = variables(conversation, model);
    let render = |messages: &[Value], tools: Option<&[Value]>| {
        let input = RenderInput {
            messages,
            tools,
            documents: conversation.documents.as_deref(),
            add_generation_prompt: conversation.add_generation_prompt,
            extra: Some(&variables),
            name: None,
            now: None,
        };
        template.render(&input).map_err(RenderFailure::Render)
    };
    if !conversation.may_call() {
        return render(&messages, None);
    }
    let mut tools: Vec<Value> = conversation.tools.iter().map(super::tools::Tool::template_value).collect();
    if model.template_features.needs_tool_descriptions {
        for tool in tools.iter_mut().filter(|tool| tool["function"]["description"].is_null()) {
            tool["function"]["description"] = json!("");
        }
    }
    match model.template_features.tools_location {
        ToolsLocation::Variable => render(&messages, Some(&tools)),
        ToolsLocation::SystemMessage => {
            tools_as_text::system(&mut messages)["tools"] =
                json!(tools_as_text::spaced(&Value::Array(tools)));
            render(&messages, None)
        }
        ToolsLocation::Unsupported => {
            let description = tools_as_text::tools(&tools, model);
            let mut with_system = messages.clone();
            tools_as_text::append(tools_as_text::system(&mut with_system), &description);
            match render(&with_system, None) {
                // Some templates reject system messages. Describe the tools in the user's first message instead.
                Err(RenderFailure::Render(RenderError::Refused(_))) => {
                    if let Some(user) = messages.iter_mut().find(|message| message["role"] == "user") {
                        tools_as_text::prepend(user, &description);
                    }
                    render(&messages, None)
                }
                rendered => rendered,
            }
        }
    }
}

/// Returns the variables that are set by parameters. Those of `chat_template_kwargs` take precedence.
fn variables(conversation: &Conversation, model: &Model) -> Map<String, Value> {
    let mut variables = Map::new();
    if let Some(effort) = conversation.reasoning.effort {
        let has_three = model.formats.reasoning == ReasoningFormat::Gptoss;
        let name = if has_three { effort.of_three() } else { effort.name() };
        variables.insert("reasoning_effort".to_owned(), json!(name));
        // Qwen's templates read the first variable; those of DeepSeek and Granite read the second.
        for name in ["enable_thinking", "thinking"] {
            variables.insert(name.to_owned(), json!(effort != Effort::None));
        }
    }
    variables.extend(conversation.variables.clone());
    variables
}

#[cfg(test)]
mod tests;
