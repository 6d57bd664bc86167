//! Checks that a user's model cannot contain native operations.

use std::path::Path;

use super::ir::{Ir, Operation, config};
use crate::load::load;
use crate::runtime::Core;
use crate::shim;

/// The inputs of the native attention.
const INPUTS: [&str; 6] = ["query", "key", "value", "key_cache", "value_cache", "step"];

/// An IR with a single operation, whose inputs are [`INPUTS`].
fn ir(operation: &Operation<'_>) -> Ir {
    let mut ir = Ir::default();
    let inputs = INPUTS.map(|name| ir.input(name, "f32", "?,64"));
    let output = ir.operation(operation, &inputs);
    ir.operation(&Operation { name: "Result", opset: "opset1", attributes: "" }, &[output]);
    ir
}

#[test]
fn a_users_model_that_names_a_native_operation_is_rejected_by_name() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("openvino_model.xml");
    let native =
        |name, attributes| ir(&Operation { name, opset: "ovfleet", attributes }).write(directory.path());
    let scale_bits = 1.0_f32.to_bits();
    let attributes = format!(
        "isa=\"1\" heads=\"1\" kv_heads=\"1\" key_size=\"64\" value_size=\"64\" precision=\"0\" scale_bits=\"{scale_bits}\" \
         attention_mass_bits=\"0\" window=\"0\" fuses_rope=\"false\" has_sinks=\"false\""
    );
    native("PagedAttention", &attributes);
    // The core for compiled models accepts the operation, so only its name can be the reason for the error.
    shim::read_ir(&shim::import_core().unwrap(), &path).unwrap();
    assert_names_the_operations(&path, "PagedAttention");
    // The error also names the operation if attributes are missing or out of range.
    for operation in ["Experts", "PagedAttention", "Projection"] {
        native(operation, "heads=\"-1\"");
        assert_names_the_operations(&path, operation);
    }
}

/// Asserts that reading and loading a model fails with an error that names `operation` and its operation set.
fn assert_names_the_operations(path: &Path, operation: &str) {
    let read = shim::read_ir(&Core::new().unwrap(), path).err().unwrap().chain();
    let loaded = load(&config(path.parent().unwrap()), &mut |_| {}).err().unwrap().chain();
    for error in [read, loaded] {
        assert!(error.starts_with("failed to read the model: "), "{error}");
        assert!(error.contains(operation) && error.contains("ovfleet"), "{error}");
    }
}

/// Number of times that each thread tries to read a missing file.
const READS: usize = 2_000;

#[test]
fn threads_that_read_models_get_the_messages_of_their_own_errors() {
    std::thread::scope(|scope| {
        for name in ["first", "second"] {
            scope.spawn(move || {
                let core = Core::new().unwrap();
                for _ in 0..READS {
                    let error =
                        shim::read_ir(&core, &Path::new(name).with_extension("xml")).err().unwrap().chain();
                    assert!(error.contains(name), "the error of {name}: {error}");
                }
            });
        }
    });
}
