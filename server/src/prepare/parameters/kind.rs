//! Defines the kinds of parameters: how their values are checked and described. A value is checked before it is parsed.
//! Every error therefore has one of OpenAI's codes, and its message states what is allowed and what the request
//! contains: the value (shortened if it is long), its type or its length.

use std::fmt;

use serde_json::{Map, Value};

use crate::error::Error;

/// The allowed values of a parameter.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    Boolean,
    /// An integer from the first number to the second.
    Integer(i64, i64),
    /// A number from the first to the second, after conversion to `f32`, the type that the engine uses.
    Number(f64, f64),
    /// A string with at most this number of bytes.
    Text(usize),
    /// A string with at most this number of characters, for parameters whose limit in OpenAI's API is in characters.
    Characters(usize),
    /// One of these strings.
    OneOf(&'static [&'static str]),
    /// An object with any members, which are checked when they are parsed.
    Object,
    /// An object with these optional members. Other members are ignored.
    Fields(&'static [(&'static str, Kind)]),
    /// An array of strings: the maximum number of strings, and of bytes in each.
    Texts(usize, usize),
    /// OpenAI's metadata: the maximum number of pairs, of characters in a name, and of characters in a value.
    Pairs(usize, usize, usize),
    /// An array: the kind and the maximum number of its values.
    Array(&'static Kind, usize),
    /// A value of one of several kinds.
    Either(&'static [Kind]),
    /// Any value, which is checked when it is parsed.
    Any,
}

/// Maximum number of characters of a value that a message repeats.
const SHOWN_MAX: usize = 64;

impl Kind {
    /// Checks the value at `path`.
    pub(crate) fn check(self, path: &str, value: &Value) -> Result<(), Error> {
        match self {
            Self::Integer(min, max) => self.integer(path, value, min, max),
            Self::Number(min, max) => self.number(path, value, min, max),
            Self::Text(bytes_max) => self.text(path, value, |text| text.len() <= bytes_max),
            Self::Characters(chars_max) => self.text(path, value, |text| text.chars().count() <= chars_max),
            Self::OneOf(words) => match value {
                Value::String(text) if words.contains(&text.as_str()) => Ok(()),
                Value::String(_) => Err(refused("invalid_value", path, value, self)),
                _ => Err(refused("invalid_type", path, value, self)),
            },
            Self::Fields(members) => {
                let object = self.object(path, value)?;
                members.iter().try_for_each(|(name, kind)| match object.get(*name) {
                    None | Some(Value::Null) => Ok(()),
                    Some(value) => kind.check(&format!("{path}.{name}"), value),
                })
            }
            Self::Pairs(count_max, name_max, value_max) => {
                let pairs = self.object(path, value)?;
                if pairs.len() > count_max {
                    let problem = format!("has {} members (limit: {count_max})", pairs.len());
                    return Err(Error::coded("object_above_max_properties", path, problem));
                }
                pairs.iter().try_for_each(|(name, value)| {
                    Self::Characters(name_max).check(path, &Value::String(name.clone()))?;
                    Self::Characters(value_max).check(&format!("{path}.{name}"), value)
                })
            }
            Self::Array(kind, count_max) => self.array(path, value, *kind, count_max),
            Self::Texts(count_max, bytes_max) => self.array(path, value, Self::Text(bytes_max), count_max),
            Self::Either(kinds) => self.either(path, value, kinds),
            Self::Boolean if !value.is_boolean() => Err(refused("invalid_type", path, value, self)),
            Self::Object => self.object(path, value).map(|_| ()),
            Self::Boolean | Self::Any => Ok(()),
        }
    }

    fn text(self, path: &str, value: &Value, fits: impl Fn(&str) -> bool) -> Result<(), Error> {
        match value {
            Value::String(text) if fits(text) => Ok(()),
            Value::String(_) => Err(refused("string_above_max_length", path, value, self)),
            _ => Err(refused("invalid_type", path, value, self)),
        }
    }

    fn object<'a>(self, path: &str, value: &'a Value) -> Result<&'a Map<String, Value>, Error> {
        value.as_object().ok_or_else(|| refused("invalid_type", path, value, self))
    }

    fn integer(self, path: &str, value: &Value, min: i64, max: i64) -> Result<(), Error> {
        match value.as_i64() {
            Some(number) if number < min => Err(refused("integer_below_min_value", path, value, self)),
            Some(number) if number > max => Err(refused("integer_above_max_value", path, value, self)),
            Some(_) => Ok(()),
            None if value.as_u64().is_some() => Err(refused("integer_above_max_value", path, value, self)),
            None => Err(refused("invalid_type", path, value, self)),
        }
    }

    fn number(self, path: &str, value: &Value, min: f64, max: f64) -> Result<(), Error> {
        match value.as_f64().map(|number| number as f32) {
            Some(number) if number < min as f32 => Err(refused("decimal_below_min_value", path, value, self)),
            Some(number) if number > max as f32 => Err(refused("decimal_above_max_value", path, value, self)),
            Some(_) => Ok(()),
            None => Err(refused("invalid_type", path, value, self)),
        }
    }

    fn array(self, path: &str, value: &Value, element: Self, count_max: usize) -> Result<(), Error> {
        let Value::Array(values) = value else { return Err(refused("invalid_type", path, value, self)) };
        if values.len() > count_max {
            let problem = format!("has {} elements (limit: {count_max})", values.len());
            return Err(Error::coded("array_above_max_length", path, problem));
        }
        (0..)
            .zip(values)
            .try_for_each(|(index, value): (usize, _)| element.check(&format!("{path}[{index}]"), value))
    }

    /// Checks a value of one of several kinds. The error is that of the kind that the value resembles most.
    fn either(self, path: &str, value: &Value, kinds: &[Self]) -> Result<(), Error> {
        let (mut closest, mut of_arrays) = (None, Vec::new());
        for kind in kinds {
            match kind.check(path, value) {
                Ok(()) => return Ok(()),
                Err(error) if kind.is_like(value) => closest = Some(error),
                Err(error) if value.is_array() && matches!(kind, Self::Texts(..) | Self::Array(..)) => {
                    of_arrays.push(error);
                }
                Err(_) => {}
            }
        }
        // If only one kind is an array, any array resembles it.
        let closest = closest.or_else(|| of_arrays.pop().filter(|_| of_arrays.is_empty()));
        Err(closest.unwrap_or_else(|| refused("invalid_type", path, value, self)))
    }

    /// Whether `value` has the JSON type of this kind. If `value` is an array, the type of its first element must also
    /// match.
    fn is_like(self, value: &Value) -> bool {
        match self {
            Self::Boolean => value.is_boolean(),
            Self::Integer(..) | Self::Number(..) => value.is_number(),
            Self::Text(_) | Self::Characters(_) | Self::OneOf(_) => value.is_string(),
            Self::Object | Self::Fields(_) | Self::Pairs(..) => value.is_object(),
            Self::Texts(..) => first(value).is_some_and(|first| first.is_none_or(Value::is_string)),
            Self::Array(kind, _) => {
                first(value).is_some_and(|first| first.is_none_or(|first| kind.is_like(first)))
            }
            Self::Either(kinds) => kinds.iter().any(|kind| kind.is_like(value)),
            Self::Any => true,
        }
    }
}

