//! A model with an adapter computes the same logits as a model whose weights include the product of the adapter's
//! matrices.

use std::path::{Path, PathBuf};

use safetensors::Dtype;
use serde_json::{Value, json};
use server_engine::ModelRunner as _;
use server_gguf::TensorType;
use server_openvino::{ADAPTER_RANK_MAX, AdapterSource, Config, load};

use crate::adapter::{AdapterRecipe, write_directory};
use crate::reference::{
    CONTEXT, EXACT, LENGTH, ROUNDED, ROUNDED_DIFFERENCE_MAX, Recipe, Reference, config, deviation,
    difference_allowed, load_file, private_directory, recipe, worst_difference_with,
};

/// The scale of the product of an adapter's matrices. With this scale, the product is about as large as the weights.
const SCALE: f32 = 2.0;

/// A file, its adapters, and the logits of the same tokens with each adapter and without an adapter.
struct AdapterCase {
    directory: tempfile::TempDir,
    tokens: Vec<u32>,
    /// The logits without an adapter, followed by the logits with each adapter.
    logits: Vec<Vec<Vec<f32>>>,
    sources: Vec<AdapterSource>,
}

impl AdapterCase {
    fn new(recipe: &Recipe, adapters: &[(AdapterRecipe, f32)]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("model.gguf");
        recipe.write(&file);
        let tokens = recipe.tokens(LENGTH);
        let mut logits = vec![Reference::open(&file, CONTEXT).logits(&tokens)];
        let mut sources = Vec::new();
        for (number, (adapter, scale)) in adapters.iter().enumerate() {
            let mut model = Reference::open(&file, CONTEXT);
            let name = format!("adapter-{number}");
            let path = adapter.write(&directory.path().join(&name), &mut model, *scale);
            logits.push(model.logits(&tokens));
            sources.push(AdapterSource { name, path });
        }
        Self { directory, tokens, logits, sources }
    }

    fn file(&self) -> PathBuf {
        self.directory.path().join("model.gguf")
    }

    fn config(&self) -> Config {
        Config { adapters: self.sources.clone(), ..config(&self.file(), &EXACT) }
    }

    /// The largest difference from the expected logits, as a fraction of the standard deviation of the first sequence's
    /// expected logits, if the sequences of each step have these adapters (0: none).
    fn difference(&self, config: &Config, numbers: [u32; 4]) -> f64 {
        let (mut runner, _) = load(config, &mut |_| {}).unwrap();
        assert_eq!(runner.adapters() as usize, self.sources.len());
        let expected = numbers.map(|number| (number, &self.logits[number as usize][..]));
        worst_difference_with(&mut runner, &self.tokens, expected)
    }

    fn check(&self, kind: TensorType, numbers: [u32; 4]) {
        let difference = self.difference(&self.config(), numbers);
        assert!(difference <= difference_allowed(kind), "{kind} {numbers:?}: {difference:.1e}");
    }

    /// Checks the native projections with adapters: in f32, with the fastest configuration, and with the attention of
    /// the plugin.
    fn check_rounded(&self, numbers: [u32; 4]) {
        let plugin_attention = ("KEY_CACHE_PRECISION", "u8");
        for properties in [&[EXACT[0], ROUNDED[0]][..], &ROUNDED, &[plugin_attention]] {
            let rounded = Config { adapters: self.sources.clone(), ..config(&self.file(), properties) };
            let is_native = load(&rounded, &mut |_| {}).unwrap().1.native_kernels;
            assert_eq!(
                is_native,
                has_native_kernels() && !properties.contains(&plugin_attention),
                "{properties:?}"
            );
            let difference = self.difference(&rounded, numbers);
            assert!(difference <= ROUNDED_DIFFERENCE_MAX, "{numbers:?}, {properties:?}: {difference:.1e}");
        }
    }
}

fn check(architecture: &'static str) {
    for kind in [TensorType::F32, TensorType::F16, TensorType::Q8_0] {
        let adapter = AdapterRecipe::of(architecture, 7);
        let case = AdapterCase::new(&recipe(architecture, kind), &[(adapter, SCALE)]);
        // If the adapter had no effect, a model that ignores it would pass.
        assert!(difference(&case.logits[0], &case.logits[1]) > 0.5);
        case.check(kind, [1, 1, 1, 1]);
        case.check(kind, [0, 1, 0, 1]);
        // Models with experts are not checked with rounding, because a small error may change the selection of experts.
        if kind == TensorType::Q8_0 && architecture != "qwen3moe" {
            case.check_rounded([0, 1, 0, 1]);
        }
    }
}

/// Whether this processor has native projections.
fn has_native_kernels() -> bool {
    #[cfg(target_arch = "x86_64")]
    return is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c");
    #[cfg(not(target_arch = "x86_64"))]
    return false;
}

