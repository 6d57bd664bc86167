//! Checks for small models with LongRoPE, in the form in which `optimum-intel` exports such models, that the result of
//! a sequence depends neither on the other sequences of a step nor on the chunks of its prompt, and that
//! `max_model_len` selects the factors.

use std::ops::Range;

use server_engine::ModelRunner as _;
use server_scheduler::{Batch, BlockId, ScheduledSequence, SequenceId};

use super::Random;
use super::ir::{Ir, Operation, config, operation};
use crate::Error;
use crate::config::Config;
use crate::load::load;
use crate::runner::OpenVinoRunner;

/// The context length up to which the short factors apply.
const ORIGINAL: u32 = 48;

/// Number of tokens of a sequence that is shorter than `ORIGINAL`, and of one that is longer.
const SHORT: usize = 8;
pub(super) const LONG: usize = 80;

const VOCABULARY: usize = 16;
const HIDDEN: usize = 64;
const HEADS: usize = 2;
const HEAD: usize = 32;

/// Number of tokens in a block of the KV cache, and number of blocks of a sequence.
const BLOCK_TOKENS: usize = 32;
const SEQUENCE_BLOCKS: usize = 4;

/// The largest allowed difference between logits that should be equal. Their magnitude is about 1.
pub(super) const TOLERANCE: f32 = 1e-3;

/// The smallest allowed difference between logits that should differ, such as those with the short factors and those
/// with the long factors.
pub(super) const DIFFERENCE_MIN: f32 = 1e-2;

/// The factors that divide the rotary frequencies, with the attention factor.
#[derive(Clone, Copy, Debug)]
pub(super) enum Factors {
    Short,
    Long,
    /// The short or the long factors, according to a condition on the largest position.
    Selected(Condition),
}

/// A condition on the largest position. The rewrite that selects the factors supports only the conditions in
/// [`Condition::KNOWN`].
#[derive(Clone, Copy, Debug)]
pub(super) enum Condition {
    /// `max(position_ids) + 1 > ORIGINAL`.
    Greater,
    /// `ORIGINAL < max(position_ids) + 1`.
    Less,
    /// `f32([max(position_ids)]) > ORIGINAL - 1`.
    Converted,
    /// `max(2 * position_ids) + 1 > ORIGINAL`, which the rewrite does not recognize.
    Unknown,
    /// `max(position_ids) + 1 > ORIGINAL`, whose left side is then doubled by so many additions that visiting each of
    /// their inputs would take years.
    Doubled,
}

impl Condition {
    const KNOWN: [Self; 3] = [Self::Greater, Self::Less, Self::Converted];

    fn add_to(self, graph: &mut Graph, position_ids: usize) -> usize {
        let positions = match self {
            Self::Unknown => {
                let two = graph.integer(2);
                graph.binary("Multiply", position_ids, two)
            }
            Self::Greater | Self::Less | Self::Converted | Self::Doubled => position_ids,
        };
        let axes = graph.integers(&[0, 1]);
        let last = graph.add("ReduceMax", "keep_dims=\"false\"", &[positions, axes]);
        if let Self::Converted = self {
            let last = graph.unsqueeze(last, &[0]);
            let last = graph.add("Convert", "destination_type=\"f32\"", &[last]);
            let limit = graph.floats("", &[ORIGINAL as f32 - 1.0]);
            return graph.binary("Greater", last, limit);
        }
        let one = graph.integer(1);
        let mut length = graph.binary("Add", last, one);
        if let Self::Doubled = self {
            for _ in 0..60 {
                length = graph.binary("Add", length, length);
            }
        }
        let original = graph.integer(i64::from(ORIGINAL));
        match self {
            Self::Less => graph.binary("Less", original, length),
            Self::Greater | Self::Converted | Self::Unknown | Self::Doubled => {
                graph.binary("Greater", length, original)
            }
        }
    }
}

/// A graph with random weights.
struct Graph {
    ir: Ir,
    random: Random,
}

/// The nodes with the cosines and sines of the angles by which the heads are rotated.
#[derive(Clone, Copy)]
struct Rotation {
    cosines: usize,
    sines: usize,
}

