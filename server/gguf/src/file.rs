//! An open GGUF file. Its metadata and tensor directory are in memory, and its tensor data is read on demand. A split
//! model is opened as if it were one file.

use std::{
    collections::{HashMap, hash_map::Entry},
    fs::{self, File},
    io::{self, BufReader},
    ops::Range,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use crate::{
    Error, FormatError, PartName, TensorEntry, Value,
    parse::{self, Header, ParseError},
    split::SplitMetadata,
};

/// An open GGUF file, or the open parts of a split model. Tensor bytes are read with `pread`, so any number of threads
/// can read at the same time.
#[derive(Debug)]
pub struct GgufFile {
    /// The parts in order; the first has the metadata.
    parts: Vec<OpenFile>,
    metadata: Vec<(String, Value)>,
    keys: HashMap<String, usize>,
    tensors: Vec<TensorEntry>,
    names: HashMap<String, usize>,
}

#[derive(Debug)]
struct OpenFile {
    path: PathBuf,
    file: File,
}

impl GgufFile {
    /// Opens `path` and reads its metadata and tensor directory. If the file is the first part of a split model, this
    /// function also opens the other parts, which must be in the same directory. If `path` is a link whose name is not
    /// that of a first part, the name and the directory of its target are used instead. The metadata of a split model
    /// is that of its first part, without the keys about the split.
    ///
    /// # Errors
    /// [`Error::Read`] if a file cannot be read, and [`Error::Format`] if a file is invalid. Both errors name the file.
    /// A split model is invalid if `path` is a later part, a part belongs to another model, or tensors are missing or
    /// appear twice.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, Error> {
        let (first, header) = OpenFile::open(path.as_ref())?;
        let Header { split, metadata, tensors } = header;
        let names = tensors.iter().enumerate().map(|(i, tensor)| (tensor.name.clone(), i)).collect();
        let mut file = Self { parts: vec![first], metadata, keys: HashMap::new(), tensors, names };
        if split.parts > 1 {
            file.open_later_parts(split)?;
            file.metadata.retain(|(key, _)| !key.starts_with("split."));
        }
        file.keys = file.metadata.iter().enumerate().map(|(i, (key, _))| (key.clone(), i)).collect();
        Ok(file)
    }

    fn open_later_parts(&mut self, split: SplitMetadata) -> Result<(), Error> {
        let SplitMetadata { part, parts, tensors: expected } = split;
        let first = &self.parts[0];
        if part > 1 {
            return Err(first.format_error(FormatError::LaterPart { part, parts }));
        }
        let paths = later_paths(&first.path, parts)
            .ok_or_else(|| first.format_error(FormatError::PartName(parts)))?;
        for path in paths {
            let (file, header) = OpenFile::open(&path)?;
            self.add_part(split, header).map_err(|problem| file.format_error(problem))?;
            self.parts.push(file);
        }
        let (found, last) = (self.tensors.len() as u64, &self.parts[self.parts.len() - 1]);
        if found < expected {
            return Err(last.format_error(FormatError::TensorCount { expected, found }));
        }
        Ok(())
    }

    /// Adds the tensors of the next part.
    fn add_part(&mut self, split: SplitMetadata, header: Header) -> Result<(), FormatError> {
        let SplitMetadata { parts, tensors: expected, .. } = split;
        let SplitMetadata { part: found_part, parts: found_parts, .. } = header.split;
        let part = self.parts.len() as u64 + 1;
        if (found_part, found_parts) != (part, parts) {
            return Err(FormatError::OtherPart { part, parts, found_part, found_parts });
        }
        let found = (self.tensors.len() + header.tensors.len()) as u64;
        if found > expected {
            return Err(FormatError::TensorCount { expected, found });
        }
        for tensor in header.tensors {
            match self.names.entry(tensor.name.clone()) {
                Entry::Occupied(_) => return Err(FormatError::TensorInEarlierPart(tensor.name)),
                Entry::Vacant(entry) => entry.insert(self.tensors.len()),
            };
            self.tensors.push(TensorEntry { part: self.parts.len(), ..tensor });
        }
        Ok(())
    }

    /// The path that was passed to [`GgufFile::open`].
    pub fn path(&self) -> &Path {
        &self.parts[0].path
    }

    /// The paths of all parts of the model. A model that is not split has one part.
    pub fn paths(&self) -> impl ExactSizeIterator<Item = &Path> {
        self.parts.iter().map(|part| part.path.as_path())
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
    /// [`Error`] if the file has no such tensor or cannot be read. After an error, the content of `bytes` is
    /// unspecified.
    pub fn read_tensor(&self, name: &str, bytes: &mut Vec<u8>) -> Result<(), Error> {
        let tensor = self.require_tensor(name)?;
        self.parts[tensor.part].read_range(tensor.offset, tensor.bytes, bytes)
    }

    /// Replaces the content of `bytes` with the stored bytes of some rows of a tensor.
    ///
    /// # Errors
    /// [`Error`] if the file has no such tensor, the tensor has fewer rows, or the file cannot be read. After an error,
    /// the content of `bytes` is unspecified.
    pub fn read_tensor_rows(&self, name: &str, rows: Range<u64>, bytes: &mut Vec<u8>) -> Result<(), Error> {
        let tensor = self.require_tensor(name)?;
        if rows.start > rows.end || rows.end > tensor.rows() {
            let Range { start, end } = rows;
            return Err(Error::NoRows { name: name.to_owned(), rows: tensor.rows(), start, end });
        }
        let row_bytes = tensor.row_bytes();
        let (start, end) = (rows.start * row_bytes, rows.end * row_bytes);
        self.parts[tensor.part].read_range(tensor.offset + start, end - start, bytes)
    }

    fn require_tensor(&self, name: &str) -> Result<&TensorEntry, Error> {
        self.tensor(name)
            .ok_or_else(|| Error::NoTensor { path: self.path().to_owned(), name: name.to_owned() })
    }
}

impl OpenFile {
    /// Opens a file and parses its header.
    fn open(path: &Path) -> Result<(Self, Header), Error> {
        let path = path.to_owned();
        let read_error = |source| Error::Read { path: path.clone(), source };
        let file = File::open(&path).map_err(read_error)?;
        let file_metadata = file.metadata().map_err(read_error)?;
        if !file_metadata.is_file() {
            return Err(read_error(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file")));
        }
        match parse::parse(BufReader::with_capacity(1 << 16, &file), file_metadata.len()) {
            Ok(header) => Ok((Self { path, file }, header)),
            Err(ParseError::Io(source)) => Err(read_error(source)),
            Err(ParseError::Format(source)) => Err(Error::Format { path, source }),
        }
    }

    fn format_error(&self, source: FormatError) -> Error {
        Error::Format { path: self.path.clone(), source }
    }

    fn read_range(&self, offset: u64, length: u64, bytes: &mut Vec<u8>) -> Result<(), Error> {
        // `open` checked that the range lies within the file. `resize` zeroes only the bytes that it adds to the
        // caller's buffer.
        bytes.resize(length as usize, 0);
        self.file
            .read_exact_at(bytes, offset)
            .map_err(|source| Error::Read { path: self.path.clone(), source })
    }
}

/// Returns the paths of all parts except the first, derived from the name of the first part or of the file to which it
/// links. `None` if neither is the name of a first part of `parts` parts.
fn later_paths(first: &Path, parts: u64) -> Option<Vec<PathBuf>> {
    let paths = |path: &Path| {
        let name = PartName::parse(path.file_name()?.to_str()?)?;
        let is_first = (name.part, name.parts) == (1, parts);
        is_first.then(|| (2..=parts).map(|part| path.with_file_name(name.of_part(part))).collect())
    };
    paths(first).or_else(|| paths(&fs::canonicalize(first).ok()?))
}
