//! Adapters: what is served is the model with the product of their matrices added to its weights.

use std::path::{Path, PathBuf};

use safetensors::Dtype;
use serde_json::{Value, json};
use server_engine::ModelRunner as _;
use server_gguf::TensorType;
use server_openvino::{ADAPTER_RANK_MAX, AdapterSource, Config, Form, Unpack, load};

use crate::adapter::{AdapterRecipe, write_folder};
use crate::reference::{
    CONTEXT, EXACT, LENGTH, ROUNDED, ROUNDED_DIFFERENCE_MAX, Recipe, Reference, config, deviation,
    difference_allowed, load_file, private_folder, recipe, worst_difference_with,
};

/// What the matrices' product is multiplied by, as much as the weights themselves.
const SCALE: f32 = 2.0;

/// A file, its adapters, and what each and none of them makes of the same tokens.
struct Adapted {
    folder: tempfile::TempDir,
    tokens: Vec<u32>,
    /// By number: none, the first adapter, the second.
    logits: Vec<Vec<Vec<f32>>>,
    sources: Vec<AdapterSource>,
}

impl Adapted {
    fn new(recipe: &Recipe, adapters: &[(AdapterRecipe, f32)]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("model.gguf");
        recipe.write(&file);
        let tokens = recipe.tokens(LENGTH);
        let mut logits = vec![Reference::open(&file, CONTEXT).logits(&tokens)];
        let mut sources = Vec::new();
        for (number, (adapter, scale)) in adapters.iter().enumerate() {
            let mut model = Reference::open(&file, CONTEXT);
            let name = format!("adapter-{number}");
            let path = adapter.write(&folder.path().join(&name), &mut model, *scale);
            logits.push(model.logits(&tokens));
            sources.push(AdapterSource { name, path });
        }
        Self { folder, tokens, logits, sources }
    }

    fn file(&self) -> PathBuf {
        self.folder.path().join("model.gguf")
    }

    fn config(&self, form: Form) -> Config {
        Config { adapters: self.sources.clone(), ..config(&self.file(), form, &EXACT) }
    }

    /// The largest difference, where the sequences of each step have these adapters.
    fn difference(&self, config: &Config, numbers: [u32; 4]) -> f64 {
        let (mut runner, _) = load(config, &mut |_| {}).unwrap();
        assert_eq!(runner.adapters() as usize, self.sources.len());
        runner.wait();
        let expected = numbers.map(|number| (number, &self.logits[number as usize][..]));
        worst_difference_with(&mut runner, &self.tokens, expected)
    }

    fn check(&self, kind: TensorType, numbers: [u32; 4]) {
        let difference = self.difference(&self.config(Form::Compact), numbers);
        assert!(
            difference <= difference_allowed(kind, Form::Compact),
            "{kind} {numbers:?}: {difference:.1e}"
        );
    }

