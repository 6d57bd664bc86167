//! What turning text into tokens and back looks like: as OVMS has it, and as vLLM has it.

use serde::{Deserialize, Serialize};

use crate::parse::{self, Malformed};
use serde_json::Value;

/// A request to `/tokenize`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct TokenizeRequest {
    /// The model's name.
    pub model: Option<String>,
    /// The text or texts.
    pub text: Option<Texts>,
    /// The same under vLLM's name.
    pub prompt: Option<Texts>,
    /// Whether a text gets the tokens that the model wants around every text.
    pub add_special_tokens: Option<bool>,
    /// Most tokens of a text.
    pub max_length: Option<u32>,
    /// Whether shorter lists are filled up to that.
    pub pad_to_max_length: Option<bool>,
    /// Where: `left` or `right`.
    pub padding_side: Option<String>,
    /// Whether the tokens' texts are wanted too.
    pub return_token_strs: Option<bool>,
}

/// A text or several.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(untagged)]
pub enum Texts {
    /// One.
    One(String),
    /// Several.
    Several(Vec<String>),
}

/// An answer of `/tokenize`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Tokenized {
    /// The tokens.
    pub tokens: Lists<u32>,
    /// How many there are, all texts together and without what they were filled up with.
    pub count: usize,
    /// Most tokens of prompt and answer together.
    pub max_model_len: u32,
    /// The tokens' texts, absent unless asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_strs: Option<Lists<String>>,
}

/// What there is of a text, or a list of that for each of several.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum Lists<T> {
    /// Of one text.
    One(Vec<T>),
    /// Of several.
    Several(Vec<Vec<T>>),
}

/// A request to `/detokenize`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct DetokenizeRequest {
    /// The model's name.
    pub model: Option<String>,
    /// The tokens.
    pub tokens: Option<Vec<u32>>,
    /// Whether special tokens have no text.
    pub skip_special_tokens: Option<bool>,
}

/// An answer of `/detokenize`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Detokenized {
    /// The text, as vLLM calls it.
    pub prompt: String,
    /// The same.
    pub text: String,
}

impl TokenizeRequest {
    /// Reads a request from a JSON object.
    ///
    /// # Errors
    /// A field has a wrong type.
    pub fn read(object: &Value) -> Result<Self, Malformed> {
        parse::fields(object)
    }
}

impl DetokenizeRequest {
    /// Reads a request from a JSON object.
    ///
    /// # Errors
    /// A field has a wrong type.
    pub fn read(object: &Value) -> Result<Self, Malformed> {
        parse::fields(object)
    }
}
