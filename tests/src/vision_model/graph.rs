//! Writes graphs in OpenVINO's IR, without OpenVINO.

use std::fmt::Write as _;
use std::path::Path;

/// The seed of the weights.
const SEED: u64 = 0x9e37_79b9_7f4a_7c15;

/// OpenVINO requires this attribute of ports, but derives the types from the operations.
const PRECISION: &str = "precision=\"FP32\"";

/// A graph. Each of its operations has at most one output.
pub(super) struct Graph {
    layers: String,
    edges: String,
    /// The number of inputs of each layer, which is also the ID of its output port.
    input_counts: Vec<usize>,
    /// The contents of the constants.
    constants: Vec<u8>,
    random: u64,
}

/// The output of a layer.
#[derive(Clone, Copy)]
pub(super) struct Node(usize);

/// The type of a layer, with its attributes as they are written in the file.
pub(super) struct Operation<'a> {
    pub(super) name: &'a str,
    pub(super) opset: u32,
    pub(super) attributes: &'a str,
}

/// An operation of the first opset.
pub(super) fn operation<'a>(name: &'a str, attributes: &'a str) -> Operation<'a> {
    Operation { name, opset: 1, attributes }
}

impl Graph {
    pub(super) fn new() -> Self {
        let (layers, edges) = (String::new(), String::new());
        Self { layers, edges, input_counts: Vec::new(), constants: Vec::new(), random: SEED }
    }

    /// Adds an input of the model. Dynamic dimensions are written as `?`.
    pub(super) fn parameter(&mut self, name: &str, element_type: &str, shape: &str) -> Node {
        let attributes = format!("shape=\"{shape}\" element_type=\"{element_type}\"");
        self.named(name, &operation("Parameter", &attributes), &[])
    }

    pub(super) fn floats(&mut self, shape: &[usize], values: &[f32]) -> Node {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.constant("f32", shape, &bytes)
    }

    /// Adds a one-dimensional constant of integers.
    pub(super) fn integers(&mut self, values: &[i64]) -> Node {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.constant("i64", &[values.len()], &bytes)
    }

    /// Adds a scalar integer constant.
    pub(super) fn integer(&mut self, value: i64) -> Node {
        self.constant("i64", &[], &value.to_le_bytes())
    }

    /// Adds a constant with random values, whose standard deviation is `deviation`.
    pub(super) fn weights(&mut self, shape: &[usize], deviation: f32) -> Node {
        let values = self.random_values(shape.iter().product(), deviation);
        self.floats(shape, &values)
    }

    /// Adds a constant of random bytes.
    pub(super) fn random_bytes(&mut self, shape: &[usize]) -> Node {
        let count = shape.iter().product();
        let bytes: Vec<u8> = (0..count).map(|_| (self.next_uniform() * 256.0) as u8).collect();
        self.constant("u8", shape, &bytes)
    }

    pub(super) fn random_values(&mut self, count: usize, deviation: f32) -> Vec<f32> {
        // The standard deviation of uniform values between -1 and 1 is the square root of a third.
        let scale = deviation * 3.0_f32.sqrt();
        (0..count).map(|_| (self.next_uniform() * 2.0 - 1.0) * scale).collect()
    }

    /// Returns a random number between 0 and 1 (SplitMix64).
    fn next_uniform(&mut self) -> f32 {
        self.random = self.random.wrapping_add(SEED);
        let mut mixed = self.random;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) >> 40) as f32 / (1_u64 << 24) as f32
    }

    fn constant(&mut self, element_type: &str, shape: &[usize], bytes: &[u8]) -> Node {
        let (offset, size) = (self.constants.len(), bytes.len());
        self.constants.extend(bytes);
        let shape = shape.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
        let attributes =
            format!("element_type=\"{element_type}\" shape=\"{shape}\" offset=\"{offset}\" size=\"{size}\"");
        self.add(&operation("Const", &attributes), &[])
    }

    /// Adds an operation on the outputs of other layers.
    pub(super) fn add(&mut self, operation: &Operation<'_>, inputs: &[Node]) -> Node {
        let name = format!("{}_{}", operation.name, self.input_counts.len());
        self.named(&name, operation, inputs)
    }

    /// Adds an operation whose output has the name `name`.
    pub(super) fn named(&mut self, name: &str, operation: &Operation<'_>, inputs: &[Node]) -> Node {
        let Operation { name: kind, opset, attributes } = operation;
        let id = self.input_counts.len();
        let mut ports = String::new();
        for (port, Node(from)) in inputs.iter().enumerate() {
            let from_port = self.input_counts[*from];
            let edge = format!(
                "from-layer=\"{from}\" from-port=\"{from_port}\" to-layer=\"{id}\" to-port=\"{port}\""
            );
            writeln!(self.edges, "<edge {edge}/>").expect("invariant: writing to a string succeeds");
            ports += &format!("<port id=\"{port}\" {PRECISION}/>");
        }
        let output = match *kind {
            "Result" | "Assign" => String::new(),
            _ => format!("<output><port id=\"{}\" {PRECISION} names=\"{name}\"/></output>", inputs.len()),
        };
        self.layers += &format!(
            "<layer id=\"{id}\" name=\"{name}\" type=\"{kind}\" version=\"opset{opset}\">\
             <data {attributes}/><input>{ports}</input>{output}</layer>\n"
        );
        self.input_counts.push(inputs.len());
        Node(id)
    }

    /// Writes the graph to `path`, and its constants to a file with the extension `bin` next to it.
    pub(super) fn write(&self, path: &Path) -> std::io::Result<()> {
        let Self { layers, edges, constants, .. } = self;
        let text = format!(
            "<?xml version=\"1.0\"?>\n<net name=\"model\" version=\"11\">\n<layers>\n{layers}</layers>\n\
             <edges>\n{edges}</edges>\n</net>\n"
        );
        std::fs::write(path.with_extension("bin"), constants)?;
        std::fs::write(path, text)
    }
}
