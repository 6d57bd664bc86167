//! Parses the header of a GGUF file: everything before the tensor data. Files are not trusted: each length is
//! compared with the remaining bytes of the file before memory is allocated.

use std::{
    collections::HashSet,
    io::{self, BufRead},
};

use crate::value::{bad_value, find};
use crate::{Array, FormatError, TensorEntry, TensorType, Value, limits, split::SplitMetadata};

/// Everything that precedes the tensor data.
#[derive(Debug)]
pub(crate) struct Header {
    pub(crate) split: SplitMetadata,
    /// The entries in the order of the file.
    pub(crate) metadata: Vec<(String, Value)>,
    /// The entries in the order of the file.
    pub(crate) tensors: Vec<TensorEntry>,
}

/// The reason why a header could not be parsed.
#[derive(Debug)]
pub(crate) enum ParseError {
    Io(io::Error),
    Format(FormatError),
}

impl From<FormatError> for ParseError {
    fn from(error: FormatError) -> Self {
        Self::Format(error)
    }
}

type Result<T> = std::result::Result<T, ParseError>;

/// Parses the header of a file of `size` bytes. `reader` must be at the start of the file.
pub(crate) fn parse(reader: impl BufRead, size: u64) -> Result<Header> {
    let mut input = Input { reader, size, offset: 0 };
    if input.array::<4>("the magic number")? != *b"GGUF" {
        return Err(FormatError::Magic.into());
    }
    let version = input.u32("the version")?;
    // In a big-endian file, the small version number appears as a large number whose lowest 16 bits are zero.
    if version & 0xffff == 0 && version != 0 {
        return Err(FormatError::BigEndian.into());
    }
    if version != 2 && version != 3 {
        return Err(FormatError::Version(version).into());
    }
    let tensors = limited("the number of tensors", input.u64("the number of tensors")?, limits::TENSORS_MAX)?;
    let keys = limited(
        "the number of metadata keys",
        input.u64("the number of metadata keys")?,
        limits::METADATA_KEYS_MAX,
    )?;
    let metadata = read_metadata(&mut input, keys)?;
    let alignment = alignment(&metadata)?;
    let split = SplitMetadata::read(&metadata)?;
    let mut tensors = read_directory(&mut input, tensors)?;
    resolve_offsets(&mut tensors, alignment, input.offset, size)?;
    Ok(Header { split, metadata, tensors })
}

fn limited(what: &str, value: u64, limit: u64) -> Result<u64> {
    if value > limit {
        return Err(FormatError::Limit { what: what.to_owned(), value, limit }.into());
    }
    Ok(value)
}

fn alignment(metadata: &[(String, Value)]) -> Result<u64> {
    const KEY: &str = "general.alignment";
    let Some(value) = find(metadata, KEY) else { return Ok(32) };
    match value {
        Value::U32(bytes) if bytes.is_power_of_two() && u64::from(*bytes) <= limits::ALIGNMENT_MAX => {
            Ok(u64::from(*bytes))
        }
        other => {
            let expected = format!("a power of two up to {}, stored as u32", limits::ALIGNMENT_MAX);
            Err(bad_value(KEY, other, &expected).into())
        }
    }
}

fn read_metadata<R: BufRead>(input: &mut Input<R>, keys: u64) -> Result<Vec<(String, Value)>> {
    let mut metadata = Vec::new();
    let mut seen = HashSet::new();
    for _ in 0..keys {
        let key = input.string("a metadata key", limits::KEY_BYTES_MAX)?;
        let kind = input.u32(&key)?;
        let value = read_value(input, &key, kind)?;
        if !seen.insert(key.clone()) {
            return Err(FormatError::DuplicateKey(key).into());
        }
        metadata.push((key, value));
    }
    Ok(metadata)
}

