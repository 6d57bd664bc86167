//! Log probabilities in the formats of the two endpoints, which differ.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// The log probabilities of a chat choice, or of its part in a chunk.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ChatLogprobs {
    /// One entry for each token.
    pub content: Vec<ChatTokenLogprob>,
    /// The log probabilities of a refusal: always `null`, because the server cannot tell refusals from other
    /// text.
    pub refusal: Option<Vec<ChatTokenLogprob>>,
}

/// The log probability of a generated token.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ChatTokenLogprob {
    /// The text of the token, with U+FFFD in place of bytes that are not UTF-8 by themselves.
    pub token: String,
    /// The natural logarithm of its probability.
    pub logprob: f32,
    /// The exact bytes of the token.
    pub bytes: Vec<u8>,
    /// The most probable tokens at its position, in descending order.
    pub top_logprobs: Vec<TopLogprob>,
}

/// A candidate for a generated token.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TopLogprob {
    /// The text of the token, as in [`ChatTokenLogprob::token`].
    pub token: String,
    /// The natural logarithm of its probability.
    pub logprob: f32,
    /// The exact bytes of the token.
    pub bytes: Vec<u8>,
}

/// The log probabilities of a completion choice, or of its part in a chunk, as parallel lists.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct CompletionLogprobs {
    /// The texts of the tokens.
    pub tokens: Vec<String>,
    /// The natural logarithms of their probabilities; `null` for the first token of a prompt.
    pub token_logprobs: Vec<Option<f32>>,
    /// The most probable tokens at each position, with their log probabilities; `null` for the first token of a
    /// prompt.
    pub top_logprobs: Vec<Option<Map<String, Value>>>,
    /// The offset of each token in the text of the choice, in characters.
    pub text_offset: Vec<usize>,
}

/// The log probabilities of a prompt in the format of vLLM: at each position, the token of the prompt and the
/// most probable tokens, by token id; `null` at the first position.
pub type PromptLogprobs = Vec<Option<BTreeMap<u32, PromptLogprob>>>;

/// The log probability of a token of a prompt, or of a candidate for it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PromptLogprob {
    /// The natural logarithm of its probability.
    pub logprob: f32,
    /// Its rank among all tokens by probability, from 1.
    pub rank: u32,
    /// The text of the token.
    pub decoded_token: String,
}
