//! Reads a GGUF file as a graph with exactly the weights that the file contains. The weights are read from the file
//! when they are needed.

use std::sync::Arc;

use server_gguf::{GgufFile, TensorEntry, TensorType};

use crate::Error;
use crate::runtime::Model;
use crate::shim::{self, GraphWeights, PermutedProjection, WeightForm};
use crate::weights::Matrix;
use graph_file::{FUSED, GraphFile};
use tensor_source::SourceTensor;
pub(crate) use tensor_source::TensorSource;

mod graph_file;
mod hyperparameters;
mod tensor_source;
mod yarn;

/// The tensor with the divisors of the rotary frequencies, one f32 for each pair of a head (Llama 3.1 and later).
const ROTARY_FACTORS: &str = "rope_freqs.weight";

/// The divisors of models with long contexts: one tensor is for contexts up to the original length, and the other for
/// longer contexts. All sequences use the same tensor, because the angles of cached keys cannot change when a sequence
/// grows beyond the original length.
const ROTARY_FACTORS_SHORT: &str = "rope_factors_short.weight";
const ROTARY_FACTORS_LONG: &str = "rope_factors_long.weight";

/// The part of a tensor's name that marks a stack of matrices, one for each expert.
const EXPERTS: &str = "_exps.";

/// Reads the file with the runtime's front end, which may round weights, and replaces the weights with exact ones.
/// `max_model_len` is the length of the longest sequence in tokens, or `None` for the context length in the file.
pub(crate) fn read(file: &Arc<GgufFile>, max_model_len: Option<u32>) -> Result<Model, Error> {
    reject_unknown_types(file)?;
    hyperparameters::check(file)?;
    reject_unproven_experts(file)?;
    match read_with(file, max_model_len, GraphInput::Vectors) {
        // If no node has the name of a weight, the graph may use the weight under another name, so let the front end
        // read all weights.
        Err(ReadError::NoNode(_)) if !is_split(file) => read_with(file, max_model_len, GraphInput::Whole),
        Err(ReadError::NoGraphFile(error)) if !is_split(file) => {
            tracing::warn!(%error, "loading takes more memory, because OpenVINO's front end reads all weights");
            read_with(file, max_model_len, GraphInput::Whole)
        }
        read => read,
    }
    .map_err(|error| match error {
        ReadError::NoNode(entry) => {
            let TensorEntry { name, kind, .. } = entry;
            Error::Unsupported(format!(
                "OpenVINO's graph of the file has no node for the weight {name} ({kind})"
            ))
        }
        ReadError::NoGraphFile(error) | ReadError::Other(error) => error,
    })
}

/// The reason why a graph cannot be read from a [`GraphInput`].
enum ReadError<'a> {
    /// The graph has no node for this weight.
    NoNode(&'a TensorEntry),
    /// The temporary file for the front end cannot be written.
    NoGraphFile(Error),
    Other(Error),
}

impl From<Error> for ReadError<'_> {
    fn from(error: Error) -> Self {
        Self::Other(error)
    }
}

impl From<server_gguf::Error> for ReadError<'_> {
    fn from(error: server_gguf::Error) -> Self {
        Self::Other(error.into())
    }
}

/// Reads the graph and corrects it. The weights are read from the file when they are needed.
fn read_with(
    file: &Arc<GgufFile>,
    max_model_len: Option<u32>,
    input: GraphInput,
) -> Result<Model, ReadError<'_>> {
    let mut model = read_graph(file, input)?;
    fix_experts(file, &mut model)?;
    restore_window(file, &mut model)?;
    divide_frequencies(file, &mut model, max_model_len)?;
    correct_yarn(file, &mut model)?;
    unscale_local_frequencies(file, &mut model)?;
    let permuted = shim::rewrite_rotary(&mut model)?;
    tracing::debug!(projections = permuted.len(), "rewrote rotary embeddings");
    replace_weights(file, &mut model, &permuted, input)?;
    check_permuted(file, &permuted)?;
    Ok(model)
}

/// The file from which the front end builds the graph.
#[derive(Clone, Copy, PartialEq, Eq)]
enum GraphInput {
    /// A file with only the vectors of the model, so that the front end reads no matrices.
    Vectors,
    /// The file of the model.
    Whole,
}

/// A weight of the graph, and the tensor of the file that replaces it.
struct Replacement<'a> {
    entry: &'a TensorEntry,
    /// The name of the weight in the graph.
    name: String,
    tensor: SourceTensor,
}

