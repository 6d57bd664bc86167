//! Checks that arbitrary bytes are either rejected with an error message or opened as a GGUF file. In an opened file,
//! all tensors can be read, and those of supported types can be decoded. `make fuzz` runs this check for a configurable
//! time, and `main.rs` runs it for seconds.

use std::cell::OnceCell;

use server_gguf::{Error, GgufFile, blocks, dequantize};
use tempfile::NamedTempFile;

thread_local! {
    static FILE: OnceCell<NamedTempFile> = const { OnceCell::new() };
}

/// Opens `input` as a GGUF file and panics if the guarantees do not hold.
pub(crate) fn check(input: &[u8]) {
    FILE.with(|file| {
        let file = file.get_or_init(|| NamedTempFile::new().expect("a temporary file"));
        std::fs::write(file.path(), input).expect("the disk has room for a small file");
        match GgufFile::open(file.path()) {
            Ok(file) => read_all(&file),
            Err(error @ Error::Format { .. }) => assert!(!error.to_string().is_empty()),
            Err(error) => panic!("{error:?}"),
        }
    });
}

/// Reads all metadata and tensors of a file, and decodes the tensors of supported types.
fn read_all(file: &GgufFile) {
    for (key, value) in file.metadata() {
        // Compare the addresses, because NaN is not equal to itself.
        assert!(file.get(key).is_some_and(|stored| std::ptr::eq(stored, value)), "{key}");
        // Conversions must not panic, regardless of the type.
        let _ = (value.i64(), value.u64(), value.u32(), value.f32(), value.i64s(), value.strs());
    }
    let mut bytes = Vec::new();
    for tensor in file.tensors() {
        file.read_tensor(&tensor.name, &mut bytes)
            .expect("opening the file checked that the tensor lies within it");
        assert_eq!(bytes.len() as u64, tensor.bytes, "{}", tensor.name);
        assert_eq!(tensor.rows() * tensor.row_bytes(), tensor.bytes, "{}", tensor.name);
        let mut values = vec![0.0; tensor.values() as usize];
        assert_eq!(dequantize(tensor.kind, &bytes, &mut values).is_ok(), tensor.kind.is_decodable());
        if let Ok(affine) = blocks::decode(tensor.kind, &bytes) {
            assert_eq!(affine.quants.len(), values.len(), "{}", tensor.name);
        }
    }
}
