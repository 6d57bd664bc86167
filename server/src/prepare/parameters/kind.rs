//! What a parameter's value may be: the check, and the words for it. A value is checked before anything is read
//! from it, so that every message names the value and the range, and every error has one of OpenAI's codes.

use std::fmt;

use serde_json::{Map, Value};

use crate::error::Error;

/// What a value may be.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    Boolean,
    /// From the first to the second.
    Integer(i64, i64),
    /// From the first to the second, once it is an `f32`, which is what the engine computes with.
    Number(f64, f64),
    /// Of so many bytes at most.
    Text(usize),
    /// One of these.
    OneOf(&'static [&'static str]),
    /// With any members; whoever reads them checks them.
    Object,
    /// With these members, none of which has to be there. Others are ignored.
    Fields(&'static [(&'static str, Kind)]),
    /// Of strings: so many of them, of so many bytes.
    Texts(usize, usize),
    /// OpenAI's metadata: so many pairs, names and values of so many bytes.
    Pairs(usize, usize, usize),
    /// So many values of a kind.
    Array(&'static Kind, usize),
    /// One of several kinds.
    Either(&'static [Kind]),
    /// Whatever it is: whoever reads it checks it.
    Any,
}

/// Longest piece of a value that a message repeats, in characters.
const SHOWN_MAX: usize = 64;

impl Kind {
    /// Checks `value`, which is called `path`.
    pub(crate) fn check(self, path: &str, value: &Value) -> Result<(), Error> {
        match self {
            Self::Integer(min, max) => integer(path, value, (min, max), self),
            Self::Number(min, max) => number(path, value, (min, max), self),
            Self::Text(bytes_max) => match value {
                Value::String(text) if text.len() <= bytes_max => Ok(()),
                Value::String(_) => Err(refused("string_above_max_length", path, value, self)),
                _ => Err(refused("invalid_type", path, value, self)),
            },
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
                    let problem = format!("has {} members, which are more than {count_max}", pairs.len());
                    return Err(Error::coded("object_above_max_properties", path, problem));
                }
                pairs.iter().try_for_each(|(name, value)| {
                    Self::Text(name_max).check(path, &Value::String(name.clone()))?;
                    Self::Text(value_max).check(&format!("{path}.{name}"), value)
                })
            }
            Self::Array(kind, count_max) => self.array(path, value, (*kind, count_max)),
            Self::Texts(count_max, bytes_max) => self.array(path, value, (Self::Text(bytes_max), count_max)),
            Self::Either(kinds) => self.either(path, value, kinds),
            Self::Boolean if !value.is_boolean() => Err(refused("invalid_type", path, value, self)),
            Self::Object => self.object(path, value).map(|_| ()),
            Self::Boolean | Self::Any => Ok(()),
        }
    }

    fn object<'a>(self, path: &str, value: &'a Value) -> Result<&'a Map<String, Value>, Error> {
        value.as_object().ok_or_else(|| refused("invalid_type", path, value, self))
    }

    fn array(self, path: &str, value: &Value, (kind, count_max): (Self, usize)) -> Result<(), Error> {
        let Value::Array(values) = value else { return Err(refused("invalid_type", path, value, self)) };
        if values.len() > count_max {
            let problem = format!("has {} elements, which are more than {count_max}", values.len());
            return Err(Error::coded("array_above_max_length", path, problem));
        }
        (0..)
            .zip(values)
            .try_for_each(|(index, value): (usize, _)| kind.check(&format!("{path}[{index}]"), value))
    }

    /// What the value comes closest to says what is wrong with it.
    fn either(self, path: &str, value: &Value, kinds: &[Self]) -> Result<(), Error> {
        let (mut told, mut of_arrays) = (None, Vec::new());
        for kind in kinds {
            match kind.check(path, value) {
                Ok(()) => return Ok(()),
                Err(error) if kind.is_like(value) => told = Some(error),
                Err(error) if value.is_array() && matches!(kind, Self::Texts(..) | Self::Array(..)) => {
                    of_arrays.push(error);
                }
                Err(_) => {}
            }
        }
        // An array of whatever comes close to the only kind of array that there may be.
        let told = told.or_else(|| of_arrays.pop().filter(|_| of_arrays.is_empty()));
        Err(told.unwrap_or_else(|| refused("invalid_type", path, value, self)))
    }

    /// Whether `value` is of this type in JSON, and its first element of that of the elements.
    fn is_like(self, value: &Value) -> bool {
        match self {
            Self::Boolean => value.is_boolean(),
            Self::Integer(..) | Self::Number(..) => value.is_number(),
            Self::Text(_) | Self::OneOf(_) => value.is_string(),
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

/// The first element of an array, if it is one and if it has one.
fn first(value: &Value) -> Option<Option<&Value>> {
    value.as_array().map(|values| values.first())
}

fn integer(path: &str, value: &Value, (min, max): (i64, i64), kind: Kind) -> Result<(), Error> {
    match value.as_i64() {
        Some(number) if number < min => Err(refused("integer_below_min_value", path, value, kind)),
        Some(number) if number > max => Err(refused("integer_above_max_value", path, value, kind)),
        Some(_) => Ok(()),
        None if value.as_u64().is_some() => Err(refused("integer_above_max_value", path, value, kind)),
        None => Err(refused("invalid_type", path, value, kind)),
    }
}

fn number(path: &str, value: &Value, (min, max): (f64, f64), kind: Kind) -> Result<(), Error> {
    match value.as_f64().map(|number| number as f32) {
        Some(number) if number < min as f32 => Err(refused("decimal_below_min_value", path, value, kind)),
        Some(number) if number > max as f32 => Err(refused("decimal_above_max_value", path, value, kind)),
        Some(_) => Ok(()),
        None => Err(refused("invalid_type", path, value, kind)),
    }
}

fn refused(code: &'static str, path: &str, value: &Value, kind: Kind) -> Error {
    Error::coded(code, path, format!("{} is not {kind}", shown(value)))
}

/// The value as it was written, or what it is if that is long.
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
            Self::Integer(min, i64::MAX) => write!(formatter, "an integer from {min}"),
            Self::Integer(min, max) if min == max => write!(formatter, "{min}"),
            Self::Integer(min, max) => write!(formatter, "an integer from {min} to {max}"),
            Self::Number(min, max) => write!(formatter, "a number from {min} to {max}"),
            Self::Text(usize::MAX) => formatter.write_str("a string"),
            Self::Text(bytes_max) => write!(formatter, "a string of at most {bytes_max} bytes"),
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
                "an object of at most {count_max} strings of at most {value_max} bytes with names of {name_max}"
            ),
            Self::Array(kind, count_max) => {
                let elements = match kind {
                    Self::Integer(0, _) => "tokens",
                    Self::Array(..) => "arrays of tokens",
                    Self::OneOf(_) | Self::Text(_) => "strings",
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