impl Graph {
    fn add(&mut self, name: &str, attributes: &str, from: &[usize]) -> usize {
        self.ir.operation(&operation(name, attributes), from)
    }

    fn binary(&mut self, name: &str, left: usize, right: usize) -> usize {
        self.add(name, "auto_broadcast=\"numpy\"", &[left, right])
    }

    fn floats(&mut self, shape: &str, values: &[f32]) -> usize {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.ir.constants("f32", shape, &bytes)
    }

    fn integers(&mut self, values: &[i64]) -> usize {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.ir.constants("i64", &values.len().to_string(), &bytes)
    }

    fn integer(&mut self, value: i64) -> usize {
        self.ir.constant("i64", &value.to_le_bytes())
    }

    /// A matrix with random weights between `-limit` and `limit`.
    fn weights(&mut self, rows: usize, columns: usize, limit: f32) -> usize {
        let random = &mut self.random;
        let values: Vec<f32> =
            (0..rows * columns).map(|_| (random.below(2001) as f32 / 1000.0 - 1.0) * limit).collect();
        self.floats(&format!("{rows},{columns}"), &values)
    }

    fn unsqueeze(&mut self, from: usize, axes: &[i64]) -> usize {
        let axes = self.integers(axes);
        self.add("Unsqueeze", "", &[from, axes])
    }

    fn transpose(&mut self, from: usize, order: &[i64]) -> usize {
        let order = self.integers(order);
        self.add("Transpose", "", &[from, order])
    }

    fn reshape(&mut self, from: usize, shape: &[i64]) -> usize {
        let shape = self.integers(shape);
        self.add("Reshape", "special_zero=\"true\"", &[from, shape])
    }

    fn gather(&mut self, data: usize, indices: usize) -> usize {
        let axis = self.integer(0);
        let gather = Operation { name: "Gather", opset: "opset8", attributes: "batch_dims=\"0\"" };
        self.ir.operation(&gather, &[data, indices, axis])
    }

    /// The size of a dimension, as a list of one number.
    fn dimension(&mut self, from: usize, dimension: i64) -> usize {
        let shape_of = Operation { name: "ShapeOf", opset: "opset3", attributes: "output_type=\"i64\"" };
        let shape = self.ir.operation(&shape_of, &[from]);
        let index = self.integers(&[dimension]);
        self.gather(shape, index)
    }

    fn project(&mut self, rows: usize) -> usize {
        // Limit the magnitude of the weights, so that the outputs have about the same magnitude as the inputs.
        let weights = self.weights(HIDDEN, HIDDEN, (3.0 / HIDDEN as f32).sqrt());
        self.add("MatMul", PRODUCT, &[rows, weights])
    }

    /// Computes a projection, and returns its output with the shape `[batch, heads, positions, elements]`.
    fn heads(&mut self, hidden: usize) -> usize {
        let projected = self.project(hidden);
        let divided = self.reshape(projected, &[0, 0, HEADS as i64, HEAD as i64]);
        self.transpose(divided, &[0, 2, 1, 3])
    }

    /// The elements of heads from `start` (inclusive) to `end` (exclusive) in the last dimension.
    fn slice(&mut self, heads: usize, start: i64, end: i64) -> usize {
        let [start, end, step, axis] = [start, end, 1, 3].map(|value| self.integers(&[value]));
        let slice = Operation { name: "Slice", opset: "opset8", attributes: "" };
        self.ir.operation(&slice, &[heads, start, end, step, axis])
    }

    /// Rotates the halves of heads.
    fn rotate(&mut self, heads: usize, rotation: Rotation) -> usize {
        let half = HEAD as i64 / 2;
        let same = self.binary("Multiply", heads, rotation.cosines);
        let second = self.slice(heads, half, i64::MAX);
        let minus_one = self.floats("", &[-1.0]);
        let second = self.binary("Multiply", second, minus_one);
        let first = self.slice(heads, 0, half);
        let swapped = self.add("Concat", "axis=\"-1\"", &[second, first]);
        let swapped = self.binary("Multiply", swapped, rotation.sines);
        self.binary("Add", same, swapped)
    }

