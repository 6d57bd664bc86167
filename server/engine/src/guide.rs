//! The interface of guides. A guide is an automaton over tokens, which restricts sequences to a form.
//!
//! While the model computes, the guide computes the allowed next tokens. The sampler samples one of these tokens, and
//! the guide advances by it. The implementations of [`Guide`] define the form and how tokens spell it.

use std::any::Any;
use std::fmt;

use server_scheduler::TokenId;

/// Returns the number of threads that compute allowed tokens: a quarter of the processors, rounded up, at most 8. Most
/// processors are left to the model, which computes at the same time.
pub fn guide_threads() -> usize {
    const MAX: usize = 8;
    std::thread::available_parallelism().map_or(1, usize::from).div_ceil(4).min(MAX)
}

/// A form to which sequences can be restricted. The sequences of a request share one guide, and several requests can
/// share the same guide.
pub trait Guide: fmt::Debug + Send + Sync {
    /// Returns the state of a sequence without generated tokens. This method is called on one of the threads that call
    /// [`GuideState::allow`].
    ///
    /// # Errors
    /// [`GuideError`], which fails the request.
    fn start(&self) -> Result<Box<dyn GuideState>, GuideError>;
}

/// A lock that, until it is dropped, prevents other threads from using shared state.
pub type CommitLock = Box<dyn Any>;

/// The state of a sequence that follows a form.
pub trait GuideState: fmt::Debug + Send {
    /// Adds the allowed next tokens to `allowed`, which is empty. Stop tokens are not part of the form: the engine
    /// allows them where the form may end. This method usually runs concurrently with the model, on a thread other than
    /// the engine's unless no such thread could be started. It may take as long as a step.
    ///
    /// # Errors
    /// [`GuideError`], which fails the request.
    fn allow(&mut self, allowed: &mut TokenSet) -> Result<Progress, GuideError>;

    /// Advances by a token, which is one of the allowed ones. This method is called for sampled tokens between steps on
    /// the engine's thread, and must return quickly. For copies of the state, it is also called with draft tokens on
    /// the threads that call [`Self::allow`]. It is not called for stop tokens.
    ///
    /// # Errors
    /// [`GuideError`], which fails the request.
    fn commit(&mut self, token: TokenId) -> Result<Progress, GuideError>;

    /// Tries to lock the data that this state shares with other states. While the lock is held, commits on the calling
    /// thread do not wait. Returns `None` if another thread is using the data. A thread that holds the lock can acquire
    /// it again.
    fn try_lock_commit(&self) -> Option<CommitLock> {
        Some(Box::new(()))
    }

    /// Returns an independent copy of the state.
    fn fork(&self) -> Box<dyn GuideState>;
}

/// Whether the form is complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// More tokens must follow.
    Open,
    /// The form is complete, and more tokens may follow.
    MayEnd,
    /// The form is complete, and no token can follow.
    Ended,
}

/// The reason why a guide cannot continue a sequence. Only the request of that sequence fails.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GuideError {
    /// The form in the request needs more time or memory than a limit allows.
    #[error("the form of the answer is too complex: {0}")]
    TooComplex(String),
    /// The guide failed for another reason.
    #[error("failed to constrain the answer to the form in the request: {0}")]
    Failed(String),
}

/// A set of tokens, stored as one bit for each token of the vocabulary.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenSet {
    words: Vec<u32>,
    vocabulary: u32,
}

impl TokenSet {
    /// Creates an empty set for a vocabulary of this size.
    pub fn new(vocabulary: u32) -> Self {
        Self { words: vec![0; vocabulary.div_ceil(u32::BITS) as usize], vocabulary }
    }

    /// Removes all tokens from the set.
    pub fn clear(&mut self) {
        self.words.fill(0);
    }

    /// Adds a token. Tokens outside the vocabulary are ignored.
    pub fn insert(&mut self, token: TokenId) {
        if token < self.vocabulary {
            self.words[(token / u32::BITS) as usize] |= 1 << (token % u32::BITS);
        }
    }

    /// Removes a token from the set.
    pub fn remove(&mut self, token: TokenId) {
        if let Some(word) = self.words.get_mut((token / u32::BITS) as usize) {
            *word &= !(1 << (token % u32::BITS));
        }
    }

    /// Whether the set contains a token.
    pub fn contains(&self, token: TokenId) -> bool {
        let word = self.words.get((token / u32::BITS) as usize).copied().unwrap_or(0);
        word >> (token % u32::BITS) & 1 == 1
    }

    /// Adds the tokens whose bits are set in `words`. Token 0 is the lowest bit of the first word. Tokens outside the
    /// vocabulary are ignored.
    pub fn insert_words(&mut self, words: &[u32]) {
        for (word, more) in self.words.iter_mut().zip(words) {
            *word |= more;
        }
        let rest = self.vocabulary % u32::BITS;
        if rest > 0
            && let Some(last) = self.words.last_mut()
        {
            *last &= (1 << rest) - 1;
        }
    }

    /// Number of tokens in the set.
    pub fn len(&self) -> u32 {
        self.words.iter().map(|word| word.count_ones()).sum()
    }

    /// Whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|&word| word == 0)
    }

    /// The tokens in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = TokenId> {
        (0..)
            .zip(&self.words)
            .flat_map(|(index, &word)| SetBits(word).map(move |bit| index * u32::BITS + bit))
    }

    /// The bits of the tokens. Token 0 is the lowest bit of the first word.
    pub fn words(&self) -> &[u32] {
        &self.words
    }

    /// Number of tokens in the vocabulary.
    pub fn vocabulary(&self) -> u32 {
        self.vocabulary
    }
}

/// The indices of the set bits of a word, in ascending order.
pub(crate) struct SetBits(pub(crate) u32);

impl Iterator for SetBits {
    type Item = u32;

    fn next(&mut self) -> Option<u32> {
        let bit = (self.0 != 0).then(|| self.0.trailing_zeros())?;
        self.0 &= self.0 - 1;
        Some(bit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_contains_inserted_tokens_and_none_outside_of_the_vocabulary() {
        let mut set = TokenSet::new(70);
        assert!(set.is_empty());
        for token in [0, 31, 32, 69, 70, 5000] {
            set.insert(token);
        }
        assert_eq!(set.iter().collect::<Vec<_>>(), [0, 31, 32, 69]);
        set.remove(31);
        set.remove(5000);
        assert!(set.contains(32) && !set.contains(31) && !set.contains(70) && !set.contains(5000));
        set.insert_words(&[0, 0, u32::MAX, u32::MAX]);
        assert_eq!(set.len(), 2 + 6);
        assert_eq!(set.words().len(), 3);
        set.clear();
        assert!(set.is_empty());
    }
}
