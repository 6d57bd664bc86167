//! Writes GGUF files, with quantization if requested. It is for tests that need a small model of any shape: values are
//! rounded to nearest, without the search for better scales that production quantizers do.

use std::{fs, io, path::Path};

use crate::{Array, TensorType, Value};

mod quantize;

pub use quantize::quantize;

const ALIGNMENT: usize = 32;

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
    /// If [`quantize`](fn@quantize) panics, or `shape` does not match the number of values.
    pub fn tensor_of(&mut self, name: &str, shape: &[u64], kind: TensorType, values: &[f32]) -> &mut Self {
        assert_eq!(shape.iter().product::<u64>(), values.len() as u64, "shape of {name}");
        self.tensor(name, shape, kind, quantize(kind, values))
    }

    /// Returns the bytes of the file.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut file = b"GGUF".to_vec();
        file.extend(3u32.to_le_bytes());
        file.extend((self.tensors.len() as u64).to_le_bytes());
        file.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, value) in &self.metadata {
            put_str(&mut file, key);
            put_value(&mut file, value);
        }
        let mut offset = 0;
        for tensor in &self.tensors {
            put_str(&mut file, &tensor.name);
            file.extend((tensor.shape.len() as u32).to_le_bytes());
            tensor.shape.iter().for_each(|length| file.extend(length.to_le_bytes()));
            file.extend(tensor.kind.number().to_le_bytes());
            file.extend((offset as u64).to_le_bytes());
            offset += tensor.bytes.len().next_multiple_of(ALIGNMENT);
        }
        for tensor in &self.tensors {
            file.resize(file.len().next_multiple_of(ALIGNMENT), 0);
            file.extend(&tensor.bytes);
        }
        file
    }

    /// Writes the file to `path`.
    ///
    /// # Errors
    /// The operating system cannot write the file.
    pub fn write(&self, path: impl AsRef<Path>) -> io::Result<()> {
        fs::write(path, self.to_bytes())
    }
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