/// Replaces the matrices that the front end may round or did not read with weights that are read from the file when
/// they are needed.
fn replace_weights<'a>(
    file: &'a Arc<GgufFile>,
    model: &mut Model,
    permuted: &[PermutedProjection],
    input: GraphInput,
) -> Result<(), ReadError<'a>> {
    let head_size =
        |entry: &TensorEntry| permuted.iter().find(|one| one.tensor == entry.name).map(|one| one.head_size);
    let tensors = file.tensors().iter().map(|entry| (entry, head_size(entry)));
    let mut replacements = Vec::new();
    for (entry, head_size) in
        tensors.filter(|(entry, head_size)| head_size.is_some() || is_replaced(entry, input))
    {
        if entry.name.contains(FUSED) {
            replacements.extend(fused_parts(file, entry));
        } else {
            let tensor = SourceTensor::whole(entry, head_size);
            replacements.push(Replacement { entry, name: entry.name.clone(), tensor });
        }
    }
    let tensors: Vec<_> = replacements.iter().map(|one| one.tensor.clone()).collect();
    let mut weights = GraphWeights::find(model, TensorSource::new(Arc::clone(file), tensors))?;
    for (number, Replacement { entry, name, tensor }) in replacements.iter().enumerate() {
        let form = Matrix::form(tensor.kind)?;
        if weights.set(name, WeightForm { number, shape: tensor.shape, form: &form })? {
            continue;
        }
        if tensor.head_size.is_some() {
            let lacks = format!("the graph lacks the projection {name}, whose rows are permuted");
            return Err(Error::runtime("write a weight", &lacks).into());
        }
        if entry.name.contains(FUSED) {
            let lacks = format!("the graph lacks {name}, a part of a fused projection");
            return Err(Error::runtime("write a weight", &lacks).into());
        }
        // A missing node is not an error if the front end has read the weight, because the graph may use it under
        // another name. However, the front end may have rounded quantized experts, so these must be replaced.
        let is_rounded = entry.shape.len() == 3 && entry.kind.is_quantized();
        if is_rounded || input == GraphInput::Vectors {
            return Err(ReadError::NoNode(entry));
        }
    }
    Ok(())
}

/// Returns the parts of a fused weight, each with the name that the front end assigns to it.
fn fused_parts<'a>(file: &GgufFile, entry: &'a TensorEntry) -> Vec<Replacement<'a>> {
    let number = |key: &str| file.get_of_architecture(key).and_then(|value| value.u64());
    let heads = number("attention.head_count").unwrap_or(0);
    let kv_heads = number("attention.head_count_kv").unwrap_or(heads);
    // The shim rejects parts whose size differs from their size in the graph, so invalid head counts need no check
    // here.
    let head_rows = entry.rows().checked_div(heads.saturating_add(kv_heads.saturating_mul(2))).unwrap_or(0);
    let mut next = 0;
    [(".attn_q.", heads), (".attn_k.", kv_heads), (".attn_v.", kv_heads)]
        .map(|(part, heads)| {
            let first = next;
            next = (first + heads * head_rows).min(entry.rows());
            let mut tensor = SourceTensor::whole(entry, None);
            tensor.first_row = first as usize;
            tensor.shape.rows = (next - first) as usize;
            Replacement { entry, name: entry.name.replace(FUSED, part), tensor }
        })
        .into()
}

/// The architectures for which the corrected graphs of models with experts are tested. The files of Mixtral have the
/// architecture `llama`.
const EXPERT_ARCHITECTURES: [&str; 3] = ["gpt-oss", "llama", "qwen3moe"];

fn has_experts(file: &GgufFile) -> bool {
    file.tensors().iter().any(|entry| entry.name.contains(EXPERTS))
}

fn reject_unknown_types(file: &GgufFile) -> Result<(), Error> {
    match file.tensors().iter().find(|tensor| !tensor.kind.is_decodable() && tensor.shape.len() > 1) {
        Some(TensorEntry { name, kind, .. }) => {
            Err(Error::Unsupported(format!("the type {kind} of its tensor {name} is not supported")))
        }
        None => Ok(()),
    }
}