    /// By our own kernels, which add what adapters do: in f32, and in what the processor likes best, beside our own attention and
    /// the plugin's.
    fn check_rounded(&self, numbers: [u32; 4]) {
        let plugins_attention = ("KEY_CACHE_PRECISION", "u8");
        for properties in [&[EXACT[0], ROUNDED[0]][..], &ROUNDED, &[plugins_attention]] {
            let rounded =
                Config { adapters: self.sources.clone(), ..config(&self.file(), Form::Compact, properties) };
            let are_own = load(&rounded, &mut |_| {}).unwrap().1.own_kernels;
            assert_eq!(
                are_own,
                has_own_kernels() && !properties.contains(&plugins_attention),
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
        let case = Adapted::new(&recipe(architecture, kind), &[(adapter, SCALE)]);
        // That they are told apart says that the adapter does something.
        assert!(difference(&case.logits[0], &case.logits[1]) > 0.5);
        case.check(kind, [1, 1, 1, 1]);
        case.check(kind, [0, 1, 0, 1]);
        // A little turns round which of nearly equal experts are taken.
        if kind == TensorType::Q8_0 && architecture != "qwen3moe" {
            case.check_rounded([0, 1, 0, 1]);
        }
    }
}

/// Whether this processor has what our own projections are made for.
fn has_own_kernels() -> bool {
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
fn llama_with_rows_in_an_order_of_its_own() {
    check("llama");
}

#[test]
fn llama_whose_rotation_is_not_rewritten() {
    for kind in [TensorType::F32, TensorType::Q8_0] {
        let biased = Recipe { biased: true, ..recipe("llama", kind) };
        let case = Adapted::new(&biased, &[(AdapterRecipe::of("llama", 7), SCALE)]);
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

/// Adapters that differ in all that they may.
fn two() -> [(AdapterRecipe, f32); 2] {
    let first = AdapterRecipe { rank: 5, dtype: Dtype::BF16, ..AdapterRecipe::of("llama", 7) };
    let second = AdapterRecipe {
        rank: 16,
        dtype: Dtype::F16,
        changes: vec!["attn_v", "ffn_down", "attn_q"],
        // What the scale is comes of it: 8 / sqrt(16).
        config: json!({"use_rslora": true, "lora_alpha": 8.0}),
        ..AdapterRecipe::of("llama", 8)
    };
    [(first, SCALE), (second, 2.0)]
}

#[test]
fn sequences_of_two_adapters_and_of_none_share_a_step() {
    for kind in [TensorType::F32, TensorType::Q4K] {
        let case = Adapted::new(&recipe("llama", kind), &two());
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
fn each_projection_alone_is_changed_by_our_own_kernels() {
    let recipe = recipe("llama", TensorType::Q8_0);
    for part in AdapterRecipe::of("llama", 7).changes {
        let adapter = AdapterRecipe { changes: vec![part], ..AdapterRecipe::of("llama", 7) };
        let case = Adapted::new(&recipe, &[(adapter, SCALE)]);
        let change = f64::from(difference(&case.logits[0], &case.logits[1])) / deviation(&case.logits[0]);
        assert!(change > 3.0 * ROUNDED_DIFFERENCE_MAX, "{part} changes {change:.1e}, which may be lost");
        case.check_rounded([0, 1, 1, 0]);
    }
}

#[test]
fn without_an_adapter_a_token_gives_what_it_does_where_there_are_none() {
    if !has_own_kernels() {
        return;
    }
    let case = Adapted::new(&recipe("llama", TensorType::Q4K), &two());
    let loaded = Config { adapters: case.sources.clone(), ..config(&case.file(), Form::Compact, &ROUNDED) };
    let beside = case.difference(&loaded, [0; 4]);
    let (mut runner, _) = load(&Config { adapters: Vec::new(), ..loaded }, &mut |_| {}).unwrap();
    let alone = worst_difference_with(&mut runner, &case.tokens, [(0, &case.logits[0][..]); 4]);
    assert_eq!(beside.to_bits(), alone.to_bits());
}

#[test]
fn large_steps_on_weights_of_their_own_have_the_adapters_too() {
    let case = Adapted::new(&recipe("llama", TensorType::Q8_0), &two());
    let config = Config { unpack: Unpack::FromTokens(8), ..case.config(Form::Compact) };
    let difference = case.difference(&config, [0, 1, 2, 1]);
    assert!(difference <= difference_allowed(TensorType::Q8_0, Form::Compact), "{difference:.1e}");
}

#[test]
fn a_kept_graph_takes_other_adapters_than_it_was_made_with() {
    let mut case = Adapted::new(&recipe("llama", TensorType::Q8_0), &two());
    let kept = tempfile::tempdir().unwrap();
    let allowed = difference_allowed(TensorType::Q8_0, Form::Compact);
    for (warm, numbers) in [(false, [0, 1, 2, 1]), (true, [2, 1, 0, 1])] {
        let config = Config { graph_folder: Some(kept.path().to_owned()), ..case.config(Form::Compact) };
        assert_eq!(load(&config, &mut |_| {}).unwrap().1.warm, warm);
        let difference = case.difference(&config, numbers);
        assert!(difference <= allowed, "{warm}: {difference:.1e}");
    }
    // The other one is the first now.
    case.sources.swap(0, 1);
    case.logits.swap(1, 2);
    let config = Config { graph_folder: Some(kept.path().to_owned()), ..case.config(Form::Compact) };
    let difference = case.difference(&config, [1, 0, 2, 1]);
    assert!(difference <= allowed, "{difference:.1e}");
    // Without any, the graph is one of its own.
    let config = Config { adapters: Vec::new(), ..config };
    assert!(!load(&config, &mut |_| {}).unwrap().1.warm);
}

#[test]
fn an_ir_is_adapted_by_the_names_of_its_modules() {
    let case = Adapted::new(&recipe("qwen3", TensorType::F16), &[(AdapterRecipe::of("qwen3", 7), SCALE)]);
    let folder = tempfile::tempdir().unwrap();
    let config = Config { graph_folder: Some(folder.path().to_owned()), ..case.config(Form::Compact) };
    drop(load(&config, &mut |_| {}).unwrap());
    let cached = private_folder(folder.path());
    as_ir(&cached);
    let config = Config { model: cached, graph_folder: None, ..config };
    let difference = case.difference(&config, [1, 0, 1, 0]);
    assert!(difference <= difference_allowed(TensorType::F16, Form::Compact), "{difference:.1e}");
}

/// Makes the kept graph of a folder an IR with the names that exporters give.
fn as_ir(folder: &Path) {
    let entries = || std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    for ending in ["xml", "bin"] {
        let from = entries().find(|path| path.extension().is_some_and(|known| known == ending)).unwrap();
        std::fs::rename(from, folder.join(format!("openvino_model.{ending}"))).unwrap();
    }
    let path = folder.join("openvino_model.xml");
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
        // No trace of the file's names.
        text = text.replace(&format!("name=\"{name}\""), &format!("name=\"constant-{id}\""));
        renamed += 1;
    }
    assert!(renamed >= 14, "{renamed}");
    std::fs::write(path, text).unwrap();
}

/// Why an adapter with these tensors is refused.
fn refused(config: &Value, tensors: &[(&str, &[usize])], dtype: Dtype, value: f32) -> String {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.gguf");
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
    let path = write_folder(&folder.path().join("adapter"), config, &tensors, dtype);
    let source = AdapterSource { name: "mine".to_owned(), path };
    let config = Config { adapters: vec![source], ..self::config(&file, Form::Compact, &EXACT) };
    let refused = load(&config, &mut |_| {}).err().expect("it is refused").chain();
    assert!(refused.starts_with("cannot use the adapter \"mine\": "), "{refused}");
    refused
}

#[test]
fn what_does_not_fit_the_model_is_refused_by_name() {
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
        (json!({"r": 4}), &right[..], "not of the rank 4"),
        (json!({}), &right[..1], "only one of its matrices"),
        (json!({}), &[], "it has no matrices"),
        (json!({}), &[("lora_A", &[2, 128]), ("lora_B", &[256, 2])], "256 rows and 128 columns"),
        (json!({}), &[("lora_A", &[2, 256]), ("lora_B", &[256, 3])], "not of the rank 2"),
        (json!({}), &[("lora_A", &[2]), ("lora_B", &[256, 2])], "are no matrices"),
        (json!({}), &[("lora_magnitude_vector", &[256])], "lora_magnitude_vector"),
        (json!({}), &[("lora_embedding_A", &[2, 256])], "lora_embedding_A"),
    ] {
        let refused = refused_with(more, tensors);
        assert!(refused.contains(named), "{refused}");
    }
    let rank = ADAPTER_RANK_MAX + 1;
    let refused_rank =
        refused_with(json!({"r": rank}), &[("lora_A", &[rank, 256]), ("lora_B", &[256, rank])]);
    assert!(refused_rank.contains("its rank 257 is more than 256"), "{refused_rank}");
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
    assert!(refused(&plain, &tensors, Dtype::F32, f32::NAN).contains("no finite numbers"));
}

#[test]
fn folders_that_are_not_whole_are_refused() {
    let case = Adapted::new(&recipe("llama", TensorType::F16), &two()[..1]);
    let refused = || load(&case.config(Form::Compact), &mut |_| {}).err().expect("it is refused").chain();
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
fn the_same_name_twice_is_refused() {
    let mut case = Adapted::new(&recipe("llama", TensorType::F16), &two());
    case.sources[1].name = case.sources[0].name.clone();
    let refused = load(&case.config(Form::Compact), &mut |_| {}).err().unwrap().chain();
    assert!(refused.contains("another has the same name"), "{refused}");
}

#[test]
fn without_adapters_there_are_none() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.gguf");
    recipe("llama", TensorType::F16).write(&file);
    let (runner, loaded) = load_file(&file, Form::Compact, &EXACT).unwrap();
    assert_eq!((runner.adapters(), loaded.adapters), (0, Vec::new()));
}
