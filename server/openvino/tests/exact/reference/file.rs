//! Small GGUF files with random weights, in the layout of each architecture's converter.

use std::path::Path;

use server_gguf::TensorType;
use server_gguf::write::GgufWriter;

use crate::random::Random;

const HIDDEN: u64 = 256;
const FEED_FORWARD: u64 = 512;
const HEADS: u64 = 4;
const KV_HEADS: u64 = 2;
const VOCABULARY: u64 = 288;
/// The context length of a model.
pub(crate) const CONTEXT: u32 = 512;
/// The number of experts of a layer with experts.
pub(crate) const EXPERTS: u64 = 4;
/// The sliding window in tokens; less than half of a test's sequence.
const WINDOW: u64 = 24;
/// The original context length of the gpt-oss file, whose context is extended with YaRN, and the factor of the
/// extension.
const YARN_CONTEXT: u64 = 64;
const YARN_FACTOR: f32 = 32.0;

/// The description of a file. The same recipe always produces the same file.
pub(crate) struct Recipe {
    pub(crate) architecture: &'static str,
    /// The type of the matrices, except for those of `values_kind`, the routers (f32) and the experts of gpt-oss
    /// (MXFP4).
    pub(crate) kind: TensorType,
    /// The type of the embeddings, of v and of the down projections of experts, which may have more bits than `kind`.
    pub(crate) values_kind: TensorType,
    /// The number of experts, out of [`EXPERTS`], that compute each token, or 0 if the layers have no experts.
    pub(crate) experts_used: u64,
    /// Whether the file has a tensor `rope_freqs.weight`.
    pub(crate) rope_factors: bool,
    /// The original context length of a model whose context was extended. The file has rotary factors for contexts up
    /// to this length and for longer ones.
    pub(crate) original_context: Option<u32>,
    /// Whether the vocabulary projection shares the weights of the embeddings.
    pub(crate) tied: bool,
    /// Whether q, k and v have biases.
    pub(crate) biased: bool,
}

impl Recipe {
    pub(crate) fn write(&self, path: &Path) {
        let mut file = GgufWriter::new(self.architecture);
        self.metadata(&mut file);
        self.tensors(&mut Tensors { file: &mut file, random: Random(1), recipe: self });
        file.write(path).unwrap();
    }

    pub(crate) fn tokens(&self, length: usize) -> Vec<u32> {
        let mut random = Random(2);
        (0..length).map(|_| (random.next() % VOCABULARY) as u32).collect()
    }

    fn is(&self, architecture: &str) -> bool {
        self.architecture == architecture
    }

    fn layers(&self) -> u64 {
        // In Gemma 3, five layers with sliding-window attention are followed by one layer with full attention. The
        // seventh layer has sliding-window attention again.
        if self.is("gemma3") { 7 } else { 2 }
    }

    /// The heads of Qwen3 and Gemma 3 are larger than the hidden size divided by the number of heads.
    fn head_size(&self) -> u64 {
        if self.is("gemma3") || self.is("qwen3") || self.is("qwen3moe") { 128 } else { HIDDEN / HEADS }
    }

