//! Adapters with random weights: their directories in the format of PEFT, and their effect on the weights of a file.

use std::path::{Path, PathBuf};

use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};
use server_gguf::{bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16};

use crate::random::Random;
use crate::reference::{Reference, normals};

/// The name of each projection in GGUF files, and its name in the model's code, which adapters use.
const MODULES: [(&str, &str); 7] = [
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
];

/// The names of the projections in files that fuse q, k and v, and that fuse gate and up.
const FUSED: [(&str, &str); 4] = [
    ("attn_qkv", "self_attn.qkv_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("ffn_up", "mlp.gate_up_proj"),
    ("ffn_down", "mlp.down_proj"),
];

/// The description of an adapter. The same recipe always produces the same adapter.
#[derive(Clone)]
pub(crate) struct AdapterRecipe {
    pub(crate) seed: u64,
    pub(crate) rank: usize,
    pub(crate) dtype: Dtype,
    /// The projections of a layer that the adapter changes, by their names in the file.
    pub(crate) changes: Vec<&'static str>,
    /// Additional members of the adapter's configuration.
    pub(crate) config: Value,
}

impl AdapterRecipe {
    pub(crate) fn of(architecture: &str, seed: u64) -> Self {
        let changes: Vec<_> = match architecture {
            "phi3" => FUSED.map(|(part, _)| part).to_vec(),
            "qwen3moe" => MODULES[..4].iter().map(|(part, _)| *part).collect(),
            _ => MODULES.map(|(part, _)| part).to_vec(),
        };
        Self { seed, rank: 8, dtype: Dtype::F32, changes, config: json!({}) }
    }

    /// Writes the directory of the adapter, and adds the product of its matrices to the weights of `model`.
    pub(crate) fn write(&self, directory: &Path, model: &mut Reference, scale: f32) -> PathBuf {
        let mut random = Random(self.seed);
        let mut tensors = Vec::new();
        for layer in 0..model.layers() {
            for part in &self.changes {
                let tensor = format!("blk.{layer}.{part}.weight");
                let (rows, columns) = model.shape(&tensor);
                let down = self.rounded(normals(
                    &mut random,
                    (self.rank * columns) as u64,
                    1.0 / (columns as f32).sqrt(),
                ));
                let up = self.rounded(normals(
                    &mut random,
                    (rows * self.rank) as u64,
                    0.5 / (self.rank as f32).sqrt(),
                ));
                let change = product(&up, &down, self.rank, scale);
                model.add(&tensor, &model.in_file_order(part, &change, columns));
                let fused = FUSED.iter().filter(|_| model.is_fused());
                let (_, module) = fused.chain(&MODULES).find(|(known, _)| known == part).unwrap();
                let name = format!("base_model.model.model.layers.{layer}.{module}");
                tensors.push((format!("{name}.lora_A.weight"), vec![self.rank, columns], self.bytes(&down)));
                tensors.push((format!("{name}.lora_B.weight"), vec![rows, self.rank], self.bytes(&up)));
            }
        }
        let mut config = json!({
            "peft_type": "LORA", "r": self.rank, "lora_alpha": self.rank as f32 * scale, "bias": "none",
            "target_modules": ["q_proj"], "task_type": "CAUSAL_LM", "base_model_name_or_path": "someone/some-model",
        });
        config.as_object_mut().unwrap().extend(self.config.as_object().unwrap().clone());
        write_directory(directory, &config, &tensors, self.dtype)
    }

    fn rounded(&self, values: Vec<f32>) -> Vec<f32> {
        let round = |value: f32| match self.dtype {
            Dtype::F16 => f16_to_f32(f32_to_f16(value)),
            Dtype::BF16 => bf16_to_f32(f32_to_bf16(value)),
            _ => value,
        };
        values.into_iter().map(round).collect()
    }

    fn bytes(&self, values: &[f32]) -> Vec<u8> {
        let bytes = |value: &f32| match self.dtype {
            Dtype::F16 => f32_to_f16(*value).to_le_bytes().to_vec(),
            Dtype::BF16 => f32_to_bf16(*value).to_le_bytes().to_vec(),
            _ => value.to_le_bytes().to_vec(),
        };
        values.iter().flat_map(bytes).collect()
    }
}

/// Writes a directory with these tensors.
pub(crate) fn write_directory(
    directory: &Path,
    config: &Value,
    tensors: &[(String, Vec<usize>, Vec<u8>)],
    dtype: Dtype,
) -> PathBuf {
    std::fs::create_dir_all(directory).unwrap();
    std::fs::write(directory.join("adapter_config.json"), config.to_string()).unwrap();
    let views = tensors
        .iter()
        .map(|(name, shape, bytes)| (name.as_str(), TensorView::new(dtype, shape.clone(), bytes).unwrap()));
    safetensors::serialize_to_file(views, None, &directory.join("adapter_model.safetensors")).unwrap();
    directory.to_owned()
}

/// Computes `scale * up * down`, in row-major order.
fn product(up: &[f32], down: &[f32], rank: usize, scale: f32) -> Vec<f32> {
    let (rows, columns) = (up.len() / rank, down.len() / rank);
    let mut product = vec![0f64; rows * columns];
    for (row, out) in product.chunks_exact_mut(columns).enumerate() {
        for r in 0..rank {
            let factor = f64::from(up[row * rank + r]) * f64::from(scale);
            let from = &down[r * columns..(r + 1) * columns];
            out.iter_mut().zip(from).for_each(|(out, value)| *out += factor * f64::from(*value));
        }
    }
    product.into_iter().map(|value| value as f32).collect()
}
