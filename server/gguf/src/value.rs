//! Metadata values with the types that the file declares.

use crate::FormatError;

/// A metadata value of any type.
#[derive(Clone, Debug, PartialEq)]
#[expect(missing_docs, reason = "each variant is named like its GGUF type")]
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    Str(String),
    Array(Array),
    U64(u64),
    I64(i64),
    F64(f64),
}

/// A metadata array, whose elements all have the same type.
#[derive(Clone, Debug, PartialEq)]
#[expect(missing_docs, reason = "each variant is named like its GGUF type")]
pub enum Array {
    U8(Vec<u8>),
    I8(Vec<i8>),
    U16(Vec<u16>),
    I16(Vec<i16>),
    U32(Vec<u32>),
    I32(Vec<i32>),
    F32(Vec<f32>),
    Bool(Vec<bool>),
    Str(Vec<String>),
    U64(Vec<u64>),
    I64(Vec<i64>),
    F64(Vec<f64>),
}

impl Value {
    /// Returns the string if the value is a string.
    pub fn str(&self) -> Option<&str> {
        match self {
            Self::Str(text) => Some(text),
            _ => None,
        }
    }

    /// Returns the boolean if the value is a boolean.
    pub fn bool(&self) -> Option<bool> {
        match self {
            Self::Bool(value) => Some(*value),
            _ => None,
        }
    }

    /// Returns the value if it is an integer of any width that fits into an `i64`.
    pub fn i64(&self) -> Option<i64> {
        Some(match self {
            Self::U8(value) => i64::from(*value),
            Self::I8(value) => i64::from(*value),
            Self::U16(value) => i64::from(*value),
            Self::I16(value) => i64::from(*value),
            Self::U32(value) => i64::from(*value),
            Self::I32(value) => i64::from(*value),
            Self::U64(value) => i64::try_from(*value).ok()?,
            Self::I64(value) => *value,
            _ => return None,
        })
    }

    /// Returns the value if it is a non-negative integer of any width.
    pub fn u64(&self) -> Option<u64> {
        match self {
            Self::U64(value) => Some(*value),
            other => u64::try_from(other.i64()?).ok(),
        }
    }

    /// Returns the value if it is an integer of any width that fits into a `u32`.
    pub fn u32(&self) -> Option<u32> {
        u32::try_from(self.u64()?).ok()
    }

    /// Returns the value if it is a float. 64-bit floats are rounded.
    pub fn f32(&self) -> Option<f32> {
        match self {
            Self::F32(value) => Some(*value),
            Self::F64(value) => Some(*value as f32),
            _ => None,
        }
    }

    /// Returns the strings if the value is an array of strings.
    pub fn strs(&self) -> Option<&[String]> {
        match self {
            Self::Array(Array::Str(values)) => Some(values),
            _ => None,
        }
    }

    /// Returns the floats if the value is an array of 32-bit floats.
    pub fn f32s(&self) -> Option<&[f32]> {
        match self {
            Self::Array(Array::F32(values)) => Some(values),
            _ => None,
        }
    }

    /// Returns the integers if the value is an array of integers of any width, all of which fit into an `i64`.
    pub fn i64s(&self) -> Option<Vec<i64>> {
        let Self::Array(array) = self else { return None };
        Some(match array {
            Array::U8(values) => values.iter().map(|&value| value.into()).collect(),
            Array::I8(values) => values.iter().map(|&value| value.into()).collect(),
            Array::U16(values) => values.iter().map(|&value| value.into()).collect(),
            Array::I16(values) => values.iter().map(|&value| value.into()).collect(),
            Array::U32(values) => values.iter().map(|&value| value.into()).collect(),
            Array::I32(values) => values.iter().map(|&value| value.into()).collect(),
            Array::U64(values) => {
                values.iter().map(|&value| i64::try_from(value).ok()).collect::<Option<_>>()?
            }
            Array::I64(values) => values.clone(),
            Array::F32(_) | Array::F64(_) | Array::Bool(_) | Array::Str(_) => return None,
        })
    }
}

impl Array {
    /// The number of elements.
    pub fn len(&self) -> usize {
        match self {
            Self::U8(values) => values.len(),
            Self::I8(values) => values.len(),
            Self::U16(values) => values.len(),
            Self::I16(values) => values.len(),
            Self::U32(values) => values.len(),
            Self::I32(values) => values.len(),
            Self::F32(values) => values.len(),
            Self::Bool(values) => values.len(),
            Self::Str(values) => values.len(),
            Self::U64(values) => values.len(),
            Self::I64(values) => values.len(),
            Self::F64(values) => values.len(),
        }
    }

    /// Whether the array has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

macro_rules! value_from {
    ($($kind:ty => $variant:ident),* $(,)?) => {$(
        impl From<$kind> for Value {
            fn from(value: $kind) -> Self {
                Self::$variant(value)
            }
        }
        impl From<Vec<$kind>> for Value {
            fn from(values: Vec<$kind>) -> Self {
                Self::Array(Array::$variant(values))
            }
        }
    )*};
}

value_from!(
    u8 => U8, i8 => I8, u16 => U16, i16 => I16, u32 => U32, i32 => I32, f32 => F32, bool => Bool,
    String => Str, u64 => U64, i64 => I64, f64 => F64,
);

impl From<&str> for Value {
    fn from(value: &str) -> Self {
        Self::Str(value.to_owned())
    }
}

/// Returns the value at a metadata key, if the key exists.
pub(crate) fn find<'a>(metadata: &'a [(String, Value)], key: &str) -> Option<&'a Value> {
    metadata.iter().find(|(name, _)| name == key).map(|(_, value)| value)
}

/// Returns the integer at a metadata key, if the key exists. Any other value, including a negative integer, is an
/// error.
pub(crate) fn integer(metadata: &[(String, Value)], key: &str) -> Result<Option<u64>, FormatError> {
    let number = |value: &Value| value.u64().ok_or_else(|| bad_value(key, value, "an integer of at least 0"));
    find(metadata, key).map(number).transpose()
}

/// Returns the error for a value that is invalid for its key. `expected` describes the valid values.
pub(crate) fn bad_value(key: &str, value: &Value, expected: &str) -> FormatError {
    // Negative integers do not fit into a `u64`, and the largest integers do not fit into an `i64`.
    let integer =
        value.i64().map(|value| value.to_string()).or_else(|| value.u64().map(|value| value.to_string()));
    let value = integer.unwrap_or_else(|| "not an integer".to_owned());
    FormatError::BadValue { key: key.to_owned(), value, expected: expected.to_owned() }
}