    /// Adds the nodes with the cosines and sines of the angles by which the heads are rotated.
    fn rotation(&mut self, position_ids: usize, factors: Factors) -> Rotation {
        const HALF: usize = HEAD / 2;
        let sets = [("16", vec![1.0; HALF], vec![4.0; HALF]), ("", vec![1.0], vec![1.5])];
        let selected = match factors {
            Factors::Short => sets.map(|(shape, short, _)| self.floats(shape, &short)),
            Factors::Long => sets.map(|(shape, _, long)| self.floats(shape, &long)),
            Factors::Selected(condition) => {
                let is_long = condition.add_to(self, position_ids);
                sets.map(|(shape, short, long)| {
                    let [long, short] = [long, short].map(|values| self.floats(shape, &values));
                    self.add("Select", "auto_broadcast=\"numpy\"", &[is_long, long, short])
                })
            }
        };
        let [divisors, scale] = selected;
        let frequencies: Vec<f32> =
            (0..HALF).map(|index| 10_000_f32.powf(-(index as f32) / HALF as f32)).collect();
        let frequencies = self.floats("16", &frequencies);
        let frequencies = self.binary("Divide", frequencies, divisors);
        let frequencies = self.unsqueeze(frequencies, &[0, 2]);
        let positions = self.unsqueeze(position_ids, &[1]);
        let positions = self.add("Convert", "destination_type=\"f32\"", &[positions]);
        let attributes = "transpose_a=\"false\" transpose_b=\"false\"";
        let angles = self.add("MatMul", attributes, &[frequencies, positions]);
        let angles = self.transpose(angles, &[0, 2, 1]);
        let angles = self.add("Concat", "axis=\"-1\"", &[angles, angles]);
        let [cosines, sines] = ["Cos", "Sin"].map(|name| {
            let part = self.add(name, "", &[angles]);
            let part = self.binary("Multiply", part, scale);
            self.unsqueeze(part, &[1])
        });
        Rotation { cosines, sines }
    }

    /// Appends keys or values to those of the earlier positions.
    fn cached(&mut self, name: &str, beam_idx: usize, batch: usize, new: usize) -> usize {
        let zero = self.floats("", &[0.0]);
        let sizes = [HEADS as i64, 0, HEAD as i64].map(|size| self.integers(&[size]));
        let shape = self.add("Concat", "axis=\"0\"", &[batch, sizes[0], sizes[1], sizes[2]]);
        let broadcast = Operation { name: "Broadcast", opset: "opset3", attributes: "mode=\"numpy\"" };
        let empty = self.ir.operation(&broadcast, &[zero, shape]);
        let variable = format!("past_key_values.0.{name}present.0.{name}");
        let attributes =
            format!("variable_id=\"{variable}\" variable_type=\"f32\" variable_shape=\"?,{HEADS},?,{HEAD}\"");
        let state = |name| Operation { name, opset: "opset6", attributes: &attributes };
        let past = self.ir.operation(&state("ReadValue"), &[empty]);
        let past = self.gather(past, beam_idx);
        let all = self.add("Concat", "axis=\"-2\"", &[past, new]);
        self.ir.operation(&state("Assign"), &[all]);
        all
    }
}

const PRODUCT: &str = "transpose_a=\"false\" transpose_b=\"true\"";

