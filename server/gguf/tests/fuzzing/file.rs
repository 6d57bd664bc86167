//! Any bytes as a GGUF file: it opens, and then every tensor can be read and decoded, or it is refused with a reason.
//! `server/fuzz` feeds it for hours, `main.rs` for seconds.

use std::cell::OnceCell;

use server_gguf::{Error, GgufFile, blocks, dequantize};
use tempfile::NamedTempFile;

thread_local! {
    static FILE: OnceCell<NamedTempFile> = const { OnceCell::new() };
}

/// Panics if a promise is broken.
pub(crate) fn check(input: &[u8]) {
    FILE.with(|file| {
        let file = file.get_or_init(|| NamedTempFile::new().expect("a temporary file"));
        std::fs::write(file.path(), input).expect("room for a small file");
        match GgufFile::open(file.path()) {
            Ok(file) => read(&file),
            Err(error @ Error::Format { .. }) => assert!(!error.to_string().is_empty()),
            Err(error) => panic!("{error:?}"),
        }
    });
}

/// Reads all that a file has.
fn read(file: &GgufFile) {
    for (key, value) in file.metadata() {
        // NaN is not equal to itself.
        assert!(file.get(key).is_some_and(|found| std::ptr::eq(found, value)), "{key}");
        // Whatever the type is, a conversion answers.
        let _ = (value.i64(), value.u64(), value.u32(), value.f32(), value.i64s(), value.strs());
    }
    let mut bytes = Vec::new();
    for tensor in file.tensors() {
        file.read_tensor(&tensor.name, &mut bytes).expect("a tensor that was found to be in the file");
        assert_eq!(bytes.len() as u64, tensor.bytes, "{}", tensor.name);
        assert_eq!(tensor.rows() * tensor.row_bytes(), tensor.bytes, "{}", tensor.name);
        let mut values = vec![0.0; tensor.values() as usize];
        assert_eq!(dequantize(tensor.kind, &bytes, &mut values).is_ok(), tensor.kind.is_decodable());
        if let Ok(affine) = blocks::decode(tensor.kind, &bytes) {
            assert_eq!(affine.quants.len(), values.len(), "{}", tensor.name);
        }
    }
}
