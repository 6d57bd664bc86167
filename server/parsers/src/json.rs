//! JSON a character at a time: where a value ends, and whether it is one. It builds nothing; what it has
//! checked is passed on as it was written, with what is wrong inside of strings put right.

mod number;
mod string;
mod value;

pub(crate) use number::Number;
pub(crate) use string::{JsonString, Pieces};
pub(crate) use value::{JsonValue, Verdict};

/// Nesting depth of the arguments in a tool call that the model generates.
///
/// Beyond it: the rest is not parsed as arguments and is returned as text.
pub const NESTING_MAX: usize = 128;

/// Appends `letter` to `text` as it stands within a JSON string.
pub(crate) fn escape(letter: char, text: &mut String) {
    match letter {
        '"' => text.push_str("\\\""),
        '\\' => text.push_str("\\\\"),
        '\n' => text.push_str("\\n"),
        '\r' => text.push_str("\\r"),
        '\t' => text.push_str("\\t"),
        letter if u32::from(letter) < 0x20 => {
            let code = u32::from(letter);
            text.push_str("\\u00");
            for digit in [code >> 4, code & 15] {
                text.push(char::from_digit(digit, 16).expect("invariant: a digit is below 16"));
            }
        }
        letter => text.push(letter),
    }
}

/// `text` as a JSON string, with its quotes.
pub(crate) fn quoted(text: &str) -> String {
    let mut json = String::with_capacity(text.len() + 2);
    json.push('"');
    for letter in text.chars() {
        escape(letter, &mut json);
    }
    json.push('"');
    json
}

#[cfg(test)]
mod tests;
