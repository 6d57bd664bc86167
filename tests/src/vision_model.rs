//! A tiny vision-language model with random weights, in the format in which optimum-intel exports LLaVA. Writing it
//! takes milliseconds, so tests can use the OpenVINO backend without downloading a model. Its answers are meaningless,
//! but depend on every token and image.

mod graph;

use std::path::{Path, PathBuf};

use graph::{Graph, Node, Operation, operation};
use serde_json::{Map, Value, json};

/// Number of tokens per image.
pub const IMAGE_TOKENS: u64 = 16;
const IMAGE_SIDE: usize = 56;
const PATCH_SIDE: usize = 14;
const HIDDEN: usize = 64;
const FEED_FORWARD: usize = 128;
const LAYERS: usize = 2;
const HEADS: usize = 2;
/// The native attention supports heads of this size.
const HEAD: usize = 32;
const SPECIAL_TOKENS: [&str; 6] = ["<unk>", "<s>", "</s>", "<image>", "<|im_start|>", "<|im_end|>"];
const VOCABULARY: usize = SPECIAL_TOKENS.len() + 256;

/// Writes the files of the model to `directory` and returns their paths.
///
/// # Errors
/// The directory cannot be written.
pub fn write(directory: &Path) -> std::io::Result<Vec<PathBuf>> {
    let graphs = [
        ("openvino_language_model.xml", language_model()),
        ("openvino_text_embeddings_model.xml", text_embeddings()),
        ("openvino_vision_embeddings_model.xml", vision_embeddings()),
    ];
    let mut paths = Vec::new();
    for (name, graph) in graphs {
        let path = directory.join(name);
        graph.write(&path)?;
        paths.extend([path.with_extension("bin"), path]);
    }
    let texts = [
        ("config.json", config().to_string()),
        ("preprocessor_config.json", preprocessor_config().to_string()),
        ("generation_config.json", json!({"bos_token_id": 1, "eos_token_id": 2}).to_string()),
        ("tokenizer.json", tokenizer().to_string()),
        ("tokenizer_config.json", json!({"bos_token": "<s>", "eos_token": "</s>"}).to_string()),
        ("chat_template.jinja", CHAT_TEMPLATE.to_owned()),
    ];
    for (name, text) in texts {
        let path = directory.join(name);
        std::fs::write(&path, text)?;
        paths.push(path);
    }
    Ok(paths)
}

const CHAT_TEMPLATE: &str = "{% for message in messages %}<|im_start|>{{ message['role'] }}\n\
    {% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}\
    {% if part['type'] == 'image' %}<image>\n{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}\
    {% endfor %}{% endif %}<|im_end|>\n{% endfor %}\
    {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

fn config() -> Value {
    json!({
        "model_type": "llava",
        "image_token_index": 3,
        "vision_feature_select_strategy": "default",
        "text_config": {
            "model_type": "llama",
            "hidden_size": HIDDEN,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": HEADS,
            "head_dim": HEAD,
            "max_position_embeddings": 4096,
            "vocab_size": VOCABULARY,
        },
        "vision_config": {"model_type": "clip_vision_model", "image_size": IMAGE_SIDE, "patch_size": PATCH_SIDE},
    })
}

fn preprocessor_config() -> Value {
    json!({
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": IMAGE_SIDE},
        "crop_size": {"height": IMAGE_SIDE, "width": IMAGE_SIDE},
        "image_mean": [0.481_454_66, 0.457_827_5, 0.408_210_73],
        "image_std": [0.268_629_54, 0.261_302_58, 0.275_777_11],
        "resample": 3,
    })
}

/// A tokenizer with one token for each byte.
fn tokenizer() -> Value {
    let special = SPECIAL_TOKENS.iter().enumerate();
    let added: Vec<Value> = special
        .clone()
        .map(|(id, content)| {
            json!({
                "id": id, "content": content, "special": true,
                "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
            })
        })
        .collect();
    let mut vocabulary: Map<String, Value> =
        special.map(|(id, content)| ((*content).to_owned(), json!(id))).collect();
    vocabulary.extend((0..=u8::MAX).map(|byte| (letter(byte).to_string(), json!(token(byte)))));
    let byte_level =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    json!({
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    })
}

/// The ID of the token for a byte.
fn token(byte: u8) -> usize {
    SPECIAL_TOKENS.len() + usize::from(byte)
}

/// The character that represents a byte in the vocabulary of a tokenizer with the type `ByteLevel`.
fn letter(byte: u8) -> char {
    let is_printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if is_printable(byte) {
        return char::from(byte);
    }
    let unprintable_before = (0..byte).filter(|other| !is_printable(*other)).count();
    char::from_u32(256 + unprintable_before as u32).expect("invariant: these are Latin letters")
}

