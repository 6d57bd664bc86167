//! Requests to the responses and conversations endpoints.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::parse::{self, RequestError};
use crate::text_or_list::TextOrList;
use crate::{Generation, ImageUrl};

/// A request to `/responses`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Request {
    /// The parameters that all generating endpoints share.
    #[serde(skip)]
    pub generation: Generation,
    /// The text of a new user message, or the new items of the conversation.
    pub input: Option<TextOrList<InputItem>>,
    /// The instructions that precede the conversation, for this response only.
    pub instructions: Option<String>,
    /// The identifier of the earlier response that the new response continues.
    pub previous_response_id: Option<String>,
    /// The conversation that the response belongs to: an identifier, or an object with an `id`.
    pub conversation: Option<Value>,
    /// The largest number of tokens to generate.
    pub max_output_tokens: Option<u32>,
    /// The largest number of calls of built-in tools.
    pub max_tool_calls: Option<u32>,
    /// The tools that the model may call.
    pub tools: Option<Vec<Map<String, Value>>>,
    /// Whether the model may, must or must not call tools, or which tool it must call.
    pub tool_choice: Option<Value>,
    /// Whether a response may contain several tool calls; true by default.
    pub parallel_tool_calls: Option<bool>,
    /// The format and the verbosity of the text.
    pub text: Option<TextParameter>,
    /// The settings of the reasoning.
    pub reasoning: Option<ReasoningParameter>,
    /// The behavior if the conversation is too long: `auto` or `disabled`.
    pub truncation: Option<String>,
    /// The optional parts to include in the response.
    pub include: Option<Vec<String>>,
    /// The number of most probable tokens to report at each position.
    pub top_logprobs: Option<u32>,
    /// Whether to report log probabilities.
    pub logprobs: Option<bool>,
    /// Whether to generate the response in the background, even if no client waits for it.
    pub background: Option<bool>,
    /// Whether to store the response; true by default.
    pub store: Option<bool>,
    /// The metadata that the client attaches for its own use.
    pub metadata: Option<Map<String, Value>>,
    /// The user on whose behalf the client sends the request.
    pub user: Option<String>,
    /// The newer name of `user`.
    pub safety_identifier: Option<String>,
    /// The key that requests with a common prompt prefix share.
    pub prompt_cache_key: Option<String>,
    /// The requested service tier.
    pub service_tier: Option<String>,
    /// Settings for the compaction of the conversation.
    pub context_management: Option<Vec<Value>>,
    /// The documents on which the answer is to be based, as a variable of the chat template.
    pub documents: Option<Vec<Map<String, Value>>>,
    /// Additional variables for the chat template.
    pub chat_template_kwargs: Option<Map<String, Value>>,
}

impl Request {
    /// Parses a request body.
    ///
    /// # Errors
    /// [`RequestError`] if the body is not a JSON object, a field has a wrong type, or a required field is missing.
    pub fn parse(body: &[u8]) -> Result<Self, RequestError> {
        Self::read(&parse::object(body)?)
    }

    /// Parses a request from a JSON object.
    ///
    /// # Errors
    /// [`RequestError`] if a field has a wrong type or a required field is missing.
    pub fn read(object: &Value) -> Result<Self, RequestError> {
        Ok(Self { generation: parse::fields(object)?, ..parse::fields(object)? })
    }
}

/// The format and the verbosity of the text, in requests and responses.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(default)]
pub struct TextParameter {
    /// The format: plain text, or JSON with an optional schema.
    pub format: Option<Map<String, Value>>,
    /// The requested length of the text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub verbosity: Option<String>,
}

/// The settings of the reasoning, in requests and responses.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default)]
pub struct ReasoningParameter {
    /// The effort: `none`, `minimal`, `low`, `medium`, `high`, `xhigh` or `max`.
    pub effort: Option<String>,
    /// The kind of summary: `auto`, `concise` or `detailed`.
    pub summary: Option<String>,
    /// The deprecated name of `summary`.
    #[serde(skip_serializing)]
    pub generate_summary: Option<String>,
}

/// An item in the form in which a client sends it. The type of the item determines which members are required.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct InputItem {
    /// The type of the item. If absent, it is `item_reference` for an item with an ID and no role, and `message` for
    /// all others.
    pub r#type: Option<String>,
    /// The identifier of the item.
    pub id: Option<String>,
    /// The state of the item.
    pub status: Option<String>,
    /// The role of the author of a message.
    pub role: Option<String>,
    /// The content of a message, or the text of reasoning.
    pub content: Option<TextOrList<InputPart>>,
    /// The summary of reasoning.
    pub summary: Option<Vec<InputPart>>,
    /// The encrypted reasoning, which the server cannot read.
    pub encrypted_content: Option<String>,
    /// The identifier of a call.
    pub call_id: Option<String>,
    /// The name of the tool that is called.
    pub name: Option<String>,
    /// The namespace of the tool that is called.
    pub namespace: Option<String>,
    /// The arguments of a function call.
    pub arguments: Option<String>,
    /// The input of a custom tool call.
    pub input: Option<String>,
    /// The result of a tool call.
    pub output: Option<TextOrList<InputPart>>,
}

/// A part of a message, of reasoning, or of the result of a tool call. The server decides which types it supports.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct InputPart {
    /// The type of the part, such as `input_text`, `output_text` or `input_image`.
    pub r#type: Option<String>,
    /// The text of the part.
    pub text: Option<String>,
    /// The text of a refusal.
    pub refusal: Option<String>,
    /// The location of an image: a URL or, as at the chat endpoint, an object with the URL.
    pub image_url: Option<ImageUrl>,
    /// The identifier of an uploaded file with an image.
    pub file_id: Option<String>,
    /// The level of detail of an image: `low`, `high` or `auto`.
    pub detail: Option<String>,
}

/// A request to `/conversations`, which creates a conversation, or to `/conversations/{id}`, which replaces its
/// metadata.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct ConversationRequest {
    /// The metadata that the client attaches for its own use.
    pub metadata: Option<Map<String, Value>>,
    /// The first items of the conversation.
    pub items: Option<Vec<InputItem>>,
}

/// A request to `/conversations/{id}/items`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct ItemsRequest {
    /// The items to add.
    pub items: Option<Vec<InputItem>>,
}

impl ConversationRequest {
    /// Parses a request body; an empty body is an empty request.
    ///
    /// # Errors
    /// [`RequestError`] if the body is not a JSON object, a field has a wrong type, or a required field is missing.
    pub fn parse(body: &[u8]) -> Result<Self, RequestError> {
        if body.is_empty() { Ok(Self::default()) } else { parse::fields(&parse::object(body)?) }
    }
}

impl ItemsRequest {
    /// Parses a request body.
    ///
    /// # Errors
    /// [`RequestError`] if the body is not a JSON object, a field has a wrong type, or a required field is missing.
    pub fn parse(body: &[u8]) -> Result<Self, RequestError> {
        parse::fields(&parse::object(body)?)
    }
}
