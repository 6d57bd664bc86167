//! The memory of compiled forms: of their grammars, their lexers, and the parsers of their sequences.
//!
//! llguidance mostly counts rows, items and symbols rather than bytes, so this module estimates the bytes from these
//! counts. For the forms in `tests/memory`, the estimates are within a factor of two of the allocated memory. The
//! constants apply to llguidance 1.9.

use std::collections::HashSet;
use std::mem::{size_of, size_of_val};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use llguidance::TokenParser;
use llguidance::earley::lexerspec::{LexemeSpec, LexerSpec};
use llguidance::earley::{CSymIdx, ParamCond, ParamExpr};

/// The size in bytes of a grammar symbol that no rule refers to anymore, because llguidance has inlined the symbol's
/// rules.
const UNUSED_SYMBOL_BYTES: usize = 600;
/// The size in bytes of a lexer without states.
const LEXER_BYTES: usize = 10_000;
/// The number of bytes per lexer state that llguidance omits from its count, without the state's set of lexemes.
const STATE_BYTES: usize = 160;
/// The number of bytes per regular expression that llguidance omits from its count.
const EXPRESSION_BYTES: usize = 12;
/// The number of bytes by which llguidance overestimates the size of a derivative of a regular expression.
const EXCESS_DERIVATIVE_BYTES: usize = 50;
/// The size in bytes of the names and the regular expression of a lexeme.
const LEXEME_HEAP_BYTES: usize = 40;

/// The size in bytes of a parser, without its rows and the set of tokens that it caches.
const PARSER_BYTES: usize = 4096;
/// The size in bytes of a row of a parser, including the row's lexeme.
const ROW_BYTES: usize = 160;
/// The sizes in bytes of an item of a row, and of the item's parameter in a grammar with parameters.
const ITEM_BYTES: usize = 12;
const PARAMETER_BYTES: usize = 12;
/// The number of bytes that a parser stores for each byte of the text.
const TEXT_BYTES: usize = 32;
/// The size in bytes of the record of a captured text, without its name and the text.
const CAPTURE_BYTES: usize = 72;

/// The memory that all owners together take, and the number of owners.
#[derive(Debug, Default)]
pub(crate) struct TotalMemory {
    bytes: AtomicUsize,
    owners: AtomicUsize,
}

impl TotalMemory {
    pub(crate) fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }
}

/// The memory of one owner: a grammar, a lexer or the parser of a sequence. It is part of the total until it is
/// dropped.
#[derive(Debug)]
pub(crate) struct OwnedMemory {
    bytes: AtomicUsize,
    total: Arc<TotalMemory>,
}

impl OwnedMemory {
    pub(crate) fn new(bytes: usize, total: &Arc<TotalMemory>) -> Self {
        total.owners.fetch_add(1, Ordering::Relaxed);
        total.bytes.fetch_add(bytes, Ordering::Relaxed);
        Self { bytes: AtomicUsize::new(bytes), total: Arc::clone(total) }
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }

    pub(crate) fn set(&self, bytes: usize) {
        let before = self.bytes.swap(bytes, Ordering::Relaxed);
        if bytes >= before {
            self.total.bytes.fetch_add(bytes - before, Ordering::Relaxed);
        } else {
            self.total.bytes.fetch_sub(before - bytes, Ordering::Relaxed);
        }
    }

    pub(crate) fn total(&self) -> &Arc<TotalMemory> {
        &self.total
    }

    /// Whether all owners together take more than `bytes_max`, and this owner takes at least `bytes_max` divided by the
    /// number of owners.
    pub(crate) fn exceeds_average(&self, bytes_max: usize) -> bool {
        let owners = self.total.owners.load(Ordering::Relaxed).max(1);
        self.total.bytes() > bytes_max && self.bytes() >= bytes_max / owners
    }
}

impl Clone for OwnedMemory {
    fn clone(&self) -> Self {
        Self::new(self.bytes(), &self.total)
    }
}