/// The standard deviation of random weights for which a matrix product preserves the magnitude of its input.
fn deviation(inputs: usize) -> f32 {
    1.0 / (inputs as f32).sqrt()
}

fn text_embeddings() -> Graph {
    let mut graph = Graph::new();
    let ids = graph.parameter("input_ids", "i64", "?,?");
    let table = graph.weights(&[VOCABULARY, HIDDEN], 0.5);
    let axis = graph.integer(0);
    let gather = Operation { name: "Gather", opset: 8, attributes: "batch_dims=\"0\"" };
    let embeddings = graph.named("inputs_embeds", &gather, &[table, ids, axis]);
    graph.add(&operation("Result", ""), &[embeddings]);
    graph
}

/// An encoder that projects each patch, adds an embedding of its position, and applies GELU and a second projection.
fn vision_embeddings() -> Graph {
    let mut graph = Graph::new();
    let pixels = graph.parameter("pixel_values", "f32", "?,3,?,?");
    let kernel = graph.weights(&[HIDDEN, 3, PATCH_SIDE, PATCH_SIDE], deviation(3 * PATCH_SIDE));
    let attributes = format!(
        "strides=\"{PATCH_SIDE}, {PATCH_SIDE}\" dilations=\"1, 1\" pads_begin=\"0, 0\" pads_end=\"0, 0\" \
         auto_pad=\"explicit\""
    );
    let patches = graph.add(&operation("Convolution", &attributes), &[pixels, kernel]);
    let patches = graph.reshape(patches, &[0, HIDDEN as i64, IMAGE_TOKENS as i64]);
    let patches = graph.transpose(patches, &[0, 2, 1]);
    let positions = graph.weights(&[1, IMAGE_TOKENS as usize, HIDDEN], 0.5);
    let patches = graph.binary("Add", patches, positions);
    let gelu = Operation { name: "Gelu", opset: 7, attributes: "approximation_mode=\"ERF\"" };
    let patches = graph.add(&gelu, &[patches]);
    let weights = graph.weights_of_8_bits(HIDDEN, HIDDEN, deviation(HIDDEN));
    let features = graph.named("last_hidden_state", &matrix_product(), &[patches, weights]);
    graph.add(&operation("Result", ""), &[features]);
    graph
}

fn language_model() -> Graph {
    let mut graph = Graph::new();
    let attention_mask = graph.parameter("attention_mask", "i64", "?,?");
    let position_ids = graph.parameter("position_ids", "i64", "?,?");
    let inputs_embeds = graph.parameter("inputs_embeds", "f32", &format!("?,?,{HIDDEN}"));
    let beam_idx = graph.parameter("beam_idx", "i32", "?");
    let positions = graph.unsqueeze(position_ids, &[1]);
    let positions = graph.add(&operation("Convert", "destination_type=\"f32\""), &[positions]);
    let attention = Attention {
        beam_idx,
        batch: graph.dimension(inputs_embeds, 0),
        mask: causal_mask(&mut graph, attention_mask, position_ids),
        rotation: Rotation::new(&mut graph, positions),
    };
    let mut hidden = inputs_embeds;
    for layer in 0..LAYERS {
        let normalized = rms_norm(&mut graph, hidden);
        let attended = attention.layer(&mut graph, layer, normalized);
        hidden = graph.binary("Add", hidden, attended);
        let normalized = rms_norm(&mut graph, hidden);
        let computed = feed_forward(&mut graph, normalized);
        hidden = graph.binary("Add", hidden, computed);
    }
    let normalized = rms_norm(&mut graph, hidden);
    // The logits of non-printable tokens are 0, and the largest logit of the printable tokens is almost certainly
    // higher, so answers are printable and do not end early.
    let mut head = graph.random_values(VOCABULARY * HIDDEN, 4.0 * deviation(HIDDEN));
    let printable = token(b' ')..=token(b'~');
    for (_, row) in head.chunks_exact_mut(HIDDEN).enumerate().filter(|(id, _)| !printable.contains(id)) {
        row.fill(0.0);
    }
    let head = graph.floats(&[VOCABULARY, HIDDEN], &head);
    let logits = graph.named("logits", &matrix_product(), &[normalized, head]);
    graph.add(&operation("Result", ""), &[logits]);
    graph
}

/// A mask of the positions, cached or new, to which each new position attends: `[batch, 1, new, all]`.
fn causal_mask(graph: &mut Graph, attention_mask: Node, position_ids: Node) -> Node {
    let total = graph.dimension(attention_mask, 1);
    let total = graph.add(&operation("Squeeze", ""), &[total]);
    let (first, step) = (graph.integer(0), graph.integer(1));
    let range = Operation { name: "Range", opset: 4, attributes: "output_type=\"i64\"" };
    let all = graph.add(&range, &[first, total, step]);
    let new = graph.unsqueeze(position_ids, &[1, 3]);
    graph.binary("LessEqual", all, new)
}