    fn metadata(&self, file: &mut GgufWriter) {
        let mut set = |key: &str, value: u64| {
            file.metadata(&format!("{}.{key}", self.architecture), value as u32);
        };
        set("context_length", u64::from(CONTEXT));
        set("embedding_length", HIDDEN);
        set("block_count", self.layers());
        set("feed_forward_length", FEED_FORWARD);
        set("attention.head_count", HEADS);
        set("attention.head_count_kv", KV_HEADS);
        set("attention.key_length", self.head_size());
        set("attention.value_length", self.head_size());
        set("rope.dimension_count", self.head_size());
        set("vocab_size", VOCABULARY);
        if self.is("gemma3") || self.is("phi3") || self.is("gpt-oss") {
            set("attention.sliding_window", WINDOW);
        }
        if self.is("gpt-oss") {
            set("rope.scaling.original_context_length", YARN_CONTEXT);
        }
        if self.experts_used > 0 {
            set("expert_count", EXPERTS);
            set("expert_used_count", self.experts_used);
            set("expert_feed_forward_length", FEED_FORWARD);
        }
        if let Some(context) = self.original_context {
            set("rope.scaling.original_context_length", u64::from(context));
            file.metadata(&format!("{}.rope.scaling.attn_factor", self.architecture), 1.19f32);
        }
        if self.is("gpt-oss") {
            file.metadata(&format!("{}.rope.scaling.type", self.architecture), "yarn")
                .metadata(&format!("{}.rope.scaling.factor", self.architecture), YARN_FACTOR);
        }
        let base = if self.is("gemma3") { 1e6f32 } else { 2e4 };
        file.metadata(&format!("{}.rope.freq_base", self.architecture), base);
        file.metadata(&format!("{}.attention.layer_norm_rms_epsilon", self.architecture), 1e-5f32);
        let tokens: Vec<String> = (0..VOCABULARY).map(|token| format!("<{token}>")).collect();
        file.metadata("tokenizer.ggml.model", "gpt2")
            .metadata("tokenizer.ggml.pre", "default")
            .metadata("tokenizer.ggml.tokens", tokens)
            .metadata("tokenizer.ggml.token_type", vec![1i32; VOCABULARY as usize])
            .metadata("tokenizer.ggml.merges", vec!["< 1".to_owned()])
            .metadata("tokenizer.ggml.bos_token_id", 1u32)
            .metadata("tokenizer.ggml.eos_token_id", 2u32);
    }

    fn tensors(&self, to: &mut Tensors<'_>) {
        // Gemma multiplies its embeddings by the square root of the hidden size, so the embeddings in the file are
        // divided by this factor.
        let size = if self.is("gemma3") { 1.0 / (HIDDEN as f32).sqrt() } else { 1.0 };
        to.values("token_embd.weight", HIDDEN, VOCABULARY, size);
        to.norm("output_norm.weight", HIDDEN);
        if !self.tied {
            to.matrix("output.weight", HIDDEN, VOCABULARY);
        }
        if self.rope_factors {
            let factors: Vec<f32> = (0..self.head_size() / 2).map(|i| 1.0 + 0.25 * i as f32).collect();
            to.plain("rope_freqs.weight", &factors);
        }
        if self.original_context.is_some() {
            let factors =
                |step: f32| (0..self.head_size() / 2).map(|i| 1.0 + step * i as f32).collect::<Vec<_>>();
            to.plain("rope_factors_short.weight", &factors(0.02));
            to.plain("rope_factors_long.weight", &factors(0.5));
        }
        for layer in 0..self.layers() {
            self.layer(to, &|name| format!("blk.{layer}.{name}"));
        }
    }

    fn layer(&self, to: &mut Tensors<'_>, name: &dyn Fn(&str) -> String) {
        let (q, kv) = (HEADS * self.head_size(), KV_HEADS * self.head_size());
        to.norm(&name("attn_norm.weight"), HIDDEN);
        if self.is("phi3") {
            to.matrix(&name("attn_qkv.weight"), HIDDEN, q + 2 * kv);
            to.matrix(&name("ffn_up.weight"), HIDDEN, 2 * FEED_FORWARD);
        } else {
            to.matrix(&name("attn_q.weight"), HIDDEN, q);
            to.matrix(&name("attn_k.weight"), HIDDEN, kv);
            to.values(&name("attn_v.weight"), HIDDEN, kv, 1.0 / (HIDDEN as f32).sqrt());
        }
        if self.experts_used > 0 {
            to.put(&name("ffn_gate_inp.weight"), &[HIDDEN, EXPERTS], TensorType::F32);
            to.experts(&name("ffn_gate_exps"), HIDDEN, FEED_FORWARD, self.kind);
            to.experts(&name("ffn_up_exps"), HIDDEN, FEED_FORWARD, self.kind);
            to.experts(&name("ffn_down_exps"), FEED_FORWARD, HIDDEN, self.values_kind);
        } else {
            if !self.is("phi3") {
                to.matrix(&name("ffn_gate.weight"), HIDDEN, FEED_FORWARD);
                to.matrix(&name("ffn_up.weight"), HIDDEN, FEED_FORWARD);
            }
            to.matrix(&name("ffn_down.weight"), FEED_FORWARD, HIDDEN);
        }
        to.matrix(&name("attn_output.weight"), q, HIDDEN);
        if self.is("gpt-oss") {
            to.norm(&name("post_attention_norm.weight"), HIDDEN);
            to.bias(&name("attn_sinks.weight"), HEADS);
            to.bias(&name("attn_output.bias"), HIDDEN);
            to.bias(&name("ffn_gate_inp.bias"), EXPERTS);
        } else {
            to.norm(&name("ffn_norm.weight"), HIDDEN);
        }
        if self.biased {
            to.bias(&name("attn_q.bias"), q);
            to.bias(&name("attn_k.bias"), kv);
            to.bias(&name("attn_v.bias"), kv);
        }
        if self.is("qwen3") || self.is("qwen3moe") || self.is("gemma3") {
            to.norm(&name("attn_q_norm.weight"), self.head_size());
            to.norm(&name("attn_k_norm.weight"), self.head_size());
        }
        if self.is("gemma3") {
            to.norm(&name("post_attention_norm.weight"), HIDDEN);
            to.norm(&name("post_ffw_norm.weight"), HIDDEN);
        }
    }
}

