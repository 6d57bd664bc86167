//! A compiled form, and the state of a sequence that follows it.

use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use llguidance::TokenParser;
use llguidance::api::StopReason;
use llguidance::panic_utils::catch_unwind;
use server_engine::{CommitLock, GuideError, GuideState, Progress, TokenSet};

use crate::Preface;
use crate::cache::{CacheValue, CompiledForms};
use crate::error::readable;
use crate::limits::{COMMIT_ITEMS_MAX, LEXER_SEQUENCES_MAX};
use crate::memory::OwnedMemory;
use crate::preface::PrefacedState;
use crate::sequence::SequenceParser;
use crate::shared_lexer::SharedLexer;

/// A compiled form. Clones share the compiled form and its lexers.
#[derive(Clone)]
pub struct Guide {
    compiled: Arc<CompiledForm>,
    preface: Option<Arc<Preface>>,
}

struct CompiledForm {
    /// The memory of the grammar, which all lexers share.
    grammar: OwnedMemory,
    /// The lexer of the form in its state after compilation. Sequences use copies of it.
    unused_lexer: SharedLexer,
    end: u32,
    /// Whether a parser has created more than [`COMMIT_ITEMS_MAX`] items for one token.
    has_large_rows: AtomicBool,
    lexers: Mutex<LexerCopies>,
    /// The compiled forms of the compiler; dangling once the compiler is dropped.
    forms: Weak<CompiledForms<Guide>>,
}

/// The copies of the lexer that sequences share. A thread that computes a mask locks the copy that the sequence uses.
struct LexerCopies {
    copies: Vec<Option<Arc<SharedLexer>>>,
    /// The index of the copy that was assigned most recently.
    last: usize,
}

impl fmt::Debug for Guide {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Guide").field("preface", &self.preface).finish_non_exhaustive()
    }
}

impl Guide {
    /// Creates the guide of a form. Its sequences begin in the state of `start`.
    pub(crate) fn new(
        start: TokenParser,
        grammar: OwnedMemory,
        end: u32,
        forms: &Arc<CompiledForms<Self>>,
    ) -> Self {
        let lexers = LexerCopies { copies: vec![None; forms.limits.lexer_copies], last: 0 };
        let compiled = CompiledForm {
            grammar,
            unused_lexer: SharedLexer::new(start, &forms.memory),
            end,
            has_large_rows: AtomicBool::new(false),
            lexers: Mutex::new(lexers),
            forms: Arc::downgrade(forms),
        };
        Self { compiled: Arc::new(compiled), preface: None }
    }

    /// Whether the grammar or the lexer of the compiled form is too large for the memory limit of all forms.
    pub(crate) fn is_too_large(&self) -> bool {
        self.compiled.is_too_large(&self.compiled.grammar)
            || self.compiled.is_too_large(self.compiled.unused_lexer.memory())
    }

    /// Returns a guide for the same form, preceded by free text.
    #[must_use]
    pub fn after(self, preface: Preface) -> Self {
        Self { preface: Some(Arc::new(preface)), ..self }
    }
}

impl CacheValue for Guide {
    fn is_idle(&self) -> bool {
        Arc::strong_count(&self.compiled) == 1
    }
}

impl CompiledForm {
    /// Returns a copy of the lexer for a new sequence, or for one whose lexer is broken. A copy that is broken, exceeds
    /// the size limit or has served [`LEXER_SEQUENCES_MAX`] sequences is replaced.
    fn next_lexer(&self) -> Arc<SharedLexer> {
        let bytes_max = self.forms.upgrade().map_or(0, |forms| forms.limits.lexer_bytes_max);
        // Ignore poisoning: a thread that panics while it holds this lock leaves every copy valid.
        let mut lexers = self.lexers.lock().unwrap_or_else(PoisonError::into_inner);
        let index = (lexers.last + 1) % lexers.copies.len();
        lexers.last = index;
        let is_usable = |lexer: &Arc<SharedLexer>| {
            !lexer.is_broken()
                && lexer.memory().bytes() <= bytes_max
                && lexer.sequences_started() < LEXER_SEQUENCES_MAX
        };
        let lexer = lexers.copies[index].take().filter(is_usable);
        let lexer = lexer.unwrap_or_else(|| Arc::new(self.unused_lexer.copy()));
        lexers.copies[index] = Some(Arc::clone(&lexer));
        lexer
    }

    /// Whether an owner of memory must stop growing: all owners together exceed the limit even after idle forms are
    /// evicted, and this owner takes at least the limit divided by the number of owners. All owners together therefore
    /// use at most about twice the limit.
    fn is_too_large(&self, memory: &OwnedMemory) -> bool {
        let Some(forms) = self.forms.upgrade() else { return false };
        let bytes_max = forms.limits.memory_bytes_max;
        if forms.memory.bytes() <= bytes_max {
            return false;
        }
        forms.cache().evict_idle(&forms, forms.limits.cached_memory_bytes_max);
        memory.exceeds_average(bytes_max)
    }

    fn sequence_bytes_max(&self) -> usize {
        self.forms.upgrade().map_or(usize::MAX, |forms| forms.limits.sequence_bytes_max)
    }
}

impl server_engine::Guide for Guide {
    fn start(&self) -> Result<Box<dyn GuideState>, GuideError> {
        let state = FormState::new(Arc::clone(&self.compiled));
        Ok(match &self.preface {
            None => Box::new(state),
            Some(preface) => Box::new(PrefacedState::start(Arc::clone(preface), state)?),
        })
    }
}

