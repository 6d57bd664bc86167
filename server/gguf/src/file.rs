//! An open GGUF file: its metadata and tensor directory in memory, its tensor data read on demand.

use std::{
    collections::HashMap,
    fs::File,
    io::{self, BufReader},
    ops::Range,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use crate::{
    Error, TensorEntry, Value,
    parse::{self, ParseError},
};

/// An open GGUF file. Tensor bytes are read by position, so any number of threads can read at once.
#[derive(Debug)]
pub struct GgufFile {
    path: PathBuf,
    file: File,
    version: u32,
    alignment: u64,
    metadata: Vec<(String, Value)>,
    keys: HashMap<String, usize>,
    tensors: Vec<TensorEntry>,
    names: HashMap<String, usize>,
}

impl GgufFile {
    /// Opens `path` and reads its metadata and tensor directory.
    ///
    /// # Errors
    /// The file cannot be read ([`Error::Read`]) or is not a sound GGUF file ([`Error::Format`]).
    pub fn open(path: impl AsRef<Path>) -> Result<Self, Error> {
        let path = path.as_ref().to_owned();
        let read_error = |source| Error::Read { path: path.clone(), source };
        let file = File::open(&path).map_err(read_error)?;
        let file_metadata = file.metadata().map_err(read_error)?;
        if !file_metadata.is_file() {
            return Err(read_error(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file")));
        }
        let header = match parse::parse(BufReader::with_capacity(1 << 16, &file), file_metadata.len()) {
            Ok(header) => header,
            Err(ParseError::Io(source)) => return Err(read_error(source)),
            Err(ParseError::Format(source)) => return Err(Error::Format { path, source }),
        };
        let keys = header.metadata.iter().enumerate().map(|(i, (key, _))| (key.clone(), i)).collect();
        let names = header.tensors.iter().enumerate().map(|(i, tensor)| (tensor.name.clone(), i)).collect();
        Ok(Self {
            path,
            file,
            version: header.version,
            alignment: header.alignment,
            metadata: header.metadata,
            keys,
            tensors: header.tensors,
            names,
        })
    }

    /// The path that the file was opened with.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The version of the format: 2 or 3.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// The alignment of tensor data, in bytes.
    pub fn alignment(&self) -> u64 {
        self.alignment
    }

    /// All metadata entries, in file order.
    pub fn metadata(&self) -> impl ExactSizeIterator<Item = (&str, &Value)> {
        self.metadata.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// The value of a metadata key.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.keys.get(key).map(|&index| &self.metadata[index].1)
    }

    /// The value of `general.architecture`, such as `llama`.
    pub fn architecture(&self) -> Option<&str> {
        self.get("general.architecture")?.str()
    }

    /// The value of `{architecture}.{key}`, such as `llama.block_count`.
    pub fn get_of_architecture(&self, key: &str) -> Option<&Value> {
        self.get(&format!("{}.{key}", self.architecture()?))
    }

    /// All tensors, in file order.
    pub fn tensors(&self) -> &[TensorEntry] {
        &self.tensors
    }

    /// The tensor with this name.
    pub fn tensor(&self, name: &str) -> Option<&TensorEntry> {
        self.names.get(name).map(|&index| &self.tensors[index])
    }

    /// Replaces the content of `bytes` with the stored bytes of a tensor.
    ///
    /// # Errors
    /// The file has no such tensor, or it cannot be read. The content of `bytes` is then unspecified.
    pub fn read_tensor(&self, name: &str, bytes: &mut Vec<u8>) -> Result<(), Error> {
        let tensor = self.require_tensor(name)?;
        self.read_range(tensor.offset, tensor.bytes, bytes)
    }

    /// Replaces the content of `bytes` with the stored bytes of some rows of a tensor.
    ///
    /// # Errors
    /// The file has no such tensor, the tensor has fewer rows, or it cannot be read. The content of `bytes` is then
    /// unspecified.
    pub fn read_tensor_rows(&self, name: &str, rows: Range<u64>, bytes: &mut Vec<u8>) -> Result<(), Error> {
        let tensor = self.require_tensor(name)?;
        if rows.start > rows.end || rows.end > tensor.rows() {
            let Range { start, end } = rows;
            return Err(Error::NoRows { name: name.to_owned(), rows: tensor.rows(), start, end });
        }
        let row_bytes = tensor.row_bytes();
        self.read_range(tensor.offset + rows.start * row_bytes, (rows.end - rows.start) * row_bytes, bytes)
    }

    fn require_tensor(&self, name: &str) -> Result<&TensorEntry, Error> {
        self.tensor(name).ok_or_else(|| Error::NoTensor { path: self.path.clone(), name: name.to_owned() })
    }

    fn read_range(&self, offset: u64, length: u64, bytes: &mut Vec<u8>) -> Result<(), Error> {
        // The length was checked against the size of the file in `open`. Reusing the buffer avoids zeroing it again.
        bytes.resize(length as usize, 0);
        self.file
            .read_exact_at(bytes, offset)
            .map_err(|source| Error::Read { path: self.path.clone(), source })
    }
}
