//! Reads an adapter's folder: the pairs of matrices, in f32, by the modules that they are for.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read as _;
use std::ops::Range;
use std::path::Path;

use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use server_gguf::{bf16_to_f32, f16_to_f32};
use xxhash_rust::xxh3::Xxh3Default;

use super::config::AdapterConfig;
use super::{ADAPTER_RANK_MAX, AdapterSource, names};
use crate::Error;

/// Size of the `adapter_config.json` of a LoRA adapter.
///
/// Beyond it: the server does not start.
const CONFIG_BYTES_MAX: u64 = 1 << 20;

/// Size of the `adapter_model.safetensors` of a LoRA adapter.
///
/// Beyond it: the server does not start.
const TENSORS_BYTES_MAX: u64 = 4 << 30;

/// An adapter.
#[derive(Debug)]
pub(super) struct Adapter {
    /// By module.
    pub(super) pairs: BTreeMap<String, Pair>,
    /// The highest of any of them.
    pub(super) rank: usize,
    /// The model it was made for, as it says.
    pub(super) base: String,
    /// Of its files' content.
    pub(super) digest: u64,
}

/// What is added to a projection: `up * (down * x)`.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Pair {
    pub(super) rank: usize,
    pub(super) rows: usize,
    pub(super) columns: usize,
    /// `[rank, columns]`.
    pub(super) down: Vec<f32>,
    /// `[rows, rank]`, the scale in it.
    pub(super) up: Vec<f32>,
}

impl Pair {
    /// Some of the rows.
    pub(super) fn part(&self, rows: Range<usize>) -> Self {
        let up = self.up[rows.start * self.rank..rows.end * self.rank].to_vec();
        Self { rows: rows.len(), up, down: self.down.clone(), ..*self }
    }
}

/// Reads an adapter.
///
/// # Errors
/// It is unsound, or not one that can be served.
pub(super) fn read(source: &AdapterSource) -> Result<Adapter, Error> {
    read_folder(&source.path).map_err(|why| Error::Adapter { name: source.name.clone(), why })
}

fn read_folder(folder: &Path) -> Result<Adapter, String> {
    let text = bytes(&folder.join("adapter_config.json"), CONFIG_BYTES_MAX)?;
    let config = AdapterConfig::read(&text)?;
    let bytes = bytes(&folder.join("adapter_model.safetensors"), TENSORS_BYTES_MAX)?;
    let mut digest = Xxh3Default::new();
    digest.update(&text);
    digest.update(&bytes);
    let wrong = |why: String| format!("adapter_model.safetensors: {why}");
    let tensors = SafeTensors::deserialize(&bytes).map_err(|error| wrong(error.to_string()))?;
    let pairs = pairs(&tensors, &config).map_err(wrong)?;
    Ok(Adapter {
        rank: pairs.values().map(|pair| pair.rank).max().unwrap_or(0),
        pairs,
        base: config.base().to_owned(),
        digest: digest.digest(),
    })
}

fn bytes(path: &Path, bytes_max: u64) -> Result<Vec<u8>, String> {
    let failed = |error: std::io::Error| format!("failed to read {}: {error}", path.display());
    let file = File::open(path).map_err(failed)?;
    let mut bytes = Vec::new();
    file.take(bytes_max + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > bytes_max {
        return Err(format!("{} has more than {bytes_max} bytes", path.display()));
    }
    Ok(bytes)
}

/// The two halves of a pair as they are found.
#[derive(Default)]
struct Halves<'a> {
    /// The module's whole name.
    path: &'a str,
    down: Option<TensorView<'a>>,
    up: Option<TensorView<'a>>,
}

fn pairs(tensors: &SafeTensors<'_>, config: &AdapterConfig) -> Result<BTreeMap<String, Pair>, String> {
    let mut modules: BTreeMap<String, Halves<'_>> = BTreeMap::new();
    for (name, tensor) in tensors.iter() {
        let (path, is_down) = half(name)
            .ok_or_else(|| format!("{name} is not one of the matrices lora_A and lora_B of a projection"))?;
        let module = names::of_adapter(path).ok_or_else(|| {
            format!("{name} is for a module that cannot be adapted: no projection of a layer")
        })?;
        let halves = modules.entry(module).or_default();
        halves.path = path;
        let place = if is_down { &mut halves.down } else { &mut halves.up };
        if place.replace(tensor).is_some() {
            return Err(format!("{name} is there twice, under another name"));
        }
    }
    if modules.is_empty() {
        return Err("it has no matrices".to_owned());
    }
    let pair = |(module, halves): (String, Halves<'_>)| match halves {
        Halves { path, down: Some(down), up: Some(up) } => {
            let pair = pair(path, (&down, &up), config).map_err(|why| format!("{module}: {why}"))?;
            Ok((module, pair))
        }
        _ => Err(format!("{module} has only one of its matrices lora_A and lora_B")),
    };
    modules.into_iter().map(pair).collect()
}

/// The module's path, and whether it is what is multiplied by first.
fn half(name: &str) -> Option<(&str, bool)> {
    let name = name.strip_suffix(".weight")?;
    // PEFT leaves the adapter's own name out; others keep the usual one.
    let name = name.strip_suffix(".default").unwrap_or(name);
    match name.rsplit_once('.')? {
        (path, "lora_A") => Some((path, true)),
        (path, "lora_B") => Some((path, false)),
        _ => None,
    }
}

fn pair(
    module: &str,
    (down, up): (&TensorView<'_>, &TensorView<'_>),
    config: &AdapterConfig,
) -> Result<Pair, String> {
    let (&[rank, columns], &[rows, other_rank]) = (down.shape(), up.shape()) else {
        return Err(format!("lora_A {:?} and lora_B {:?} are no matrices", down.shape(), up.shape()));
    };
    let (scale, expected) = config.scale_and_rank(module);
    if rank != expected || other_rank != expected {
        return Err(format!(
            "lora_A {:?} and lora_B {:?} are not of the rank {expected} that adapter_config.json gives",
            down.shape(),
            up.shape()
        ));
    }
    if rank > ADAPTER_RANK_MAX {
        return Err(format!("its rank {rank} is more than {ADAPTER_RANK_MAX}"));
    }
    if rows == 0 || columns == 0 {
        return Err("its matrices are empty".to_owned());
    }
    let scaled = |value: f32| (f64::from(value) * scale) as f32;
    let pair =
        Pair { rank, rows, columns, down: values(down)?, up: values(up)?.into_iter().map(scaled).collect() };
    if pair.down.iter().chain(&pair.up).all(|value| value.is_finite()) {
        Ok(pair)
    } else {
        Err("its matrices have values that are no finite numbers".to_owned())
    }
}

fn values(tensor: &TensorView<'_>) -> Result<Vec<f32>, String> {
    let data = tensor.data();
    let halves = |convert: fn(u16) -> f32| {
        data.as_chunks::<2>().0.iter().map(|bytes| convert(u16::from_le_bytes(*bytes))).collect()
    };
    match tensor.dtype() {
        Dtype::F32 => Ok(data.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()),
        Dtype::F16 => Ok(halves(f16_to_f32)),
        Dtype::BF16 => Ok(halves(bf16_to_f32)),
        other => Err(format!("its matrices are of type {other:?}, which is none of F32, F16 and BF16")),
    }
}
