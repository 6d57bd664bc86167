//! From a GGUF file to a graph with the weights that the file contains.

use std::num::NonZero;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::sync_channel;

use server_gguf::{GgufFile, TensorEntry, TensorType};

use crate::Error;
use crate::runtime::Model;
use crate::shim::{self, Permuted, WeightsOf};
use crate::weights::{Form, Matrix, is_quantized, permute_rows};

mod hyperparameters;

/// A factor for each pair of a head, in f32, by which its frequency is divided (Llama 3.1 and later).
const ROTARY_FACTORS: &str = "rope_freqs.weight";

/// The same for models of long contexts, of which the file has two: for contexts up to the original one, and for
/// longer ones. One serves all sequences: the angles of what is in the KV cache could not change when a sequence
/// grows beyond the original context.
const ROTARY_FACTORS_SHORT: &str = "rope_factors_short.weight";
const ROTARY_FACTORS_LONG: &str = "rope_factors_long.weight";

/// What is in the name of a tensor that holds a matrix for each expert.
const EXPERTS: &str = "_exps.";

/// Reads the file with the runtime's front end and writes its matrices anew, exactly. `context_tokens_max` is the
/// longest sequence there will be, if that is less than the model was made for.
pub(crate) fn read(path: &Path, form: Form, context_tokens_max: Option<u32>) -> Result<Model, Error> {
    let file = GgufFile::open(path)?;
    hyperparameters::check(&file)?;
    refuse_unproven_experts(&file)?;
    let mut model = read_graph(path, &file)?;
    mend_experts(&file, &mut model)?;
    restore_window(&file, &mut model)?;
    divide_frequencies(&file, &mut model, context_tokens_max)?;
    unscale_local_frequencies(&file, &mut model)?;
    let permuted = shim::rewrite_rotary(&mut model)?;
    tracing::debug!(projections = permuted.len(), "rewrote rotary embeddings");
    write_weights(&file, &mut model, &permuted, form)?;
    check_permuted(&file, &permuted)?;
    Ok(model)
}

/// What a file says it is; empty if it does not.
pub(crate) fn architecture(path: &Path) -> Result<String, Error> {
    Ok(GgufFile::open(path)?.architecture().unwrap_or_default().to_owned())
}

/// Threads that decode matrices at once. More would wait for the one that writes them.
const DECODERS_MAX: usize = 4;

/// A tensor on its way from the file into the graph.
struct Decoded<'a> {
    entry: &'a TensorEntry,
    /// If its rows were permuted.
    head_size: Option<usize>,
    bytes: Vec<u8>,
    matrix: Matrix,
}

/// Writes all matrices anew that the front end may not have right. They are decoded on several threads, and written on
/// this one, as they come; a few at a time are in memory.
fn write_weights(file: &GgufFile, model: &mut Model, permuted: &[Permuted], form: Form) -> Result<(), Error> {
    let mut weights = WeightsOf::find(model)?;
    let head_size =
        |entry: &TensorEntry| permuted.iter().find(|one| one.tensor == entry.name).map(|one| one.head_size);
    let all = file.tensors().iter().map(|entry| (entry, head_size(entry)));
    let all: Vec<_> = all.filter(|(entry, head_size)| head_size.is_some() || is_rewritten(entry)).collect();
    let next = AtomicUsize::new(0);
    let following = || all.get(next.fetch_add(1, Ordering::Relaxed)).copied();
    let threads = std::thread::available_parallelism().map_or(1, NonZero::get).min(DECODERS_MAX);
    std::thread::scope(|scope| {
        let (sender, decoded) = sync_channel(1);
        let following = &following;
        for _ in 0..threads {
            let sender = sender.clone();
            scope.spawn(move || {
                while let Some((entry, head_size)) = following() {
                    // Nobody takes more once one has failed.
                    if sender.send(decode(file, entry, head_size, form)).is_err() {
                        return;
                    }
                }
            });
        }
        drop(sender);
        decoded.into_iter().try_for_each(|decoded| write(&mut weights, file, decoded?, form))
    })
}

