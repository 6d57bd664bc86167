//! A simple forward pass: in f64, one token after the other, without cache blocks or fused operations.
//!
//! It follows the conventions of the file format: the tensors of a layer determine its operations, and the architecture
//! determines only the properties that do not follow from the tensors.

use std::collections::HashMap;
use std::path::Path;

use server_gguf::{GgufFile, dequantize};

/// A model with f32 weights.
pub(crate) struct Reference {
    tensors: HashMap<String, Tensor>,
    layers: usize,
    heads: usize,
    kv_heads: usize,
    head_size: usize,
    epsilon: f64,
    rope_base: f64,
    /// The number of experts of a layer. Their matrices follow each other in one tensor.
    experts: usize,
    experts_used: usize,
    /// The factor for cosines and sines.
    rope_scale: f64,
    yarn: Option<Yarn>,
    /// The name of the tensor with the divisors of the rotary frequencies.
    rope_factors: &'static str,
    /// The sliding window in tokens, including the current one.
    window: Option<usize>,
    architecture: String,
}

/// The extension of a context with YaRN. The frequencies of the pairs between `first` and `last` are interpolated.
struct Yarn {
    factor: f64,
    first: f64,
    last: f64,
}

impl Yarn {
    /// Returns the factor by which the frequency of a pair is multiplied.
    fn scale(&self, pair: usize) -> f64 {
        let slow = ((pair as f64 - self.first) / (self.last - self.first)).clamp(0.0, 1.0);
        slow / self.factor + 1.0 - slow
    }
}

struct Tensor {
    columns: usize,
    values: Vec<f32>,
}

/// The keys and values of a layer, one entry for each token.
#[derive(Default)]
struct Past {
    keys: Vec<Vec<f64>>,
    values: Vec<Vec<f64>>,
}

impl Reference {
    /// Reads the model of a file, for sequences of at most `context` tokens.
    pub(crate) fn open(path: &Path, context: u32) -> Self {
        let file = GgufFile::open(path).unwrap();
        let mut tensors = HashMap::new();
        let mut bytes = Vec::new();
        for entry in file.tensors() {
            file.read_tensor(&entry.name, &mut bytes).unwrap();
            let mut values = vec![0.0; entry.values() as usize];
            dequantize(entry.kind, &bytes, &mut values).unwrap();
            tensors.insert(entry.name.clone(), Tensor { columns: entry.shape[0] as usize, values });
        }
        let number =
            |key: &str| file.get_of_architecture(key).and_then(|value| value.u64()).map(|n| n as usize);
        let real = |key: &str| f64::from(file.get_of_architecture(key).unwrap().f32().unwrap());
        let is_gpt_oss = file.architecture() == Some("gpt-oss");
        let original = number("rope.scaling.original_context_length").filter(|_| !is_gpt_oss);
        let yarn = is_gpt_oss.then(|| {
            let context = number("rope.scaling.original_context_length").unwrap() as f64;
            let dimensions = number("rope.dimension_count").unwrap() as f64;
            // Returns the index of the pair that rotates this many times within the original context.
            let pair = |rotations: f64| {
                let wave = context / (rotations * std::f64::consts::TAU);
                dimensions * wave.ln() / (2.0 * real("rope.freq_base").ln())
            };
            let (first, last) = (pair(32.0).max(0.0), pair(1.0).min(dimensions - 1.0));
            Yarn { factor: real("rope.scaling.factor"), first, last }
        });
        Self {
            tensors,
            experts: number("expert_count").unwrap_or(0),
            experts_used: number("expert_used_count").unwrap_or(0),
            rope_scale: match &yarn {
                Some(yarn) => 1.0 + 0.1 * yarn.factor.ln(),
                None => original.map_or(1.0, |_| real("rope.scaling.attn_factor")),
            },
            yarn,
            rope_factors: match original {
                None => "rope_freqs.weight",
                Some(original) if context as usize <= original => "rope_factors_short.weight",
                Some(_) => "rope_factors_long.weight",
            },
            layers: number("block_count").unwrap(),
            heads: number("attention.head_count").unwrap(),
            kv_heads: number("attention.head_count_kv").unwrap(),
            head_size: number("attention.key_length").unwrap(),
            epsilon: real("attention.layer_norm_rms_epsilon"),
            rope_base: real("rope.freq_base"),
            window: number("attention.sliding_window"),
            architecture: file.architecture().unwrap().to_owned(),
        }
    }

