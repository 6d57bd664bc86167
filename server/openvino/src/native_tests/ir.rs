//! Writes small OpenVINO IRs, as a user could provide them.

use std::path::Path;

use crate::config::Config;

/// A graph in the text form of an IR. Each of its operations has at most one output.
#[derive(Default)]
pub(super) struct Ir {
    layers: String,
    edges: String,
    /// The number of inputs of each layer, which is also the index of its output port.
    inputs: Vec<usize>,
    /// The contents of the constants.
    constants: Vec<u8>,
    metadata: String,
}

/// An operation of an IR. The attributes are written unchanged.
pub(super) struct Operation<'a> {
    pub(super) name: &'a str,
    pub(super) opset: &'a str,
    pub(super) attributes: &'a str,
}

/// An operation of OpenVINO's first operation set.
pub(super) const fn operation<'a>(name: &'a str, attributes: &'a str) -> Operation<'a> {
    Operation { name, opset: "opset1", attributes }
}

impl Ir {
    /// Adds an input of the model and returns the number of its layer. Dynamic dimensions are written as `?`.
    pub(super) fn input(&mut self, name: &str, element_type: &str, shape: &str) -> usize {
        let attributes = format!("shape=\"{shape}\" element_type=\"{element_type}\"");
        self.named(name, &operation("Parameter", &attributes), &[])
    }

    /// Adds a constant of one number, given its bytes, and returns the number of its layer.
    pub(super) fn constant(&mut self, element_type: &str, bytes: &[u8]) -> usize {
        self.constants(element_type, "", bytes)
    }

    /// Adds a constant of a shape such as `2,3`, given its bytes, and returns the number of its layer.
    pub(super) fn constants(&mut self, element_type: &str, shape: &str, bytes: &[u8]) -> usize {
        let (offset, size) = (self.constants.len(), bytes.len());
        self.constants.extend(bytes);
        let attributes =
            format!("element_type=\"{element_type}\" shape=\"{shape}\" offset=\"{offset}\" size=\"{size}\"");
        self.operation(&Operation { name: "Const", opset: "opset1", attributes: &attributes }, &[])
    }

    /// Adds an operation on the outputs of other layers and returns the number of its layer.
    pub(super) fn operation(&mut self, operation: &Operation<'_>, from: &[usize]) -> usize {
        let name = format!("{}_{}", operation.name, self.inputs.len());
        self.named(&name, operation, from)
    }

    /// Adds an operation whose output has the name `name`, and returns the number of its layer.
    pub(super) fn named(&mut self, name: &str, operation: &Operation<'_>, from: &[usize]) -> usize {
        let Operation { name: kind, opset, attributes } = operation;
        let (id, output) = (self.inputs.len(), from.len());
        for (port, layer) in from.iter().enumerate() {
            let from_port = self.inputs[*layer];
            self.edges += &format!(
                "<edge from-layer=\"{layer}\" from-port=\"{from_port}\" to-layer=\"{id}\" to-port=\"{port}\"/>\n"
            );
        }
        let ports: String =
            (0..from.len()).map(|port| format!("<port id=\"{port}\" precision=\"FP32\"/>")).collect();
        let output = match *kind {
            "Result" | "Assign" => String::new(),
            _ => format!("<output><port id=\"{output}\" precision=\"FP32\" names=\"{name}\"/></output>"),
        };
        self.layers += &format!(
            "<layer id=\"{id}\" name=\"{name}\" type=\"{kind}\" version=\"{opset}\"><data {attributes}/>\
             <input>{ports}</input>{output}</layer>\n"
        );
        self.inputs.push(from.len());
        id
    }

    /// Sets the metadata of the model to a section with one entry.
    pub(super) fn set_metadata(&mut self, section: &str, name: &str, value: i64) {
        self.metadata = format!("<rt_info><{section}><{name} value=\"{value}\"/></{section}></rt_info>\n");
    }

    /// Writes the files of the IR to the directory of a model.
    pub(super) fn write(&self, directory: &Path) {
        let Self { layers, edges, constants, metadata, .. } = self;
        let text = format!(
            "<?xml version=\"1.0\"?>\n<net name=\"model\" version=\"11\">\n<layers>\n{layers}</layers>\n\
             <edges>\n{edges}</edges>\n{metadata}</net>\n"
        );
        let path = directory.join("openvino_model.xml");
        std::fs::write(path.with_extension("bin"), constants).unwrap();
        std::fs::write(path, text).unwrap();
    }
}

/// The configuration of a model in a directory.
pub(super) fn config(directory: &Path) -> Config {
    Config { kv_cache_bytes: Some(1 << 20), ..Config::new(directory.to_owned()) }
}