fn read_value<R: BufRead>(input: &mut Input<R>, key: &str, kind: u32) -> Result<Value> {
    Ok(match kind {
        0 => Value::U8(input.array::<1>(key)?[0]),
        1 => Value::I8(i8::from_le_bytes(input.array(key)?)),
        2 => Value::U16(u16::from_le_bytes(input.array(key)?)),
        3 => Value::I16(i16::from_le_bytes(input.array(key)?)),
        4 => Value::U32(input.u32(key)?),
        5 => Value::I32(i32::from_le_bytes(input.array(key)?)),
        6 => Value::F32(f32::from_le_bytes(input.array(key)?)),
        7 => Value::Bool(boolean(key, input.array::<1>(key)?[0])?),
        8 => Value::Str(input.string(key, limits::HEADER_BYTES_MAX)?),
        9 => Value::Array(read_array(input, key)?),
        10 => Value::U64(input.u64(key)?),
        11 => Value::I64(i64::from_le_bytes(input.array(key)?)),
        12 => Value::F64(f64::from_le_bytes(input.array(key)?)),
        kind => return Err(FormatError::ValueType { key: key.to_owned(), kind }.into()),
    })
}

fn boolean(key: &str, value: u8) -> Result<bool> {
    match value {
        0 => Ok(false),
        1 => Ok(true),
        value => Err(FormatError::Bool { key: key.to_owned(), value }.into()),
    }
}

fn read_array<R: BufRead>(input: &mut Input<R>, key: &str) -> Result<Array> {
    let kind = input.u32(key)?;
    let what = format!("the number of elements of metadata {key:?}");
    let length = limited(&what, input.u64(key)?, limits::ARRAY_ELEMENTS_MAX)? as usize;
    Ok(match kind {
        0 => Array::U8(numbers(input, key, length, u8::from_le_bytes)?),
        1 => Array::I8(numbers(input, key, length, i8::from_le_bytes)?),
        2 => Array::U16(numbers(input, key, length, u16::from_le_bytes)?),
        3 => Array::I16(numbers(input, key, length, i16::from_le_bytes)?),
        4 => Array::U32(numbers(input, key, length, u32::from_le_bytes)?),
        5 => Array::I32(numbers(input, key, length, i32::from_le_bytes)?),
        6 => Array::F32(numbers(input, key, length, f32::from_le_bytes)?),
        7 => {
            let bytes = numbers(input, key, length, u8::from_le_bytes)?;
            Array::Bool(bytes.into_iter().map(|byte| boolean(key, byte)).collect::<Result<_>>()?)
        }
        8 => {
            // Check the minimum size before allocating: the length of each string precedes it and occupies 8 bytes.
            input.require_bytes(key, length as u64 * 8)?;
            let mut values = Vec::with_capacity(length);
            for _ in 0..length {
                values.push(input.string(key, limits::HEADER_BYTES_MAX)?);
            }
            Array::Str(values)
        }
        9 => return Err(FormatError::NestedArray(key.to_owned()).into()),
        10 => Array::U64(numbers(input, key, length, u64::from_le_bytes)?),
        11 => Array::I64(numbers(input, key, length, i64::from_le_bytes)?),
        12 => Array::F64(numbers(input, key, length, f64::from_le_bytes)?),
        kind => return Err(FormatError::ValueType { key: key.to_owned(), kind }.into()),
    })
}

fn numbers<R: BufRead, T, const N: usize>(
    input: &mut Input<R>,
    key: &str,
    length: usize,
    convert: fn([u8; N]) -> T,
) -> Result<Vec<T>> {
    let bytes = input.bytes(key, (length * N) as u64)?;
    Ok(bytes.as_chunks::<N>().0.iter().map(|chunk| convert(*chunk)).collect())
}

/// Reads the tensor directory. The returned offsets are relative to the start of the tensor data.
fn read_directory<R: BufRead>(input: &mut Input<R>, count: u64) -> Result<Vec<TensorEntry>> {
    let mut tensors = Vec::new();
    let mut seen = HashSet::new();
    for _ in 0..count {
        let name = input.string("a tensor's name", limits::TENSOR_NAME_BYTES_MAX)?;
        let dimensions = input.u32(&name)?;
        let what = || format!("the number of dimensions of tensor {name:?}");
        limited(&what(), dimensions.into(), limits::DIMENSIONS_MAX.into())?;
        let mut shape = Vec::new();
        for _ in 0..dimensions {
            shape.push(input.u64(&name)?);
        }
        let number = input.u32(&name)?;
        let offset = input.u64(&name)?;
        let Some(kind) = TensorType::from_number(number) else {
            return Err(FormatError::TensorType { name, kind: number }.into());
        };
        let Some(bytes) = tensor_bytes(kind, &shape) else {
            return Err(FormatError::Shape { name, kind, shape }.into());
        };
        if !seen.insert(name.clone()) {
            return Err(FormatError::DuplicateTensor(name).into());
        }
        tensors.push(TensorEntry { name, shape, kind, part: 0, offset, bytes });
    }
    Ok(tensors)
}