fn reject_unproven_experts(file: &GgufFile) -> Result<(), Error> {
    let architecture = file.architecture().unwrap_or_default();
    if has_experts(file) && !EXPERT_ARCHITECTURES.contains(&architecture) {
        return Err(Error::Unsupported(format!(
            "its architecture {architecture:?} is not supported with experts (supported: {})",
            EXPERT_ARCHITECTURES.join(", ")
        )));
    }
    Ok(())
}

/// Corrects the graphs that the front end builds for these architectures. In these graphs, the output of the experts
/// has the shape of one sequence. The weights of the chosen experts are normalized only if the file requires it, and
/// for gpt-oss over a dimension of size 1. For qwen3moe, the graphs rotate pairs of adjacent elements, although the
/// weights are for pairs of one element from each half of a head.
fn fix_experts(file: &GgufFile, model: &mut Model) -> Result<(), Error> {
    if !has_experts(file) {
        return Ok(());
    }
    let rotated = match file.architecture() {
        Some("qwen3moe") => shim::rotate_halves(model)?,
        _ => 0,
    };
    let layers = shim::fix_experts(model)?;
    tracing::debug!(rotated, layers, "fixed the graph of the experts");
    Ok(())
}

/// Sets the sliding window of all layers of Phi 3, which the front end sets only in every other layer.
fn restore_window(file: &GgufFile, model: &mut Model) -> Result<(), Error> {
    let window = file.get_of_architecture("attention.sliding_window").and_then(|value| value.u64());
    match (file.architecture(), window) {
        (Some("phi3"), Some(window)) if window > 0 => {
            // A window that exceeds 32 bits has no effect.
            u32::try_from(window)
                .map_or(Ok(()), |window| shim::set_sliding_window(model, window.min(i32::MAX as u32)))
        }
        _ => Ok(()),
    }
}

fn read_graph(file: &GgufFile, input: GraphInput) -> Result<Model, ReadError<'_>> {
    let graph_file = match input {
        GraphInput::Vectors => {
            let written = GraphFile::write(file, |entry| is_replaced(entry, input));
            Some(written.map_err(|error| match error {
                Error::Runtime { .. } => ReadError::NoGraphFile(error),
                other => ReadError::Other(other),
            })?)
        }
        GraphInput::Whole => None,
    };
    let model =
        shim::read_gguf(graph_file.as_ref().map_or(file.path(), GraphFile::path)).map_err(|error| {
            let architecture = file.architecture().unwrap_or("(none)");
            match error {
                Error::Runtime { message, .. } => Error::Unsupported(format!(
                    "OpenVINO's front end rejects its file (architecture: {architecture:?}): {message}"
                )),
                other => other,
            }
        })?;
    Ok(model)
}

/// Divides the frequencies of the rotary embeddings by the factors in the file, which the front end ignores.
fn divide_frequencies(file: &GgufFile, model: &mut Model, max_model_len: Option<u32>) -> Result<(), Error> {
    let Some(entry) = rotary_factors(file, max_model_len) else { return Ok(()) };
    let unsupported = |why| Err(Error::Unsupported(format!("its rotary factors ({}) {why}", entry.name)));
    let mut bytes = Vec::new();
    file.read_tensor(&entry.name, &mut bytes)?;
    let factors: Vec<f32> = bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    if entry.kind != TensorType::F32 || !factors.iter().all(|factor| factor.is_finite() && *factor > 0.0) {
        return unsupported("are not positive, finite f32 numbers");
    }
    if shim::divide_frequencies(model, None, &factors)? == 0 {
        return unsupported("match no frequencies in the graph");
    }
    if entry.name == ROTARY_FACTORS {
        return Ok(());
    }
    // A longer context flattens the attention, and this factor compensates for that.
    let scale = file.get_of_architecture("rope.scaling.attn_factor").and_then(|value| value.f32());
    match scale {
        Some(scale) if scale != 1.0 && shim::scale_rotary(model, scale, factors.len())? == 0 => {
            unsupported("come with an attention factor that matches no rotary embedding in the graph")
        }
        _ => Ok(()),
    }
}

/// Returns the tensor with the factors that apply to the model's context length.
fn rotary_factors(file: &GgufFile, max_model_len: Option<u32>) -> Option<&TensorEntry> {
    let (short, long) = (file.tensor(ROTARY_FACTORS_SHORT), file.tensor(ROTARY_FACTORS_LONG));
    let number = |key: &str| file.get_of_architecture(key).and_then(|value| value.u64());
    let context = number("context_length");
    let original = number("rope.scaling.original_context_length").or(context).unwrap_or(u64::MAX);
    let longest = max_model_len.map(u64::from).or(context).unwrap_or(0);
    let extended = if longest > original { long } else { short };
    extended.or_else(|| file.tensor(ROTARY_FACTORS))
}

