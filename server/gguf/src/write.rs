//! Writes GGUF files, with quantization if requested. Except for [`header`](fn@header), the module is for tests that
//! need a small model of any shape: values are rounded to nearest, without the search for better scales that production
//! quantizers perform.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use crate::{Array, GgufFile, PartName, TensorType, Value};

mod quantize;

pub use quantize::quantize;

/// The alignment of tensor data in files that this module writes, in bytes.
pub const ALIGNMENT: u64 = 32;

/// Collects metadata and tensors, then writes them as a GGUF file of version 3.
#[derive(Clone, Debug, Default)]
pub struct GgufWriter {
    metadata: Vec<(String, Value)>,
    tensors: Vec<Tensor>,
}

#[derive(Clone, Debug)]
struct Tensor {
    name: String,
    shape: Vec<u64>,
    kind: TensorType,
    bytes: Vec<u8>,
}

impl GgufWriter {
    /// Creates a writer with `general.architecture` as its only metadata.
    pub fn new(architecture: &str) -> Self {
        let mut writer = Self::default();
        writer.metadata("general.architecture", architecture);
        writer
    }

    /// Adds a metadata value, or replaces the value of an existing key.
    pub fn metadata(&mut self, key: &str, value: impl Into<Value>) -> &mut Self {
        let value = value.into();
        match self.metadata.iter_mut().find(|(name, _)| name == key) {
            Some((_, existing)) => *existing = value,
            None => self.metadata.push((key.to_owned(), value)),
        }
        self
    }

    /// Adds a tensor whose bytes are stored unchanged. `shape[0]` varies fastest.
    pub fn tensor(&mut self, name: &str, shape: &[u64], kind: TensorType, bytes: Vec<u8>) -> &mut Self {
        self.tensors.push(Tensor { name: name.to_owned(), shape: shape.to_vec(), kind, bytes });
        self
    }

    /// Adds a tensor with these `values`, stored as `kind`.
    ///
    /// # Panics
    /// Panics if [`quantize`](fn@quantize) panics, or if `shape` does not match the number of values.
    pub fn tensor_of(&mut self, name: &str, shape: &[u64], kind: TensorType, values: &[f32]) -> &mut Self {
        assert_eq!(shape.iter().product::<u64>(), values.len() as u64, "shape of {name}");
        self.tensor(name, shape, kind, quantize(kind, values))
    }

    /// Returns the bytes of the file.
    pub fn to_bytes(&self) -> Vec<u8> {
        let metadata: Vec<_> = self.metadata.iter().map(|(key, value)| (key.as_str(), value)).collect();
        let (mut tensors, mut offset) = (Vec::new(), 0);
        for Tensor { name, shape, kind, bytes } in &self.tensors {
            tensors.push(TensorHeader { name, shape, kind: *kind, offset });
            offset += (bytes.len() as u64).next_multiple_of(ALIGNMENT);
        }
        let mut file = header(&metadata, &tensors);
        for tensor in &self.tensors {
            pad(&mut file);
            file.extend(&tensor.bytes);
        }
        file
    }

    /// Writes the file to `path`.
    ///
    /// # Errors
    /// The error of the operating system if it cannot write the file.
    pub fn write(&self, path: impl AsRef<Path>) -> io::Result<()> {
        fs::write(path, self.to_bytes())
    }
}

/// The entry of a tensor in a header that is to be written.
#[derive(Clone, Copy, Debug)]
pub struct TensorHeader<'a> {
    /// The name of the tensor.
    pub name: &'a str,
    /// The dimensions of the tensor; `shape[0]` varies fastest.
    pub shape: &'a [u64],
    /// The type of the tensor's values.
    pub kind: TensorType,
    /// The offset of the tensor's first byte in the tensor data, in bytes: a multiple of [`ALIGNMENT`].
    pub offset: u64,
}

