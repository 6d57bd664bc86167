//! What holds a sequence to a form: an automaton over tokens, which says what may come next.
//!
//! The engine knows none. It asks one for the tokens that may come while the model computes, lets the sampler
//! choose among them, and tells it what was chosen. What the form is, and how tokens spell it, is the business
//! of whoever implements [`Guide`].

use std::any::Any;
use std::fmt;

use server_scheduler::TokenId;

pub use thread_lock::{ThreadGuard, ThreadLock};

mod thread_lock;

/// Threads that compute what may come next: a quarter of the processors, since the model has use for the others and
/// need not wait for these.
pub fn guide_threads() -> usize {
    const MAX: usize = 8;
    std::thread::available_parallelism().map_or(1, usize::from).div_ceil(4).min(MAX)
}

/// A form that answers can be held to. Shared by all sequences of a request, and by requests.
pub trait Guide: fmt::Debug + Send + Sync {
    /// The state of a sequence that has generated nothing. Called on one of the threads that compute
    /// [`GuideState::allow`].
    ///
    /// # Errors
    /// The request fails with it.
    fn start(&self) -> Result<Box<dyn GuideState>, GuideError>;
}

/// Keeps other threads from what states share, until it is dropped.
pub type Hold = Box<dyn Any>;

/// How far a sequence has come in its form.
pub trait GuideState: fmt::Debug + Send {
    /// Adds to `allowed`, which is empty, the tokens that may come next, those that end the sequence aside. Called
    /// beside the model's step, on a thread other than the engine's. It may take as long as a step does.
    ///
    /// # Errors
    /// The request fails with it.
    fn allow(&mut self, allowed: &mut TokenSet) -> Result<Progress, GuideError>;

    /// Takes the token that was chosen, which is one of those allowed. Called between steps, on the engine's
    /// thread: it is to be quick. Stop tokens are not told.
    ///
    /// # Errors
    /// The request fails with it.
    fn commit(&mut self, token: TokenId) -> Result<Progress, GuideError>;

    /// Reserves for the calling thread what this state shares with other states, without waiting, so that its commits do
    /// not wait either. `None` while another thread is using it. A thread that holds it can hold it again.
    fn try_hold(&self) -> Option<Hold> {
        Some(Box::new(()))
    }

    /// A state that goes on by itself from here.
    fn fork(&self) -> Box<dyn GuideState>;
}

/// Whether a form is complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// More has to come.
    Open,
    /// It is complete as it is, and may go on.
    MayEnd,
    /// It is complete, and nothing can follow.
    Ended,
}

/// Why a guide cannot go on. The request fails, others are not concerned.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GuideError {
    /// To follow the form takes more time or memory than a limit allows. The request is at fault.
    #[error("the form that the answer is held to is too complex: {0}")]
    TooComplex(String),
    /// The guide failed. The request is not at fault.
    #[error("the form that the answer is held to cannot go on: {0}")]
    Failed(String),
}

/// A set of tokens: a bit for each.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenSet {
    words: Vec<u32>,
    vocabulary: u32,
}

impl TokenSet {
    /// The empty set of tokens of a vocabulary of this size.
    pub fn new(vocabulary: u32) -> Self {
        Self { words: vec![0; vocabulary.div_ceil(u32::BITS) as usize], vocabulary }
    }

    /// Takes all tokens out.
    pub fn clear(&mut self) {
        self.words.fill(0);
    }

    /// Adds a token. One that is not in the vocabulary is passed over.
    pub fn insert(&mut self, token: TokenId) {
        if token < self.vocabulary {
            self.words[(token / u32::BITS) as usize] |= 1 << (token % u32::BITS);
        }
    }

    /// Takes a token out.
    pub fn remove(&mut self, token: TokenId) {
        if let Some(word) = self.words.get_mut((token / u32::BITS) as usize) {
            *word &= !(1 << (token % u32::BITS));
        }
    }

    /// Whether a token is in it.
    pub fn contains(&self, token: TokenId) -> bool {
        let word = self.words.get((token / u32::BITS) as usize).copied().unwrap_or(0);
        word >> (token % u32::BITS) & 1 == 1
    }

    /// Adds the tokens whose bits are set in `words`, the lowest bit of the first being token 0. What is beyond the
    /// vocabulary is passed over.
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

    /// Tokens in it.
    pub fn len(&self) -> u32 {
        self.words.iter().map(|word| word.count_ones()).sum()
    }

    /// Whether no token is in it.
    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|&word| word == 0)
    }

    /// Its tokens in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = TokenId> {
        (0..).zip(&self.words).flat_map(|(index, &word)| Bits(word).map(move |bit| index * u32::BITS + bit))
    }

    /// A bit for each token, the lowest of the first word being token 0.
    pub fn words(&self) -> &[u32] {
        &self.words
    }

    /// Tokens there are.
    pub fn vocabulary(&self) -> u32 {
        self.vocabulary
    }
}

/// The places of the bits of a word that are set, in ascending order.
pub(crate) struct Bits(pub(crate) u32);

impl Iterator for Bits {
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
    fn a_set_holds_what_was_put_in_and_nothing_beyond_the_vocabulary() {
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
