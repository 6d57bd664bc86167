//! Compiles forms for one vocabulary and caches the results.

use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, PoisonError};

use llguidance::api::{GrammarInit, TopLevelGrammar};
use llguidance::panic_utils::catch_unwind;
use llguidance::{ParserFactory, TokenParser};

use crate::cache::CompiledForms;
use crate::error::readable;
use crate::guide::is_too_complex;
use crate::limits::{
    COMPILE_FUEL, GuideLimits, ROW_ITEMS_MAX, STEP_ITEMS_MAX, SYMBOLS_MAX, UNOPTIMIZED_SYMBOLS_MAX,
};
use crate::locate::{locate, path};
use crate::memory::{OwnedMemory, grammar_bytes};
use crate::nesting::on_large_stack;
use crate::trial::{self, Trial, TrialError};
use crate::{Form, FormError, Guide, Preface, Vocabulary, VocabularyError, grammar};

/// Compiles forms to guides. Threads can share a compiler.
pub struct Compiler {
    vocabulary: Arc<Vocabulary>,
    factory: ParserFactory,
    /// The token that represents the end of the output in masks.
    end: u32,
    forms: Arc<CompiledForms<Guide>>,
    /// Tries costly grammars before they are compiled. If it is `None`, they are compiled regardless of their cost.
    trial: Option<Box<dyn Trial>>,
    /// This lock is held while a costly grammar is tried and compiled, so that the memory limit of one trial is the
    /// limit for all costly grammars together.
    costly: Mutex<()>,
}

/// The largest number of trials to locate the error of one form.
const LOCATING_TRIALS_MAX: usize = 2;

impl std::fmt::Debug for Compiler {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Compiler").field("limits", &self.forms.limits).finish_non_exhaustive()
    }
}

impl Compiler {
    /// Creates a compiler for a vocabulary. `threads` is the number of threads that will compute masks.
    ///
    /// # Errors
    /// llguidance cannot use the vocabulary.
    pub fn new(vocabulary: Vocabulary, threads: usize) -> Result<Self, VocabularyError> {
        Self::with_limits(vocabulary, GuideLimits { lexer_copies: threads, ..GuideLimits::default() })
    }

    /// Creates a compiler with custom limits.
    ///
    /// # Errors
    /// llguidance cannot use the vocabulary.
    pub fn with_limits(vocabulary: Vocabulary, limits: GuideLimits) -> Result<Self, VocabularyError> {
        let build = || {
            let (environment, end) = vocabulary.trie();
            let mut factory = ParserFactory::new_simple(&environment).map_err(|error| error.to_string())?;
            factory.quiet();
            let factory_limits = factory.limits_mut();
            factory_limits.initial_lexer_fuel = COMPILE_FUEL;
            factory_limits.step_lexer_fuel = limits.step_fuel;
            factory_limits.step_max_items = STEP_ITEMS_MAX;
            factory_limits.max_lexer_states = limits.lexer_states_max;
            factory_limits.max_items_in_row = ROW_ITEMS_MAX;
            factory_limits.max_grammar_size = UNOPTIMIZED_SYMBOLS_MAX;
            Ok::<_, String>((factory, end))
        };
        // The trie panics on vocabularies that it does not support.
        let built = std::panic::catch_unwind(AssertUnwindSafe(build));
        let built = built.unwrap_or_else(|_| Err("the trie of its tokens cannot be built".to_owned()));
        let (factory, end) = built.map_err(VocabularyError)?;
        let forms = CompiledForms::new(GuideLimits { lexer_copies: limits.lexer_copies.max(1), ..limits });
        Ok(Self {
            vocabulary: Arc::new(vocabulary),
            factory,
            end,
            forms,
            trial: None,
            costly: Mutex::new(()),
        })
    }

    /// Makes the compiler run a trial of each grammar whose cost could be large before it compiles the grammar in this
    /// process.
    #[must_use]
    pub fn with_trial(self, trial: Box<dyn Trial>) -> Self {
        Self { trial: Some(trial), ..self }
    }

    /// The vocabulary that forms are compiled for.
    pub fn vocabulary(&self) -> &Vocabulary {
        &self.vocabulary
    }

    /// Compiles a form, or returns the cached result. Without a trial, compiling takes milliseconds, or tens of
    /// milliseconds for large schemas.
    ///
    /// # Errors
    /// The form is invalid or too expensive, and the error contains the path of the invalid part; or a trial could not
    /// be run ([`FormError::is_internal`]).
    pub fn compile(&self, form: &Form) -> Result<Guide, FormError> {
        let key = format!("{form:?}");
        if let Some(guide) = self.forms.cache().get(&key) {
            return Ok(guide);
        }
        let grammar = grammar::grammar(form, &self.vocabulary)?;
        let guide = self.build(grammar).map_err(|error| self.located(form, error))?;
        if guide.is_too_large() {
            let problem = "the compiled form needs more memory than remains for compiled forms";
            return Err(FormError::new(path(form), problem));
        }
        self.forms.cache().put(key, guide.clone(), &self.forms);
        Ok(guide)
    }