/// Returns the bytes that precede the tensor data in a file of version 3, including the padding that aligns the tensor
/// data.
///
/// `metadata` must not set `general.alignment`, because the padding relies on the default, [`ALIGNMENT`].
pub fn header(metadata: &[(&str, &Value)], tensors: &[TensorHeader<'_>]) -> Vec<u8> {
    let mut file = b"GGUF".to_vec();
    file.extend(3u32.to_le_bytes());
    file.extend((tensors.len() as u64).to_le_bytes());
    file.extend((metadata.len() as u64).to_le_bytes());
    for (key, value) in metadata {
        put_str(&mut file, key);
        put_value(&mut file, value);
    }
    for tensor in tensors {
        put_str(&mut file, tensor.name);
        file.extend((tensor.shape.len() as u32).to_le_bytes());
        tensor.shape.iter().for_each(|length| file.extend(length.to_le_bytes()));
        file.extend(tensor.kind.number().to_le_bytes());
        file.extend(tensor.offset.to_le_bytes());
    }
    pad(&mut file);
    file
}

/// Writes a model as several parts, `NAME-00001-of-0000N.gguf` and so on, like llama.cpp's `gguf-split`. Returns the
/// path of the first part.
///
/// # Errors
/// An error if a tensor cannot be read or a part cannot be written.
pub fn write_parts(file: &GgufFile, directory: &Path, name: &str, parts: u16) -> io::Result<PathBuf> {
    let tensors = file.tensors();
    let name = PartName { prefix: name, part: 1, parts: parts.into() };
    let mut chunks = tensors.chunks(tensors.len().div_ceil(parts.into()).max(1));
    for part in 0..parts {
        let mut writer = GgufWriter::default();
        if part == 0 {
            writer.metadata = file.metadata().map(|(key, value)| (key.to_owned(), value.clone())).collect();
        }
        writer
            .metadata("split.no", part)
            .metadata("split.count", parts)
            .metadata("split.tensors.count", tensors.len() as i32);
        for tensor in chunks.next().unwrap_or_default() {
            let mut bytes = Vec::new();
            file.read_tensor(&tensor.name, &mut bytes).map_err(io::Error::other)?;
            writer.tensor(&tensor.name, &tensor.shape, tensor.kind, bytes);
        }
        writer.write(directory.join(name.of_part(u64::from(part) + 1)))?;
    }
    Ok(directory.join(name.of_part(1)))
}

fn pad(file: &mut Vec<u8>) {
    file.resize(file.len().next_multiple_of(ALIGNMENT as usize), 0);
}

fn put_str(file: &mut Vec<u8>, text: &str) {
    file.extend((text.len() as u64).to_le_bytes());
    file.extend(text.as_bytes());
}

fn put_value(file: &mut Vec<u8>, value: &Value) {
    let mut put = |kind: u32, bytes: &[u8]| {
        file.extend(kind.to_le_bytes());
        file.extend(bytes);
    };
    match value {
        Value::U8(value) => put(0, &value.to_le_bytes()),
        Value::I8(value) => put(1, &value.to_le_bytes()),
        Value::U16(value) => put(2, &value.to_le_bytes()),
        Value::I16(value) => put(3, &value.to_le_bytes()),
        Value::U32(value) => put(4, &value.to_le_bytes()),
        Value::I32(value) => put(5, &value.to_le_bytes()),
        Value::F32(value) => put(6, &value.to_le_bytes()),
        Value::Bool(value) => put(7, &[u8::from(*value)]),
        Value::Str(text) => {
            put(8, &[]);
            put_str(file, text);
        }
        Value::Array(array) => {
            put(9, &[]);
            put_array(file, array);
        }
        Value::U64(value) => put(10, &value.to_le_bytes()),
        Value::I64(value) => put(11, &value.to_le_bytes()),
        Value::F64(value) => put(12, &value.to_le_bytes()),
    }
}

fn put_array(file: &mut Vec<u8>, array: &Array) {
    let kind: u32 = match array {
        Array::U8(_) => 0,
        Array::I8(_) => 1,
        Array::U16(_) => 2,
        Array::I16(_) => 3,
        Array::U32(_) => 4,
        Array::I32(_) => 5,
        Array::F32(_) => 6,
        Array::Bool(_) => 7,
        Array::Str(_) => 8,
        Array::U64(_) => 10,
        Array::I64(_) => 11,
        Array::F64(_) => 12,
    };
    file.extend(kind.to_le_bytes());
    file.extend((array.len() as u64).to_le_bytes());
    match array {
        Array::U8(values) => file.extend(values),
        Array::I8(values) => values.iter().for_each(|value| file.extend(value.to_le_bytes())),
        Array::U16(values) => values.iter().for_each(|value| file.extend(value.to_le_bytes())),
        Array::I16(values) => values.iter().for_each(|value| file.extend(value.to_le_bytes())),
        Array::U32(values) => values.iter().for_each(|value| file.extend(value.to_le_bytes())),
        Array::I32(values) => values.iter().for_each(|value| file.extend(value.to_le_bytes())),
        Array::F32(values) => values.iter().for_each(|value| file.extend(value.to_le_bytes())),
        Array::Bool(values) => values.iter().for_each(|&value| file.push(value.into())),
        Array::Str(values) => values.iter().for_each(|value| put_str(file, value)),
        Array::U64(values) => values.iter().for_each(|value| file.extend(value.to_le_bytes())),
        Array::I64(values) => values.iter().for_each(|value| file.extend(value.to_le_bytes())),
        Array::F64(values) => values.iter().for_each(|value| file.extend(value.to_le_bytes())),
    }
}
