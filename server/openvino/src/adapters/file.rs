//! Reads the directory of an adapter, and returns its matrices in f32, keyed by the modules that they change.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read as _;
use std::ops::Range;
use std::path::Path;

use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use server_gguf::{bf16_to_f32, f16_to_f32};
use xxhash_rust::xxh3::Xxh3Default;

use super::names;
use super::peft_config::PeftConfig;
use super::source::{ADAPTER_RANK_MAX, AdapterSource};
use crate::Error;

/// Size of the `adapter_config.json` of a LoRA adapter.
///
/// If exceeded: the server does not start.
const CONFIG_BYTES_MAX: u64 = 1 << 20;

/// Size of the `adapter_model.safetensors` of a LoRA adapter.
///
/// If exceeded: the server does not start.
const TENSORS_BYTES_MAX: u64 = 4 << 30;

/// The content of an adapter.
#[derive(Debug)]
pub(super) struct Adapter {
    /// The matrices of each module.
    pub(super) matrices: BTreeMap<String, LoraMatrices>,
    /// The largest rank of a module.
    pub(super) rank: usize,
    /// The model for which the adapter was trained, as its configuration names it.
    pub(super) base_model: String,
    /// A digest of the files' content.
    pub(super) digest: u64,
}

/// The low-rank matrices for one projection, to whose output `up * (down * x)` is added.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct LoraMatrices {
    pub(super) rank: usize,
    pub(super) rows: usize,
    pub(super) columns: usize,
    /// The matrix of shape `[rank, columns]`.
    pub(super) down: Vec<f32>,
    /// The matrix of shape `[rows, rank]`, multiplied by the scale.
    pub(super) up: Vec<f32>,
}

impl LoraMatrices {
    /// Returns the matrices for these rows of the output.
    pub(super) fn part(&self, rows: Range<usize>) -> Self {
        let up = self.up[rows.start * self.rank..rows.end * self.rank].to_vec();
        Self { rows: rows.len(), up, down: self.down.clone(), ..*self }
    }
}

/// Reads an adapter.
///
/// # Errors
/// The adapter is invalid or not supported.
pub(super) fn read(source: &AdapterSource) -> Result<Adapter, Error> {
    read_directory(&source.path).map_err(|why| Error::Adapter { name: source.name.clone(), why })
}

fn read_directory(directory: &Path) -> Result<Adapter, String> {
    let text = bytes(&directory.join("adapter_config.json"), CONFIG_BYTES_MAX)?;
    let config = PeftConfig::read(&text)?;
    let bytes = bytes(&directory.join("adapter_model.safetensors"), TENSORS_BYTES_MAX)?;
    let mut digest = Xxh3Default::new();
    digest.update(&text);
    digest.update(&bytes);
    let invalid = |why: String| format!("adapter_model.safetensors: {why}");
    let tensors = SafeTensors::deserialize(&bytes).map_err(|error| invalid(error.to_string()))?;
    let matrices = matrices_by_module(&tensors, &config).map_err(invalid)?;
    Ok(Adapter {
        rank: matrices.values().map(|matrices| matrices.rank).max().unwrap_or(0),
        matrices,
        base_model: config.base_model().to_owned(),
        digest: digest.digest(),
    })
}

fn bytes(path: &Path, bytes_max: u64) -> Result<Vec<u8>, String> {
    let failed = |error: std::io::Error| format!("failed to read {}: {error}", path.display());
    let file = File::open(path).map_err(failed)?;
    let mut bytes = Vec::new();
    file.take(bytes_max + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > bytes_max {
        return Err(format!("{} is too large (limit: {bytes_max} bytes)", path.display()));
    }
    Ok(bytes)
}

/// The tensors of one module.
#[derive(Default)]
struct ModuleTensors<'a> {
    /// The full name of the module.
    path: &'a str,
    down: Option<TensorView<'a>>,
    up: Option<TensorView<'a>>,
}

fn matrices_by_module(
    tensors: &SafeTensors<'_>,
    config: &PeftConfig,
) -> Result<BTreeMap<String, LoraMatrices>, String> {
    let mut modules: BTreeMap<String, ModuleTensors<'_>> = BTreeMap::new();
    for (name, tensor) in tensors.iter() {
        let TensorName { path, is_down } = TensorName::parse(name)
            .ok_or_else(|| format!("{name} is not the lora_A or lora_B matrix of a projection"))?;
        let module = names::of_adapter(path).ok_or_else(|| {
            format!(
                "{name} does not belong to a projection in a layer of the model; only projections in layers can be adapted"
            )
        })?;
        let module = modules.entry(module).or_default();
        module.path = path;
        let matrix = if is_down { &mut module.down } else { &mut module.up };
        if matrix.replace(tensor).is_some() {
            let matrix = if is_down { "lora_A" } else { "lora_B" };
            return Err(format!(
                "{name} is a duplicate: another tensor is the {matrix} matrix of the same module"
            ));
        }
    }
    if modules.is_empty() {
        return Err("it has no matrices".to_owned());
    }
    let matrices = |(name, module): (String, ModuleTensors<'_>)| {
        let matrices = matrices(&module, config).map_err(|why| format!("{name}: {why}"))?;
        Ok((name, matrices))
    };
    modules.into_iter().map(matrices).collect()
}

/// The parts of a tensor's name.
struct TensorName<'a> {
    /// The path of the module.
    path: &'a str,
    /// Whether the matrix is the first of the two (`lora_A`), by which the input is multiplied.
    is_down: bool,
}

impl<'a> TensorName<'a> {
    fn parse(name: &'a str) -> Option<Self> {
        let name = name.strip_suffix(".weight")?;
        // PEFT omits the adapter's name from the names of tensors, but other programs include PEFT's default adapter
        // name.
        let name = name.strip_suffix(".default").unwrap_or(name);
        match name.rsplit_once('.')? {
            (path, "lora_A") => Some(Self { path, is_down: true }),
            (path, "lora_B") => Some(Self { path, is_down: false }),
            _ => None,
        }
    }
}

fn matrices(module: &ModuleTensors<'_>, config: &PeftConfig) -> Result<LoraMatrices, String> {
    let ModuleTensors { path, down: Some(down), up: Some(up) } = module else {
        return Err("one of the matrices lora_A and lora_B is missing".to_owned());
    };
    let (&[rank, columns], &[rows, other_rank]) = (down.shape(), up.shape()) else {
        return Err(format!(
            "lora_A has shape {:?} and lora_B has shape {:?}, but both must be matrices",
            down.shape(),
            up.shape()
        ));
    };
    let (scale, expected) = config.scale_and_rank(path);
    if rank != expected || other_rank != expected {
        return Err(format!(
            "lora_A has shape {:?} and lora_B has shape {:?}, but adapter_config.json specifies the rank \
             {expected}",
            down.shape(),
            up.shape()
        ));
    }
    if rank > ADAPTER_RANK_MAX {
        return Err(format!("its rank {rank} is too large (limit: {ADAPTER_RANK_MAX})"));
    }
    if rows == 0 || columns == 0 {
        return Err("its matrices are empty".to_owned());
    }
    let scaled = |value: f32| (f64::from(value) * scale) as f32;
    let (down, up) = (values(down)?, values(up)?.into_iter().map(scaled).collect());
    let matrices = LoraMatrices { rank, rows, columns, down, up };
    if matrices.down.iter().chain(&matrices.up).all(|value| value.is_finite()) {
        Ok(matrices)
    } else {
        Err("its matrices have values that are not finite".to_owned())
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
        other => Err(format!("a matrix has the type {other:?} (supported: F32, F16, BF16)")),
    }
}