/// Writes tensors whose values come from one sequence of random numbers.
struct Tensors<'a> {
    file: &'a mut GgufWriter,
    random: Random,
    recipe: &'a Recipe,
}

impl Tensors<'_> {
    /// Writes a projection that preserves the variance of its input, so that every layer affects the logits.
    fn put(&mut self, name: &str, shape: &[u64], kind: TensorType) {
        let values = normals(&mut self.random, shape.iter().product(), 1.0 / (shape[0] as f32).sqrt());
        self.file.tensor_of(name, shape, kind, &values);
    }

    /// Writes a matrix for each expert. The experts of gpt-oss have biases, and some of their products exceed the
    /// limits of the activation function.
    fn experts(&mut self, name: &str, columns: u64, rows: u64, kind: TensorType) {
        let is_gpt_oss = self.recipe.is("gpt-oss");
        let kind = if is_gpt_oss { TensorType::Mxfp4 } else { kind };
        let size = if is_gpt_oss && rows == FEED_FORWARD { 3.0 } else { 1.0 };
        let values = normals(&mut self.random, columns * rows * EXPERTS, size / (columns as f32).sqrt());
        self.file.tensor_of(&format!("{name}.weight"), &[columns, rows, EXPERTS], kind, &values);
        if is_gpt_oss {
            let values = normals(&mut self.random, rows * EXPERTS, 0.5);
            self.file.tensor_of(&format!("{name}.bias"), &[rows, EXPERTS], TensorType::F32, &values);
        }
    }

    fn matrix(&mut self, name: &str, columns: u64, rows: u64) {
        self.put(name, &[columns, rows], self.recipe.kind);
    }

    fn values(&mut self, name: &str, columns: u64, rows: u64, size: f32) {
        let values = normals(&mut self.random, columns * rows, size);
        self.file.tensor_of(name, &[columns, rows], self.recipe.values_kind, &values);
    }

    fn norm(&mut self, name: &str, length: u64) {
        let values: Vec<f32> = (0..length).map(|_| 1.0 + 0.3 * normal(&mut self.random)).collect();
        self.plain(name, &values);
    }

    fn bias(&mut self, name: &str, length: u64) {
        let values: Vec<f32> = (0..length).map(|_| 0.5 * normal(&mut self.random)).collect();
        self.plain(name, &values);
    }

    fn plain(&mut self, name: &str, values: &[f32]) {
        self.file.tensor_of(name, &[values.len() as u64], TensorType::F32, values);
    }
}

/// `count` random numbers with mean 0 and standard deviation `size`.
pub(crate) fn normals(random: &mut Random, count: u64, size: f32) -> Vec<f32> {
    (0..count).map(|_| size * normal(random)).collect()
}

/// A random number with mean 0 and standard deviation 1. The sum of four uniform numbers is close enough to a normal
/// distribution for weights.
fn normal(random: &mut Random) -> f32 {
    let uniform = |bits: u64| (bits & 0xffff) as f32 / 65536.0 - 0.5;
    let bits = random.next();
    let sum = uniform(bits) + uniform(bits >> 16) + uniform(bits >> 32) + uniform(bits >> 48);
    sum * 3f32.sqrt()
}