fn rms_norm(graph: &mut Graph, hidden: Node) -> Node {
    let two = graph.floats(&[1, 1, 1], &[2.0]);
    let square = graph.binary("Power", hidden, two);
    let axes = graph.integers(&[-1]);
    let mean = graph.add(&operation("ReduceMean", "keep_dims=\"true\""), &[square, axes]);
    let epsilon = graph.floats(&[1, 1, 1], &[1e-6]);
    let mean = graph.binary("Add", mean, epsilon);
    let root = graph.add(&operation("Sqrt", ""), &[mean]);
    let one = graph.floats(&[1, 1, 1], &[1.0]);
    let scale = graph.binary("Divide", one, root);
    let normalized = graph.binary("Multiply", hidden, scale);
    let weights = graph.floats(&[1, 1, HIDDEN], &[1.0; HIDDEN]);
    graph.binary("Multiply", weights, normalized)
}

fn feed_forward(graph: &mut Graph, hidden: Node) -> Node {
    let gate = graph.project(hidden, HIDDEN, FEED_FORWARD);
    let gate = graph.add(&Operation { name: "Swish", opset: 4, attributes: "" }, &[gate]);
    let up = graph.project(hidden, HIDDEN, FEED_FORWARD);
    let product = graph.binary("Multiply", gate, up);
    graph.project(product, FEED_FORWARD, HIDDEN)
}

/// The inputs that the attention operations of all layers share.
struct Attention {
    beam_idx: Node,
    /// The number of sequences, as a tensor with one element.
    batch: Node,
    mask: Node,
    rotation: Rotation,
}

impl Attention {
    fn layer(&self, graph: &mut Graph, layer: usize, hidden: Node) -> Node {
        let query = heads(graph, hidden);
        let query = self.rotation.rotate(graph, query);
        let key = heads(graph, hidden);
        let key = self.rotation.rotate(graph, key);
        let value = heads(graph, hidden);
        let key = self.cached(graph, &format!("past_key_values.{layer}.keypresent.{layer}.key"), key);
        let value = self.cached(graph, &format!("past_key_values.{layer}.valuepresent.{layer}.value"), value);
        let scale = graph.floats(&[], &[deviation(HEAD)]);
        let sdpa = Operation { name: "ScaledDotProductAttention", opset: 13, attributes: "causal=\"false\"" };
        let attended = graph.add(&sdpa, &[query, key, value, self.mask, scale]);
        let attended = graph.transpose(attended, &[0, 2, 1, 3]);
        let attended = graph.reshape(attended, &[0, 0, (HEADS * HEAD) as i64]);
        graph.project(attended, HEADS * HEAD, HIDDEN)
    }

    /// Appends keys or values to those of the earlier positions.
    fn cached(&self, graph: &mut Graph, variable: &str, new: Node) -> Node {
        let zero = graph.floats(&[], &[0.0]);
        let sizes = [HEADS as i64, 0, HEAD as i64].map(|size| graph.integers(&[size]));
        let shape =
            graph.add(&operation("Concat", "axis=\"0\""), &[self.batch, sizes[0], sizes[1], sizes[2]]);
        let broadcast = Operation { name: "Broadcast", opset: 3, attributes: "mode=\"numpy\"" };
        let empty = graph.add(&broadcast, &[zero, shape]);
        let attributes =
            format!("variable_id=\"{variable}\" variable_type=\"f32\" variable_shape=\"?,{HEADS},?,{HEAD}\"");
        let past = graph.add(&Operation { name: "ReadValue", opset: 6, attributes: &attributes }, &[empty]);
        let axis = graph.integer(0);
        let gather = Operation { name: "Gather", opset: 8, attributes: "batch_dims=\"0\"" };
        let past = graph.add(&gather, &[past, self.beam_idx, axis]);
        let all = graph.add(&operation("Concat", "axis=\"-2\""), &[past, new]);
        graph.add(&Operation { name: "Assign", opset: 6, attributes: &attributes }, &[all]);
        all
    }
}

/// Projects the hidden states to queries, keys or values: `[batch, heads, positions, elements]`.
fn heads(graph: &mut Graph, hidden: Node) -> Node {
    let projected = graph.project(hidden, HIDDEN, HEADS * HEAD);
    let divided = graph.reshape(projected, &[0, 0, HEADS as i64, HEAD as i64]);
    graph.transpose(divided, &[0, 2, 1, 3])
}