/// A language model with one layer. A position attends to itself and, with `past`, to at most this number of earlier
/// positions. Models with different factors or masks have the same weights.
pub(super) fn ir(factors: Factors, past: Option<i64>) -> Ir {
    let mut graph = Graph { ir: Ir::default(), random: Random(1) };
    let input_ids = graph.ir.input("input_ids", "i64", "?,?");
    let attention_mask = graph.ir.input("attention_mask", "i64", "?,?");
    let position_ids = graph.ir.input("position_ids", "i64", "?,?");
    let beam_idx = graph.ir.input("beam_idx", "i32", "?");
    let table = graph.weights(VOCABULARY, HIDDEN, 1.7);
    let hidden = graph.gather(table, input_ids);
    let rotation = graph.rotation(position_ids, factors);
    let batch = graph.dimension(input_ids, 0);
    let query = graph.heads(hidden);
    let query = graph.rotate(query, rotation);
    let key = graph.heads(hidden);
    let key = graph.rotate(key, rotation);
    let value = graph.heads(hidden);
    let key = graph.cached("key", beam_idx, batch, key);
    let value = graph.cached("value", beam_idx, batch, value);
    // Whether a position attends to each of the cached and new positions.
    let total = graph.dimension(attention_mask, 1);
    let total = graph.add("Squeeze", "", &[total]);
    let (first, step) = (graph.integer(0), graph.integer(1));
    let range = Operation { name: "Range", opset: "opset4", attributes: "output_type=\"i64\"" };
    let all = graph.ir.operation(&range, &[first, total, step]);
    let new = graph.unsqueeze(position_ids, &[1, 3]);
    let mut mask = graph.binary("LessEqual", all, new);
    if let Some(past) = past {
        let past = graph.integer(past);
        let first = graph.binary("Subtract", new, past);
        let within = graph.binary("GreaterEqual", all, first);
        mask = graph.binary("LogicalAnd", mask, within);
    }
    let scale = graph.floats("", &[1.0 / (HEAD as f32).sqrt()]);
    let attention =
        Operation { name: "ScaledDotProductAttention", opset: "opset13", attributes: "causal=\"false\"" };
    let attended = graph.ir.operation(&attention, &[query, key, value, mask, scale]);
    let attended = graph.transpose(attended, &[0, 2, 1, 3]);
    let attended = graph.reshape(attended, &[0, 0, HIDDEN as i64]);
    let attended = graph.project(attended);
    let hidden = graph.binary("Add", hidden, attended);
    let head = graph.weights(VOCABULARY, HIDDEN, (3.0 / HIDDEN as f32).sqrt());
    let logits = graph.ir.named("logits", &operation("MatMul", PRODUCT), &[hidden, head]);
    graph.add("Result", "", &[logits]);
    graph.ir
}

/// Loads a model with a context of `max_model_len` tokens.
fn load_model(factors: Factors, max_model_len: Option<u32>) -> Result<OpenVinoRunner, Error> {
    load_ir(&ir(factors, None), max_model_len)
}

/// Loads the model of an IR, with a context of `max_model_len` tokens.
pub(super) fn load_ir(ir: &Ir, max_model_len: Option<u32>) -> Result<OpenVinoRunner, Error> {
    let directory = tempfile::tempdir().unwrap();
    ir.write(directory.path());
    let properties = [("INFERENCE_PRECISION_HINT", "f32"), ("KV_CACHE_PRECISION", "f32")];
    let plugin_config = properties.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
    let config = Config { plugin_config, max_model_len, ..config(directory.path()) };
    Ok(load(&config, &mut |_| {})?.0)
}

/// A part of a prompt. The sequence with number `sequence` always has the same tokens and the same blocks.
struct Chunk {
    sequence: usize,
    positions: Range<usize>,
}

/// Computes chunks in one step, and returns the logits of the last token of each.
fn run(runner: &mut OpenVinoRunner, chunks: &[Chunk]) -> Vec<Vec<f32>> {
    let mut batch = Batch::default();
    for Chunk { sequence, positions } in chunks {
        let id = SequenceId::new(*sequence as u64, 0);
        let starts = [batch.tokens.len(), batch.blocks.len(), batch.samples.len()].map(|start| start as u32);
        batch.tokens.extend(
            positions.clone().map(|position| ((position * position + 3 * sequence) % VOCABULARY) as u32),
        );
        let first_block = sequence * SEQUENCE_BLOCKS;
        let blocks = first_block..first_block + positions.end.div_ceil(BLOCK_TOKENS);
        batch.blocks.extend(blocks.map(|block| BlockId(block as u32)));
        batch.samples.push(id);
        batch.sequences.push(ScheduledSequence {
            id,
            computed_tokens: positions.start as u32,
            tokens: starts[0]..batch.tokens.len() as u32,
            blocks: starts[1]..batch.blocks.len() as u32,
            samples: starts[2]..batch.samples.len() as u32,
            scored_tokens: 0..0,
            num_draft_tokens: 0,
            evicted_tokens: 0,
            adapter: 0,
        });
    }
    runner.run(&batch).unwrap().rows().map(<[f32]>::to_vec).collect()
}

