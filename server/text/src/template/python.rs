//! Formats values as Python does: `str`, `repr` and `json.dumps`.

use std::fmt::Write as _;

use minijinja::{Value, value::ValueKind};
use serde_json::Value as Json;

/// Returns `str(value)`, or an empty string if the value is undefined, as in Jinja.
pub(super) fn str(value: &Value) -> String {
    match value.as_str() {
        Some(text) => text.to_owned(),
        None if value.is_undefined() => String::new(),
        None => {
            let mut text = String::new();
            repr(value, &mut text);
            text
        }
    }
}

/// Appends `repr(value)` to `text`.
fn repr(value: &Value, text: &mut String) {
    match value.kind() {
        ValueKind::None => text.push_str("None"),
        ValueKind::Undefined => text.push_str("Undefined"),
        ValueKind::Bool => text.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number if value.is_integer() => text.push_str(&value.to_string()),
        ValueKind::Number => match f64::try_from(value.clone()) {
            Ok(number) => text.push_str(&float(number)),
            Err(_) => text.push_str(&value.to_string()),
        },
        ValueKind::String => string(value.as_str().unwrap_or_default(), text),
        ValueKind::Seq => {
            text.push('[');
            for (index, item) in value.try_iter().into_iter().flatten().enumerate() {
                text.push_str(if index > 0 { ", " } else { "" });
                repr(&item, text);
            }
            text.push(']');
        }
        ValueKind::Map => {
            text.push('{');
            for (index, key) in value.try_iter().into_iter().flatten().enumerate() {
                text.push_str(if index > 0 { ", " } else { "" });
                repr(&key, text);
                text.push_str(": ");
                repr(&value.get_item(&key).unwrap_or_default(), text);
            }
            text.push('}');
        }
        _ => text.push_str(&value.to_string()),
    }
}

/// Appends the `repr` of a string, in single quotes unless only double quotes avoid escaping.
fn string(value: &str, text: &mut String) {
    let quote = if value.contains('\'') && !value.contains('"') { '"' } else { '\'' };
    text.push(quote);
    for c in value.chars() {
        match c {
            '\\' => text.push_str("\\\\"),
            '\n' => text.push_str("\\n"),
            '\r' => text.push_str("\\r"),
            '\t' => text.push_str("\\t"),
            c if c == quote => {
                text.push('\\');
                text.push(c);
            }
            c if (c as u32) < 0x20 || (0x7f..0xa1).contains(&(c as u32)) || c == '\u{ad}' => {
                let _ = write!(text, "\\x{:02x}", c as u32);
            }
            c => text.push(c),
        }
    }
    text.push(quote);
}

/// Returns the `repr` of a float: the shortest digits that identify it, with an exponent if the magnitude is below 1e-4
/// or at least 1e16.
fn float(value: f64) -> String {
    if value.is_nan() {
        return "nan".to_owned();
    }
    if value.is_infinite() {
        return if value > 0.0 { "inf" } else { "-inf" }.to_owned();
    }
    let scientific = format!("{value:e}");
    let (digits, exponent) = scientific.split_once('e').expect("invariant: this notation has an exponent");
    let exponent: i32 = exponent.parse().expect("invariant: an exponent is an integer");
    if value == 0.0 || (-4..16).contains(&exponent) {
        let plain = format!("{value}");
        return if plain.contains('.') { plain } else { plain + ".0" };
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.abs())
}

/// The options of `json.dumps`.
pub(super) struct JsonStyle {
    /// The indentation of each level; `None` writes everything on one line.
    pub(super) indent: Option<String>,
    /// The separator between items, and that between key and value.
    pub(super) separators: [String; 2],
    /// Whether to escape non-ASCII characters.
    pub(super) ensure_ascii: bool,
    pub(super) sort_keys: bool,
}

impl JsonStyle {
    pub(super) fn write(&self, value: &Json) -> String {
        let mut text = String::new();
        self.value(value, 0, &mut text);
        text
    }

    fn value(&self, value: &Json, depth: usize, text: &mut String) {
        match value {
            Json::Null => text.push_str("null"),
            Json::Bool(value) => text.push_str(if *value { "true" } else { "false" }),
            Json::Number(number) => match number.as_f64().filter(|_| number.is_f64()) {
                Some(value) => text.push_str(&float(value)),
                None => text.push_str(&number.to_string()),
            },
            Json::String(value) => self.string(value, text),
            Json::Array(items) => {
                self.items("[]", depth, items.iter(), text, |item, text| {
                    self.value(item, depth + 1, text);
                });
            }
            Json::Object(map) => {
                let mut items: Vec<_> = map.iter().collect();
                if self.sort_keys {
                    items.sort_by_key(|(key, _)| *key);
                }
                self.items("{}", depth, items.into_iter(), text, |(key, value), text| {
                    self.string(key, text);
                    text.push_str(&self.separators[1]);
                    self.value(value, depth + 1, text);
                });
            }
        }
    }

    fn items<T>(
        &self,
        brackets: &str,
        depth: usize,
        items: impl ExactSizeIterator<Item = T>,
        text: &mut String,
        write: impl Fn(T, &mut String),
    ) {
        let (open, close) = brackets.split_at(1);
        let empty = items.len() == 0;
        text.push_str(open);
        for (index, item) in items.enumerate() {
            if index > 0 {
                text.push_str(&self.separators[0]);
            }
            self.new_line(depth + 1, text);
            write(item, text);
        }
        if !empty {
            self.new_line(depth, text);
        }
        text.push_str(close);
    }

    fn new_line(&self, depth: usize, text: &mut String) {
        if let Some(indent) = &self.indent {
            text.push('\n');
            (0..depth).for_each(|_| text.push_str(indent));
        }
    }

    fn string(&self, value: &str, text: &mut String) {
        text.push('"');
        for c in value.chars() {
            match c {
                '"' => text.push_str("\\\""),
                '\\' => text.push_str("\\\\"),
                '\n' => text.push_str("\\n"),
                '\r' => text.push_str("\\r"),
                '\t' => text.push_str("\\t"),
                '\u{8}' => text.push_str("\\b"),
                '\u{c}' => text.push_str("\\f"),
                c if (c as u32) < 0x20 || (self.ensure_ascii && !c.is_ascii()) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        let _ = write!(text, "\\u{unit:04x}");
                    }
                }
                c => text.push(c),
            }
        }
        text.push('"');
    }
}
