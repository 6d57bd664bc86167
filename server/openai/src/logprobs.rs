//! Log probabilities. The chat and completions endpoints use different formats.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// The log probabilities of a chat choice, or of the part of it in a chunk.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ChatLogprobs {
    /// One entry for each token.
    pub content: Vec<ChatTokenLogprob>,
    /// The log probabilities of a refusal: always `null`, because the server cannot distinguish refusals from other
    /// text.
    pub refusal: Option<Vec<ChatTokenLogprob>>,
}

/// The log probability of a generated token.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ChatTokenLogprob {
    /// The text of the token, with U+FFFD in place of bytes that are not UTF-8 by themselves; `token_id:` and the ID if
    /// the request sets `return_tokens_as_token_ids`.
    pub token: String,
    /// The natural logarithm of the token's probability.
    pub logprob: f32,
    /// The exact bytes of the token.
    pub bytes: Vec<u8>,
    /// The most probable tokens at the token's position, in descending order of probability.
    pub top_logprobs: Vec<TopLogprob>,
}

/// A candidate for a generated token.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TopLogprob {
    /// The text of the token, as in [`ChatTokenLogprob::token`].
    pub token: String,
    /// The natural logarithm of the token's probability.
    pub logprob: f32,
    /// The exact bytes of the token.
    pub bytes: Vec<u8>,
}

/// The log probabilities of a completion choice, or of the part of it in a chunk, as parallel lists.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct CompletionLogprobs {
    /// The text of each token; `bytes:` and the bytes if they are not UTF-8, or `token_id:` and the ID if requested.
    pub tokens: Vec<String>,
    /// The natural logarithms of the tokens' probabilities; `null` for the first token of a prompt.
    pub token_logprobs: Vec<Option<f32>>,
    /// The most probable tokens at each position and the token itself, with their log probabilities; `null` for the
    /// first token of a prompt.
    pub top_logprobs: Vec<Option<Map<String, Value>>>,
    /// The offset of each token in the text of the choice, in characters.
    pub text_offset: Vec<usize>,
}

/// The log probabilities of a prompt in the format of vLLM: at each position, the token of the prompt and the most
/// probable tokens, by token ID; `null` at the first position.
pub type PromptLogprobs = Vec<Option<BTreeMap<u32, PromptLogprob>>>;

/// The log probability of a token of a prompt, or of a candidate for it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PromptLogprob {
    /// The natural logarithm of the token's probability.
    pub logprob: f32,
    /// The rank of the token among all tokens by probability, starting at 1.
    pub rank: u32,
    /// The text of the token.
    pub decoded_token: String,
}
