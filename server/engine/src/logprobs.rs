//! Log probabilities of tokens.

use server_scheduler::TokenId;

/// The log probabilities at one position.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprobs {
    /// The log probability of the token at this position.
    pub chosen: TokenLogprob,
    /// The most probable tokens, most probable first: at most the requested number.
    pub top: Vec<TokenLogprob>,
}

/// The log probabilities of a prompt token.
#[derive(Clone, Debug, PartialEq)]
pub struct ScoredToken {
    /// The log probabilities of the token and of the most probable tokens.
    pub logprobs: TokenLogprobs,
    /// The rank of the token by probability in the vocabulary. The most probable token has rank 1.
    pub rank: u32,
}

/// A token and the natural logarithm of its probability.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenLogprob {
    /// The id of the token.
    pub token: TokenId,
    /// The natural logarithm of the token's probability.
    pub logprob: f32,
}