/// Corrects the frequencies of gpt-oss, whose context was extended with YaRN: like llama.cpp, the front end rounds the
/// ends of the range of pairs whose frequencies are mixtures (see `yarn.rs`), but the model was trained without this
/// rounding.
fn correct_yarn(file: &GgufFile, model: &mut Model) -> Result<(), Error> {
    let is_yarn = file.get_of_architecture("rope.scaling.type").and_then(|value| value.str()) == Some("yarn");
    if file.architecture() != Some("gpt-oss") || !is_yarn {
        return Ok(());
    }
    let integer = |key: &str| file.get_of_architecture(key).and_then(|value| value.u64());
    let real = |key: &str| file.get_of_architecture(key).and_then(|value| value.f32()).map(f64::from);
    let parameters = (
        integer("rope.dimension_count").or(integer("attention.key_length")),
        integer("rope.scaling.original_context_length"),
        real("rope.freq_base"),
        real("rope.scaling.factor"),
    );
    let (Some(dimensions), Some(context), Some(base), Some(factor)) = parameters else {
        return Err(Error::Unsupported(
            "it lacks YaRN hyperparameters (required: rope.dimension_count or attention.key_length, \
             rope.scaling.original_context_length, rope.freq_base and rope.scaling.factor)"
                .to_owned(),
        ));
    };
    let yarn = yarn::Yarn::new(dimensions, context, base, factor).ok_or_else(|| {
        Error::Unsupported(format!(
            "its YaRN hyperparameters are invalid: {dimensions} dimensions (allowed: at least 2), a context of \
             {context} tokens (at least 1), base {base} (greater than 1), factor {factor} (greater than 0)"
        ))
    })?;
    match shim::divide_frequencies(model, None, &yarn.divisors())? {
        0 => Err(Error::Unsupported("its YaRN frequencies match no frequencies in the graph".to_owned())),
        _ => Ok(()),
    }
}

/// Undoes the scaling of positions in the local layers of Gemma 3. The scaling is meant for the global layers, which
/// have another rotary base, but the front end applies it to all layers.
fn unscale_local_frequencies(file: &GgufFile, model: &mut Model) -> Result<(), Error> {
    const LOCAL_BASE: f64 = 10_000.0;
    let number = |key: &str| file.get_of_architecture(key).and_then(|value| value.f32());
    let scaling = number("rope.scaling.factor").filter(|factor| *factor > 0.0 && *factor != 1.0);
    let (Some("gemma3"), Some(scaling)) = (file.architecture(), scaling) else { return Ok(()) };
    let pairs =
        file.get_of_architecture("attention.key_length").and_then(|value| value.u64()).unwrap_or(0) / 2;
    match shim::divide_frequencies(model, Some(LOCAL_BASE), &vec![1.0 / scaling; pairs as usize])? {
        0 => Err(Error::Unsupported(
            "its rope.scaling.factor must not apply to local layers, but the graph has no frequencies of local layers"
                .to_owned(),
        )),
        _ => Ok(()),
    }
}

/// Whether the model consists of several files.
fn is_split(file: &GgufFile) -> bool {
    file.paths().len() > 1
}

/// Whether a tensor is replaced, because it contains weights of a matrix or of experts that the front end may round or
/// did not read.
fn is_replaced(entry: &TensorEntry, input: GraphInput) -> bool {
    // The biases of experts have two dimensions, as matrices do, but need no replacement: the front end reads them, as
    // it reads the biases of projections.
    !entry.name.ends_with(".bias")
        && (entry.shape.len() == 2 || entry.shape.len() == 3 && entry.name.contains(EXPERTS))
        && (entry.kind.is_quantized()
            || matches!(entry.kind, TensorType::F16 | TensorType::Bf16)
            || entry.kind == TensorType::F32 && input == GraphInput::Vectors)
}

fn check_permuted(file: &GgufFile, permuted: &[PermutedProjection]) -> Result<(), Error> {
    match permuted.iter().find(|one| file.tensor(&one.tensor).is_none()) {
        Some(one) => Err(Error::Unsupported(format!(
            "the file lacks the weight {} of a rotated projection",
            one.tensor
        ))),
        None => Ok(()),
    }
}
