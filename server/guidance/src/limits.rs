//! Limits on forms and on their memory. A form that exceeds a limit when it is compiled is rejected together with its
//! request. Other limits apply while a sequence follows a form.

/// Size of a JSON schema, written without whitespace.
///
/// If exceeded: 400, `invalid_value`.
pub const SCHEMA_BYTES_MAX: usize = 1 << 20;
/// Nesting depth of a JSON schema.
///
/// If exceeded: 400, `invalid_value`.
pub const SCHEMA_DEPTH_MAX: usize = 100;
/// Number of properties of a JSON schema and its subschemas: names in `properties` or `required`, and keys of the
/// objects in `enum` and `const`.
///
/// If exceeded: 400, `invalid_value`.
pub const PROPERTIES_MAX: usize = 5000;
/// Number of `patternProperties` of a JSON schema and its subschemas. The time to compare them grows with the third
/// power of their number, and 64 of them take about a second.
///
/// If exceeded: 400, `invalid_value`.
pub const PATTERN_PROPERTIES_MAX: usize = 64;
/// Number of different values of `pattern` in a JSON schema that combines schemas: with `allOf`, or with `$ref`,
/// `anyOf` or `oneOf` together with other constraints. The memory to follow a text grows exponentially with the number
/// of patterns that the text must match at the same time.
///
/// If exceeded: 400, `invalid_value`.
pub const COMBINED_PATTERNS_MAX: usize = 2;
/// Number of `&` operators in a grammar. As with the patterns of [`COMBINED_PATTERNS_MAX`], the required memory grows
/// exponentially with their number.
///
/// If exceeded: 400, `invalid_value`.
pub const CONJUNCTIONS_MAX: usize = 1;
/// Number of different targets of `$ref` in a JSON schema.
///
/// If exceeded: 400, `invalid_value`.
pub const REFERENCES_MAX: usize = 256;
/// Size of a grammar.
///
/// If exceeded: 400, `invalid_value`.
pub const GRAMMAR_BYTES_MAX: usize = 256 << 10;
/// Number of rules and groups of a grammar (each `:`, `(`, `[` and `~` in its Lark text counts as one).
///
/// If exceeded: 400, `invalid_value`.
pub const GRAMMAR_GROUPS_MAX: usize = 16_384;
/// Size of a regular expression.
///
/// If exceeded: 400, `invalid_value`.
pub const REGEX_BYTES_MAX: usize = 32 << 10;
/// Number of elements in one list of a form: the alternatives of a choice, the parts of a sequence, the triggers and
/// tags together, or the excluded texts.
///
/// If exceeded: 400, `invalid_value`.
pub const ELEMENTS_MAX: usize = 8192;
/// Nesting depth of a form.
///
/// If exceeded: 400, `invalid_value`.
pub const FORM_DEPTH_MAX: usize = 64;
/// Total size of a form, including its schemas, grammars and texts, and of the grammar generated from it.
///
/// If exceeded: 400, `invalid_value`.
pub const FORM_BYTES_MAX: usize = 4 << 20;
/// Maximum count of a repetition in an EBNF grammar or a structural tag, and maximum `max_chars` of a structural tag.
///
/// If exceeded: 400, `invalid_value`.
pub const REPEAT_MAX: u32 = 1 << 16;

