//! The conversation, with its tools, of a request to the chat or the responses endpoint. This module performs the
//! checks that do not depend on the model; `prompt` renders the conversation.

use serde_json::{Map, Value};
use server_openai::{ChatRequest, Message};

use super::functions;
use super::tools::{self, Tool, ToolChoice};
use crate::error::Error;

/// The conversation to which the model responds.
#[derive(Clone, Debug, Default)]
pub(crate) struct Conversation {
    /// The parameter with the messages, for errors: `messages` or `input`.
    pub(crate) param: &'static str,
    pub(crate) messages: Vec<Message>,
    /// The tools of the request, whether or not they may be called.
    pub(crate) tools: Vec<Tool>,
    pub(crate) choice: ToolChoice,
    /// Whether an answer may have several calls; `None` means true.
    pub(crate) parallel: Option<bool>,
    /// Whether the request declares its tools as `functions`, in which case calls are reported as `function_call`.
    pub(crate) calls_functions: bool,
    pub(crate) reasoning: Reasoning,
    /// The documents for the template.
    pub(crate) documents: Option<Vec<Value>>,
    /// Additional variables for the template, which override the variables that the reasoning effort sets.
    pub(crate) variables: Map<String, Value>,
    /// Whether the template opens the assistant's turn.
    pub(crate) add_generation_prompt: bool,
    /// Whether the model continues the last message instead of answering it.
    pub(crate) continues: bool,
}

/// The reasoning effort, and whether the answer contains the reasoning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reasoning {
    /// The requested effort, if any.
    pub(crate) effort: Option<Effort>,
    /// Whether the answer contains the reasoning.
    pub(crate) is_shown: bool,
}

impl Default for Reasoning {
    fn default() -> Self {
        Self { effort: None, is_shown: true }
    }
}

/// The reasoning effort.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Effort {
    None,
    Minimal,
    Low,
    Medium,
    High,
    XHigh,
}

impl Effort {
    const ALL: [Self; 6] = [Self::None, Self::Minimal, Self::Low, Self::Medium, Self::High, Self::XHigh];

    /// Returns the name of the effort in requests.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Minimal => "minimal",
            Self::Low => "low",
            Self::Medium => "medium",
            Self::High => "high",
            Self::XHigh => "xhigh",
        }
    }

    /// Returns the name of the effort in templates that know only three efforts.
    pub(crate) fn of_three(self) -> &'static str {
        match self {
            Self::None | Self::Minimal | Self::Low => "low",
            Self::Medium => "medium",
            Self::High | Self::XHigh => "high",
        }
    }

    /// Parses the name of an effort.
    ///
    /// # Errors
    /// The name is unknown.
    pub(crate) fn read(name: &str, param: &'static str) -> Result<Self, Error> {
        // `max` is another name for the highest effort.
        let name = if name == "max" { Self::XHigh.name() } else { name };
        Self::ALL.into_iter().find(|effort| effort.name() == name).ok_or_else(|| {
            let known = Self::ALL.map(Self::name).join(", ");
            Error::invalid(param, format!("{name:?} is not one of {known}, max"))
        })
    }
}

impl Conversation {
    /// Returns the conversation of a request to the chat endpoint.
    ///
    /// # Errors
    /// The messages are missing, or a parameter of the conversation is invalid.
    pub(crate) fn of_chat(mut request: ChatRequest) -> Result<Self, Error> {
        let mut messages = request.messages.take().ok_or_else(|| Error::missing("messages"))?;
        functions::in_messages(&mut messages)?;
        let calls_functions = functions::become_tools(&mut request)?;
        let renamed = |error| if calls_functions { functions::renamed(error) } else { error };
        let tools = tools::read(request.tools.unwrap_or_default()).map_err(renamed)?;
        let choice = ToolChoice::read(request.tool_choice.as_ref(), &tools).map_err(renamed)?;
        let continues = request.continue_final_message.unwrap_or(false);
        if continues && request.add_generation_prompt == Some(true) {
            return Err(Error::invalid(
                "continue_final_message",
                "cannot be combined with add_generation_prompt",
            ));
        }
        let effort = request.reasoning_effort.as_deref();
        let effort = effort.map(|name| Effort::read(name, "reasoning_effort")).transpose()?;
        Ok(Self {
            param: "messages",
            messages,
            tools,
            choice,
            parallel: request.parallel_tool_calls,
            calls_functions,
            reasoning: Reasoning { effort, is_shown: request.include_reasoning.unwrap_or(true) },
            documents: request.documents.map(|documents| documents.into_iter().map(Value::Object).collect()),
            variables: request.chat_template_kwargs.unwrap_or_default(),
            add_generation_prompt: request.add_generation_prompt.unwrap_or(!continues),
            continues,
        })
    }

    /// Whether the model may call tools.
    pub(crate) fn may_call(&self) -> bool {
        !self.tools.is_empty() && self.choice != ToolChoice::None
    }
}