    /// The rows and columns of a matrix.
    pub(crate) fn shape(&self, tensor: &str) -> (usize, usize) {
        let Tensor { columns, values } = &self.tensors[tensor];
        (values.len() / columns, *columns)
    }

    pub(crate) fn layers(&self) -> usize {
        self.layers
    }

    /// Whether q, k and v are projected by a single matrix.
    pub(crate) fn is_fused(&self) -> bool {
        self.has("blk.0.attn_qkv")
    }

    /// The rows of a projection in the order of the file: llama interleaves the two halves of each head of q and k.
    pub(crate) fn in_file_order(&self, part: &str, values: &[f32], columns: usize) -> Vec<f32> {
        if self.architecture != "llama" || !matches!(part, "attn_q" | "attn_k") {
            return values.to_vec();
        }
        let half = self.head_size / 2;
        let heads = values.chunks_exact(self.head_size * columns);
        let interleaved = heads.flat_map(|head| {
            let row = |row: usize| head[row * columns..(row + 1) * columns].iter().copied();
            (0..half).flat_map(move |i| row(i).chain(row(half + i)))
        });
        interleaved.collect()
    }

    /// Adds a change to a matrix.
    pub(crate) fn add(&mut self, tensor: &str, change: &[f32]) {
        let values = &mut self.tensors.get_mut(tensor).unwrap().values;
        assert_eq!(values.len(), change.len(), "{tensor}");
        values.iter_mut().zip(change).for_each(|(value, change)| *value += change);
    }

    /// The logits of each token.
    pub(crate) fn logits(&self, tokens: &[u32]) -> Vec<Vec<f32>> {
        let mut past: Vec<Past> = (0..self.layers).map(|_| Past::default()).collect();
        tokens.iter().enumerate().map(|(position, token)| self.token(*token, position, &mut past)).collect()
    }

    fn token(&self, token: u32, position: usize, past: &mut [Past]) -> Vec<f32> {
        let embeddings = &self.tensors["token_embd.weight"];
        let at = token as usize * embeddings.columns;
        let mut x: Vec<f64> =
            embeddings.values[at..at + embeddings.columns].iter().map(|value| f64::from(*value)).collect();
        if self.architecture == "gemma3" {
            let scale = (x.len() as f64).sqrt();
            x.iter_mut().for_each(|value| *value *= scale);
        }
        for (layer, past) in past.iter_mut().enumerate() {
            let name = |name: &str| format!("blk.{layer}.{name}.weight");
            let attended = self.attention(layer, &self.norm(&name("attn_norm"), &x), position, past);
            // In gpt-oss, `post_attention_norm` is the name of the norm before the experts.
            let (after, before) = match self.architecture.as_str() {
                "gpt-oss" => ("", "post_attention_norm"),
                _ => ("post_attention_norm", "ffn_norm"),
            };
            add(&mut x, &self.norm(&name(after), &attended));
            let fed = self.feed_forward(layer, &self.norm(&name(before), &x));
            add(&mut x, &self.norm(&name("post_ffw_norm"), &fed));
        }
        let x = self.norm("output_norm.weight", &x);
        let projection = if self.tensors.contains_key("output.weight") { "output" } else { "token_embd" };
        self.project(projection, &x).into_iter().map(|value| value as f32).collect()
    }

