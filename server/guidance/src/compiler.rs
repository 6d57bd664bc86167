//! Forms to guides, for one vocabulary. What was compiled is kept for the next request.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use llguidance::ParserFactory;
use llguidance::api::TopLevelGrammar;
use llguidance::panic_utils::catch_unwind;

use crate::cache::Forms;
use crate::error::told;
use crate::guide::is_too_complex;
use crate::limits::{COMPILE_FUEL, Limits, ROW_ITEMS_MAX, STEP_ITEMS_MAX, SYMBOLS_MAX};
use crate::locate::locate;
use crate::{BuildError, Form, Guide, Invalid, Preface, Vocabulary, lark};

/// Compiles forms. Shared between threads.
pub struct Compiler {
    vocabulary: Arc<Vocabulary>,
    factory: ParserFactory,
    /// The token that stands for the end in masks.
    end: u32,
    forms: Arc<Forms>,
}

impl std::fmt::Debug for Compiler {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Compiler").field("limits", &self.forms.limits).finish_non_exhaustive()
    }
}

impl Compiler {
    /// A compiler for a vocabulary, which is gone through once. `lanes` is how many threads will compute masks.
    ///
    /// # Errors
    /// The vocabulary cannot be used.
    pub fn new(vocabulary: Vocabulary, lanes: usize) -> Result<Self, BuildError> {
        Self::with_limits(vocabulary, Limits { lanes, ..Limits::default() })
    }

    /// As [`Self::new`], with limits of one's own.
    ///
    /// # Errors
    /// The vocabulary cannot be used.
    pub fn with_limits(vocabulary: Vocabulary, given: Limits) -> Result<Self, BuildError> {
        let build = || {
            let (environment, end) = vocabulary.trie();
            let mut factory = ParserFactory::new_simple(&environment).map_err(|error| error.to_string())?;
            factory.quiet();
            let limits = factory.limits_mut();
            limits.initial_lexer_fuel = COMPILE_FUEL;
            limits.step_lexer_fuel = given.step_fuel;
            limits.step_max_items = STEP_ITEMS_MAX;
            limits.max_lexer_states = given.lexer_states_max;
            limits.max_items_in_row = ROW_ITEMS_MAX;
            limits.max_grammar_size = SYMBOLS_MAX;
            Ok::<_, String>((factory, end))
        };
        // A vocabulary that the trie is not made for makes it panic.
        let built = std::panic::catch_unwind(AssertUnwindSafe(build));
        let built = built.unwrap_or_else(|_| Err("the trie of its tokens cannot be built".to_owned()));
        let (factory, end) = built.map_err(BuildError)?;
        let forms = Forms::new(Limits { lanes: given.lanes.max(1), ..given });
        Ok(Self { vocabulary: Arc::new(vocabulary), factory, end, forms })
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
        if let Some(guide) = self.forms.cache().get(&key) {
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
        self.forms.cache().put(key, guide.clone(), &self.forms);
        Ok(guide)
    }

    /// Whether a form can be compiled. It says no more, and so takes a fraction of the time that [`Self::compile`] takes to
    /// say what is wrong; the compiled form is not cached.
    pub fn accepts(&self, form: &Form) -> bool {
        lark::grammar(form, &self.vocabulary).is_ok_and(|grammar| self.build(grammar).is_ok())
    }

    /// What comes before a form: free text that ends with `close`, if `open` comes first. Without `open` it has come
    /// already. None if this vocabulary has no token that opens.
    pub fn preface(&self, open: Option<&str>, close: &str) -> Option<Preface> {
        Preface::new(&self.vocabulary, open, close)
    }

    /// The bytes that all lexers take, of compiled forms that are kept or in use.
    pub fn lexer_bytes(&self) -> usize {
        self.forms.memory.bytes()
    }

    fn build(&self, grammar: TopLevelGrammar) -> Result<Guide, String> {
        let mut start = self.factory.create_parser(grammar).map_err(told)?;
        start.start_without_prompt();
        // What leaves nothing at its beginning is told now rather than when it is to be followed. So is what is too complex
        // there or after a first token, such as the quote of a string.
        let mut first = start.deep_clone();
        let begin = AssertUnwindSafe(|| {
            let mask = first.compute_mask()?;
            let Some(token) = mask.iter().find(|&token| token != self.end) else { return Ok(()) };
            first.consume_token(token)?;
            if first.check_stop()? {
                return Ok(());
            }
            let second = first.compute_mask();
            if is_too_complex(&first) { second.map(drop) } else { Ok(()) }
        });
        catch_unwind(begin).map_err(told)?;
        Ok(Guide::new(start, self.end, &self.forms))
    }
}
