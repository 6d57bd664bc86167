//! Parses Python literals one character at a time and converts them to JSON.

mod number;
mod string;
mod value;

pub(crate) use number::number;
pub(crate) use value::{ClosingContext, PythonValue};

use crate::json::{ValueEffect, quoted};
use crate::schema::Types;

/// Converts `text` to JSON; `None` if it is not exactly one Python literal.
pub(crate) fn literal(text: &str) -> Option<String> {
    let mut value = PythonValue::new(Types::default(), |text, _| quoted(text));
    let mut json = String::new();
    // A space at the end completes a number or a word.
    let mut letters = text.trim().chars().chain([' ']);
    loop {
        match value.step(letters.next()?, &mut json) {
            ValueEffect::Continues => {}
            ValueEffect::Completes => {
                return (letters.next()? == ' ' && letters.next().is_none()).then_some(json);
            }
            ValueEffect::AlreadyComplete => return letters.next().is_none().then_some(json),
            ValueEffect::Invalid => return None,
        }
    }
}

#[cfg(test)]
mod tests;