impl Drop for OwnedMemory {
    fn drop(&mut self) {
        self.total.bytes.fetch_sub(self.bytes(), Ordering::Relaxed);
        self.total.owners.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Returns the size in bytes of the compiled grammar of a parser. The grammar has `symbol_count` symbols.
pub(crate) fn grammar_bytes(parser: &TokenParser, symbol_count: usize) -> usize {
    let grammar = parser.parser.grammar();
    let element_bytes = size_of::<CSymIdx>() + size_of::<ParamExpr>();
    let rule_bytes = size_of::<u32>() + size_of::<ParamCond>();
    let mut bytes = spec_bytes(grammar.lexer_spec());
    let mut used = HashSet::from([grammar.start()]);
    let mut symbols = vec![grammar.start()];
    while let Some(symbol) = symbols.pop() {
        let symbol = grammar.sym_data(symbol);
        let mut elements = 0;
        for rule in &symbol.rules {
            let parts = grammar.rule_rhs(*rule).0;
            elements += parts.len() + 1;
            symbols.extend(parts.iter().filter(|part| used.insert(**part)));
        }
        // llguidance pads the elements of a symbol to a multiple of four, and the capacity of a list of rules is
        // assumed to be a multiple of four.
        bytes += with_spare_room(size_of_val(symbol) + elements.next_multiple_of(4) * element_bytes);
        bytes += symbol.name.len() + symbol.rules.len().next_multiple_of(4) * rule_bytes;
    }
    bytes + symbol_count.saturating_sub(used.len()) * UNUSED_SYMBOL_BYTES
}

/// Returns the size in bytes of the lexer of a parser with all its states, or `None` if the lexer cannot be measured,
/// because it panicked. Call this only while no other thread uses the lexer.
pub(crate) fn lexer_bytes(parser: &TokenParser) -> Option<usize> {
    let stats = catch_unwind(AssertUnwindSafe(|| parser.parser.lexer_stats())).ok()?;
    let counted = stats.num_bytes.saturating_sub(stats.num_derivatives * EXCESS_DERIVATIVE_BYTES);
    let expressions = (stats.num_ast_nodes + stats.num_derived) * EXPRESSION_BYTES;
    let states = stats.num_states * (STATE_BYTES + stats.num_regexps.div_ceil(8));
    let spec = spec_bytes(parser.parser.grammar().lexer_spec());
    Some(LEXER_BYTES + spec + with_spare_room(counted) + expressions + states)
}

/// Returns the size in bytes of the description of a lexer. The grammar and each lexer have a copy of this description.
fn spec_bytes(spec: &LexerSpec) -> usize {
    let expressions = spec.regex_builder.exprset();
    let lexemes = spec.lexemes.len() * (size_of::<LexemeSpec>() + LEXEME_HEAP_BYTES);
    lexemes + with_spare_room(expressions.num_bytes()) + expressions.len() * EXPRESSION_BYTES
}

/// Returns the estimated size in bytes of a list or a table that grows by doubling, given the size of its elements.
fn with_spare_room(bytes: usize) -> usize {
    bytes + bytes / 2
}

/// Returns the size in bytes of a parser in the start state of a form.
pub(crate) fn parser_bytes(parser: &TokenParser) -> usize {
    PARSER_BYTES + parser.token_env.tok_trie().vocab_size() / 8 + table_bytes(parser)
}

/// Returns an upper bound on the number of bytes that a parser has allocated for the items of its largest step, because
/// all of these items might be on one path.
pub(crate) fn step_bytes(parser: &TokenParser) -> usize {
    parser.max_step_stats().all_items * item_bytes(parser)
}

/// Returns the size in bytes of the texts that a parser has captured.
pub(crate) fn captured_bytes(captures: &[(String, Vec<u8>)]) -> usize {
    captures.iter().map(|(name, text)| CAPTURE_BYTES + name.len() + text.len()).sum()
}

/// Returns the size in bytes of all rows that a parser has computed so far, including those that it has discarded.
pub(crate) fn table_bytes(parser: &TokenParser) -> usize {
    let stats = parser.parser_stats();
    stats.rows * ROW_BYTES + stats.all_items * item_bytes(parser) + stats.definitive_bytes * TEXT_BYTES
}

fn item_bytes(parser: &TokenParser) -> usize {
    ITEM_BYTES + if parser.parser.grammar().parametric() { PARAMETER_BYTES } else { 0 }
}
