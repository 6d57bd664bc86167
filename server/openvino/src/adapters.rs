//! LoRA adapters: determines which projections of the model each adapter changes, and with which matrices.
//!
//! All adapters are in one graph, concatenated along the rank, and an input specifies the adapter of each token, so
//! that a step can contain tokens of any adapter. `adapters/` reads their files, `shim/graph/adapters.cpp` adds them to
//! the graph, and `shim/projection/adapters.cpp` adds them to the native projections.

mod file;
#[cfg(test)]
mod fuzzing;
mod names;
mod peft_config;
mod source;

use std::collections::{BTreeMap, BTreeSet};

use file::{Adapter, LoraMatrices};
use server_engine::ADAPTERS_MAX;
pub use source::{ADAPTER_RANK_MAX, AdapterSource};

use crate::Error;
use crate::runtime::Model;
use crate::shim::{self, AdapterMethod, LoraWeights, Projection};

/// Sum of the ranks of all LoRA adapters at one projection. Where the native kernels do not compute the projection,
/// every token is multiplied by the matrices of all adapters.
///
/// If exceeded: the server does not start.
pub const ADAPTER_RANKS_MAX: usize = 1024;

/// The origin of the graph, which determines the names in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GraphOrigin<'a> {
    /// The graph was read from a GGUF file of this architecture.
    Gguf(&'a str),
    /// The graph was read from an IR.
    Ir,
}

/// The architectures of GGUF files in which the projections are known to match those that adapters change.
const ARCHITECTURES: [&str; 6] = ["llama", "qwen2", "qwen3", "qwen3moe", "phi3", "gemma3"];

/// The architecture whose files, unlike adapters, interleave the rows of the two halves of each head of q and k. Where
/// the rotary embedding was rewritten, the rows are already in the order of the adapters, and [`Projection::paired`] is
/// `None`.
const INTERLEAVED: &str = "llama";

/// Reads adapters and adds them to a model in which no projections are merged. Returns a digest of each adapter.
///
/// # Errors
/// An adapter is invalid or does not fit the model.
pub(crate) fn add(
    model: &mut Model,
    sources: &[AdapterSource],
    origin: GraphOrigin<'_>,
    method: AdapterMethod,
) -> Result<Vec<u64>, Error> {
    check(sources)?;
    let projections = projections(model, origin)?;
    let mut loras: BTreeMap<String, LoraWeights> = BTreeMap::new();
    let mut digests = Vec::with_capacity(sources.len());
    for (number, source) in (1..).zip(sources) {
        let adapter = file::read(source)?;
        tracing::info!(
            name = source.name,
            rank = adapter.rank,
            projections = adapter.matrices.len(),
            base_model = adapter.base_model,
            "read an adapter"
        );
        digests.push(adapter.digest);
        for (module, matrices) in split_fused(adapter, &projections) {
            let unusable = |why: String| Err(Error::Adapter { name: source.name.clone(), why });
            let Some(projection) = projections.get(&module) else {
                return unusable(format!(
                    "it changes {module}, which does not exist in the model or cannot be adapted"
                ));
            };
            if (matrices.rows, matrices.columns) != (projection.rows, projection.columns) {
                return unusable(format!(
                    "its matrices for {module} require a projection of {} rows and {} columns, but that of the model has {} \
                     rows and {} columns",
                    matrices.rows, matrices.columns, projection.rows, projection.columns
                ));
            }
            let lora = loras.entry(module.clone()).or_insert_with(|| LoraWeights {
                projection: projection.clone(),
                down: Vec::new(),
                up: Vec::new(),
                adapters: Vec::new(),
            });
            let ranks = lora.adapters.len() + matrices.rank;
            if ranks > ADAPTER_RANKS_MAX {
                return unusable(format!(
                    "the total rank of all adapters at {module} is at least {ranks} (limit: {ADAPTER_RANKS_MAX})"
                ));
            }
            append(lora, matrices, number);
        }
    }
    let loras: Vec<LoraWeights> = loras.into_values().collect();
    let words = sources.iter().zip(&digests).map(|(source, digest)| format!("{}:{digest:016x}", source.name));
    shim::add_adapters(model, &loras, method, &words.collect::<Vec<_>>().join(" "))?;
    Ok(digests)
}

fn check(sources: &[AdapterSource]) -> Result<(), Error> {
    let mut names = BTreeSet::new();
    for (index, AdapterSource { name, .. }) in sources.iter().enumerate() {
        let unusable = |why: String| Err(Error::Adapter { name: name.clone(), why });
        if index >= ADAPTERS_MAX {
            return unusable(format!("there are too many adapters (limit: {ADAPTERS_MAX})"));
        }
        if !names.insert(name) {
            return unusable("another adapter has the same name".to_owned());
        }
    }
    Ok(())
}

