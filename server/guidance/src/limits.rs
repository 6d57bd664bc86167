//! How much a form may be. What is over a limit is refused when it is compiled, and a request with it.

/// Bytes of a JSON schema, written without space.
pub const SCHEMA_BYTES_MAX: usize = 1 << 20;
/// How deep a JSON schema nests.
pub const SCHEMA_DEPTH_MAX: usize = 100;
/// Bytes of a grammar.
pub const GRAMMAR_BYTES_MAX: usize = 256 << 10;
/// Bytes of a regular expression.
pub const REGEX_BYTES_MAX: usize = 32 << 10;
/// Alternatives of a choice, elements of a sequence, tags and triggers.
pub const ELEMENTS_MAX: usize = 8192;
/// How deep forms nest.
pub const FORM_DEPTH_MAX: usize = 64;
/// Bytes of all that a form consists of.
pub const FORM_BYTES_MAX: usize = 4 << 20;
/// The greatest count of a repetition.
pub const REPEAT_MAX: u32 = 1 << 16;

/// Work to read regular expressions when a form is compiled: about 50 000 in a millisecond.
pub const COMPILE_FUEL: u64 = 1_000_000;
/// Work on regular expressions to know what may come next: about 14 000 in a millisecond.
pub const STEP_FUEL: u64 = 400_000;
/// Items of the parser to know what may come next: about 20 000 in a millisecond.
pub const STEP_ITEMS_MAX: usize = 200_000;
/// Symbols of a compiled grammar.
pub const SYMBOLS_MAX: usize = 500_000;
/// States of a lexer: one or two kilobytes each.
pub const LEXER_STATES_MAX: usize = 60_000;

/// Compiled forms that are kept.
pub const CACHED_GUIDES_MAX: usize = 256;
/// Bytes of the forms whose compiled forms are kept.
pub const CACHED_BYTES_MAX: usize = 8 << 20;
/// Sequences that share what is learnt of a compiled form, before it is learnt anew: what there is to learn has no
/// limit, and so memory would have none.
pub const LANE_STARTS_MAX: usize = 512;
