//! Tests that reading a valid file returns the written values, and that invalid files are rejected with one clear
//! error.

#![expect(clippy::unwrap_used, reason = "a failed precondition fails the test")]

use std::{fs, path::PathBuf};

use server_gguf::{
    Array, Error, FormatError, GgufFile, TensorType, Value, blocks, dequantize,
    write::{GgufWriter, quantize},
};
use tempfile::TempDir;

struct Fixture {
    directory: TempDir,
}

impl Fixture {
    fn new() -> Self {
        Self { directory: TempDir::new().unwrap() }
    }

    fn path(&self) -> PathBuf {
        self.directory.path().join("model.gguf")
    }

    fn open(&self, bytes: &[u8]) -> Result<GgufFile, Error> {
        fs::write(self.path(), bytes).unwrap();
        GgufFile::open(self.path())
    }

    /// Opens an invalid file and returns the problem.
    fn problem(&self, bytes: &[u8]) -> FormatError {
        match self.open(bytes) {
            Err(Error::Format { source, .. }) => source,
            other => panic!("{other:?}"),
        }
    }
}

/// Deterministic values in `-1..1`.
fn noise(count: usize) -> Vec<f32> {
    let mut state = 0x2545_f491_4f6c_dd1du64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

fn small() -> GgufWriter {
    let mut writer = GgufWriter::new("llama");
    writer
        .metadata("u8", 200u8)
        .metadata("i8", -3i8)
        .metadata("u16", 60_000u16)
        .metadata("i16", -300i16)
        .metadata("u32", 1u32 << 31)
        .metadata("i32", -5i32)
        .metadata("u64", u64::MAX)
        .metadata("i64", i64::MIN)
        .metadata("f32", 1.5f32)
        .metadata("f64", 2.5f64)
        .metadata("bool", true)
        .metadata("strings", vec!["a".to_owned(), String::new(), "ü".to_owned()])
        .metadata("floats", vec![0.5f32, -1.0])
        .metadata("ints", vec![1i32, -1])
        .metadata("bools", vec![true, false])
        .metadata("llama.block_count", 2u32)
        .tensor_of("b", &[32, 3], TensorType::Q4_1, &noise(96))
        .tensor_of("a", &[5], TensorType::F32, &noise(5))
        .tensor_of("c", &[4, 2, 2], TensorType::F16, &noise(16));
    writer
}

#[test]
fn values_read_back_as_they_were_written() {
    let fixture = Fixture::new();
    let file = fixture.open(&small().to_bytes()).unwrap();
    assert_eq!(file.architecture(), Some("llama"));
    assert_eq!(file.get("u8").unwrap().u32(), Some(200));
    assert_eq!(file.get("i8").unwrap().i64(), Some(-3));
    assert_eq!(file.get("i8").unwrap().u32(), None);
    assert_eq!(file.get("u16").unwrap().u32(), Some(60_000));
    assert_eq!(file.get("i16").unwrap().i64(), Some(-300));
    assert_eq!(file.get("u32").unwrap().u32(), Some(1 << 31));
    assert_eq!(file.get("i32").unwrap().i64(), Some(-5));
    assert_eq!(file.get("u64").unwrap().u64(), Some(u64::MAX));
    assert_eq!(file.get("u64").unwrap().i64(), None);
    assert_eq!(file.get("i64").unwrap().i64(), Some(i64::MIN));
    assert_eq!(file.get("f32").unwrap().f32(), Some(1.5));
    assert_eq!(file.get("f64").unwrap().f32(), Some(2.5));
    assert_eq!(file.get("bool").unwrap().bool(), Some(true));
    assert_eq!(file.get("strings").unwrap().strs().unwrap(), ["a", "", "ü"]);
    assert_eq!(file.get("floats").unwrap().f32s(), Some(&[0.5, -1.0][..]));
    assert_eq!(file.get("ints").unwrap().i64s(), Some(vec![1, -1]));
    assert_eq!(file.get("bools"), Some(&Value::Array(Array::Bool(vec![true, false]))));
    assert_eq!(file.get_of_architecture("block_count").unwrap().u32(), Some(2));
    assert!(file.get("absent").is_none());
    assert_eq!(file.metadata().len(), 17);
    let names: Vec<_> = file.tensors().iter().map(|tensor| tensor.name.as_str()).collect();
    assert_eq!(names, ["b", "a", "c"]);
}

#[test]
fn tensors_can_be_read_whole_and_by_rows() {
    let fixture = Fixture::new();
    let file = fixture.open(&small().to_bytes()).unwrap();
    let mut whole = Vec::new();
    file.read_tensor("b", &mut whole).unwrap();
    assert_eq!(whole, quantize(TensorType::Q4_1, &noise(96)));
    let tensor = file.tensor("b").unwrap();
    assert_eq!((tensor.rows(), tensor.row_bytes(), tensor.values()), (3, 20, 96));
    let mut rows = vec![9; 1000];
    file.read_tensor_rows("b", 1..3, &mut rows).unwrap();
    assert_eq!(rows, whole[20..]);
    file.read_tensor_rows("c", 3..4, &mut rows).unwrap();
    assert_eq!(rows.len(), 8);
    assert!(matches!(file.read_tensor_rows("b", 1..4, &mut rows), Err(Error::NoRows { rows: 3, .. })));
    assert!(matches!(file.read_tensor("d", &mut rows), Err(Error::NoTensor { .. })));
}

#[test]
fn quantized_values_are_near_the_originals() {
    let values = noise(2048);
    for &kind in TensorType::ALL.iter().filter(|kind| kind.is_decodable()) {
        if matches!(kind, TensorType::Q2K | TensorType::Q3K) {
            continue; // The writer cannot quantize to these types.
        }
        let mut read = vec![0.0; values.len()];
        dequantize(kind, &quantize(kind, &values), &mut read).unwrap();
        let bits = kind.quant_layout().map_or(8, |layout| layout.bits);
        let worst = values.iter().zip(&read).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        // The tolerance is about half a quantization step, doubled because scales are rounded too. MXFP4 rounds numbers
        // between 6 and 8 times the scale to 6 times the scale. The largest scale here is 1/8.
        let tolerance = if kind == TensorType::Mxfp4 { 0.25 } else { 2.2 / (1u32 << bits) as f32 };
        assert!(worst <= tolerance, "{kind}: {worst}");
        let zeros = vec![0.0; 256];
        let mut read = vec![1.0; 256];
        dequantize(kind, &quantize(kind, &zeros), &mut read).unwrap();
        assert!(read.iter().all(|value| *value == 0.0), "{kind}");
    }
}

#[test]
fn mismatched_lengths_are_rejected() {
    let mut values = [0.0; 32];
    assert!(matches!(dequantize(TensorType::Q4_0, &[0; 17], &mut values), Err(Error::Lengths { .. })));
    assert!(matches!(dequantize(TensorType::Q4_0, &[0; 36], &mut values), Err(Error::Lengths { .. })));
    assert!(matches!(blocks::decode(TensorType::Q4_0, &[0; 17]), Err(Error::Lengths { .. })));
    assert!(matches!(blocks::decode(TensorType::F16, &[0; 2]), Err(Error::Undecodable(_))));
    assert!(matches!(dequantize(TensorType::Iq4Nl, &[0; 18], &mut values), Err(Error::Undecodable(_))));
}

#[test]
fn a_file_cut_at_any_byte_is_reported_as_truncated() {
    let fixture = Fixture::new();
    let bytes = small().to_bytes();
    for length in 0..bytes.len() {
        let problem = fixture.problem(&bytes[..length]);
        assert!(matches!(problem, FormatError::Truncated { .. }), "{length}: {problem}");
    }
}

#[test]
fn a_file_with_any_byte_changed_opens_or_is_rejected() {
    let fixture = Fixture::new();
    let bytes = small().to_bytes();
    let mut rejected = 0;
    for at in 0..bytes.len() {
        for change in [0x01, 0x80, 0xff] {
            let mut bytes = bytes.clone();
            bytes[at] ^= change;
            match fixture.open(&bytes) {
                Ok(file) => {
                    let mut buffer = Vec::new();
                    for tensor in file.tensors() {
                        file.read_tensor(&tensor.name, &mut buffer).unwrap();
                        assert_eq!(buffer.len() as u64, tensor.bytes);
                    }
                }
                Err(Error::Format { source, .. }) => {
                    assert!(!source.to_string().is_empty());
                    rejected += 1;
                }
                Err(other) => panic!("byte {at}: {other}"),
            }
        }
    }
    assert!(rejected > 100, "{rejected}");
}

/// A file of version 3 with these counts, followed by `rest` and 4096 zero bytes.
fn raw(tensors: u64, keys: u64, rest: &[&[u8]]) -> Vec<u8> {
    let mut bytes = b"GGUF\x03\0\0\0".to_vec();
    bytes.extend(tensors.to_le_bytes());
    bytes.extend(keys.to_le_bytes());
    rest.iter().for_each(|part| bytes.extend(*part));
    bytes.resize(bytes.len() + 4096, 0);
    bytes
}

fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

#[test]
fn a_wrong_magic_number_or_version_is_rejected() {
    let fixture = Fixture::new();
    assert_eq!(fixture.problem(b"PK\x03\x04 and more"), FormatError::Magic);
    assert_eq!(fixture.problem(b"GGUF\0\0\0\x03........"), FormatError::BigEndian);
    assert_eq!(fixture.problem(b"GGUF\x01\0\0\0........"), FormatError::Version(1));
    assert_eq!(fixture.problem(b"GGUF\x04\0\0\0........"), FormatError::Version(4));
}

#[test]
fn huge_counts_are_rejected_before_memory_is_allocated() {
    let fixture = Fixture::new();
    assert!(matches!(fixture.problem(&raw(u64::MAX, 0, &[])), FormatError::Limit { .. }));
    assert!(matches!(fixture.problem(&raw(0, u64::MAX, &[])), FormatError::Limit { .. }));
    let huge = (1u64 << 40).to_le_bytes();
    assert!(matches!(fixture.problem(&raw(0, 1, &[&huge])), FormatError::Truncated { .. }));
    let array = |kind: u32, length: u64| {
        raw(0, 1, &[&text("k"), &9u32.to_le_bytes(), &kind.to_le_bytes(), &length.to_le_bytes()])
    };
    for kind in [0, 6, 7, 8, 10] {
        assert!(matches!(fixture.problem(&array(kind, u64::MAX)), FormatError::Limit { .. }));
        assert!(matches!(fixture.problem(&array(kind, 1 << 24)), FormatError::Truncated { .. }));
    }
    assert_eq!(fixture.problem(&array(9, 1)), FormatError::NestedArray("k".into()));
    assert!(matches!(fixture.problem(&array(13, 1)), FormatError::ValueType { kind: 13, .. }));
}

#[test]
fn errors_name_invalid_metadata() {
    let fixture = Fixture::new();
    let kind = |kind: u32| kind.to_le_bytes();
    let problem = fixture.problem(&raw(0, 1, &[&text("k"), &kind(77)]));
    assert_eq!(problem, FormatError::ValueType { key: "k".into(), kind: 77 });
    let problem = fixture.problem(&raw(0, 1, &[&text("k"), &kind(7), &[2]]));
    assert_eq!(problem, FormatError::Bool { key: "k".into(), value: 2 });
    let problem = fixture.problem(&raw(0, 1, &[&text("k"), &kind(8), &[2, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xfe]]));
    assert!(matches!(problem, FormatError::Utf8(_)));
    let problem = fixture.problem(&raw(0, 2, &[&text("k"), &kind(0), &[1], &text("k"), &kind(0), &[1]]));
    assert_eq!(problem, FormatError::DuplicateKey("k".into()));
    for alignment in [0u32, 3, 1 << 31] {
        let problem =
            fixture.problem(&GgufWriter::new("a").metadata("general.alignment", alignment).to_bytes());
        assert!(matches!(problem, FormatError::BadValue { .. }));
    }
    for (alignment, value) in [
        (Value::U64(u64::MAX), "18446744073709551615"),
        (Value::I64(i64::MIN), "-9223372036854775808"),
        (Value::Str("32".to_owned()), "not an integer"),
    ] {
        let problem =
            fixture.problem(&GgufWriter::new("a").metadata("general.alignment", alignment).to_bytes());
        let (key, value) = ("general.alignment".to_owned(), value.to_owned());
        let expected = "a power of two up to 1048576, stored as u32".to_owned();
        assert_eq!(problem, FormatError::BadValue { key, value, expected });
    }
}

#[test]
fn errors_name_invalid_tensors() {
    let fixture = Fixture::new();
    let tensor = |name: &str, shape: &[u64], kind: u32, offset: u64| {
        let mut bytes = text(name);
        bytes.extend((shape.len() as u32).to_le_bytes());
        shape.iter().for_each(|length| bytes.extend(length.to_le_bytes()));
        bytes.extend(kind.to_le_bytes());
        bytes.extend(offset.to_le_bytes());
        bytes
    };
    let problem =
        |shape: &[u64], kind, offset| fixture.problem(&raw(1, 0, &[&tensor("t", shape, kind, offset)]));
    assert!(matches!(problem(&[4], 99, 0), FormatError::TensorType { kind: 99, .. }));
    assert!(matches!(problem(&[], 0, 0), FormatError::Shape { .. }));
    assert!(matches!(problem(&[4, 0], 0, 0), FormatError::Shape { .. }));
    assert!(matches!(problem(&[33], 2, 0), FormatError::Shape { .. }));
    assert!(matches!(problem(&[1 << 62, 9], 0, 0), FormatError::Shape { .. }));
    assert!(matches!(problem(&[1; 5], 0, 0), FormatError::Limit { .. }));
    assert!(matches!(problem(&[4], 0, 4), FormatError::Unaligned { .. }));
    assert!(matches!(problem(&[4], 0, 1 << 40), FormatError::Truncated { .. }));
    assert!(matches!(problem(&[4], 0, u64::MAX - 31), FormatError::Truncated { .. }));
    let two =
        |a: &str, b: &str| fixture.problem(&raw(2, 0, &[&tensor(a, &[16], 0, 32), &tensor(b, &[16], 0, 0)]));
    assert_eq!(two("a", "b"), FormatError::Overlap("b".into(), "a".into()));
    assert_eq!(two("a", "a"), FormatError::DuplicateTensor("a".into()));
}

#[test]
fn errors_name_a_missing_file_and_a_directory() {
    let fixture = Fixture::new();
    for path in [fixture.path(), fixture.directory.path().to_owned()] {
        let error = GgufFile::open(&path).unwrap_err();
        assert!(matches!(error, Error::Read { .. }));
        assert!(error.to_string().contains(path.to_str().unwrap()));
    }
}
