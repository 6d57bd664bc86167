//! From a GGUF file to a graph with the weights that the file contains.

use std::path::Path;

use server_gguf::{GgufFile, TensorEntry, TensorType};

use crate::runtime::Model;
use crate::shim::{self, Permuted};
use crate::weights::{Form, Matrix, permute_rows};
use crate::{Error, weights};

/// A factor for each pair of a head, in f32, by which its frequency is divided (Llama 3.1 and later).
const ROTARY_FACTORS: &str = "rope_freqs.weight";

/// The same for short contexts, beside another tensor for long ones. Not served: the angles of what is in the
/// KV cache would change when a sequence grows from the one into the other.
const ROTARY_FACTORS_SHORT: &str = "rope_factors_short.weight";

/// Reads the file with the runtime's front end and writes its matrices anew, exactly.
pub(crate) fn read(path: &Path, form: Form) -> Result<Model, Error> {
    let file = GgufFile::open(path)?;
    refuse_lost_window(&file)?;
    let mut model = read_graph(path, &file)?;
    divide_frequencies(&file, &mut model)?;
    unscale_local_frequencies(&file, &mut model)?;
    let permuted = shim::rewrite_rotary(&mut model)?;
    tracing::debug!(projections = permuted.len(), "rewrote rotary embeddings");
    let mut bytes = Vec::new();
    for entry in file.tensors() {
        let head_size = permuted.iter().find(|one| one.tensor == entry.name).map(|one| one.head_size);
        if head_size.is_none() && !is_rewritten(entry) {
            continue;
        }
        file.read_tensor(&entry.name, &mut bytes)?;
        if let Some(head_size) = head_size {
            permute_rows(&mut bytes, row_bytes(entry), head_size);
        }
        let matrix = Matrix::new(entry.kind, (entry.rows() as usize, entry.shape[0] as usize), &bytes, form)?;
        let found = shim::set_weight(&mut model, &entry.name, &matrix)?;
        if head_size.is_some() && !found {
            return Err(Error::runtime("write a weight", "a rotated projection is not in the graph"));
        }
        if !found && entry.name.contains(FUSED) {
            set_fused(&mut model, (&file, entry), &bytes, form)?;
        }
    }
    check_permuted(&file, &permuted)?;
    Ok(model)
}

/// What is in the name of a tensor that holds q, k and v in one; the front end takes it apart.
const FUSED: &str = ".attn_qkv.";

/// Writes the parts of a fused q, k and v, each by the name that the front end gives it.
fn set_fused(
    model: &mut Model,
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
        if !shim::set_weight(model, &entry.name.replace(FUSED, part), &matrix)? {
            return Err(Error::runtime("write a weight", "a part of a fused projection is not in the graph"));
        }
    }
    Ok(())
}

/// The front end builds Phi 3 without the sliding window that its files name: beyond the window it would be
/// another model.
fn refuse_lost_window(file: &GgufFile) -> Result<(), Error> {
    let number = |key: &str| file.get_of_architecture(key).and_then(|value| value.u64()).unwrap_or(0);
    let (window, context) = (number("attention.sliding_window"), number("context_length"));
    if file.architecture() == Some("phi3") && window > 0 && window < context {
        return Err(Error::Unsupported(format!("phi3 with a sliding window of {window} tokens")));
    }
    Ok(())
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
fn divide_frequencies(file: &GgufFile, model: &mut Model) -> Result<(), Error> {
    let refused =
        |tensor: &str| Err(Error::Unsupported(format!("its rotary factors ({tensor}) find no place")));
    if file.tensor(ROTARY_FACTORS_SHORT).is_some() {
        return refused(ROTARY_FACTORS_SHORT);
    }
    if file.tensor(ROTARY_FACTORS).is_none() {
        return Ok(());
    }
    let mut bytes = Vec::new();
    file.read_tensor(ROTARY_FACTORS, &mut bytes)?;
    let factors: Vec<f32> = bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    match shim::divide_frequencies(model, None, &factors)? {
        0 => refused(ROTARY_FACTORS),
        _ => Ok(()),
    }
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

/// Matrices that are quantised, or of half precision (which a front end may round on its way).
fn is_rewritten(entry: &TensorEntry) -> bool {
    entry.shape.len() == 2
        && (weights::is_quantized(entry.kind) || matches!(entry.kind, TensorType::F16 | TensorType::Bf16))
}

fn check_permuted(file: &GgufFile, permuted: &[Permuted]) -> Result<(), Error> {
    match permuted.iter().find(|one| file.tensor(&one.tensor).is_none()) {
        Some(one) => {
            Err(Error::Unsupported(format!("its rotated projection {} is not in the file", one.tensor)))
        }
        None => Ok(()),
    }
}
