//! Low-rank adapters: which projections of the model each changes, and what is added to them.
//!
//! All adapters are in one graph, after each other along the rank, and an input names the adapter of each token. So a
//! step may have tokens of all of them. Reading an adapter's files is in `adapters/`; what the graph looks like in
//! `shim/adapt.cpp`, and where projections are our own, what these compute in `shim/projection/adapters.cpp`.

mod config;
mod file;
#[cfg(test)]
mod fuzzing;
mod names;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use file::{Adapter, Pair};
use server_engine::ADAPTERS_MAX;

use crate::Error;
use crate::runtime::Model;
use crate::shim::{self, Adapted, Projection};

/// Rank of a LoRA adapter.
///
/// Beyond it: the server does not start.
pub const ADAPTER_RANK_MAX: usize = 256;

/// Sum of the ranks of all LoRA adapters at one projection. Every token is multiplied by all of them where the native
/// kernels do not compute the projection.
///
/// Beyond it: the server does not start.
pub const ADAPTER_RANKS_MAX: usize = 1024;

/// An adapter to load.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdapterSource {
    /// By which it is told apart.
    pub name: String,
    /// A folder as PEFT writes it: `adapter_config.json` and `adapter_model.safetensors`.
    pub path: PathBuf,
}

/// Where the graph that is adapted comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin<'a> {
    /// A GGUF file of this architecture.
    Gguf(&'a str),
    /// An IR.
    Ir,
}

/// The architectures of GGUF files whose projections are known to be those that adapters are made for.
const ARCHITECTURES: [&str; 6] = ["llama", "qwen2", "qwen3", "qwen3moe", "phi3", "gemma3"];

/// Of these the one whose files have the rows of q and k in another order than adapters: the two halves of each head
/// interleaved. Where the rotation was rewritten, so were they.
const INTERLEAVED: &str = "llama";

/// Reads adapters and adds them to a model whose projections are not merged, and with `own` will all be our own. Answers a
/// number for each that changes with its content.
///
/// # Errors
/// One is unsound, or does not fit the model.
pub(crate) fn adapt(
    model: &mut Model,
    sources: &[AdapterSource],
    origin: Origin<'_>,
    own: bool,
) -> Result<Vec<u64>, Error> {
    check(sources)?;
    let projections = projections(model, origin)?;
    let mut adapted: BTreeMap<String, Adapted> = BTreeMap::new();
    let mut digests = Vec::with_capacity(sources.len());
    for (number, source) in (1..).zip(sources) {
        let adapter = file::read(source)?;
        tracing::info!(
            name = source.name,
            rank = adapter.rank,
            projections = adapter.pairs.len(),
            base = adapter.base,
            "read an adapter"
        );
        digests.push(adapter.digest);
        for (module, pair) in resolved(adapter, &projections) {
            let refused = |why: String| Err(Error::Adapter { name: source.name.clone(), why });
            let Some(projection) = projections.get(&module) else {
                return refused(format!(
                    "it changes {module}, which the model has not or cannot have changed"
                ));
            };
            if (pair.rows, pair.columns) != (projection.rows, projection.columns) {
                return refused(format!(
                    "for {module} it is made for a matrix of {} rows and {} columns, and the model's has {} and {}",
                    pair.rows, pair.columns, projection.rows, projection.columns
                ));
            }
            let one = adapted.entry(module.clone()).or_insert_with(|| Adapted {
                projection: projection.clone(),
                down: Vec::new(),
                up: Vec::new(),
                owners: Vec::new(),
            });
            if one.owners.len() + pair.rank > ADAPTER_RANKS_MAX {
                return refused(format!(
                    "with those before it the ranks at {module} are more than {ADAPTER_RANKS_MAX} together"
                ));
            }
            append(one, pair, number);
        }
    }
    let adapted: Vec<Adapted> = adapted.into_values().collect();
    let words = sources.iter().zip(&digests).map(|(source, digest)| format!("{}:{digest:016x}", source.name));
    shim::adapt(model, &adapted, own, &words.collect::<Vec<_>>().join(" "))?;
    Ok(digests)
}

fn check(sources: &[AdapterSource]) -> Result<(), Error> {
    let mut names = BTreeSet::new();
    for (index, AdapterSource { name, .. }) in sources.iter().enumerate() {
        let refused = |why: String| Err(Error::Adapter { name: name.clone(), why });
        if index >= ADAPTERS_MAX {
            return refused(format!("there are {ADAPTERS_MAX} before it, and no more may be"));
        }
        if !names.insert(name) {
            return refused("another has the same name".to_owned());
        }
    }
    Ok(())
}