fn difference(a: &[Vec<f32>], b: &[Vec<f32>]) -> f32 {
    a.iter().flatten().zip(b.iter().flatten()).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

#[test]
fn llama_with_interleaved_rows() {
    check("llama");
}

#[test]
fn llama_whose_rotation_is_not_rewritten() {
    for kind in [TensorType::F32, TensorType::Q8_0] {
        let biased = Recipe { biased: true, ..recipe("llama", kind) };
        let case = AdapterCase::new(&biased, &[(AdapterRecipe::of("llama", 7), SCALE)]);
        case.check(kind, [1, 0, 1, 0]);
    }
}

#[test]
fn qwen2_with_biases() {
    check("qwen2");
}

#[test]
fn qwen3_with_norms_of_q_and_k() {
    check("qwen3");
}

#[test]
fn qwen3moe_at_its_attention() {
    check("qwen3moe");
}

#[test]
fn phi3_with_fused_projections() {
    check("phi3");
}

#[test]
fn gemma3_with_sliding_windows() {
    check("gemma3");
}

/// Two adapters with different seeds, ranks, data types and projections. The second one uses rsLoRA.
fn two() -> [(AdapterRecipe, f32); 2] {
    let first = AdapterRecipe { rank: 5, dtype: Dtype::BF16, ..AdapterRecipe::of("llama", 7) };
    let second = AdapterRecipe {
        rank: 16,
        dtype: Dtype::F16,
        changes: vec!["attn_v", "ffn_down", "attn_q"],
        // The scale is 8 / sqrt(16).
        config: json!({"use_rslora": true, "lora_alpha": 8.0}),
        ..AdapterRecipe::of("llama", 8)
    };
    [(first, SCALE), (second, 2.0)]
}

#[test]
fn sequences_of_two_adapters_and_of_none_share_a_step() {
    for kind in [TensorType::F32, TensorType::Q4K] {
        let case = AdapterCase::new(&recipe("llama", kind), &two());
        assert!(difference(&case.logits[1], &case.logits[2]) > 0.5);
        for numbers in [[0, 1, 2, 1], [2, 0, 1, 2], [1, 2, 0, 0], [0, 0, 0, 0]] {
            case.check(kind, numbers);
        }
        if kind == TensorType::Q4K {
            case.check_rounded([2, 0, 1, 2]);
        }
    }
}

#[test]
fn the_native_kernels_apply_an_adapter_of_each_projection() {
    let recipe = recipe("llama", TensorType::Q8_0);
    for part in AdapterRecipe::of("llama", 7).changes {
        let adapter = AdapterRecipe { changes: vec![part], ..AdapterRecipe::of("llama", 7) };
        let case = AdapterCase::new(&recipe, &[(adapter, SCALE)]);
        let change = f64::from(difference(&case.logits[0], &case.logits[1])) / deviation(&case.logits[0]);
        assert!(
            change > 3.0 * ROUNDED_DIFFERENCE_MAX,
            "an adapter of {part} changes the logits by {change:.1e}, which rounding may hide"
        );
        case.check_rounded([0, 1, 1, 0]);
    }
}

#[test]
fn adapters_do_not_change_the_logits_of_sequences_without_one() {
    if !has_native_kernels() {
        return;
    }
    let case = AdapterCase::new(&recipe("llama", TensorType::Q4K), &two());
    let loaded = Config { adapters: case.sources.clone(), ..config(&case.file(), &ROUNDED) };
    let beside = case.difference(&loaded, [0; 4]);
    let (mut runner, _) = load(&Config { adapters: Vec::new(), ..loaded }, &mut |_| {}).unwrap();
    let alone = worst_difference_with(&mut runner, &case.tokens, [(0, &case.logits[0][..]); 4]);
    assert_eq!(beside.to_bits(), alone.to_bits());
}

#[test]
fn a_cached_graph_can_be_used_with_other_adapters() {
    let mut case = AdapterCase::new(&recipe("llama", TensorType::Q8_0), &two());
    let cache = tempfile::tempdir().unwrap();
    let allowed = difference_allowed(TensorType::Q8_0);
    for (from_cache, numbers) in [(false, [0, 1, 2, 1]), (true, [2, 1, 0, 1])] {
        let config = Config { cache_dir: Some(cache.path().to_owned()), ..case.config() };
        assert_eq!(load(&config, &mut |_| {}).unwrap().1.from_cache, from_cache);
        let difference = case.difference(&config, numbers);
        assert!(difference <= allowed, "{from_cache}: {difference:.1e}");
    }
    // The cached graph contains no adapters, so their order may change.
    case.sources.swap(0, 1);
    case.logits.swap(1, 2);
    let config = Config { cache_dir: Some(cache.path().to_owned()), ..case.config() };
    let difference = case.difference(&config, [1, 0, 2, 1]);
    assert!(difference <= allowed, "{difference:.1e}");
    // The graph that is used without adapters is cached separately, because its projections are merged.
    let config = Config { adapters: Vec::new(), ..config };
    assert!(!load(&config, &mut |_| {}).unwrap().1.from_cache);
}

#[test]
fn adapters_find_the_projections_of_an_ir_by_module_names() {
    let case = AdapterCase::new(&recipe("qwen3", TensorType::F16), &[(AdapterRecipe::of("qwen3", 7), SCALE)]);
    let directory = tempfile::tempdir().unwrap();
    let config = Config { cache_dir: Some(directory.path().to_owned()), ..case.config() };
    drop(load(&config, &mut |_| {}).unwrap());
    let cached = private_directory(directory.path());
    as_ir(&cached);
    let config = Config { model: cached, cache_dir: None, ..config };
    let difference = case.difference(&config, [1, 0, 1, 0]);
    assert!(difference <= difference_allowed(TensorType::F16), "{difference:.1e}");
}

/// Turns the cached graph in a directory into an IR with the names that exporters use.
fn as_ir(directory: &Path) {
    let entries = || std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    for ending in ["xml", "bin"] {
        let from = entries().find(|path| path.extension().is_some_and(|known| known == ending)).unwrap();
        std::fs::rename(from, directory.join(format!("openvino_model.{ending}"))).unwrap();
    }
    let path = directory.join("openvino_model.xml");
    let mut text = std::fs::read_to_string(&path).unwrap();
    let attribute = |line: &str, name: &str| {
        let (_, rest) = line.split_once(&format!(" {name}=\""))?;
        rest.split_once('"').map(|(value, _)| value.to_owned())
    };
    let layers: Vec<(String, String)> = text
        .lines()
        .filter(|line| line.trim_start().starts_with("<layer "))
        .map(|line| (attribute(line, "id").unwrap(), attribute(line, "name").unwrap()))
        .collect();
    let mut renamed = 0;
    for (id, name) in &layers {
        let Some(tensor) = name.strip_prefix("weight.weight_blk.") else { continue };
        let (layer, part) = tensor.strip_suffix(".weight").unwrap().split_once('.').unwrap();
        let module = match part {
            "attn_q" => "self_attn.q_proj",
            "attn_k" => "self_attn.k_proj",
            "attn_v" => "self_attn.v_proj",
            "attn_output" => "self_attn.o_proj",
            "ffn_gate" => "mlp.gate_proj",
            "ffn_up" => "mlp.up_proj",
            "ffn_down" => "mlp.down_proj",
            _ => continue,
        };
        let edge = text.lines().find(|line| attribute(line, "from-layer").as_ref() == Some(id)).unwrap();
        let reader = attribute(edge, "to-layer").unwrap();
        let old = &layers.iter().find(|(id, _)| *id == reader).unwrap().1;
        let new = format!("__module.model.layers.{layer}.{module}/ov_ext::linear/MatMul");
        let (from, to) =
            (format!("id=\"{reader}\" name=\"{old}\""), format!("id=\"{reader}\" name=\"{new}\""));
        assert_eq!(text.matches(&from).count(), 1, "{from}");
        text = text.replace(&from, &to);
        // Replace the names that come from the GGUF file.
        text = text.replace(&format!("name=\"{name}\""), &format!("name=\"constant-{id}\""));
        renamed += 1;
    }
    assert!(renamed >= 14, "{renamed}");
    std::fs::write(path, text).unwrap();
}

/// The error for an adapter with these tensors.
fn refused(config: &Value, tensors: &[(&str, &[usize])], dtype: Dtype, value: f32) -> String {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("model.gguf");
    recipe("llama", TensorType::F16).write(&file);
    let width = if dtype == Dtype::F64 { 8 } else { 4 };
    let tensors: Vec<_> = tensors
        .iter()
        .map(|(name, shape)| {
            let count = shape.iter().product::<usize>();
            let bytes = value.to_le_bytes().into_iter().cycle().take(count * width).collect();
            (format!("base_model.model.{name}.weight"), shape.to_vec(), bytes)
        })
        .collect();
    let path = write_directory(&directory.path().join("adapter"), config, &tensors, dtype);
    let source = AdapterSource { name: "mine".to_owned(), path };
    let config = Config { adapters: vec![source], ..self::config(&file, &EXACT) };
    let refused = load(&config, &mut |_| {}).err().expect("the adapter is rejected").chain();
    assert!(refused.starts_with("cannot use the adapter \"mine\": "), "{refused}");
    refused
}

#[test]
fn adapters_that_do_not_fit_the_model_are_rejected_with_the_reason() {
    const Q: &str = "model.layers.0.self_attn.q_proj";
    let plain = json!({"peft_type": "LORA", "r": 2, "lora_alpha": 2});
    let refused_with = |more: Value, tensors: &[(&str, &[usize])]| {
        let mut config = plain.clone();
        config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let tensors: Vec<_> = tensors.iter().map(|(half, shape)| (format!("{Q}.{half}"), *shape)).collect();
        let tensors: Vec<_> = tensors.iter().map(|(name, shape)| (name.as_str(), *shape)).collect();
        refused(&config, &tensors, Dtype::F32, 1.0)
    };
    let right: [(&str, &[usize]); 2] = [("lora_A", &[2, 256]), ("lora_B", &[256, 2])];
    for (more, tensors, named) in [
        (json!({"use_dora": true}), &right[..], "DoRA"),
        (json!({"modules_to_save": ["embed_tokens"]}), &right[..], "modules_to_save"),
        (json!({"r": 4}), &right[..], "specifies the rank 4"),
        (json!({}), &right[..1], "one of the matrices lora_A and lora_B is missing"),
        (json!({}), &[], "it has no matrices"),
        (json!({}), &[("lora_A", &[2, 128]), ("lora_B", &[256, 2])], "256 rows and 128 columns"),
        (json!({}), &[("lora_A", &[2, 256]), ("lora_B", &[256, 3])], "specifies the rank 2"),
        (json!({}), &[("lora_A", &[2]), ("lora_B", &[256, 2])], "but both must be matrices"),
        (json!({}), &[("lora_magnitude_vector", &[256])], "lora_magnitude_vector"),
        (json!({}), &[("lora_embedding_A", &[2, 256])], "lora_embedding_A"),
    ] {
        let refused = refused_with(more, tensors);
        assert!(refused.contains(named), "{refused}");
    }
    let rank = ADAPTER_RANK_MAX + 1;
    let refused_rank =
        refused_with(json!({"r": rank}), &[("lora_A", &[rank, 256]), ("lora_B", &[256, rank])]);
    assert!(refused_rank.contains("its rank 257 is too large (limit: 256)"), "{refused_rank}");
    for module in
        ["lm_head", "model.embed_tokens", "model.layers.0.mlp.gate", "model.layers.2.self_attn.q_proj"]
    {
        let (a, b) = (format!("{module}.lora_A"), format!("{module}.lora_B"));
        let why = refused(&plain, &[(&a, &[2, 256]), (&b, &[256, 2])], Dtype::F32, 1.0);
        assert!(why.contains(module.trim_start_matches("model.")), "{why}");
    }
    let (a, b) = (format!("{Q}.lora_A"), format!("{Q}.lora_B"));
    let tensors: [(&str, &[usize]); 2] = [(&a, &[2, 256]), (&b, &[256, 2])];
    assert!(refused(&plain, &tensors, Dtype::F64, 1.0).contains("F64"));
    assert!(refused(&plain, &tensors, Dtype::F32, f32::NAN).contains("not finite"));
}

#[test]
fn incomplete_directories_are_rejected() {
    let case = AdapterCase::new(&recipe("llama", TensorType::F16), &two()[..1]);
    let refused = || load(&case.config(), &mut |_| {}).err().expect("the adapter is rejected").chain();
    let tensors = case.sources[0].path.join("adapter_model.safetensors");
    let bytes = std::fs::read(&tensors).unwrap();
    for broken in [&bytes[..4], &bytes[..bytes.len() / 2], &[0xff; 64][..]] {
        std::fs::write(&tensors, broken).unwrap();
        assert!(refused().contains("adapter_model.safetensors"), "{}", refused());
    }
    std::fs::remove_file(&tensors).unwrap();
    assert!(refused().contains("failed to read"), "{}", refused());
    std::fs::remove_file(case.sources[0].path.join("adapter_config.json")).unwrap();
    assert!(refused().contains("adapter_config.json"), "{}", refused());
}

#[test]
fn duplicate_names_are_rejected() {
    let mut case = AdapterCase::new(&recipe("llama", TensorType::F16), &two());
    case.sources[1].name = case.sources[0].name.clone();
    let refused = load(&case.config(), &mut |_| {}).err().unwrap().chain();
    assert!(refused.contains("another adapter has the same name"), "{refused}");
}

#[test]
fn a_model_without_adapters_reports_none() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("model.gguf");
    recipe("llama", TensorType::F16).write(&file);
    let (runner, loaded) = load_file(&file, &EXACT).unwrap();
    assert_eq!((runner.adapters(), loaded.adapter_digests), (0, Vec::new()));
}
