//! Decides which thread encodes a part of an answer. An answer can have millions of log probabilities and token IDs, and
//! repeat megabytes of prompts. If a thread that serves connections encoded them, it would delay the tokens of other
//! requests.

use crate::blocking;

/// Number of tokens, with their IDs or log probabilities, up to which a part of an answer is encoded inline. A step of the
/// engine adds one token to each choice. Parts with more tokens are prompts, whole texts, and deltas that have accumulated
/// because the client reads slowly.
const INLINE_TOKENS_MAX: usize = 64;
/// Size in bytes of the text of a part up to which the part is encoded inline.
const INLINE_TEXT_BYTES_MAX: usize = 16 << 10;

/// The cost of encoding a part of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum EncodingCost {
    /// The part is encoded in about the time that it takes to pass it to another thread.
    Low,
    /// Encoding the part may take so long that it would delay other requests.
    High,
}

impl EncodingCost {
    /// Returns the cost of this number of tokens with IDs or log probabilities.
    pub(crate) fn of_tokens(num_tokens: usize) -> Self {
        if num_tokens > INLINE_TOKENS_MAX { Self::High } else { Self::Low }
    }

    /// Returns the cost of a text with this number of bytes.
    pub(crate) fn of_text(num_bytes: usize) -> Self {
        if num_bytes > INLINE_TEXT_BYTES_MAX { Self::High } else { Self::Low }
    }
}

/// Runs `work`, which encodes a part of an answer, on another thread if its cost is high.
pub(crate) async fn run<T: Send + 'static>(
    cost: EncodingCost,
    work: impl FnOnce() -> T + Send + 'static,
) -> T {
    match cost {
        EncodingCost::Low => work(),
        EncodingCost::High => blocking::run(work).await,
    }
}

#[cfg(test)]
mod tests {
    use std::thread::{self, ThreadId};

    use super::*;

    #[tokio::test]
    async fn only_large_parts_are_encoded_on_another_thread() {
        let encoded = async |cost| -> ThreadId { run(cost, || thread::current().id()).await };
        for cost in [EncodingCost::of_tokens(INLINE_TOKENS_MAX), EncodingCost::of_text(INLINE_TEXT_BYTES_MAX)]
        {
            assert_eq!(encoded(cost).await, thread::current().id());
        }
        for cost in
            [EncodingCost::of_tokens(INLINE_TOKENS_MAX + 1), EncodingCost::of_text(INLINE_TEXT_BYTES_MAX + 1)]
        {
            assert_ne!(encoded(cost).await, thread::current().id());
        }
    }
}
