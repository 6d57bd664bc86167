//! Tests that a split model is read like a single file, and that invalid, missing and foreign parts are rejected with
//! an error that names the file.

#![expect(clippy::unwrap_used, reason = "a failed precondition fails the test")]

use std::{
    fs::{self, File},
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

use server_gguf::{
    Error, FormatError, GgufFile, TensorType, limits,
    write::{GgufWriter, write_parts},
};
use tempfile::TempDir;

/// A model of seven tensors in three parts, `model-0000?-of-00003.gguf`.
struct Split {
    directory: TempDir,
    whole: GgufFile,
}

fn values(tensor: usize) -> Vec<f32> {
    (0..=tensor).map(|i| (i * 7 + tensor) as f32).collect()
}

impl Split {
    fn new() -> Self {
        let directory = TempDir::new().unwrap();
        let mut writer = GgufWriter::new("llama");
        writer.metadata("llama.block_count", 2u32);
        for tensor in 0..7 {
            let values = values(tensor);
            writer.tensor_of(&format!("t{tensor}"), &[values.len() as u64], TensorType::F32, &values);
        }
        let path = directory.path().join("whole.gguf");
        writer.write(&path).unwrap();
        let whole = GgufFile::open(path).unwrap();
        write_parts(&whole, directory.path(), "model", 3).unwrap();
        Self { directory, whole }
    }

    fn part(&self, part: u16) -> PathBuf {
        self.directory.path().join(format!("model-{part:05}-of-00003.gguf"))
    }

    fn open(&self) -> Result<GgufFile, Error> {
        GgufFile::open(self.part(1))
    }

    /// Replaces a part with a file that has one tensor, and whose metadata has the `numbers`: the number of the part
    /// (the first is 0), the number of parts and the number of tensors.
    fn replace(&self, part: u16, numbers: [i32; 3], tensor: &str) {
        let [no, count, tensors] = numbers;
        let mut writer = GgufWriter::default();
        writer
            .metadata("split.no", no)
            .metadata("split.count", count)
            .metadata("split.tensors.count", tensors)
            .tensor_of(tensor, &[1], TensorType::F32, &[1.0]);
        writer.write(self.part(part)).unwrap();
    }

    /// Opens the model, which must fail because of this part, and returns the problem.
    fn problem(&self, part: u16) -> FormatError {
        match self.open() {
            Err(Error::Format { path, source }) => {
                assert_eq!(path, self.part(part), "{source}");
                source
            }
            other => panic!("{other:?}"),
        }
    }
}

fn assert_same(file: &GgufFile, whole: &GgufFile) {
    assert!(file.metadata().eq(whole.metadata()), "keys about the split are not metadata of the model");
    assert_eq!(file.architecture(), Some("llama"));
    let names = |file: &GgufFile| file.tensors().iter().map(|tensor| tensor.name.clone()).collect::<Vec<_>>();
    assert_eq!(names(file), names(whole));
    let (mut read, mut expected) = (Vec::new(), Vec::new());
    for tensor in whole.tensors() {
        let rows = 0..tensor.rows();
        whole.read_tensor(&tensor.name, &mut expected).unwrap();
        file.read_tensor(&tensor.name, &mut read).unwrap();
        assert_eq!(read, expected, "{}", tensor.name);
        file.read_tensor_rows(&tensor.name, rows, &mut read).unwrap();
        assert_eq!(read, expected, "{}", tensor.name);
    }
}

#[test]
fn the_first_part_opens_the_whole_model() {
    let split = Split::new();
    let file = split.open().unwrap();
    assert_same(&file, &split.whole);
    assert_eq!(file.path(), split.part(1));
    assert!(file.paths().eq([split.part(1), split.part(2), split.part(3)]));
    assert_eq!(split.whole.paths().len(), 1);
    let parts: Vec<usize> = file.tensors().iter().map(|tensor| tensor.part).collect();
    assert_eq!(parts, [0, 0, 0, 1, 1, 1, 2]);
}

/// The first part has no tensors, like the first part that `gguf-split --no-tensor-first-split` writes.
#[test]
fn a_part_may_have_no_tensors() {
    let split = Split::new();
    let metadata = |writer: &mut GgufWriter, no: u16| {
        writer.metadata("split.no", no).metadata("split.count", 2u16).metadata("split.tensors.count", 1i32);
    };
    let (mut first, mut second) = (GgufWriter::new("llama"), GgufWriter::default());
    metadata(&mut first, 0);
    metadata(&mut second, 1);
    second.tensor_of("t", &[1], TensorType::F32, &[1.0]);
    let path = |part: u16| split.directory.path().join(format!("other-{part:05}-of-00002.gguf"));
    first.write(path(1)).unwrap();
    second.write(path(2)).unwrap();
    assert_eq!(GgufFile::open(path(1)).unwrap().tensor("t").unwrap().part, 1);
}

/// `ovfleet-server fetch` creates a link like `current`. The cache of the Hugging Face Hub contains links whose targets
/// are named after digests.
#[test]
fn links_lead_to_the_parts_beside_the_link_or_beside_its_target() {
    let split = Split::new();
    let link = split.directory.path().join("current");
    symlink(split.part(1), &link).unwrap();
    assert_same(&GgufFile::open(&link).unwrap(), &split.whole);

    let snapshot = TempDir::new().unwrap();
    let blobs = TempDir::new().unwrap();
    for part in 1..=3 {
        let blob = blobs.path().join(format!("digest{part}"));
        fs::copy(split.part(part), &blob).unwrap();
        symlink(blob, snapshot.path().join(split.part(part).file_name().unwrap())).unwrap();
    }
    let first = snapshot.path().join(split.part(1).file_name().unwrap());
    assert_same(&GgufFile::open(first).unwrap(), &split.whole);
}

#[test]
fn a_file_that_is_its_only_part_needs_no_special_name() {
    let split = Split::new();
    let path = write_parts(&split.whole, split.directory.path(), "one", 1).unwrap();
    let renamed = split.directory.path().join("renamed.gguf");
    fs::rename(path, &renamed).unwrap();
    assert_eq!(GgufFile::open(renamed).unwrap().tensors().len(), 7);
}

#[test]
fn later_parts_and_other_names_are_rejected() {
    let split = Split::new();
    let refused = |path: &Path| match GgufFile::open(path) {
        Err(Error::Format { path: refused, source }) => {
            assert_eq!(refused, path);
            source
        }
        other => panic!("{other:?}"),
    };
    let problem = refused(&split.part(2));
    assert_eq!(problem, FormatError::LaterPart { part: 2, parts: 3 });
    assert!(problem.to_string().contains("part 2 of 3"), "{problem}");
    assert!(problem.to_string().contains("-00001-of-00003.gguf"), "{problem}");
    for name in ["model.gguf", "model-00001-of-00002.gguf", "model-00002-of-00003.gguf"] {
        let split = Split::new();
        let renamed = split.directory.path().join(name);
        fs::rename(split.part(1), &renamed).unwrap();
        assert_eq!(refused(&renamed), FormatError::PartName(3), "{name}");
    }
}

#[test]
fn a_missing_part_is_named() {
    for part in [2, 3] {
        let split = Split::new();
        fs::remove_file(split.part(part)).unwrap();
        match split.open() {
            Err(Error::Read { path, .. }) => assert_eq!(path, split.part(part)),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn parts_of_other_models_are_rejected() {
    let other = |part, parts, found_part, found_parts| FormatError::OtherPart {
        part,
        parts,
        found_part,
        found_parts,
    };
    let split = Split::new();
    fs::copy(split.part(3), split.part(2)).unwrap();
    assert_eq!(split.problem(2), other(2, 3, 3, 3));
    split.replace(2, [1, 4, 7], "t");
    assert_eq!(split.problem(2), other(2, 3, 2, 4));
    // The second part is replaced with a model that is not split.
    fs::copy(split.directory.path().join("whole.gguf"), split.part(2)).unwrap();
    assert_eq!(split.problem(2), other(2, 3, 1, 1));
    split.replace(2, [1, 3, 7], "t0");
    assert_eq!(split.problem(2), FormatError::TensorInEarlierPart("t0".into()));
}

#[test]
fn missing_and_additional_tensors_are_rejected() {
    let split = Split::new();
    split.replace(2, [1, 3, 7], "t");
    assert_eq!(split.problem(3), FormatError::TensorCount { expected: 7, found: 5 });
    let split = Split::new();
    split.replace(1, [0, 3, 2], "t");
    assert_eq!(split.problem(2), FormatError::TensorCount { expected: 2, found: 4 });
}

#[test]
fn a_part_cut_at_any_byte_is_reported_as_truncated() {
    let split = Split::new();
    for part in [2, 3] {
        let bytes = fs::read(split.part(part)).unwrap();
        let file = File::options().write(true).open(split.part(part)).unwrap();
        for length in (0..bytes.len()).rev() {
            file.set_len(length as u64).unwrap();
            let problem = split.problem(part);
            assert!(matches!(problem, FormatError::Truncated { .. }), "{length}: {problem}");
        }
        fs::write(split.part(part), &bytes).unwrap();
    }
}

#[test]
fn invalid_numbers_of_parts_are_rejected() {
    let split = Split::new();
    split.replace(1, [0, limits::PARTS_MAX as i32 + 1, 7], "t");
    assert!(matches!(split.problem(1), FormatError::Limit { value: 257, limit: 256, .. }));
    for numbers in [[-1, 3, 7], [0, -3, 7], [0, 3, -7]] {
        split.replace(1, numbers, "t");
        assert!(matches!(split.problem(1), FormatError::BadValue { .. }), "{numbers:?}");
    }
    split.replace(1, [i32::MAX, 3, 7], "t");
    assert!(matches!(split.problem(1), FormatError::LaterPart { .. }));
}