/// The model's projections by the modules that adapters name.
fn projections(model: &mut Model, origin: Origin<'_>) -> Result<BTreeMap<String, Projection>, Error> {
    let unsupported = |why: String| Err(Error::Unsupported(why));
    let (all, unknown) = shim::projections(model)?;
    if let Origin::Gguf(architecture) = origin {
        if !ARCHITECTURES.contains(&architecture) {
            return unsupported(format!(
                "adapters of its architecture {architecture:?} are not served; those of {} are",
                ARCHITECTURES.join(", ")
            ));
        }
        if unknown > 0 || architecture != INTERLEAVED && all.iter().any(|one| one.paired.is_some()) {
            return unsupported(
                "the order of the rows that its rotary embeddings turn is not known".to_owned(),
            );
        }
    }
    let mut named: BTreeMap<String, Projection> = BTreeMap::new();
    let names: BTreeSet<&str> = all.iter().map(|one| one.name.as_str()).collect();
    for projection in &all {
        let module = match origin {
            Origin::Gguf(_) => names::of_tensor(&projection.name, &names),
            Origin::Ir => names::of_node(&projection.name),
        };
        let Some(module) = module else { continue };
        let mut projection = projection.clone();
        if origin == Origin::Ir {
            // The graph is the original model's: its order is that of adapters.
            projection.paired = None;
        }
        if named.insert(module.clone(), projection).is_some() {
            return unsupported(format!("it has two projections {module}, of which adapters name one"));
        }
    }
    Ok(named)
}

/// What an adapter changes, by the modules that the model has. A fused q, k and v that the model has apart is taken
/// apart.
fn resolved(adapter: Adapter, projections: &BTreeMap<String, Projection>) -> Vec<(String, Pair)> {
    let mut all = Vec::with_capacity(adapter.pairs.len());
    for (module, pair) in adapter.pairs {
        let parts = names::parts_of_fused(&module).filter(|_| !projections.contains_key(&module));
        let rows = parts.as_ref().map(|parts| {
            parts.iter().map(|part| projections.get(part).map(|one| one.rows)).collect::<Option<Vec<_>>>()
        });
        match (parts, rows.flatten()) {
            (Some(parts), Some(rows)) if rows.iter().sum::<usize>() == pair.rows => {
                let mut first = 0;
                for (part, rows) in parts.into_iter().zip(rows) {
                    all.push((part, pair.part(first..first + rows)));
                    first += rows;
                }
            }
            _ => all.push((module, pair)),
        }
    }
    all
}

/// Puts an adapter's matrices behind those that are there.
fn append(to: &mut Adapted, pair: Pair, number: i32) {
    let Pair { rank, rows, down, up, .. } = pair;
    let order = match to.projection.paired {
        Some(head_size) => interleaved(rows, head_size),
        None => (0..rows).collect(),
    };
    let before = std::mem::take(&mut to.up);
    let ranks = to.owners.len();
    to.up.reserve_exact(rows * (ranks + rank));
    for (row, from) in order.into_iter().enumerate() {
        to.up.extend_from_slice(&before[row * ranks..(row + 1) * ranks]);
        to.up.extend_from_slice(&up[from * rank..(from + 1) * rank]);
    }
    to.down.extend(down);
    to.owners.extend(std::iter::repeat_n(number, rank));
}

/// Where each row of a head is taken from, where the halves of the adapter's are interleaved.
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
    use super::*;

    #[test]
    fn halves_of_heads_are_interleaved() {
        assert_eq!(interleaved(12, 6), [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]);
    }

    #[test]
    fn adapters_lie_after_each_other_along_the_rank() {
        let projection = Projection { name: "p".to_owned(), rows: 2, columns: 3, paired: None };
        let mut to = Adapted { projection, down: Vec::new(), up: Vec::new(), owners: Vec::new() };
        let pair = |rank: usize, from: f32| Pair {
            rank,
            rows: 2,
            columns: 3,
            down: (0..rank * 3).map(|i| from + i as f32).collect(),
            up: (0..2 * rank).map(|i| -from - i as f32).collect(),
        };
        append(&mut to, pair(1, 10.0), 1);
        append(&mut to, pair(2, 20.0), 2);
        assert_eq!(to.owners, [1, 2, 2]);
        assert_eq!(to.down, [10.0, 11.0, 12.0, 20.0, 21.0, 22.0, 23.0, 24.0, 25.0]);
        assert_eq!(to.up, [-10.0, -20.0, -21.0, -11.0, -22.0, -23.0]);
    }

    #[test]
    fn names_come_once_and_in_bounds() {
        let source = |name: &str| AdapterSource { name: name.to_owned(), path: PathBuf::new() };
        let many: Vec<_> = (0..=ADAPTERS_MAX).map(|number| source(&number.to_string())).collect();
        assert!(check(&many[..ADAPTERS_MAX]).is_ok());
        assert!(check(&many).unwrap_err().chain().contains("\"32\""));
        assert!(check(&[source("a"), source("a")]).unwrap_err().chain().contains("same name"));
    }
}
