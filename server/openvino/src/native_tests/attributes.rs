//! Checks that a native operation with any attributes is either rejected with a reason when its model is read, or has
//! attributes that the kernels support. `scripts/sanitize operations` also computes such operations, with sanitizers
//! and for longer.

use std::collections::HashMap;

use tempfile::TempDir;

use super::ir::{Ir, Operation};
use crate::mutations::{check_mutations, seeds};
use crate::runtime::Core;
use crate::shim;

const CASES: u64 = 4_000;
/// Largest number of inputs of an operation.
const INPUTS_MAX: usize = 9;

thread_local! {
    // Only the core for compiled models reads native operations.
    static READER: (Core, TempDir) = (shim::import_core().unwrap(), tempfile::tempdir().unwrap());
}

/// Reads a model with the operation in `input`: its name and then its attributes, one on each line. The attribute
/// `inputs` is the number of the operation's inputs. Returns whether the operation is accepted, and panics if it is
/// accepted but must not be, or if it is rejected without a reason.
fn is_accepted(input: &[u8]) -> bool {
    let text = String::from_utf8_lossy(input);
    let mut lines = text.lines();
    let name = escape(lines.next().unwrap_or_default());
    let values: HashMap<&str, &str> = lines.filter_map(|line| line.split_once('=')).collect();
    let attributes: String = values
        .iter()
        .filter(|(key, _)| **key != "inputs")
        .map(|(key, value)| format!("{key}=\"{}\" ", escape(value)))
        .collect();
    let inputs = values.get("inputs").and_then(|count| count.parse().ok()).unwrap_or(INPUTS_MAX);
    let is_read = READER.with(|(core, directory)| {
        let operation = Operation { name: &name, opset: "ovfleet", attributes: &attributes };
        ir(&operation, inputs.min(INPUTS_MAX)).write(directory.path());
        let read = shim::read_ir(core, &directory.path().join("openvino_model.xml"));
        if let Err(error) = &read {
            assert!(error.chain().len() > "failed to read the model: ".len());
        }
        read.is_ok()
    });
    if is_read && name == "PagedAttention" {
        assert_supported(&values);
    }
    is_read
}

fn ir(operation: &Operation<'_>, inputs: usize) -> Ir {
    let mut ir = Ir::default();
    let inputs: Vec<usize> =
        (0..inputs).map(|number| ir.input(&format!("input{number}"), "f32", "?,64")).collect();
    let output = ir.operation(operation, &inputs);
    ir.operation(&Operation { name: "Result", opset: "opset1", attributes: "" }, &[output]);
    ir
}

/// Asserts that an accepted attention operation has attributes within the limits of the kernels.
fn assert_supported(values: &HashMap<&str, &str>) {
    let number = |name: &str| values.get(name).and_then(|value| value.parse::<i64>().ok());
    let names = ["heads", "kv_heads", "key_size", "value_size", "precision", "window"].map(number);
    // OpenVINO also accepts numbers that are followed by other characters. Operations with such attributes are not
    // checked.
    let [Some(heads), Some(kv_heads), Some(key_size), Some(value_size), Some(precision), Some(window)] =
        names
    else {
        return;
    };
    assert!((1..=65_536).contains(&heads) && kv_heads > 0 && heads % kv_heads == 0, "{values:?}");
    assert!((1..=512).contains(&key_size) && key_size % 32 == 0, "{values:?}");
    assert!((1..=512).contains(&value_size) && value_size % 16 == 0, "{values:?}");
    assert!((0..=4).contains(&precision) && (0..=i64::from(i32::MAX)).contains(&window), "{values:?}");
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('"', "&quot;")
}

#[test]
fn an_operation_with_any_attributes_is_supported_or_rejected_with_a_reason() {
    let seeds = seeds(concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz/seeds/operations"));
    for seed in &seeds {
        assert!(is_accepted(seed), "{}", seed.escape_ascii());
    }
    let dictionary = include_str!("../../../fuzz/dictionaries/operations.dict");
    check_mutations(CASES, &seeds, dictionary, |input| {
        is_accepted(input);
    });
}