/// Returns the logits of the last token of a sequence that is computed in one step.
pub(super) fn logits_alone(runner: &mut OpenVinoRunner, sequence: usize, length: usize) -> Vec<f32> {
    run(runner, &[Chunk { sequence, positions: 0..length }]).remove(0)
}

pub(super) fn difference(one: &[f32], other: &[f32]) -> f32 {
    assert_eq!((one.len(), other.len()), (VOCABULARY, VOCABULARY));
    one.iter().zip(other).map(|(one, other)| (one - other).abs()).fold(0.0, f32::max)
}

#[test]
fn a_sequence_depends_neither_on_longer_ones_nor_on_the_chunks_of_its_prompt() {
    for condition in Condition::KNOWN {
        let mut runner = load_model(Factors::Selected(condition), Some(LONG as u32)).unwrap();
        let alone = logits_alone(&mut runner, 0, SHORT);
        let chunks = [Chunk { sequence: 0, positions: 0..SHORT }, Chunk { sequence: 1, positions: 0..LONG }];
        let together = run(&mut runner, &chunks);
        let changed = difference(&together[0], &alone);
        assert!(changed < TOLERANCE, "{condition:?}: a longer sequence changes logits by {changed}");
        let whole = &together[1];
        logits_alone(&mut runner, 2, ORIGINAL as usize - 8);
        let parts = run(&mut runner, &[Chunk { sequence: 2, positions: ORIGINAL as usize - 8..LONG }]);
        let whole_again = logits_alone(&mut runner, 2, LONG);
        let changed = difference(&parts[0], &whole_again);
        assert!(changed < TOLERANCE, "{condition:?}: chunks change logits by {changed}");
        let expected = logits_alone(&mut load_model(Factors::Long, None).unwrap(), 1, LONG);
        let changed = difference(whole, &expected);
        assert!(
            changed < TOLERANCE,
            "{condition:?}: logits differ from those with long factors by {changed}"
        );
    }
}

#[test]
fn the_longest_sequence_selects_the_factors() {
    let [short, long] = [Factors::Short, Factors::Long]
        .map(|factors| logits_alone(&mut load_model(factors, None).unwrap(), 0, SHORT));
    assert!(difference(&short, &long) > DIFFERENCE_MIN, "{short:?} {long:?}");
    for condition in Condition::KNOWN {
        for (max_model_len, expected) in [(ORIGINAL, &short), (ORIGINAL + 1, &long)] {
            let mut runner = load_model(Factors::Selected(condition), Some(max_model_len)).unwrap();
            let changed = difference(&logits_alone(&mut runner, 0, SHORT), expected);
            assert!(changed < TOLERANCE, "{condition:?}, {max_model_len} tokens: {changed}");
        }
    }
}

#[test]
fn a_condition_with_an_unknown_form_or_without_a_context_length_is_rejected() {
    let rejection = |condition, max_model_len| {
        load_model(Factors::Selected(condition), max_model_len).err().unwrap().chain()
    };
    for condition in Condition::KNOWN {
        let error = rejection(condition, None);
        assert!(error.contains("no context length; set --max-model-len"), "{error}");
    }
    // `Unknown` is already true from position 24 on, so its value also varies among sequences of at most `ORIGINAL`
    // tokens.
    for condition in [Condition::Unknown, Condition::Doubled] {
        for max_model_len in [None, Some(ORIGINAL), Some(ORIGINAL + 1)] {
            let error = rejection(condition, max_model_len);
            assert!(error.contains("in an unknown way; supported conditions compare"), "{error}");
            assert!(!error.contains("--max-model-len"), "{error}");
        }
    }
}