/// The rotary embedding of the positions.
struct Rotation {
    cos: Node,
    sin: Node,
}

impl Rotation {
    /// Computes the cosines and sines of `positions`, whose shape is `[batch, 1, positions]`.
    fn new(graph: &mut Graph, positions: Node) -> Self {
        const HALF: usize = HEAD / 2;
        let frequencies: Vec<f32> =
            (0..HALF).map(|index| 10_000_f32.powf(-(index as f32) / HALF as f32)).collect();
        let frequencies = graph.floats(&[1, HALF, 1], &frequencies);
        let attributes = "transpose_a=\"false\" transpose_b=\"false\"";
        let angles = graph.add(&operation("MatMul", attributes), &[frequencies, positions]);
        let angles = graph.transpose(angles, &[0, 2, 1]);
        let angles = graph.add(&operation("Concat", "axis=\"-1\""), &[angles, angles]);
        let mut part = |name| {
            let part = graph.add(&operation(name, ""), &[angles]);
            graph.unsqueeze(part, &[1])
        };
        Self { cos: part("Cos"), sin: part("Sin") }
    }

    fn rotate(&self, graph: &mut Graph, heads: Node) -> Node {
        let same = graph.binary("Multiply", heads, self.cos);
        let half = HEAD as i64 / 2;
        let second = graph.slice_last(heads, half, i64::MAX);
        let minus_one = graph.floats(&[], &[-1.0]);
        let second = graph.binary("Multiply", second, minus_one);
        let first = graph.slice_last(heads, 0, half);
        let swapped = graph.add(&operation("Concat", "axis=\"-1\""), &[second, first]);
        let swapped = graph.binary("Multiply", swapped, self.sin);
        graph.binary("Add", same, swapped)
    }
}

fn matrix_product() -> Operation<'static> {
    operation("MatMul", "transpose_a=\"false\" transpose_b=\"true\"")
}

impl Graph {
    fn binary(&mut self, name: &str, left: Node, right: Node) -> Node {
        self.add(&operation(name, "auto_broadcast=\"numpy\""), &[left, right])
    }

    /// Multiplies rows of `inputs` values by random weights.
    fn project(&mut self, rows: Node, inputs: usize, outputs: usize) -> Node {
        let weights = self.weights(&[outputs, inputs], deviation(inputs));
        self.add(&matrix_product(), &[rows, weights])
    }

    /// A matrix of random 8-bit weights with zero points and scales, in a form that the native kernels support.
    fn weights_of_8_bits(&mut self, outputs: usize, inputs: usize, deviation: f32) -> Node {
        let quants = self.random_bytes(&[outputs, inputs]);
        let zeros = self.floats(&[outputs, 1], &vec![127.5; outputs]);
        // The standard deviation of random bytes is 74.
        let scales = self.floats(&[outputs, 1], &vec![deviation / 74.0; outputs]);
        let quants = self.add(&operation("Convert", "destination_type=\"f32\""), &[quants]);
        let centered = self.binary("Subtract", quants, zeros);
        self.binary("Multiply", centered, scales)
    }

    /// Changes the shape of `node`. A size of 0 retains the size of that dimension.
    fn reshape(&mut self, node: Node, shape: &[i64]) -> Node {
        let shape = self.integers(shape);
        self.add(&operation("Reshape", "special_zero=\"true\""), &[node, shape])
    }

    fn transpose(&mut self, node: Node, order: &[i64]) -> Node {
        let order = self.integers(order);
        self.add(&operation("Transpose", ""), &[node, order])
    }

    fn unsqueeze(&mut self, node: Node, axes: &[i64]) -> Node {
        let axes = self.integers(axes);
        self.add(&operation("Unsqueeze", ""), &[node, axes])
    }

    /// Returns the size of a dimension, as a tensor with one element.
    fn dimension(&mut self, node: Node, dimension: i64) -> Node {
        let shape_of = Operation { name: "ShapeOf", opset: 3, attributes: "output_type=\"i64\"" };
        let shape = self.add(&shape_of, &[node]);
        let (index, axis) = (self.integers(&[dimension]), self.integer(0));
        let gather = Operation { name: "Gather", opset: 8, attributes: "batch_dims=\"0\"" };
        self.add(&gather, &[shape, index, axis])
    }

    /// The elements of the last dimension from `start` to `end`.
    fn slice_last(&mut self, node: Node, start: i64, end: i64) -> Node {
        let [start, end, step, axis] = [start, end, 1, 3].map(|value| self.integers(&[value]));
        self.add(&Operation { name: "Slice", opset: 8, attributes: "" }, &[node, start, end, step, axis])
    }
}
