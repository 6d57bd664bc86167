//! What is learnt of a form while it is followed: a lexer that sequences share, and how much memory lexers take.
//!
//! A lexer builds the states of its automaton as it needs them, and keeps them. What there is to build has no useful limit,
//! so each lexer has one, all together have one, and a lexer that has reached its limit is of no further use: llguidance
//! leaves it in a state in which everything fails. Then its lane is broken. New sequences start in another, and those that
//! were in it read their text again in another.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use llguidance::TokenParser;
use llguidance::earley::regexvec::LexerStats;
use server_engine::{ThreadGuard, ThreadLock};

/// The bytes of a state of a lexer besides those that llguidance counts, and besides the set of its lexemes.
const STATE_BYTES: usize = 160;

/// The memory of all lexers of a compiler.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    bytes: AtomicUsize,
    lanes: AtomicUsize,
}

impl Memory {
    pub(crate) fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }

    /// What each lexer may take of so many bytes if all take as much.
    pub(crate) fn share(&self, bytes: usize) -> usize {
        bytes / self.lanes.load(Ordering::Relaxed).max(1)
    }
}

/// A lexer, and the parser at the beginning of the form.
pub(crate) struct Lane {
    start: TokenParser,
    lock: Arc<ThreadLock>,
    bytes: AtomicUsize,
    starts: AtomicUsize,
    is_broken: AtomicBool,
    memory: Arc<Memory>,
}

impl Lane {
    /// A lane with the lexer of `start`, which no other parser has.
    pub(crate) fn new(start: TokenParser, memory: Arc<Memory>) -> Self {
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

    /// A lane in which as much is learnt as in this one.
    pub(crate) fn copy(&self) -> Self {
        Self::new(self.start.deep_clone(), Arc::clone(&self.memory))
    }

    /// A parser at the beginning of the form, with the lexer of this lane.
    pub(crate) fn begin(&self) -> TokenParser {
        self.starts.fetch_add(1, Ordering::Relaxed);
        self.start.clone()
    }

    /// Sequences that began here.
    pub(crate) fn starts(&self) -> usize {
        self.starts.load(Ordering::Relaxed)
    }

    /// Waits until no other thread uses the lexer.
    pub(crate) fn lock(&self) -> ThreadGuard {
        self.lock.lock()
    }

    /// As [`Self::lock`]; `None` instead of waiting.
    pub(crate) fn try_lock(&self) -> Option<ThreadGuard> {
        self.lock.try_lock()
    }

    /// Whether everything fails here.
    pub(crate) fn is_broken(&self) -> bool {
        self.is_broken.load(Ordering::Acquire)
    }

    /// Something failed here.
    pub(crate) fn set_broken(&self) {
        self.is_broken.store(true, Ordering::Release);
    }

    /// The bytes of the lexer when it was measured last.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Measures the lexer. To be called when no other thread uses it.
    pub(crate) fn measure(&self) {
        // A lexer in which something panicked cannot be asked.
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