    /// Whether a form can be compiled without a trial. Because the check does not locate errors, it rejects a form in a
    /// fraction of the time that [`Self::compile`] takes. The result is not cached.
    pub fn accepts(&self, form: &Form) -> bool {
        let is_accepted = |grammar| !self.needs_trial(&grammar) && self.build(grammar).is_ok();
        grammar::grammar(form, &self.vocabulary).is_ok_and(is_accepted)
    }

    fn needs_trial(&self, grammar: &TopLevelGrammar) -> bool {
        self.trial.is_some() && trial::is_needed(grammar)
    }

    fn located(&self, form: &Form, error: TrialError) -> FormError {
        let grammar_of =
            |form: &Form| grammar::grammar(form, &self.vocabulary).map_err(|error| error.problem);
        match error {
            TrialError::Failed(problem) => FormError { is_internal: true, ..FormError::new("", problem) },
            TrialError::TooExpensive(problem) => {
                // Another trial would cost as much, so a part that needs one is presumed to be the cause.
                let mut presume = |form: &Form| {
                    let grammar = grammar_of(form)?;
                    if self.needs_trial(&grammar) { Err(problem.clone()) } else { Ok(()) }
                };
                locate(form, &problem, &mut presume)
            }
            TrialError::Invalid(problem) => {
                let mut trials = LOCATING_TRIALS_MAX;
                let mut compile = |form: &Form| {
                    let grammar = grammar_of(form)?;
                    if self.needs_trial(&grammar) {
                        let Some(remaining) = trials.checked_sub(1) else { return Ok(()) };
                        trials = remaining;
                    }
                    match self.build(grammar) {
                        Err(TrialError::Invalid(problem)) => Err(problem),
                        _ => Ok(()),
                    }
                };
                locate(form, &problem, &mut compile)
            }
        }
    }

    /// Creates a preface: free text that ends with `close`. The text begins with `open`, or has already begun if `open`
    /// is `None`. Returns `None` if the vocabulary has no token for `open`, or `close` is empty.
    pub fn preface(&self, open: Option<&str>, close: &str) -> Option<Preface> {
        Preface::new(&self.vocabulary, open, close)
    }

    /// The memory of all compiled forms that are cached or in use, and of the sequences that they constrain, in bytes.
    pub fn memory_bytes(&self) -> usize {
        self.forms.memory.bytes()
    }

    fn build(&self, grammar: TopLevelGrammar) -> Result<Guide, TrialError> {
        let _turn;
        if let Some(trial) = &self.trial
            && trial::is_needed(&grammar)
        {
            _turn = self.costly.lock().unwrap_or_else(PoisonError::into_inner);
            trial.run(&trial::request(&grammar, self.vocabulary.len()))?;
        }
        self.build_here(grammar).map_err(TrialError::Invalid)
    }

    /// Compiles a grammar in this process.
    fn build_here(&self, grammar: TopLevelGrammar) -> Result<Guide, String> {
        let (mut start, symbol_count) = on_large_stack(|| self.parser(grammar)).flatten()?;
        start.start_without_prompt();
        // Report two errors now instead of during generation. One is that no token is allowed at the start. The other
        // is that the form is too complex, either at the start or after a first token, such as the quote of a string.
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
        catch_unwind(begin).map_err(readable)?;
        let grammar = OwnedMemory::new(grammar_bytes(&start, symbol_count), &self.forms.memory);
        Ok(Guide::new(start, grammar, self.end, &self.forms))
    }

    /// Returns a parser in the start state of a grammar, and the number of symbols of the compiled grammar.
    fn parser(&self, grammar: TopLevelGrammar) -> Result<(TokenParser, usize), String> {
        let environment = Some(self.factory.tok_env().clone());
        let limits = self.factory.limits().clone();
        let parsed = catch_unwind(AssertUnwindSafe(|| {
            let (grammar, lexer) = GrammarInit::Serialized(grammar).to_internal(environment, limits)?;
            // llguidance compiles the optimized grammar, but does not report its size.
            let symbol_count = grammar.optimize().num_symbols();
            Ok((grammar, lexer, symbol_count))
        }));
        let (grammar, lexer, symbol_count) = parsed.map_err(readable)?;
        if symbol_count > SYMBOLS_MAX {
            return Err(format!(
                "the compiled grammar has {symbol_count} symbols, which exceeds the limit of {SYMBOLS_MAX}"
            ));
        }
        let parser = self.factory.create_parser_from_init_default(GrammarInit::Internal(grammar, lexer));
        Ok((parser.map_err(readable)?, symbol_count))
    }
}

/// Compiles the grammar of a [`Trial`] for a substitute vocabulary: the 256 single bytes, followed by empty tokens up
/// to the size of the real vocabulary.
///
/// # Errors
/// The request is malformed, or the grammar cannot be compiled.
pub fn try_grammar(request: &[u8]) -> Result<(), String> {
    let (grammar, tokens) = trial::read_request(request)?;
    let bytes = (0..=u8::MAX).map(|byte| vec![byte]);
    let others = (256..tokens).map(|_| Vec::new());
    let vocabulary = Vocabulary::new(bytes.chain(others).map(|bytes| (bytes, false)));
    let compiler = vocabulary.and_then(|vocabulary| Compiler::new(vocabulary, 1)).map_err(|error| error.0)?;
    on_large_stack(|| compiler.parser(grammar).map(drop)).flatten()
}