fn decode<'a>(
    file: &GgufFile,
    entry: &'a TensorEntry,
    head_size: Option<usize>,
    form: Form,
) -> Result<Decoded<'a>, Error> {
    let mut bytes = Vec::new();
    file.read_tensor(&entry.name, &mut bytes)?;
    if let Some(head_size) = head_size {
        permute_rows(&mut bytes, row_bytes(entry), head_size);
    }
    let matrix = Matrix::new(entry.kind, (entry.rows() as usize, entry.shape[0] as usize), &bytes, form)?;
    Ok(Decoded { entry, head_size, bytes, matrix })
}

fn write(
    weights: &mut WeightsOf<'_>,
    file: &GgufFile,
    decoded: Decoded<'_>,
    form: Form,
) -> Result<(), Error> {
    let Decoded { entry, head_size, bytes, matrix } = decoded;
    let found = weights.set(&entry.name, &matrix)?;
    if head_size.is_some() && !found {
        return Err(Error::runtime("write a weight", "a rotated projection is not in the graph"));
    }
    if !found && entry.name.contains(FUSED) {
        set_fused(weights, (file, entry), &bytes, form)?;
    }
    if !found && entry.shape.len() == 3 && is_quantized(entry.kind) {
        // The front end may have rounded them on their way to wherever they are.
        return Err(Error::Unsupported(format!(
            "its experts ({}, {}) find no place in the graph",
            entry.name, entry.kind
        )));
    }
    Ok(())
}

/// What is in the name of a tensor that holds q, k and v in one; the front end takes it apart.
const FUSED: &str = ".attn_qkv.";

/// Writes the parts of a fused q, k and v, each by the name that the front end gives it.
fn set_fused(
    weights: &mut WeightsOf<'_>,
    (file, entry): (&GgufFile, &TensorEntry),
    bytes: &[u8],
    form: Form,
) -> Result<(), Error> {
    let number = |key: &str| file.get_of_architecture(key).and_then(|value| value.u64());
    let heads = number("attention.head_count").unwrap_or(0);
    let kv_heads = number("attention.head_count_kv").unwrap_or(heads);
    // The shim refuses parts of another size than the graph's.
    let head_rows = entry.rows().checked_div(heads + 2 * kv_heads).unwrap_or(0);
    let mut rest = bytes;
    for (part, heads) in [(".attn_q.", heads), (".attn_k.", kv_heads), (".attn_v.", kv_heads)] {
        let rows = (heads * head_rows) as usize;
        let (own, others) = rest.split_at((rows * row_bytes(entry)).min(rest.len()));
        rest = others;
        let matrix = Matrix::new(entry.kind, (rows, entry.shape[0] as usize), own, form)?;
        if !weights.set(&entry.name.replace(FUSED, part), &matrix)? {
            return Err(Error::runtime("write a weight", "a part of a fused projection is not in the graph"));
        }
    }
    Ok(())
}

/// The mixtures of experts whose graphs are known to be right, once mended.
const MIXTURES: [&str; 1] = ["qwen3moe"];

fn refuse_unproven_experts(file: &GgufFile) -> Result<(), Error> {
    let architecture = file.architecture().unwrap_or_default();
    let has_experts = file.tensors().iter().any(|entry| entry.name.contains(EXPERTS));
    if has_experts && !MIXTURES.contains(&architecture) {
        return Err(Error::Unsupported(format!(
            "its architecture {architecture:?} with experts is not served; of those with experts {} is",
            MIXTURES.join(", ")
        )));
    }
    Ok(())
}

/// The front end rotates adjacent pairs where files of these architectures have halves, lays the experts' output
/// out for one sequence, and makes their weights add up to 1 only if the file says so, which it need not.
fn mend_experts(file: &GgufFile, model: &mut Model) -> Result<(), Error> {
    if !file.architecture().is_some_and(|architecture| MIXTURES.contains(&architecture)) {
        return Ok(());
    }
    let rotated = shim::rotate_halves(model)?;
    let aligned = shim::mend_experts(model)?;
    tracing::debug!(rotated, aligned, "mended the experts' graph");
    Ok(())
}

/// Phi 3's window is that of all its layers; the front end gives it to every other one.
fn restore_window(file: &GgufFile, model: &mut Model) -> Result<(), Error> {
    let window = file.get_of_architecture("attention.sliding_window").and_then(|value| value.u64());
    match (file.architecture(), window) {
        (Some("phi3"), Some(window)) if window > 0 => {
            // A wider one than can be told is none.
            u32::try_from(window)
                .map_or(Ok(()), |window| shim::set_window(model, window.min(i32::MAX as u32)))
        }
        _ => Ok(()),
    }
}

