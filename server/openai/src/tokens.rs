//! Tokenization requests and responses, in a format that combines those of OVMS and vLLM.

use serde::{Deserialize, Serialize};

use crate::parse::{self, RequestError};
use serde_json::Value;

/// A request to `/tokenize`. If the request contains a conversation instead of a text, the server also reads it as a
/// [`ChatRequest`](crate::ChatRequest).
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct TokenizeRequest {
    /// The name of the model.
    pub model: Option<String>,
    /// The text or texts to tokenize.
    pub text: Option<Texts>,
    /// The name that vLLM uses for `text`.
    pub prompt: Option<Texts>,
    /// Whether to add the special tokens that the model expects around a text. It has no effect on a conversation.
    pub add_special_tokens: Option<bool>,
    /// The number of tokens to which each text is truncated.
    pub max_length: Option<u32>,
    /// Whether to pad shorter lists to `max_length`.
    pub pad_to_max_length: Option<bool>,
    /// The side to pad: `left` or `right`.
    pub padding_side: Option<String>,
    /// Whether to return the texts of the tokens in addition to their IDs.
    pub return_token_strs: Option<bool>,
}

/// One or several texts.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(untagged)]
pub enum Texts {
    /// The request has a single text.
    One(String),
    /// The request has several texts.
    Several(Vec<String>),
}

/// A response of `/tokenize`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TokenizeResponse {
    /// The tokens of each text.
    pub tokens: Lists<u32>,
    /// The total number of tokens of all texts, without padding.
    pub count: usize,
    /// The largest number of tokens of a prompt and its response together.
    pub max_model_len: u32,
    /// The texts of the tokens; absent unless requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_strs: Option<Lists<String>>,
}

/// One list for a single text or a conversation, or a list for each of several texts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum Lists<T> {
    /// The list of a single text or of a conversation.
    One(Vec<T>),
    /// The lists of several texts.
    Several(Vec<Vec<T>>),
}

/// A request to `/detokenize`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct DetokenizeRequest {
    /// The name of the model.
    pub model: Option<String>,
    /// The tokens to convert to text.
    pub tokens: Option<Vec<u32>>,
    /// Whether to leave special tokens out of the text.
    pub skip_special_tokens: Option<bool>,
}

/// A response of `/detokenize`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DetokenizeResponse {
    /// The text, under the name that vLLM uses.
    pub prompt: String,
    /// The text, under the name that OVMS uses.
    pub text: String,
}

impl TokenizeRequest {
    /// Parses a request from a JSON object.
    ///
    /// # Errors
    /// [`RequestError`] if a field has a wrong type.
    pub fn read(object: &Value) -> Result<Self, RequestError> {
        parse::fields(object)
    }
}

impl DetokenizeRequest {
    /// Parses a request from a JSON object.
    ///
    /// # Errors
    /// [`RequestError`] if a field has a wrong type.
    pub fn read(object: &Value) -> Result<Self, RequestError> {
        parse::fields(object)
    }
}