/// Returns the number of bytes of a tensor, or `None` if there are no dimensions, a row is not a whole number of
/// blocks, a dimension is 0, or the product overflows.
fn tensor_bytes(kind: TensorType, shape: &[u64]) -> Option<u64> {
    let (&row, rest) = shape.split_first()?;
    if shape.contains(&0) {
        return None;
    }
    rest.iter().try_fold(kind.bytes_of(row)?, |bytes, &length| bytes.checked_mul(length))
}

/// Changes the offsets so that they count from the start of the file, and checks that the tensors are aligned, lie
/// within the file and do not overlap.
fn resolve_offsets(
    tensors: &mut [TensorEntry],
    alignment: u64,
    header_bytes: u64,
    size: u64,
) -> std::result::Result<(), FormatError> {
    let data = header_bytes.next_multiple_of(alignment);
    for tensor in tensors.iter_mut() {
        let name = || tensor.name.clone();
        if !tensor.offset.is_multiple_of(alignment) {
            return Err(FormatError::Unaligned { name: name(), offset: tensor.offset, alignment });
        }
        let offset = data.saturating_add(tensor.offset);
        if offset.checked_add(tensor.bytes).is_none_or(|end| end > size) {
            let what = format!("tensor {:?}", tensor.name);
            return Err(FormatError::Truncated { what, needed: tensor.bytes, offset, size });
        }
        tensor.offset = offset;
    }
    let mut sorted: Vec<&TensorEntry> = tensors.iter().collect();
    sorted.sort_by_key(|tensor| tensor.offset);
    for pair in sorted.windows(2) {
        if pair[0].offset + pair[0].bytes > pair[1].offset {
            return Err(FormatError::Overlap(pair[0].name.clone(), pair[1].name.clone()));
        }
    }
    Ok(())
}

/// Reads a file in order and tracks how many bytes remain.
struct Input<R> {
    reader: R,
    size: u64,
    offset: u64,
}

impl<R: BufRead> Input<R> {
    /// Fails unless the file has `needed` more bytes and the header remains within its limit.
    fn require_bytes(&self, what: &str, needed: u64) -> Result<()> {
        if needed > self.size - self.offset {
            let (offset, size) = (self.offset, self.size);
            return Err(FormatError::Truncated { what: what.to_owned(), needed, offset, size }.into());
        }
        limited("the size of the header in bytes", self.offset + needed, limits::HEADER_BYTES_MAX)?;
        Ok(())
    }

    fn fill(&mut self, what: &str, buffer: &mut [u8]) -> Result<()> {
        self.require_bytes(what, buffer.len() as u64)?;
        self.reader.read_exact(buffer).map_err(ParseError::Io)?;
        self.offset += buffer.len() as u64;
        Ok(())
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N]> {
        let mut buffer = [0; N];
        self.fill(what, &mut buffer)?;
        Ok(buffer)
    }

    fn u32(&mut self, what: &str) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    fn u64(&mut self, what: &str) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    fn bytes(&mut self, what: &str, length: u64) -> Result<Vec<u8>> {
        self.require_bytes(what, length)?;
        let mut bytes = vec![0; length as usize];
        self.fill(what, &mut bytes)?;
        Ok(bytes)
    }

    fn string(&mut self, what: &str, limit: u64) -> Result<String> {
        let length = self.u64(what)?;
        self.require_bytes(what, length)?;
        limited(&format!("the length of {what} in bytes"), length, limit)?;
        String::from_utf8(self.bytes(what, length)?)
            .map_err(|_| FormatError::Utf8(format!("{what} (before offset {})", self.offset)).into())
    }
}