/// Returns the projections of the model, keyed by the names that adapters use for them.
fn projections(model: &mut Model, origin: GraphOrigin<'_>) -> Result<BTreeMap<String, Projection>, Error> {
    let unsupported = |why: String| Err(Error::Unsupported(why));
    let shim::Projections { all, unknown_rotations } = shim::list_projections(model)?;
    if let GraphOrigin::Gguf(architecture) = origin {
        if !ARCHITECTURES.contains(&architecture) {
            return unsupported(format!(
                "adapters are not supported for its architecture {architecture:?} (supported: {})",
                ARCHITECTURES.join(", ")
            ));
        }
        if unknown_rotations > 0 || architecture != INTERLEAVED && all.iter().any(|one| one.paired.is_some())
        {
            return unsupported(
                "adapters are not supported: the row order of its query and key projections is unknown"
                    .to_owned(),
            );
        }
    }
    let mut named: BTreeMap<String, Projection> = BTreeMap::new();
    let names: BTreeSet<&str> = all.iter().map(|one| one.name.as_str()).collect();
    for projection in &all {
        let module = match origin {
            GraphOrigin::Gguf(_) => names::of_tensor(&projection.name, &names),
            GraphOrigin::Ir => names::of_node(&projection.name),
        };
        let Some(module) = module else { continue };
        let mut projection = projection.clone();
        if origin == GraphOrigin::Ir {
            // The rows of a projection in an exported IR are in the same order as those in an adapter.
            projection.paired = None;
        }
        if named.insert(module.clone(), projection).is_some() {
            return unsupported(format!(
                "adapters are not supported for a model with two projections that are named {module}"
            ));
        }
    }
    Ok(named)
}

/// Returns the matrices of an adapter, with the names of the model's modules that they change. Fused matrices for q, k
/// and v are split if the model has separate projections.
fn split_fused(adapter: Adapter, projections: &BTreeMap<String, Projection>) -> Vec<(String, LoraMatrices)> {
    let mut all = Vec::with_capacity(adapter.matrices.len());
    for (module, matrices) in adapter.matrices {
        let parts = names::parts_of_fused(&module).filter(|_| !projections.contains_key(&module));
        let rows = parts.as_ref().map(|parts| {
            parts.iter().map(|part| projections.get(part).map(|one| one.rows)).collect::<Option<Vec<_>>>()
        });
        match (parts, rows.flatten()) {
            (Some(parts), Some(rows)) if rows.iter().sum::<usize>() == matrices.rows => {
                let mut first = 0;
                for (part, rows) in parts.into_iter().zip(rows) {
                    all.push((part, matrices.part(first..first + rows)));
                    first += rows;
                }
            }
            _ => all.push((module, matrices)),
        }
    }
    all
}

/// Appends the matrices of the adapter with this number to those of earlier adapters, along the rank.
fn append(to: &mut LoraWeights, matrices: LoraMatrices, number: i32) {
    let LoraMatrices { rank, rows, down, up, .. } = matrices;
    let order = match to.projection.paired {
        Some(head_size) => interleaved(rows, head_size),
        None => (0..rows).collect(),
    };
    let before = std::mem::take(&mut to.up);
    let ranks = to.adapters.len();
    to.up.reserve_exact(rows * (ranks + rank));
    for (row, from) in order.into_iter().enumerate() {
        to.up.extend_from_slice(&before[row * ranks..(row + 1) * ranks]);
        to.up.extend_from_slice(&up[from * rank..(from + 1) * rank]);
    }
    to.down.extend(down);
    to.adapters.extend(std::iter::repeat_n(number, rank));
}

/// For each row of a matrix whose head halves are interleaved, returns the index of the corresponding row of the
/// adapter's matrix.
fn interleaved(rows: usize, head_size: usize) -> Vec<usize> {
    let half = head_size / 2;
    (0..rows)
        .map(|row| {
            let (head, within) = (row / head_size, row % head_size);
            head * head_size + within / 2 + within % 2 * half
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    #[test]
    fn halves_of_heads_are_interleaved() {
        assert_eq!(interleaved(12, 6), [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]);
    }

    #[test]
    fn adapters_are_concatenated_along_the_rank() {
        let projection = Projection { name: "p".to_owned(), rows: 2, columns: 3, paired: None };
        let mut to = LoraWeights { projection, down: Vec::new(), up: Vec::new(), adapters: Vec::new() };
        let matrices = |rank: usize, from: f32| LoraMatrices {
            rank,
            rows: 2,
            columns: 3,
            down: (0..rank * 3).map(|i| from + i as f32).collect(),
            up: (0..2 * rank).map(|i| -from - i as f32).collect(),
        };
        append(&mut to, matrices(1, 10.0), 1);
        append(&mut to, matrices(2, 20.0), 2);
        assert_eq!(to.adapters, [1, 2, 2]);
        assert_eq!(to.down, [10.0, 11.0, 12.0, 20.0, 21.0, 22.0, 23.0, 24.0, 25.0]);
        assert_eq!(to.up, [-10.0, -20.0, -21.0, -11.0, -22.0, -23.0]);
    }

    #[test]
    fn names_are_unique_and_their_number_is_limited() {
        let source = |name: &str| AdapterSource { name: name.to_owned(), path: PathBuf::new() };
        let many: Vec<_> = (0..=ADAPTERS_MAX).map(|number| source(&number.to_string())).collect();
        assert!(check(&many[..ADAPTERS_MAX]).is_ok());
        assert!(check(&many).unwrap_err().chain().contains("\"32\""));
        assert!(check(&[source("a"), source("a")]).unwrap_err().chain().contains("same name"));
    }
}
