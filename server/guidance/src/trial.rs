//! Trials of grammars. llguidance's compiler cannot be interrupted, and compiling even a small grammar can take
//! gigabytes: the work grows with the square of the number of properties of an object with `minProperties`, and with
//! the product of several `multipleOf` values. A grammar that could be that expensive is first compiled in a process
//! that can be stopped.

use llguidance::api::{GrammarWithLexer, TopLevelGrammar};
use serde_json::{Value, json};

use crate::nesting::{conjunctions, schemas};

/// The largest size of a grammar that needs no trial, in bytes.
const BYTES_MAX: usize = 32 << 10;
/// The largest number of properties of a grammar that needs no trial.
const PROPERTIES_MAX: usize = 500;
/// The largest number of alternatives of a grammar that needs no trial: elements of `enum`, `anyOf` and similar lists.
const ALTERNATIVES_MAX: usize = 1000;
/// The largest number of patterns, formats and `&` operators of a grammar that needs no trial.
const PATTERNS_MAX: usize = 3;
/// The largest product of all `multipleOf` values of a grammar that needs no trial. An automaton can have that many
/// states.
const MULTIPLES_MAX: f64 = 1000.0;

/// Compiles grammars in an environment where the work can be stopped, such as another process.
pub trait Trial: Send + Sync {
    /// Compiles a grammar with [`try_grammar`](crate::try_grammar) within limits of time and memory.
    ///
    /// # Errors
    /// The grammar cannot be compiled at all or within the limits, or the trial cannot be run.
    fn run(&self, request: &[u8]) -> Result<(), TrialError>;
}

/// The reason why a grammar was not compiled, either in a trial or after it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TrialError {
    /// The grammar cannot be compiled. The text is llguidance's error message.
    Invalid(String),
    /// The grammar cannot be compiled within the limits. The text describes the exceeded limit.
    TooExpensive(String),
    /// The trial could not be run, for a reason unrelated to the grammar.
    Failed(String),
}

/// Writes the request of a trial: the grammar, and the number of tokens of the vocabulary, which bounds the token IDs
/// in the grammar.
pub(crate) fn request(grammar: &TopLevelGrammar, tokens: usize) -> Vec<u8> {
    json!({"grammar": grammar, "tokens": tokens}).to_string().into_bytes()
}

/// Reads the request of a trial.
pub(crate) fn read_request(request: &[u8]) -> Result<(TopLevelGrammar, usize), String> {
    let mut request: Value = serde_json::from_slice(request).map_err(|error| error.to_string())?;
    let tokens = request["tokens"].as_u64().ok_or("the number of tokens is missing")?;
    let grammar = serde_json::from_value(request["grammar"].take()).map_err(|error| error.to_string())?;
    Ok((grammar, tokens as usize))
}

/// Whether compiling a grammar could take more time or memory than is known to be harmless.
pub(crate) fn is_needed(grammar: &TopLevelGrammar) -> bool {
    let mut size = GrammarSize {
        bytes: 0,
        properties: 0,
        alternatives: 0,
        patterns: 0,
        multiples: 1.0,
        has_costly_keyword: false,
    };
    grammar.grammars.iter().for_each(|grammar| size.add(grammar));
    let GrammarSize { bytes, properties, alternatives, patterns, multiples, has_costly_keyword } = size;
    bytes > BYTES_MAX
        || properties > PROPERTIES_MAX
        || alternatives > ALTERNATIVES_MAX
        || patterns > PATTERNS_MAX
        || multiples > MULTIPLES_MAX
        || has_costly_keyword
}

/// The quantities that determine the work of compiling a grammar.
struct GrammarSize {
    bytes: usize,
    properties: usize,
    alternatives: usize,
    /// The number of patterns, formats and `&` operators: a text may have to match several patterns at the same time.
    patterns: usize,
    /// The product of all `multipleOf` values.
    multiples: f64,
    /// Whether the grammar has a keyword whose cost grows with the square of the number of properties, or is unknown.
    has_costly_keyword: bool,
}

impl GrammarSize {
    fn add(&mut self, grammar: &GrammarWithLexer) {
        if let Some(schema) = &grammar.json_schema {
            self.bytes += schema.to_string().len();
            self.add_schema(schema);
        }
        let Some(lark) = &grammar.lark_grammar else { return };
        self.bytes += lark.len();
        self.patterns += conjunctions(lark);
        self.has_costly_keyword |= lark.contains("%regex") || lark.contains("%lark");
        schemas(lark).for_each(|schema| self.add_schema(&schema));
    }

    /// Counts every member that could be a keyword, at any depth of the schema.
    fn add_schema(&mut self, value: &Value) {
        match value {
            Value::Array(values) => values.iter().for_each(|value| self.add_schema(value)),
            Value::Object(members) => {
                for (keyword, value) in members {
                    self.add_keyword(keyword, value);
                    self.add_schema(value);
                }
            }
            _ => {}
        }
    }

    fn add_keyword(&mut self, keyword: &str, value: &Value) {
        match (keyword, value) {
            ("properties", Value::Object(members)) => self.properties += members.len(),
            ("patternProperties", Value::Object(members)) => self.patterns += members.len(),
            ("pattern" | "format", Value::String(_)) => self.patterns += 1,
            ("required" | "enum" | "anyOf" | "oneOf" | "allOf" | "prefixItems", Value::Array(values)) => {
                self.alternatives += values.len();
            }
            ("minProperties" | "maxProperties", Value::Number(_)) => self.has_costly_keyword = true,
            ("multipleOf", Value::Number(number)) => {
                let number = number.as_f64().unwrap_or(f64::INFINITY);
                // For a fraction, the number of states depends on the digits instead of the value: 0.997 needs at least
                // as many states as 997.
                self.multiples *= if number.fract() == 0.0 { number.abs().max(1.0) } else { f64::INFINITY };
            }
            _ => {}
        }
    }
}
