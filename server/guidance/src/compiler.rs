//! Forms to guides, for one vocabulary. What was compiled is kept for the next request.

use std::sync::{Arc, Mutex, PoisonError};

use llguidance::api::TopLevelGrammar;
use llguidance::{Matcher, ParserFactory};

use crate::cache::Cache;
use crate::error::told;
use crate::limits::{COMPILE_FUEL, LEXER_STATES_MAX, STEP_FUEL, STEP_ITEMS_MAX, SYMBOLS_MAX};
use crate::locate::locate;
use crate::{BuildError, Form, Guide, Invalid, Preface, Vocabulary, lark};

/// Compiles forms. Shared between threads.
pub struct Compiler {
    vocabulary: Arc<Vocabulary>,
    factory: ParserFactory,
    /// The token that stands for the end in masks.
    end: u32,
    /// How many threads may compute masks of one guide without waiting for each other.
    lanes: usize,
    cache: Mutex<Cache>,
}

impl std::fmt::Debug for Compiler {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Compiler").field("lanes", &self.lanes).finish_non_exhaustive()
    }
}

impl Compiler {
    /// A compiler for a vocabulary, which is gone through once. `lanes` is how many threads will compute masks.
    ///
    /// # Errors
    /// The vocabulary cannot be used.
    pub fn new(vocabulary: Vocabulary, lanes: usize) -> Result<Self, BuildError> {
        let build = || {
            let (environment, end) = vocabulary.trie();
            let mut factory = ParserFactory::new_simple(&environment).map_err(|error| error.to_string())?;
            factory.quiet();
            let limits = factory.limits_mut();
            limits.initial_lexer_fuel = COMPILE_FUEL;
            limits.step_lexer_fuel = STEP_FUEL;
            limits.step_max_items = STEP_ITEMS_MAX;
            limits.max_lexer_states = LEXER_STATES_MAX;
            limits.max_grammar_size = SYMBOLS_MAX;
            Ok::<_, String>((factory, end))
        };
        // A vocabulary that the trie is not made for makes it panic.
        let built = std::panic::catch_unwind(std::panic::AssertUnwindSafe(build));
        let built = built.unwrap_or_else(|_| Err("the trie of its tokens cannot be built".to_owned()));
        let (factory, end) = built.map_err(BuildError)?;
        let cache = Mutex::default();
        Ok(Self { vocabulary: Arc::new(vocabulary), factory, end, lanes: lanes.max(1), cache })
    }

    /// The vocabulary.
    pub fn vocabulary(&self) -> &Vocabulary {
        &self.vocabulary
    }

    /// Compiles a form, or finds it among those compiled before. It takes milliseconds, for large schemas tens of
    /// them.
    ///
    /// # Errors
    /// What is wrong with it, and where.
    pub fn compile(&self, form: &Form) -> Result<Guide, Invalid> {
        let key = format!("{form:?}");
        if let Some(guide) = self.cached().get(&key) {
            return Ok(guide);
        }
        let grammar = lark::grammar(form, &self.vocabulary)?;
        let guide = match self.build(grammar) {
            Ok(guide) => guide,
            Err(problem) => {
                let mut compile = |form: &Form| {
                    let grammar = lark::grammar(form, &self.vocabulary).map_err(|invalid| invalid.problem)?;
                    self.build(grammar).map(drop)
                };
                return Err(locate(form, &problem, &mut compile));
            }
        };
        self.cached().put(key, guide.clone());
        Ok(guide)
    }

    /// What comes before a form: free text that ends with `close`, if `open` comes first. Without `open` it has come
    /// already. None if this vocabulary has no token that opens.
    pub fn preface(&self, open: Option<&str>, close: &str) -> Option<Preface> {
        Preface::new(&self.vocabulary, open, close)
    }

    fn build(&self, grammar: TopLevelGrammar) -> Result<Guide, String> {
        let parser = self.factory.create_parser(grammar).map_err(told)?;
        let mut start = Matcher::new(Ok(parser));
        // What leaves nothing at its beginning is told now rather than when it is to be followed.
        let mut first = start.deep_clone();
        first.compute_mask_or_eos().map_err(told)?;
        if start.is_stopped() {
            start = first;
        }
        Ok(Guide::new(start, self.end, self.lanes))
    }

    fn cached(&self) -> std::sync::MutexGuard<'_, Cache> {
        // Nothing is left half done by a panic that the next user would see.
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
