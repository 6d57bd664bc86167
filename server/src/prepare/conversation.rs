//! A conversation with tools: what the chat and the responses endpoint have in common, whatever it looked like
//! on the wire. Checked as far as it can be without a model; how it becomes a prompt is `prompt`'s business.

use serde_json::{Map, Value};
use server_openai::{ChatRequest, Message};

use super::functions;
use super::tools::{self, Tool, ToolChoice};
use crate::error::Error;

/// What the model is to answer to.
#[derive(Clone, Debug, Default)]
pub(crate) struct Conversation {
    /// The parameter that the messages came in, for errors: `messages` or `input`.
    pub(crate) param: &'static str,
    pub(crate) messages: Vec<Message>,
    /// The tools of the request, whether or not they may be called.
    pub(crate) tools: Vec<Tool>,
    pub(crate) choice: ToolChoice,
    /// Whether several calls may go out in one answer; they may if the request does not say.
    pub(crate) parallel: Option<bool>,
    /// Whether the tools came as functions, and calls are to be told as such.
    pub(crate) calls_functions: bool,
    pub(crate) reasoning: Reasoning,
    /// The documents to answer from, for the template.
    pub(crate) documents: Option<Vec<Value>>,
    /// More variables for the template, which win over those that other parameters set.
    pub(crate) variables: Map<String, Value>,
    /// Whether the template opens the assistant's turn.
    pub(crate) add_generation_prompt: bool,
    /// Whether the last message is gone on with in place of being answered.
    pub(crate) continues: bool,
}

/// How much the model is to think, and who sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reasoning {
    /// `None` if the request does not say.
    pub(crate) effort: Option<Effort>,
    /// Whether the answer has it.
    pub(crate) is_shown: bool,
}

impl Default for Reasoning {
    fn default() -> Self {
        Self { effort: None, is_shown: true }
    }
}

/// How much the model is to think.
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

    /// As in requests.
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

    /// As in a template that knows three.
    pub(crate) fn of_three(self) -> &'static str {
        match self {
            Self::None | Self::Minimal | Self::Low => "low",
            Self::Medium => "medium",
            Self::High | Self::XHigh => "high",
        }
    }

    /// The effort of this name.
    ///
    /// # Errors
    /// There is none.
    pub(crate) fn read(name: &str, param: &'static str) -> Result<Self, Error> {
        // OpenAI's name for more than the most that others have.
        let name = if name == "max" { Self::XHigh.name() } else { name };
        Self::ALL.into_iter().find(|effort| effort.name() == name).ok_or_else(|| {
            let known = Self::ALL.map(Self::name).join(", ");
            Error::invalid(param, format!("{name:?} is none of {known}"))
        })
    }
}

impl Conversation {
    /// The conversation of a request to the chat endpoint.
    ///
    /// # Errors
    /// It is not one, or its tools are none.
    pub(crate) fn of_chat(mut request: ChatRequest) -> Result<Self, Error> {
        let mut messages = request.messages.take().ok_or_else(|| Error::missing("messages"))?;
        functions::in_messages(&mut messages)?;
        let calls_functions = functions::become_tools(&mut request)?;
        let said = |error| if calls_functions { functions::said_of_functions(error) } else { error };
        let tools = tools::read(request.tools.unwrap_or_default()).map_err(said)?;
        let choice = ToolChoice::read(request.tool_choice.as_ref(), &tools).map_err(said)?;
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

    /// Whether the model may call tools at all.
    pub(crate) fn may_call(&self) -> bool {
        !self.tools.is_empty() && self.choice != ToolChoice::None
    }
}
