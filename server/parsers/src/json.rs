//! Parses JSON one character at a time, to determine where a value ends and whether it is valid. The module builds no
//! values: it emits valid text as it was written, and corrects malformed strings.

mod number;
mod string;
mod value;

pub(crate) use number::Number;
pub(crate) use string::{JsonString, Pieces, escape, quoted};
pub use value::NESTING_MAX;
pub(crate) use value::{JsonValue, ValueEffect};

#[cfg(test)]
mod tests;
