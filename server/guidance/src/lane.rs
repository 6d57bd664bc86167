//! Lexers that sequences share, and the memory they use.
//!
//! A lexer builds the states of its automaton on demand and keeps them. The number of states has no useful
//! upper bound, so each lexer has a limit, and all lexers together have one. llguidance leaves a lexer that has
//! reached its limit in a state in which every operation fails: its lane is broken. New sequences then start in
//! another lane, and the sequences of the broken lane consume their tokens again in another.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use llguidance::TokenParser;
use llguidance::earley::regexvec::LexerStats;
use server_engine::{ThreadGuard, ThreadLock};

/// The bytes of a lexer state that llguidance does not count, without the set of its lexemes.
const STATE_BYTES: usize = 160;

/// The memory that all lexers of a compiler use.
#[derive(Debug, Default)]
pub(crate) struct LexerMemory {
    bytes: AtomicUsize,
    lanes: AtomicUsize,
}

impl LexerMemory {
    pub(crate) fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }

    /// The bytes per lane if all lanes use the same part of `bytes`.
    pub(crate) fn bytes_per_lane(&self, bytes: usize) -> usize {
        bytes / self.lanes.load(Ordering::Relaxed).max(1)
    }
}

/// A lexer, and the parser in the start state of the form.
pub(crate) struct Lane {
    start: TokenParser,
    lock: Arc<ThreadLock>,
    bytes: AtomicUsize,
    starts: AtomicUsize,
    is_broken: AtomicBool,
    memory: Arc<LexerMemory>,
}

impl Lane {
    /// Creates a lane with the lexer of `start`, which no other parser uses.
    pub(crate) fn new(start: TokenParser, memory: Arc<LexerMemory>) -> Self {
        memory.lanes.fetch_add(1, Ordering::Relaxed);
        let lane = Self {
            start,
            lock: Arc::default(),
            bytes: AtomicUsize::new(0),
            starts: AtomicUsize::new(0),
            is_broken: AtomicBool::new(false),
            memory,
        };
        lane.measure();
        lane
    }

    /// Creates a lane with a copy of the lexer and all its states.
    pub(crate) fn copy(&self) -> Self {
        Self::new(self.start.deep_clone(), Arc::clone(&self.memory))
    }

    /// Returns a parser in the start state of the form, with the lexer of this lane.
    pub(crate) fn begin(&self) -> TokenParser {
        self.starts.fetch_add(1, Ordering::Relaxed);
        self.start.clone()
    }

    /// The number of sequences that started in this lane.
    pub(crate) fn starts(&self) -> usize {
        self.starts.load(Ordering::Relaxed)
    }

    /// Waits until no other thread uses the lexer.
    pub(crate) fn lock(&self) -> ThreadGuard {
        self.lock.lock()
    }

    /// Like [`Self::lock`], but returns `None` instead of waiting.
    pub(crate) fn try_lock(&self) -> Option<ThreadGuard> {
        self.lock.try_lock()
    }

    /// Whether every operation of the lexer fails.
    pub(crate) fn is_broken(&self) -> bool {
        self.is_broken.load(Ordering::Acquire)
    }

    /// Marks the lane as broken.
    pub(crate) fn set_broken(&self) {
        self.is_broken.store(true, Ordering::Release);
    }

    /// The memory of the lexer when it was last measured, in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Measures the memory of the lexer. Call this only while no other thread uses it.
    pub(crate) fn measure(&self) {
        // A lexer that panicked cannot be measured.
        let stats = catch_unwind(AssertUnwindSafe(|| self.start.parser.lexer_stats()));
        let Ok(LexerStats { num_bytes, num_states, num_regexps, .. }) = stats else { return };
        let now = num_bytes + num_states * (STATE_BYTES + num_regexps.div_ceil(8));
        let before = self.bytes.swap(now, Ordering::Relaxed);
        if now >= before {
            self.memory.bytes.fetch_add(now - before, Ordering::Relaxed);
        } else {
            self.memory.bytes.fetch_sub(before - now, Ordering::Relaxed);
        }
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        self.memory.bytes.fetch_sub(self.bytes(), Ordering::Relaxed);
        self.memory.lanes.fetch_sub(1, Ordering::Relaxed);
    }
}
