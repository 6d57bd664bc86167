//! Parses Python numbers, which include notations that JSON lacks.

use crate::json::Number;

/// Converts an integer or a floating-point number in Python's notation to a JSON number. Returns `None` for any other
/// text, and for hexadecimal, octal and binary integers of more than 128 bits.
pub(crate) fn number(text: &str) -> Option<String> {
    if Number::is(text) {
        return Some(text.to_owned());
    }
    let (sign, digits) = match text.strip_prefix('-') {
        Some(digits) => ("-", digits),
        None => ("", text.strip_prefix('+').unwrap_or(text)),
    };
    for (prefix, radix) in [("0x", 16), ("0X", 16), ("0o", 8), ("0O", 8), ("0b", 2), ("0B", 2)] {
        if let Some(digits) = digits.strip_prefix(prefix) {
            // An underscore may also separate the prefix from the first digit.
            let digits = plain(digits.strip_prefix('_').unwrap_or(digits), radix)?;
            let is_plain = digits.starts_with(|letter: char| letter.is_digit(radix));
            let value = u128::from_str_radix(&digits, radix).ok().filter(|_| is_plain)?;
            return Some(format!("{sign}{value}"));
        }
    }
    let digits = plain(digits, 10)?;
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

/// Removes the underscores, which are allowed only between two digits of the radix.
fn plain(text: &str, radix: u32) -> Option<String> {
    let is_digit = |letter: Option<char>| letter.is_some_and(|letter| letter.is_digit(radix));
    let are_between_digits = text.match_indices('_').all(|(at, underscore)| {
        is_digit(text[..at].chars().next_back()) && is_digit(text[at + underscore.len()..].chars().next())
    });
    are_between_digits.then(|| text.replace('_', ""))
}
