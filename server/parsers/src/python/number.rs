//! Parses Python numbers, which include notations that JSON lacks.

use crate::json::Number;

/// Converts `text` to a JSON number, if it is a finite number in Python.
pub(crate) fn number(text: &str) -> Option<String> {
    if Number::is(text) {
        return Some(text.to_owned());
    }
    let (sign, digits) = match text.strip_prefix('-') {
        Some(digits) => ("-", digits),
        None => ("", text.strip_prefix('+').unwrap_or(text)),
    };
    let digits = plain(digits)?;
    for (prefix, radix) in [("0x", 16), ("0X", 16), ("0o", 8), ("0O", 8), ("0b", 2), ("0B", 2)] {
        if let Some(digits) = digits.strip_prefix(prefix) {
            let is_plain = digits.starts_with(|letter: char| letter.is_digit(radix));
            let value = u128::from_str_radix(digits, radix).ok().filter(|_| is_plain)?;
            return Some(format!("{sign}{value}"));
        }
    }
    let (mantissa, exponent) = match digits.find(['e', 'E']) {
        Some(at) => digits.split_at(at),
        None => (digits.as_str(), ""),
    };
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    if whole.is_empty() && fraction.is_empty() {
        return None;
    }
    let whole = if whole.is_empty() { "0" } else { whole };
    let point = if fraction.is_empty() { "" } else { "." };
    let json = format!("{sign}{whole}{point}{fraction}{exponent}");
    Number::is(&json).then_some(json)
}

/// Removes the underscores, which are allowed only between two digits.
fn plain(digits: &str) -> Option<String> {
    let is_misplaced = digits.starts_with('_') || digits.ends_with('_') || digits.contains("__");
    (!is_misplaced).then(|| digits.replace('_', ""))
}
