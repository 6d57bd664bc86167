//! What requests look like.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{self, Deserializer, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::Generation;
use crate::parse::{self, Malformed};

/// A request to `/responses`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Request {
    /// The parameters that it has in common with other endpoints.
    #[serde(skip)]
    pub generation: Generation,
    /// What is new in the conversation.
    pub input: Option<TextOr<InputItem>>,
    /// What goes before the conversation, in this response only.
    pub instructions: Option<String>,
    /// The response that this one follows.
    pub previous_response_id: Option<String>,
    /// The conversation it is in: a name, or an object with an `id`.
    pub conversation: Option<Value>,
    /// Most tokens to generate.
    pub max_output_tokens: Option<u32>,
    /// Most calls of built-in tools.
    pub max_tool_calls: Option<u32>,
    /// The tools the model may call.
    pub tools: Option<Vec<Map<String, Value>>>,
    /// Which of them.
    pub tool_choice: Option<Value>,
    /// Whether there may be several calls. Default true.
    pub parallel_tool_calls: Option<bool>,
    /// The form of the text.
    pub text: Option<TextParameter>,
    /// How much is thought.
    pub reasoning: Option<ReasoningParameter>,
    /// What happens if the conversation is too long.
    pub truncation: Option<String>,
    /// What is wanted beside the usual.
    pub include: Option<Vec<String>>,
    /// Of how many of the most probable tokens log probabilities are told.
    pub top_logprobs: Option<u32>,
    /// Whether log probabilities are told.
    pub logprobs: Option<bool>,
    /// Whether the response is made whether or not anybody waits for it.
    pub background: Option<bool>,
    /// Whether it is kept. Default true.
    pub store: Option<bool>,
    /// For the client's own use.
    pub metadata: Option<Map<String, Value>>,
    /// Who asks.
    pub user: Option<String>,
    /// Who asks.
    pub safety_identifier: Option<String>,
    /// What has prompts in common with this one.
    pub prompt_cache_key: Option<String>,
    /// How fast it has to be.
    pub service_tier: Option<String>,
    /// How long conversations are shortened.
    pub context_management: Option<Vec<Value>>,
    /// The documents to answer from, for the chat template.
    pub documents: Option<Vec<Map<String, Value>>>,
    /// More variables for the chat template.
    pub chat_template_kwargs: Option<Map<String, Value>>,
}

impl Request {
    /// Reads a body.
    ///
    /// # Errors
    /// It is no JSON object, or a field has a wrong type.
    pub fn parse(body: &[u8]) -> Result<Self, Malformed> {
        Self::read(&parse::object(body)?)
    }

    /// Reads a request from a JSON object.
    ///
    /// # Errors
    /// A field has a wrong type.
    pub fn read(object: &Value) -> Result<Self, Malformed> {
        Ok(Self { generation: parse::fields(object)?, ..parse::fields(object)? })
    }
}

/// The form of the text, asked for and as it is.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(default)]
pub struct TextParameter {
    /// Plain text, or JSON and of which form.
    pub format: Option<Map<String, Value>>,
    /// How many words are made of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub verbosity: Option<String>,
}

/// How much is thought, asked for and as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default)]
pub struct ReasoningParameter {
    /// `none`, `minimal`, `low`, `medium`, `high`, `xhigh` or `max`.
    pub effort: Option<String>,
    /// `auto`, `concise` or `detailed`.
    pub summary: Option<String>,
    /// `summary`, as it was called before.
    #[serde(skip_serializing)]
    pub generate_summary: Option<String>,
}

/// An item as clients give it: which members it must have goes by its type.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct InputItem {
    /// `message` if it is not there.
    pub r#type: Option<String>,
    /// Names it.
    pub id: Option<String>,
    /// How far it is.
    pub status: Option<String>,
    /// Who speaks.
    pub role: Option<String>,
    /// What is said, or thought.
    pub content: Option<TextOr<InputPart>>,
    /// What is thought.
    pub summary: Option<Vec<InputPart>>,
    /// What is thought, in a way that cannot be read here.
    pub encrypted_content: Option<String>,
    /// Names a call.
    pub call_id: Option<String>,
    /// The tool that is called.
    pub name: Option<String>,
    /// The namespace of the tool that is called.
    pub namespace: Option<String>,
    /// With what.
    pub arguments: Option<String>,
    /// With what, where the tool is a custom one.
    pub input: Option<String>,
    /// What it answers.
    pub output: Option<TextOr<InputPart>>,
}

/// A part of what is said. Which kinds can be served is for the server to say.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct InputPart {
    /// `input_text`, `output_text`, `input_image` and so on.
    pub r#type: Option<String>,
    /// The text.
    pub text: Option<String>,
    /// The text of a refusal.
    pub refusal: Option<String>,
}

/// A text, or a list of something.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TextOr<T> {
    /// A text.
    Text(String),
    /// A list.
    List(Vec<T>),
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for TextOr<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Read<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for Read<T> {
            type Value = TextOr<T>;
            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a string or an array of objects")
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<TextOr<T>, E> {
                Ok(TextOr::Text(text.to_owned()))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<TextOr<T>, A::Error> {
                let mut read = Vec::new();
                while let Some(element) = elements.next_element()? {
                    read.push(element);
                }
                Ok(TextOr::List(read))
            }
        }
        deserializer.deserialize_any(Read(PhantomData))
    }
}

/// A request to `/conversations`, to create one or to change one.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct ConversationRequest {
    /// For the client's own use.
    pub metadata: Option<Map<String, Value>>,
    /// What it begins with.
    pub items: Option<Vec<InputItem>>,
}

/// A request to `/conversations/{id}/items`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct ItemsRequest {
    /// What is added.
    pub items: Option<Vec<InputItem>>,
}

impl ConversationRequest {
    /// Reads a body; none at all is an empty one.
    ///
    /// # Errors
    /// It is no JSON object, or a field has a wrong type.
    pub fn parse(body: &[u8]) -> Result<Self, Malformed> {
        if body.is_empty() { Ok(Self::default()) } else { parse::fields(&parse::object(body)?) }
    }
}

impl ItemsRequest {
    /// Reads a body.
    ///
    /// # Errors
    /// It is no JSON object, or a field has a wrong type.
    pub fn parse(body: &[u8]) -> Result<Self, Malformed> {
        parse::fields(&parse::object(body)?)
    }
}
