//! Lexers that sequences share.
//!
//! A lexer builds the states of its automaton on demand and never discards them. The number of states has no useful
//! upper bound, so each lexer has a limit, and so do all lexers together. After a lexer has reached its limit,
//! llguidance leaves it in a state in which every operation fails. Such a lexer is called broken. New sequences then
//! start with another copy of the lexer, and the sequences of the broken one consume their tokens again with another
//! copy.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use llguidance::TokenParser;
use parking_lot::{ArcReentrantMutexGuard, RawMutex, RawThreadId, ReentrantMutex};

use crate::memory::{OwnedMemory, TotalMemory, lexer_bytes, parser_bytes};

/// Prevents other threads from using a lexer until the guard is dropped.
pub(crate) type LexerGuard = ArcReentrantMutexGuard<RawMutex, RawThreadId, ()>;

/// A lexer that several sequences share, with a parser in the start state of the form.
pub(crate) struct SharedLexer {
    start: TokenParser,
    lock: Arc<ReentrantMutex<()>>,
    sequences_started: AtomicUsize,
    is_broken: AtomicBool,
    /// The memory of the lexer and of `start` when it was last measured.
    memory: OwnedMemory,
}

impl SharedLexer {
    /// Shares the lexer of `start`, which no other parser may use.
    pub(crate) fn new(start: TokenParser, total: &Arc<TotalMemory>) -> Self {
        let lexer = Self {
            start,
            lock: Arc::default(),
            sequences_started: AtomicUsize::new(0),
            is_broken: AtomicBool::new(false),
            memory: OwnedMemory::new(0, total),
        };
        lexer.measure();
        lexer
    }

    /// Copies the lexer with all its states.
    pub(crate) fn copy(&self) -> Self {
        Self::new(self.start.deep_clone(), self.memory.total())
    }

    /// Returns a parser that is in the start state of the form and shares the lexer.
    pub(crate) fn new_parser(&self) -> TokenParser {
        self.sequences_started.fetch_add(1, Ordering::Relaxed);
        self.start.clone()
    }

    /// The number of sequences that have started with this lexer or moved to it.
    pub(crate) fn sequences_started(&self) -> usize {
        self.sequences_started.load(Ordering::Relaxed)
    }

    /// Locks the lexer, waiting until no other thread uses it. A thread can lock the lexer several times.
    pub(crate) fn lock(&self) -> LexerGuard {
        self.lock.lock_arc()
    }

    /// Like [`Self::lock`], but returns `None` instead of waiting.
    pub(crate) fn try_lock(&self) -> Option<LexerGuard> {
        self.lock.try_lock_arc()
    }

    /// Whether the lexer is marked as broken: an operation has failed, or the lexer takes too much memory.
    pub(crate) fn is_broken(&self) -> bool {
        self.is_broken.load(Ordering::Acquire)
    }

    /// Marks the lexer as broken.
    pub(crate) fn set_broken(&self) {
        self.is_broken.store(true, Ordering::Release);
    }

    /// The memory of the lexer and its start state when it was last measured.
    pub(crate) fn memory(&self) -> &OwnedMemory {
        &self.memory
    }

    /// Measures the memory. Call this only while no other thread uses the lexer.
    pub(crate) fn measure(&self) {
        // A lexer that panicked cannot be measured.
        let Some(lexer) = lexer_bytes(&self.start) else { return };
        self.memory.set(lexer + parser_bytes(&self.start));
    }
}
