//! Checks that a user's model cannot contain native operations.

use std::fmt::Write as _;
use std::path::Path;

use crate::config::{ActivationPrecision, Config};
use crate::load::load;
use crate::runtime::Core;
use crate::shim;

/// The inputs of a native attention.
const INPUTS: [&str; 6] = ["query", "key", "value", "key_cache", "value_cache", "step"];

/// An IR with a single operation, whose inputs are [`INPUTS`].
fn ir(operation: &str, opset: &str, attributes: &str) -> String {
    let mut text = "<?xml version=\"1.0\"?>\n<net name=\"model\" version=\"11\">\n<layers>\n".to_owned();
    let port = |id: usize| format!("<port id=\"{id}\" precision=\"FP32\"><dim>-1</dim><dim>64</dim></port>");
    let mut edges = String::new();
    for (id, name) in INPUTS.iter().enumerate() {
        writeln!(
            text,
            "<layer id=\"{id}\" name=\"{name}\" type=\"Parameter\" version=\"opset1\"><data shape=\"?,64\" \
             element_type=\"f32\"/><output>{}</output></layer>",
            port(0)
        )
        .unwrap();
        writeln!(edges, "<edge from-layer=\"{id}\" from-port=\"0\" to-layer=\"6\" to-port=\"{id}\"/>")
            .unwrap();
    }
    let inputs: String = (0..INPUTS.len()).map(port).collect();
    writeln!(
        text,
        "<layer id=\"6\" name=\"operation\" type=\"{operation}\" version=\"{opset}\"><data {attributes}/>\
         <input>{inputs}</input><output>{}</output></layer>",
        port(6)
    )
    .unwrap();
    writeln!(
        text,
        "<layer id=\"7\" name=\"result\" type=\"Result\" version=\"opset1\"><input>{}</input></layer>",
        port(0)
    )
    .unwrap();
    edges.push_str("<edge from-layer=\"6\" from-port=\"6\" to-layer=\"7\" to-port=\"0\"/>");
    format!("{text}</layers>\n<edges>\n{edges}\n</edges>\n</net>\n")
}

#[test]
fn a_users_model_that_names_a_native_operation_is_rejected_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("openvino_model.xml");
    std::fs::write(path.with_extension("bin"), []).unwrap();
    let scale_bits = 1.0_f32.to_bits();
    let attributes = format!(
        "isa=\"1\" heads=\"1\" kv_heads=\"1\" key_size=\"64\" value_size=\"64\" precision=\"0\" scale_bits=\"{scale_bits}\" \
         attention_mass_bits=\"0\" window=\"0\" fuses_rope=\"false\""
    );
    std::fs::write(&path, ir("PagedAttention", "ovfleet", &attributes)).unwrap();
    // The core of compiled models accepts the operation, so only its name can be the reason.
    shim::import_core().unwrap().read_model(&path).unwrap();
    assert_names_the_operations(&path, "PagedAttention");
    // Missing attributes and attributes out of range do not hide the name.
    for operation in ["PagedAttention", "Projection"] {
        std::fs::write(&path, ir(operation, "ovfleet", "heads=\"-1\"")).unwrap();
        assert_names_the_operations(&path, operation);
    }
}

/// Asserts that reading and loading a model fails with an error that names `operation` and its operation set.
fn assert_names_the_operations(path: &Path, operation: &str) {
    let read = Core::new().unwrap().read_model(path).err().unwrap().chain();
    let config = Config {
        model: path.parent().unwrap().to_owned(),
        device: "CPU".to_owned(),
        plugin_config: Vec::new(),
        kv_cache_bytes: Some(1 << 20),
        kv_cache_tokens_max: 0,
        adapters: Vec::new(),
        sparse_attention: None,
        block_scores: false,
        activation_precision: ActivationPrecision::Auto,
        cache_dir: None,
        max_model_len: None,
    };
    let loaded = load(&config, &mut |_| {}).err().unwrap().chain();
    for error in [read, loaded] {
        assert!(error.starts_with("failed to read the model: "), "{error}");
        assert!(error.contains(operation) && error.contains("ovfleet"), "{error}");
    }
}
