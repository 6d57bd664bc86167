//! Parses JSON one character at a time: where a value ends, and whether it is valid. It builds no values: it
//! passes on valid text as it was written, with malformed strings corrected.

mod number;
mod string;
mod value;

pub(crate) use number::Number;
pub(crate) use string::{JsonString, Pieces, escape, quoted};
pub use value::NESTING_MAX;
pub(crate) use value::{JsonValue, Verdict};

#[cfg(test)]
mod tests;