fn read_graph(path: &Path, file: &GgufFile) -> Result<Model, Error> {
    shim::read_gguf(path).map_err(|error| {
        let architecture = file.architecture().unwrap_or("(not named)");
        match error {
            Error::Runtime { message, .. } => Error::Unsupported(format!(
                "its architecture {architecture:?} was refused by the front end: {message}"
            )),
            other => other,
        }
    })
}

/// Files may divide the frequencies of their rotary embeddings, by factors that the front end leaves out.
fn divide_frequencies(
    file: &GgufFile,
    model: &mut Model,
    context_tokens_max: Option<u32>,
) -> Result<(), Error> {
    let Some(entry) = rotary_factors(file, context_tokens_max) else { return Ok(()) };
    let refused = |why| Err(Error::Unsupported(format!("its rotary factors ({}) {why}", entry.name)));
    let mut bytes = Vec::new();
    file.read_tensor(&entry.name, &mut bytes)?;
    let factors: Vec<f32> = bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    if entry.kind != TensorType::F32 || !factors.iter().all(|factor| factor.is_finite() && *factor > 0.0) {
        return refused("are no positive numbers");
    }
    if shim::divide_frequencies(model, None, &factors)? == 0 {
        return refused("find no place");
    }
    if entry.name == ROTARY_FACTORS {
        return Ok(());
    }
    // A stretched context makes attention flatter, which this makes up for.
    let scale = file.get_of_architecture("rope.scaling.attn_factor").and_then(|value| value.f32());
    match scale {
        Some(scale) if scale != 1.0 && shim::scale_rotary(model, scale, factors.len())? == 0 => {
            refused("come with an attention factor that finds no place")
        }
        _ => Ok(()),
    }
}

/// The tensor of factors that are in force.
fn rotary_factors(file: &GgufFile, context_tokens_max: Option<u32>) -> Option<&TensorEntry> {
    let (short, long) = (file.tensor(ROTARY_FACTORS_SHORT), file.tensor(ROTARY_FACTORS_LONG));
    let number = |key: &str| file.get_of_architecture(key).and_then(|value| value.u64());
    let context = number("context_length");
    let original = number("rope.scaling.original_context_length").or(context).unwrap_or(u64::MAX);
    let longest = context_tokens_max.map(u64::from).or(context).unwrap_or(0);
    let stretched = if longest > original { long } else { short };
    stretched.or_else(|| file.tensor(ROTARY_FACTORS))
}

/// Gemma 3's scaling of positions is for its global layers; the front end applies it to the local ones too,
/// whose rotary base is another.
fn unscale_local_frequencies(file: &GgufFile, model: &mut Model) -> Result<(), Error> {
    const LOCAL_BASE: f64 = 10_000.0;
    let number = |key: &str| file.get_of_architecture(key).and_then(|value| value.f32());
    let scaling = number("rope.scaling.factor").filter(|factor| *factor > 0.0 && *factor != 1.0);
    let (Some("gemma3"), Some(scaling)) = (file.architecture(), scaling) else { return Ok(()) };
    let pairs =
        file.get_of_architecture("attention.key_length").and_then(|value| value.u64()).unwrap_or(0) / 2;
    match shim::divide_frequencies(model, Some(LOCAL_BASE), &vec![1.0 / scaling; pairs as usize])? {
        0 => Err(Error::Unsupported("the scaling of its positions finds no place".to_owned())),
        _ => Ok(()),
    }
}

fn row_bytes(entry: &TensorEntry) -> usize {
    entry.row_bytes() as usize
}

/// Matrices, and those of experts, that are quantised, or of half precision (which a front end may round on its
/// way).
fn is_rewritten(entry: &TensorEntry) -> bool {
    (entry.shape.len() == 2 || entry.shape.len() == 3 && entry.name.contains(EXPERTS))
        && (is_quantized(entry.kind) || matches!(entry.kind, TensorType::F16 | TensorType::Bf16))
}

fn check_permuted(file: &GgufFile, permuted: &[Permuted]) -> Result<(), Error> {
    match permuted.iter().find(|one| file.tensor(&one.tensor).is_none()) {
        Some(one) => {
            Err(Error::Unsupported(format!("its rotated projection {} is not in the file", one.tensor)))
        }
        None => Ok(()),
    }
}