/// Returns the first element of an array; the inner `None` stands for an empty array.
fn first(value: &Value) -> Option<Option<&Value>> {
    value.as_array().map(|values| values.first())
}

fn refused(code: &'static str, path: &str, value: &Value, kind: Kind) -> Error {
    Error::coded(code, path, format!("{} is not {kind}", shown(value)))
}

/// Returns the JSON of the value, shortened if it is long. For an array or an object, returns only its type.
fn shown(value: &Value) -> String {
    let text = match value {
        Value::Array(_) => return "an array".to_owned(),
        Value::Object(_) => return "an object".to_owned(),
        other => other.to_string(),
    };
    match text.char_indices().nth(SHOWN_MAX) {
        Some((end, _)) => format!("{}… ({} bytes)", &text[..end], text.len()),
        None => text,
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Boolean => formatter.write_str("true or false"),
            Self::Integer(i64::MIN, i64::MAX) => formatter.write_str("an integer"),
            Self::Integer(min, i64::MAX) => write!(formatter, "an integer of at least {min}"),
            Self::Integer(min, max) if min == max => write!(formatter, "{min}"),
            Self::Integer(min, max) => write!(formatter, "an integer from {min} to {max}"),
            Self::Number(min, max) => write!(formatter, "a number from {min} to {max}"),
            Self::Text(usize::MAX) => formatter.write_str("a string"),
            Self::Text(bytes_max) => write!(formatter, "a string of at most {bytes_max} bytes"),
            Self::Characters(chars_max) => write!(formatter, "a string of at most {chars_max} characters"),
            Self::OneOf(words) => {
                let quoted: Vec<String> = words.iter().map(|word| format!("{word:?}")).collect();
                match quoted.as_slice() {
                    [only] => formatter.write_str(only),
                    [first @ .., last] => write!(formatter, "{} or {last}", first.join(", ")),
                    [] => Ok(()),
                }
            }
            Self::Object | Self::Fields(_) => formatter.write_str("an object"),
            Self::Texts(count_max, _) => at_most(formatter, "an array of", count_max, "strings"),
            Self::Pairs(count_max, name_max, value_max) => write!(
                formatter,
                "an object of at most {count_max} strings of at most {value_max} characters with names of at most \
                 {name_max} characters"
            ),
            Self::Array(kind, count_max) => {
                let elements = match kind {
                    Self::Integer(0, _) => "tokens",
                    Self::Array(..) => "arrays of tokens",
                    Self::OneOf(_) | Self::Text(_) | Self::Characters(_) => "strings",
                    _ => "objects",
                };
                at_most(formatter, "an array of", count_max, elements)
            }
            Self::Either(kinds) => {
                for (index, kind) in kinds.iter().enumerate() {
                    let before = match index {
                        0 => "",
                        _ if index + 1 == kinds.len() => " or ",
                        _ => ", ",
                    };
                    write!(formatter, "{before}{kind}")?;
                }
                Ok(())
            }
            Self::Any => formatter.write_str("a value"),
        }
    }
}

fn at_most(formatter: &mut fmt::Formatter<'_>, before: &str, count: usize, what: &str) -> fmt::Result {
    match count {
        usize::MAX => write!(formatter, "{before} {what}"),
        count => write!(formatter, "{before} at most {count} {what}"),
    }
}

#[cfg(test)]
mod tests;
