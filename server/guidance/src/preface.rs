//! Free text, such as the reasoning of a model, that precedes a form and ends with a closing mark.
//!
//! Within the text, the same tokens are allowed everywhere, except where a token would continue after the mark with
//! more than a newline, so masks need little computation. A newline token directly after the mark is layout and not
//! part of the form, unless the form may begin with a newline.

use std::sync::Arc;

use server_engine::{CommitLock, GuideError, GuideState, Progress, TokenId, TokenSet};

use crate::Vocabulary;

/// Free text that ends with a closing mark.
#[derive(Debug)]
pub struct Preface {
    vocabulary: Arc<Vocabulary>,
    /// The token that begins the text; `None` if the text has already begun.
    open: Option<TokenId>,
    /// The mark that ends the text.
    close: Vec<u8>,
    /// The tokens that are allowed in the text, unless they would complete the mark and continue after it with more
    /// than a newline.
    free: TokenSet,
    newline: Option<TokenId>,
}

impl Preface {
    pub(crate) fn new(vocabulary: &Arc<Vocabulary>, open: Option<&str>, close: &str) -> Option<Self> {
        let open = match open {
            None => None,
            Some(open) => Some(vocabulary.token(open)?),
        };
        let close = close.as_bytes();
        if close.is_empty() {
            return None;
        }
        let mut free = TokenSet::new(vocabulary.len() as u32);
        for token in 0..vocabulary.len() as TokenId {
            let bytes = vocabulary.bytes(token);
            let is_mark = bytes == close;
            let is_text = !vocabulary.is_special(token) && !bytes.is_empty();
            if is_mark || (is_text && ends_with_mark_at_most(bytes, close)) {
                free.insert(token);
            }
        }
        let newline = vocabulary.token("\n").filter(|&token| !vocabulary.is_special(token));
        Some(Self { vocabulary: Arc::clone(vocabulary), open, close: close.to_vec(), free, newline })
    }

    /// Removes from `allowed` the tokens that would complete the mark and continue after it with more than a newline,
    /// if the text so far ends with `tail`.
    fn remove_overlong(&self, tail: &[u8], allowed: &mut TokenSet) {
        let prefixes = (1..self.close.len()).filter(|&length| tail.ends_with(&self.close[..length]));
        for length in prefixes {
            let rest = &self.close[length..];
            let is_overlong = |token: &TokenId| {
                let bytes = self.vocabulary.bytes(*token);
                bytes.starts_with(rest) && !is_layout(&bytes[rest.len()..])
            };
            let overlong: Vec<TokenId> = self.free.iter().filter(is_overlong).collect();
            overlong.into_iter().for_each(|token| allowed.remove(token));
        }
    }
}

/// Whether the bytes of a token either do not contain the mark, or contain only layout after it.
fn ends_with_mark_at_most(bytes: &[u8], close: &[u8]) -> bool {
    let found = bytes.windows(close.len()).position(|window| window == close);
    found.is_none_or(|at| is_layout(&bytes[at + close.len()..]))
}

fn is_layout(bytes: &[u8]) -> bool {
    bytes.is_empty() || bytes == b"\n"
}

/// The state of a sequence in the preface or in its form.
#[derive(Clone, Debug)]
pub(crate) struct PrefacedState<S> {
    preface: Arc<Preface>,
    phase: Phase,
    form: S,
    /// Whether the form may begin with a newline, which is then not layout.
    form_takes_newline: bool,
}

#[derive(Clone, Debug)]
enum Phase {
    /// No token has been committed: the sequence may begin with the preface or directly with the form.
    Lead,
    /// The sequence is in the free text; `tail` is the end of that text.
    Free { tail: Vec<u8> },
    /// The sequence is directly after the mark.
    Marked,
    /// The sequence is in the form after the preface.
    Form,
}

impl<S: GuideState> PrefacedState<S> {
    /// Creates the state at the beginning of the preface. `form` must be in its start state.
    ///
    /// # Errors
    /// The tokens with which the form may begin cannot be computed.
    pub(crate) fn start(preface: Arc<Preface>, mut form: S) -> Result<Self, GuideError> {
        let phase = if preface.open.is_some() { Phase::Lead } else { Phase::Free { tail: Vec::new() } };
        let mut first = TokenSet::new(preface.vocabulary.len() as u32);
        form.allow(&mut first)?;
        let form_takes_newline = preface.newline.is_some_and(|newline| first.contains(newline));
        Ok(Self { preface, phase, form, form_takes_newline })
    }
}

impl<S: GuideState + Clone + 'static> GuideState for PrefacedState<S> {
    fn allow(&mut self, allowed: &mut TokenSet) -> Result<Progress, GuideError> {
        let Self { preface, phase, form, .. } = self;
        match phase {
            Phase::Lead => {
                let progress = form.allow(allowed)?;
                preface.open.into_iter().for_each(|open| allowed.insert(open));
                Ok(progress)
            }
            Phase::Free { tail } => {
                allowed.insert_words(preface.free.words());
                preface.remove_overlong(tail, allowed);
                Ok(Progress::Open)
            }
            Phase::Marked => {
                let progress = form.allow(allowed)?;
                preface.newline.into_iter().for_each(|newline| allowed.insert(newline));
                Ok(progress)
            }
            Phase::Form => form.allow(allowed),
        }
    }

    fn commit(&mut self, token: TokenId) -> Result<Progress, GuideError> {
        match &mut self.phase {
            Phase::Lead if Some(token) == self.preface.open => {
                self.phase = Phase::Free { tail: Vec::new() };
                return Ok(Progress::Open);
            }
            Phase::Free { tail } => {
                let close = &self.preface.close;
                tail.extend_from_slice(self.preface.vocabulary.bytes(token));
                let found = tail.windows(close.len()).position(|window| window == close);
                match found.map(|at| &tail[at + close.len()..]) {
                    Some([]) => self.phase = Phase::Marked,
                    Some(_) => self.phase = Phase::Form,
                    // Retain only the suffix that may be the beginning of the mark.
                    None => drop(tail.drain(..(tail.len() + 1).saturating_sub(close.len()))),
                }
                return Ok(Progress::Open);
            }
            Phase::Marked if Some(token) == self.preface.newline && !self.form_takes_newline => {
                self.phase = Phase::Form;
                return Ok(Progress::Open);
            }
            Phase::Lead | Phase::Marked => self.phase = Phase::Form,
            Phase::Form => {}
        }
        self.form.commit(token)
    }

    fn try_lock_commit(&self) -> Option<CommitLock> {
        match self.phase {
            // The form is not used before the preface ends.
            Phase::Free { .. } => Some(Box::new(())),
            Phase::Lead | Phase::Marked | Phase::Form => self.form.try_lock_commit(),
        }
    }

    fn fork(&self) -> Box<dyn GuideState> {
        Box::new(self.clone())
    }
}
