//! Checks the hyperparameters of a GGUF file before the front end or this crate divides by them, multiplies them or
//! uses them as sizes of allocations, because files are untrusted.

use server_gguf::{GgufFile, Value};

use crate::Error;

/// An integer hyperparameter of the architecture, and its valid values. The upper limits are far above the values of
/// any model, and far below values that cause overflows or exhaust memory.
struct Range {
    key: &'static str,
    least: u64,
    most: u64,
}

const fn range(key: &'static str, least: u64, most: u64) -> Range {
    Range { key, least, most }
}

const INTEGERS: [Range; 12] = [
    range("block_count", 1, 1 << 12),
    range("context_length", 0, 1 << 40),
    range("embedding_length", 1, 1 << 20),
    range("feed_forward_length", 0, 1 << 24),
    range("attention.head_count", 1, 1 << 16),
    range("attention.head_count_kv", 1, 1 << 16),
    range("attention.key_length", 1, 1 << 14),
    range("attention.value_length", 1, 1 << 14),
    range("rope.dimension_count", 0, 1 << 14),
    range("rope.scaling.original_context_length", 0, 1 << 40),
    range("expert_count", 0, 1 << 16),
    range("expert_used_count", 0, 1 << 16),
];

/// Floating-point hyperparameters, which must be finite and not negative.
const FLOATS: [&str; 6] = [
    "attention.layer_norm_epsilon",
    "attention.layer_norm_rms_epsilon",
    "rope.freq_base",
    "rope.freq_base_swa",
    "rope.scaling.attn_factor",
    "rope.scaling.factor",
];

/// Rejects a file with an invalid hyperparameter.
pub(super) fn check(file: &GgufFile) -> Result<(), Error> {
    for range in &INTEGERS {
        if let Some(value) = file.get_of_architecture(range.key) {
            check_integer(value, range).map_err(|fault| invalid(range.key, &fault))?;
        }
    }
    for key in FLOATS {
        let value = file.get_of_architecture(key).and_then(Value::f32);
        if let Some(value) = value.filter(|value| !(value.is_finite() && *value >= 0.0)) {
            return Err(invalid(key, &format!("is {value}; it must be finite and at least 0")));
        }
    }
    Ok(())
}

fn check_integer(value: &Value, range: &Range) -> Result<(), String> {
    let Range { least, most, .. } = *range;
    // A list has one number for each layer. The number is 0 for layers without attention, so `least` does not apply.
    if let Some(all) = value.i64s() {
        let outside = all.iter().find(|value| u64::try_from(**value).map_or(true, |value| value > most));
        return match outside {
            Some(value) => Err(format!("has the element {value}; each element must be from 0 to {most}")),
            None => Ok(()),
        };
    }
    match value.i64() {
        Some(number) if u64::try_from(number).is_ok_and(|number| (least..=most).contains(&number)) => Ok(()),
        Some(number) => Err(format!("is {number}; it must be from {least} to {most}")),
        None => match value.u64() {
            Some(number) => Err(format!("is {number}; it must be from {least} to {most}")),
            None => Err("is not an integer".to_owned()),
        },
    }
}

fn invalid(key: &str, fault: &str) -> Error {
    Error::Unsupported(format!("its hyperparameter {key} {fault}"))
}

#[cfg(test)]
mod tests {
    use server_gguf::write::GgufWriter;

    use super::*;

    fn checked(key: &str, value: impl Into<Value>) -> Result<(), String> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("model.gguf");
        let mut writer = GgufWriter::new("phi3");
        writer.metadata(&format!("phi3.{key}"), value);
        std::fs::write(&path, writer.to_bytes()).unwrap();
        check(&GgufFile::open(&path).unwrap()).map_err(|error| error.to_string())
    }

    #[test]
    fn hyperparameters_that_overflow_divide_by_zero_or_exhaust_memory_are_rejected() {
        let heads = "attention.head_count";
        for (key, value) in [
            (heads, Value::U32(0)),
            (heads, Value::U64(u64::MAX)),
            (heads, Value::I32(-1)),
            (heads, Value::Str("32".to_owned())),
            (heads, Value::F32(32.0)),
            ("attention.head_count_kv", Value::U64(1 << 62)),
            ("attention.key_length", Value::U64(u64::MAX)),
            ("attention.key_length", Value::U32(0)),
            ("block_count", Value::U32(u32::MAX)),
            ("embedding_length", Value::U32(0)),
            ("attention.layer_norm_rms_epsilon", Value::F32(f32::NAN)),
            ("rope.freq_base", Value::F32(f32::INFINITY)),
            ("rope.scaling.factor", Value::F32(-1.0)),
        ] {
            let fault = checked(key, value.clone()).unwrap_err();
            assert!(fault.contains(key), "{key} {value:?}: {fault}");
        }
        let fault = checked("attention.head_count_kv", vec![8i32, -1]).unwrap_err();
        assert!(fault.contains("-1"), "{fault}");
    }

    #[test]
    fn the_hyperparameters_of_models_are_accepted() {
        assert_eq!(checked("attention.head_count", 128u32), Ok(()));
        assert_eq!(checked("attention.head_count_kv", vec![0i32, 8, 0, 8]), Ok(()));
        assert_eq!(checked("rope.freq_base", 1e7f32), Ok(()));
        assert_eq!(checked("context_length", 10_485_760u32), Ok(()));
    }
}
