//! Text as a value of the type that the tool's schema wants, for formats whose values have no types.

use crate::json::{JsonValue, Number, Verdict, quoted};
use crate::python;
use crate::schema::Types;

/// `text` as JSON. It is a string unless it can be read as another type that is allowed.
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

/// `text`, which was cut off, as the beginning of JSON: of a type that is allowed if it can be, else of a
/// string.
pub(crate) fn partial(text: &str, types: Types) -> String {
    let value = text.trim();
    let words = [("true", types.boolean), ("false", types.boolean), ("null", types.null)];
    if words.iter().any(|(word, is_wanted)| *is_wanted && word.starts_with(value)) {
        return value.to_owned();
    }
    if let Some(number) = numeric(value, types) {
        return number;
    }
    if value.starts_with('{') && types.object || value.starts_with('[') && types.array {
        let mut machine = JsonValue::new();
        let mut written = String::new();
        if value.chars().all(|letter| machine.step(letter, &mut written) == Verdict::More) {
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
    // An integer may have been written with a point.
    let whole = match number.split_once('.') {
        Some((whole, fraction)) if fraction.bytes().all(|digit| digit == b'0') => whole.to_owned(),
        _ => number,
    };
    Number::is(&whole).then_some(whole)
}

/// Objects and arrays, as JSON or as models used to Python write them.
fn compound(value: &str, types: Types) -> Option<String> {
    let is_wanted = match value.chars().next()? {
        '{' => types.object,
        '[' | '(' => types.array,
        _ => false,
    };
    if !is_wanted {
        return None;
    }
    json(value).or_else(|| python::literal(value))
}

/// All of `value` as a JSON value.
fn json(value: &str) -> Option<String> {
    let mut machine = JsonValue::new();
    let mut written = String::with_capacity(value.len());
    let mut letters = value.chars();
    loop {
        match machine.step(letters.next()?, &mut written) {
            Verdict::More => {}
            Verdict::Done => return letters.next().is_none().then_some(written),
            Verdict::Over | Verdict::Bad => return None,
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
    fn text_that_was_cut_off_becomes_the_beginning_of_what_is_wanted() {
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
    fn text_becomes_what_is_wanted() {
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