/// The state of a sequence that follows a form.
#[derive(Clone)]
pub(crate) struct FormState {
    sequence: SequenceParser,
    lexer: Arc<SharedLexer>,
    compiled: Arc<CompiledForm>,
    /// All tokens so far. A sequence that moves to another lexer consumes them again.
    tokens: Vec<u32>,
    /// The number of tokens that the parser has consumed.
    consumed: usize,
}

impl fmt::Debug for FormState {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("FormState").field("tokens", &self.tokens.len()).finish_non_exhaustive()
    }
}

impl FormState {
    fn new(compiled: Arc<CompiledForm>) -> Self {
        let lexer = compiled.next_lexer();
        Self { sequence: SequenceParser::new(&lexer), lexer, compiled, tokens: Vec::new(), consumed: 0 }
    }

    /// Moves the sequence to another lexer, which consumes all of its tokens again.
    fn move_to(&mut self, lexer: Arc<SharedLexer>) -> Result<(), GuideError> {
        self.sequence = SequenceParser::new(&lexer);
        self.consumed = 0;
        self.lexer = lexer;
        let _guard = self.lexer.lock();
        self.catch_up()
    }

    /// Consumes the tokens that the parser has not consumed.
    fn catch_up(&mut self) -> Result<(), GuideError> {
        while self.consumed < self.tokens.len() {
            self.consume_next().map_err(|error| failed(&self.sequence.parser, error))?;
        }
        Ok(())
    }

    fn consume_next(&mut self) -> Result<(), String> {
        let before = self.sequence.items();
        self.sequence.consume(self.tokens[self.consumed])?;
        self.consumed += 1;
        if self.sequence.items() - before > COMMIT_ITEMS_MAX {
            self.compiled.has_large_rows.store(true, Ordering::Relaxed);
        }
        Ok(())
    }

    fn allow_here(&mut self, allowed: &mut TokenSet) -> Result<Progress, GuideError> {
        if self.sequence.is_over() {
            return Ok(Progress::Ended);
        }
        let parser = &mut self.sequence.parser;
        let may_end = catch_unwind(AssertUnwindSafe(|| Ok(parser.is_accepting())));
        let may_end = may_end.map_err(|error| failed(parser, error))?;
        let mask = match catch_unwind(AssertUnwindSafe(|| parser.compute_mask())) {
            Ok(mask) => mask,
            // Computing the mask can reveal that no token can follow.
            Err(_) if self.sequence.is_over() => {
                return Ok(if may_end { Progress::Ended } else { Progress::Open });
            }
            Err(error) => return Err(failed(&self.sequence.parser, error)),
        };
        allowed.insert_words(mask.as_slice());
        allowed.remove(self.compiled.end);
        Ok(if may_end { Progress::MayEnd } else { Progress::Open })
    }
}

impl GuideState for FormState {
    fn allow(&mut self, allowed: &mut TokenSet) -> Result<Progress, GuideError> {
        let guard = self.lexer.lock();
        let progress = if self.lexer.is_broken() {
            Err(None)
        } else {
            self.catch_up().and_then(|()| self.allow_here(allowed)).map_err(Some)
        };
        let progress = match progress {
            Ok(progress) => progress,
            Err(error) => {
                // Mark the lexer as broken, so that other sequences move to another lexer before they fail too.
                self.lexer.set_broken();
                drop(guard);
                // Another sequence may have caused the error. A separate lexer shows whether this sequence
                // caused it.
                let lexer = match error {
                    None => self.compiled.next_lexer(),
                    Some(_) => Arc::new(self.compiled.unused_lexer.copy()),
                };
                self.move_to(lexer)?;
                let _guard = self.lexer.lock();
                let progress = self.allow_here(allowed);
                if progress.is_err() {
                    self.lexer.set_broken();
                }
                progress?
            }
        };
        self.lexer.measure();
        if self.compiled.is_too_large(self.lexer.memory()) {
            self.lexer.set_broken();
            return Err(GuideError::TooComplex(
                "the form needs more memory than the limit allows".to_owned(),
            ));
        }
        self.sequence.measure();
        let memory = self.sequence.memory();
        if memory.bytes() > self.compiled.sequence_bytes_max() || self.compiled.is_too_large(memory) {
            return Err(GuideError::TooComplex(
                "parsing the text needs more memory than the limit allows".to_owned(),
            ));
        }
        Ok(progress)
    }

    fn commit(&mut self, token: u32) -> Result<Progress, GuideError> {
        let is_behind = self.consumed < self.tokens.len();
        self.tokens.push(token);
        // Consuming tokens can take a long time if the sequence moves to another lexer or if the rows of the parser are
        // large. Leave these tokens to `allow`, which does not run on the engine's thread.
        let is_deferred = self.lexer.is_broken() || self.compiled.has_large_rows.load(Ordering::Relaxed);
        if is_behind || is_deferred {
            return Ok(Progress::Open);
        }
        if self.consume_next().is_err() {
            self.lexer.set_broken();
            return Ok(Progress::Open);
        }
        Ok(if self.sequence.is_over() { Progress::Ended } else { Progress::Open })
    }

    fn try_lock_commit(&self) -> Option<CommitLock> {
        self.lexer.try_lock().map(|guard| Box::new(guard) as CommitLock)
    }

    fn fork(&self) -> Box<dyn GuideState> {
        Box::new(self.clone())
    }
}

/// Whether the parser stopped because it reached a limit.
pub(crate) fn is_too_complex(parser: &TokenParser) -> bool {
    matches!(parser.stop_reason(), StopReason::LexerTooComplex | StopReason::ParserTooComplex)
}

fn failed(parser: &TokenParser, error: impl fmt::Display) -> GuideError {
    let problem = readable(error);
    if is_too_complex(parser) { GuideError::TooComplex(problem) } else { GuideError::Failed(problem) }
}