/// Work units for parsing the regular expressions of a form. About 50,000 units take a millisecond.
///
/// If exceeded: 400, `invalid_value`.
pub const COMPILE_FUEL: u64 = 1_000_000;
/// Work units for matching regular expressions in one computation of the allowed next tokens. About 14,000 units take a
/// millisecond.
///
/// If exceeded: 400, `invalid_value`, if this happens at the beginning of the output; otherwise 400,
/// `form_too_complex`; a stream ends with this error.
pub const STEP_FUEL: u64 = 400_000;
/// Number of parser items that are created in one computation of the allowed next tokens. About 20,000 items take a
/// millisecond.
///
/// If exceeded: 400, `invalid_value`, if this happens at the beginning of the output; otherwise 400,
/// `form_too_complex`; a stream ends with this error.
pub const STEP_ITEMS_MAX: usize = 200_000;
/// Number of parser items that one generated token of a form may create on the engine's thread. The time grows with the
/// square of the number of items in a row, and 1000 items take about 0.2 ms.
///
/// If exceeded: from then on, the threads that compute the allowed next tokens consume the generated tokens of this
/// form.
pub const COMMIT_ITEMS_MAX: usize = 1000;
/// Number of symbols of a grammar before it is simplified.
///
/// If exceeded: 400, `invalid_value`.
pub const UNOPTIMIZED_SYMBOLS_MAX: usize = 250_000;
/// Number of symbols of a compiled grammar; llguidance numbers the symbols with 16 bits.
///
/// If exceeded: 400, `invalid_value`.
pub const SYMBOLS_MAX: usize = 65_000;
/// Number of parser items at one position of the output: about one for each alternative. A choice of [`ELEMENTS_MAX`]
/// alternatives needs slightly more items than alternatives.
///
/// If exceeded: 400, `invalid_value`, if this happens at the beginning of the output; otherwise 400,
/// `form_too_complex`; a stream ends with this error.
pub const ROW_ITEMS_MAX: usize = 4 * ELEMENTS_MAX;
/// Number of states of the lexer of a form. A state takes one or two kilobytes.
///
/// If exceeded: 400, `invalid_value`, if this happens at the beginning of the output; otherwise 400,
/// `form_too_complex`; a stream ends with this error.
pub const LEXER_STATES_MAX: usize = 60_000;
/// Maximum size in bytes of a lexer with which new sequences start. Only the sequences that already use a larger lexer
/// continue to use it.
pub const LEXER_BYTES_MAX: usize = 32 << 20;
/// Memory of the parser of one sequence; it grows with the length of the text and the number of alternatives at each
/// position.
///
/// If exceeded: 400, `form_too_complex`; a stream ends with this error.
pub const SEQUENCE_BYTES_MAX: usize = 64 << 20;
/// Total memory of the compiled grammars and lexers of all forms and of the parsers of all sequences.
///
/// If exceeded: compiled forms that no request uses are evicted; then requests that need more than an equal share of
/// the memory fail with 400: `invalid_value` if the grammar needs it, or `form_too_complex` if a growing lexer or
/// parser needs it.
pub const MEMORY_BYTES_MAX: usize = 512 << 20;
/// Total memory of compiled forms and of their sequences above which idle forms are evicted from the cache, in bytes.
pub const CACHED_MEMORY_BYTES_MAX: usize = 256 << 20;

/// Number of compiled forms in the cache.
pub const CACHED_GUIDES_MAX: usize = 256;
/// Total size of the sources of the cached forms, in bytes.
pub const CACHED_BYTES_MAX: usize = 8 << 20;
/// Number of cache lookups after which an unused compiled form is evicted.
pub const CACHED_USES_MAX: u64 = 10_000;
/// Number of sequences that share a lexer before a fresh copy replaces it. Otherwise, the states of a frequently used
/// lexer would accumulate until they reach another limit.
pub const LEXER_SEQUENCES_MAX: usize = 512;

/// The limits that can be set for each compiler. The defaults are the constants of this module, with one copy of the
/// lexer of a form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GuideLimits {
    /// The number of copies of the lexer of a form, which is the number of threads that can compute masks of one form
    /// without waiting for each other.
    pub lexer_copies: usize,
    /// The limit [`STEP_FUEL`], in work units.
    pub step_fuel: u64,
    /// The limit [`LEXER_STATES_MAX`], in lexer states.
    pub lexer_states_max: usize,
    /// The limit [`LEXER_BYTES_MAX`], in bytes.
    pub lexer_bytes_max: usize,
    /// The limit [`SEQUENCE_BYTES_MAX`], in bytes.
    pub sequence_bytes_max: usize,
    /// The limit [`MEMORY_BYTES_MAX`], in bytes.
    pub memory_bytes_max: usize,
    /// The limit [`CACHED_MEMORY_BYTES_MAX`], in bytes.
    pub cached_memory_bytes_max: usize,
}

impl Default for GuideLimits {
    fn default() -> Self {
        Self {
            lexer_copies: 1,
            step_fuel: STEP_FUEL,
            lexer_states_max: LEXER_STATES_MAX,
            lexer_bytes_max: LEXER_BYTES_MAX,
            sequence_bytes_max: SEQUENCE_BYTES_MAX,
            memory_bytes_max: MEMORY_BYTES_MAX,
            cached_memory_bytes_max: CACHED_MEMORY_BYTES_MAX,
        }
    }
}
