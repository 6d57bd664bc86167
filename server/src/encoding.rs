//! Decides which thread encodes a part of an answer. An answer can have millions of log probabilities and token IDs,
//! and repeat megabytes of prompts. If a thread that serves connections encoded such an answer, it would delay the
//! tokens of other requests.

use tokio::sync::Semaphore;

use crate::blocking;

/// A part of an answer that contains token IDs or log probabilities is encoded inline if it has at most this number of
/// tokens. A step of the engine adds one token to each choice, or a few with speculative decoding. Parts with more
/// tokens than this limit are prompts, whole texts, and deltas that have accumulated because the client reads slowly.
const INLINE_TOKENS_MAX: usize = 64;
/// Maximum size in bytes of the text of a part that is encoded inline.
const INLINE_TEXT_BYTES_MAX: usize = 16 << 10;
/// Number of parts of responses that are encoded on separate threads at the same time.
///
/// If exceeded: further parts wait.
const ENCODINGS_MAX: usize = 8;

/// The slots of the parts that are encoded on separate threads.
static SLOTS: Semaphore = Semaphore::const_new(ENCODINGS_MAX);

/// The cost of encoding a part of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum EncodingCost {
    /// Encoding the part takes at most about as long as passing it to another thread.
    Low,
    /// Encoding the part may take so long that it would delay other requests.
    High,
}

impl EncodingCost {
    /// Returns the cost of encoding this number of tokens with their IDs or log probabilities.
    pub(crate) fn of_tokens(num_tokens: usize) -> Self {
        if num_tokens > INLINE_TOKENS_MAX { Self::High } else { Self::Low }
    }

    /// Returns the cost of encoding a text of this number of bytes.
    pub(crate) fn of_text(num_bytes: usize) -> Self {
        if num_bytes > INLINE_TEXT_BYTES_MAX { Self::High } else { Self::Low }
    }
}

/// Runs `work`, which encodes a part of an answer. If `cost` is high, `work` runs on another thread. At most
/// [`ENCODINGS_MAX`] such threads are used at the same time.
///
/// # Cancel safety
/// Once `work` has started, it runs to completion even if the future is dropped.
pub(crate) async fn run<T: Send + 'static>(
    cost: EncodingCost,
    work: impl FnOnce() -> T + Send + 'static,
) -> T {
    match cost {
        EncodingCost::Low => work(),
        EncodingCost::High => {
            let slot = SLOTS.acquire().await.expect("invariant: the semaphore is never closed");
            blocking::run(move || {
                let _slot = slot;
                work()
            })
            .await
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread::{self, ThreadId};

    use futures_util::FutureExt as _;
    use tokio::task::JoinSet;

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

    #[tokio::test]
    async fn a_limited_number_of_parts_is_encoded_on_separate_threads_at_the_same_time() {
        let (started, mut starts) = tokio::sync::mpsc::channel(ENCODINGS_MAX);
        let (mut gates, mut encodings) = (Vec::new(), JoinSet::new());
        for _ in 0..ENCODINGS_MAX {
            let (gate, opened) = mpsc::channel::<()>();
            gates.push(gate);
            let started = started.clone();
            encodings.spawn(run(EncodingCost::High, move || {
                started.try_send(()).unwrap();
                // The gate opens when its sender is dropped.
                opened.recv().unwrap_err();
            }));
        }
        for _ in 0..ENCODINGS_MAX {
            starts.recv().await.unwrap();
        }
        assert_eq!(SLOTS.available_permits(), 0);
        let mut further = Box::pin(run(EncodingCost::High, || 7));
        assert_eq!(further.as_mut().now_or_never(), None);
        drop(gates);
        assert_eq!(further.await, 7);
        assert_eq!(encodings.join_all().await.len(), ENCODINGS_MAX);
    }
}
