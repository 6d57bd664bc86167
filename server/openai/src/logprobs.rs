//! What log probabilities look like. The two endpoints have nothing in common here.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// The log probabilities of a chat choice, or of its part in a chunk.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ChatLogprobs {
    /// One entry for each token.
    pub content: Vec<ChatTokenLogprob>,
    /// Always `null`: we do not tell refusals apart.
    pub refusal: Option<Vec<ChatTokenLogprob>>,
}

/// One generated token.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ChatTokenLogprob {
    /// Its text; where it is not UTF-8 by itself, with U+FFFD in place of what is not.
    pub token: String,
    /// The natural logarithm of its probability.
    pub logprob: f32,
    /// Its bytes, exactly.
    pub bytes: Vec<u8>,
    /// The most probable tokens at its position, most probable first.
    pub top_logprobs: Vec<TopLogprob>,
}

/// A token that might have been generated.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TopLogprob {
    /// Its text, as in [`ChatTokenLogprob::token`].
    pub token: String,
    /// The natural logarithm of its probability.
    pub logprob: f32,
    /// Its bytes, exactly.
    pub bytes: Vec<u8>,
}

/// The log probabilities of a completion choice, or of its part in a chunk. The lists are parallel.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct CompletionLogprobs {
    /// The texts of the tokens.
    pub tokens: Vec<String>,
    /// The natural logarithms of their probabilities; `null` for the first token of a prompt.
    pub token_logprobs: Vec<Option<f32>>,
    /// The most probable tokens at each position with theirs; `null` for the first token of a prompt.
    pub top_logprobs: Vec<Option<Map<String, Value>>>,
    /// Where each token's text begins in the choice's text, in characters.
    pub text_offset: Vec<usize>,
}

/// The log probabilities of a prompt, as vLLM tells them: by the tokens' numbers, at each position those of the
/// prompt's token and of the most probable ones; `null` at the first.
pub type PromptLogprobs = Vec<Option<BTreeMap<u32, PromptLogprob>>>;

/// A token of a prompt, or one that might have been there.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PromptLogprob {
    /// The natural logarithm of its probability.
    pub logprob: f32,
    /// Its place among all tokens by their probabilities, from 1.
    pub rank: u32,
    /// Its text.
    pub decoded_token: String,
}
