//! Converts text to a value of a type that the schema of the tool allows, or otherwise to a string, for formats whose
//! values are untyped.

use crate::json::{JsonValue, Number, ValueEffect, quoted};
use crate::python;
use crate::schema::Types;

/// Converts `text` to JSON: a string, unless it can be parsed as another allowed type.
pub(crate) fn typed(text: &str, types: Types) -> String {
    if types.is_text_only() {
        return quoted(text);
    }
    let value = text.trim();
    word(value, types)
        .or_else(|| numeric(value, types))
        .or_else(|| compound(value, types))
        .unwrap_or_else(|| quoted(text))
}

/// Converts `text`, which was cut off, to the beginning of a JSON value of an allowed type if possible, and otherwise
/// to the beginning of a string.
pub(crate) fn partial(text: &str, types: Types) -> String {
    let value = text.trim();
    let words = [("true", types.boolean), ("false", types.boolean), ("null", types.null)];
    if words.iter().any(|(word, is_allowed)| *is_allowed && word.starts_with(value)) {
        return value.to_owned();
    }
    if let Some(number) = numeric(value, types) {
        return number;
    }
    if value.starts_with('{') && types.object || value.starts_with('[') && types.array {
        let mut machine = JsonValue::new();
        let mut written = String::new();
        if value.chars().all(|letter| machine.step(letter, &mut written) == ValueEffect::Continues) {
            return written + &machine.held();
        }
    }
    let mut string = if text.is_empty() { String::new() } else { quoted(text) };
    string.pop();
    string
}

fn word(value: &str, types: Types) -> Option<String> {
    let word = match value {
        "true" | "True" | "TRUE" if types.boolean => "true",
        "false" | "False" | "FALSE" if types.boolean => "false",
        "null" | "None" | "NULL" if types.null => "null",
        _ => return None,
    };
    Some(word.to_owned())
}

fn numeric(value: &str, types: Types) -> Option<String> {
    if !(types.integer || types.number) {
        return None;
    }
    let number = python::number(value)?;
    if types.number {
        return Some(number);
    }
    // Models sometimes write integers with a decimal point.
    let whole = match number.split_once('.') {
        Some((whole, fraction)) if fraction.bytes().all(|digit| digit == b'0') => whole.to_owned(),
        _ => number,
    };
    Number::is(&whole).then_some(whole)
}

/// Parses an object or an array in JSON or Python notation.
fn compound(value: &str, types: Types) -> Option<String> {
    let is_allowed = match value.chars().next()? {
        '{' => types.object,
        '[' | '(' => types.array,
        _ => false,
    };
    if !is_allowed {
        return None;
    }
    json(value).or_else(|| python::literal(value))
}

/// Parses the whole of `value` as JSON.
fn json(value: &str) -> Option<String> {
    let mut machine = JsonValue::new();
    let mut written = String::with_capacity(value.len());
    let mut letters = value.chars();
    loop {
        match machine.step(letters.next()?, &mut written) {
            ValueEffect::Continues => {}
            ValueEffect::Completes => return letters.next().is_none().then_some(written),
            ValueEffect::AlreadyComplete | ValueEffect::Invalid => return None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INTEGER: Types = Types {
        integer: true,
        text: false,
        number: false,
        boolean: false,
        null: false,
        object: false,
        array: false,
    };
    const ANY: Types =
        Types { text: true, number: true, boolean: true, null: true, object: true, array: true, ..INTEGER };

    #[test]
    fn text_that_was_cut_off_becomes_the_beginning_of_an_allowed_type() {
        for (text, types, json) in [
            ("1", INTEGER, "1"),
            ("ma", INTEGER, "\"ma"),
            ("", INTEGER, ""),
            ("", ANY, ""),
            ("tr", ANY, "tr"),
            ("tr", INTEGER, "\"tr"),
            (" {\"a\": [1", ANY, "{\"a\": [1"),
            ("{\"a\": \"x\\", ANY, "{\"a\": \"x\\"),
            ("{'a", ANY, "\"{'a"),
            ("[1]", ANY, "\"[1]"),
        ] {
            assert_eq!(partial(text, types), json, "{text}");
        }
    }

    #[test]
    fn text_becomes_a_value_of_an_allowed_type() {
        for (text, types, json) in [
            ("5", Types::default(), "\"5\""),
            ("5", INTEGER, "5"),
            (" 5\n", INTEGER, "5"),
            ("5.0", INTEGER, "5"),
            ("5.5", INTEGER, "5.5"),
            ("five", INTEGER, "\"five\""),
            ("-1e3", ANY, "-1e3"),
            ("True", ANY, "true"),
            ("None", ANY, "null"),
            ("true", INTEGER, "\"true\""),
            ("{\"a\": [1]}", ANY, "{\"a\": [1]}"),
            ("{'a': (1, None)}", ANY, "{\"a\":[1,null]}"),
            ("[1] and more", ANY, "\"[1] and more\""),
            ("{a}", ANY, "\"{a}\""),
            ("[1]", INTEGER, "\"[1]\""),
            (" a\n", ANY, "\" a\\n\""),
            ("", ANY, "\"\""),
        ] {
            assert_eq!(typed(text, types), json, "{text}");
        }
    }
}