    fn attention(&self, layer: usize, x: &[f64], position: usize, past: &mut Past) -> Vec<f64> {
        let name = |name: &str| format!("blk.{layer}.{name}");
        let (q_size, kv_size) = (self.heads * self.head_size, self.kv_heads * self.head_size);
        let (mut q, mut k, v) = if self.has(&name("attn_qkv")) {
            let mut q = self.project(&name("attn_qkv"), x);
            let mut k = q.split_off(q_size);
            let v = k.split_off(kv_size);
            (q, k, v)
        } else {
            let project = |one| self.project(&name(one), x);
            (project("attn_q"), project("attn_k"), project("attn_v"))
        };
        let sliding = match self.architecture.as_str() {
            "phi3" => true,
            "gemma3" => layer % 6 != 5,
            "gpt-oss" => layer.is_multiple_of(2),
            _ => false,
        };
        for (vector, norm) in [(&mut q, "attn_q_norm.weight"), (&mut k, "attn_k_norm.weight")] {
            for head in vector.chunks_exact_mut(self.head_size) {
                head.copy_from_slice(&self.norm(&name(norm), head));
                self.rotate(head, position, sliding);
            }
        }
        past.keys.push(k);
        past.values.push(v);
        let first = match self.window {
            Some(window) if sliding => (position + 1).saturating_sub(window),
            _ => 0,
        };
        let mut out = Vec::with_capacity(q_size);
        for (head, q) in q.chunks_exact(self.head_size).enumerate() {
            let at = head / (self.heads / self.kv_heads) * self.head_size;
            let part = |vector: &Vec<f64>| vector[at..at + self.head_size].to_vec();
            let keys: Vec<_> = past.keys[first..].iter().map(part).collect();
            let values: Vec<_> = past.values[first..].iter().map(part).collect();
            let sinks = self.tensors.get(&name("attn_sinks.weight"));
            out.extend(attend(q, &keys, &values, sinks.map(|sinks| f64::from(sinks.values[head]))));
        }
        self.project(&name("attn_output"), &out)
    }

    fn feed_forward(&self, layer: usize, x: &[f64]) -> Vec<f64> {
        let name = |name: &str| format!("blk.{layer}.{name}");
        if self.experts > 0 {
            return self.mixture(layer, x);
        }
        let mut up = self.project(&name("ffn_up"), x);
        let gate = if self.has(&name("ffn_gate")) {
            self.project(&name("ffn_gate"), x)
        } else {
            // A single matrix contains the gate and up projections, in this order.
            let second = up.split_off(up.len() / 2);
            std::mem::replace(&mut up, second)
        };
        let activation = if self.architecture == "gemma3" { gelu } else { silu };
        up.iter_mut().zip(gate).for_each(|(up, gate)| *up *= activation(gate));
        self.project(&name("ffn_down"), &up)
    }

    /// The sum of the outputs of a token's most probable experts, weighted by the router's probabilities, which are
    /// normalized over these experts.
    fn mixture(&self, layer: usize, x: &[f64]) -> Vec<f64> {
        let name = |name: &str| format!("blk.{layer}.{name}");
        let mut ranked: Vec<(f64, usize)> =
            self.project(&name("ffn_gate_inp"), x).into_iter().zip(0..self.experts).collect();
        ranked.sort_by(|a, b| b.0.total_cmp(&a.0));
        ranked.truncate(self.experts_used);
        let total: f64 = ranked.iter().map(|(logit, _)| (logit - ranked[0].0).exp()).sum();
        let mut out = vec![0.0; x.len()];
        for (logit, expert) in &ranked {
            let mut up = self.project_of(&name("ffn_up_exps"), *expert, x);
            let gate = self.project_of(&name("ffn_gate_exps"), *expert, x);
            for (up, gate) in up.iter_mut().zip(gate) {
                *up =
                    if self.architecture == "gpt-oss" { clamped_swiglu(gate, *up) } else { *up * silu(gate) };
            }
            let weight = (logit - ranked[0].0).exp() / total;
            let fed = self.project_of(&name("ffn_down_exps"), *expert, &up);
            out.iter_mut().zip(fed).for_each(|(out, fed)| *out += weight * fed);
        }
        out
    }

    fn project_of(&self, name: &str, expert: usize, x: &[f64]) -> Vec<f64> {
        let weight = &self.tensors[&format!("{name}.weight")];
        let size = weight.values.len() / self.experts;
        let mut y = product(&weight.values[expert * size..(expert + 1) * size], x);
        if let Some(bias) = self.tensors.get(&format!("{name}.bias")) {
            let of_expert = &bias.values[expert * y.len()..][..y.len()];
            y.iter_mut().zip(of_expert).for_each(|(y, bias)| *y += f64::from(*bias));
        }
        y
    }

    fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(&format!("{name}.weight"))
    }

    fn project(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let weight = &self.tensors[&format!("{name}.weight")];
        assert_eq!(weight.columns, x.len(), "{name}");
        let mut y = product(&weight.values, x);
        if let Some(bias) = self.tensors.get(&format!("{name}.bias")) {
            y.iter_mut().zip(&bias.values).for_each(|(y, bias)| *y += f64::from(*bias));
        }
        y
    }

    /// Applies an RMS norm, if the file has its weight.
    fn norm(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let Some(weight) = self.tensors.get(name) else { return x.to_vec() };
        let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
        let scale = 1.0 / (mean + self.epsilon).sqrt();
        x.iter().zip(&weight.values).map(|(x, w)| x * scale * f64::from(*w)).collect()
    }

    /// Applies the rotary embedding: llama rotates adjacent pairs, all other architectures rotate halves.
    fn rotate(&self, head: &mut [f64], position: usize, sliding: bool) {
        let half = head.len() / 2;
        // Gemma 3's sliding-window layers have this base, regardless of the file's base for the other layers.
        let base = if sliding && self.architecture == "gemma3" { 10_000.0 } else { self.rope_base };
        let factors = self.tensors.get(self.rope_factors);
        for i in 0..half {
            let factor = factors.map_or(1.0, |factors| f64::from(factors.values[i]));
            let scale = self.yarn.as_ref().map_or(1.0, |yarn| yarn.scale(i));
            let angle = position as f64 * base.powf(-(i as f64) / half as f64) * scale / factor;
            let (one, two) = if self.architecture == "llama" { (2 * i, 2 * i + 1) } else { (i, i + half) };
            let (a, b) = (head[one], head[two]);
            let (cos, sin) = (angle.cos() * self.rope_scale, angle.sin() * self.rope_scale);
            head[one] = a * cos - b * sin;
            head[two] = a * sin + b * cos;
        }
    }
}

/// Multiplies a row-major matrix by a vector.
fn product(matrix: &[f32], x: &[f64]) -> Vec<f64> {
    let (x, rest) = x.as_chunks::<4>();
    assert!(rest.is_empty());
    // With a single sum, each addition would wait for the previous one.
    let dot = |row: &[f32]| {
        let mut sums = [0.0; 4];
        for (w, x) in row.as_chunks::<4>().0.iter().zip(x) {
            sums[0] += f64::from(w[0]) * x[0];
            sums[1] += f64::from(w[1]) * x[1];
            sums[2] += f64::from(w[2]) * x[2];
            sums[3] += f64::from(w[3]) * x[3];
        }
        sums.iter().sum()
    };
    matrix.chunks_exact(4 * x.len()).map(dot).collect()
}

/// The attention of a query. A sink takes part in the softmax like the score of an additional key whose value vector is
/// zero.
fn attend(q: &[f64], keys: &[Vec<f64>], values: &[Vec<f64>], sink: Option<f64>) -> Vec<f64> {
    let scale = 1.0 / (q.len() as f64).sqrt();
    let scores: Vec<f64> =
        keys.iter().map(|k| k.iter().zip(q).map(|(k, q)| k * q).sum::<f64>() * scale).collect();
    let highest = scores.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|score| (score - highest).exp()).collect();
    let total = weights.iter().sum::<f64>() + sink.map_or(0.0, |sink| (sink - highest).exp());
    let mut out = vec![0.0; q.len()];
    for (weight, value) in weights.iter().zip(values) {
        out.iter_mut().zip(value).for_each(|(out, value)| *out += weight / total * value);
    }
    out
}

fn add(x: &mut [f64], y: &[f64]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
}

fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

/// The activation of gpt-oss.
fn clamped_swiglu(gate: f64, up: f64) -> f64 {
    let gate = gate.min(7.0);
    gate / (1.0 + (-1.702 * gate).exp()) * (up.clamp(-7.0, 7.0) + 1.0)
}

/// GELU with the tanh approximation, which Gemma 3 uses.
fn gelu(x: f64) -> f64 {
    0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x * x * x)).tanh())
}
