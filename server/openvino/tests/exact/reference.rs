//! What the tests of whole models share: small files of random weights, a forward pass that is plainly right,
//! and a way to step a runner through the same tokens. Knows nothing of how the crate under test works.

mod file;
mod forward;
mod steps;

use std::path::{Path, PathBuf};

use server_gguf::TensorType;
use server_openvino::{Attention, Config, Form, Loaded, OpenVinoRunner, Unpack, Weights, load};

pub(crate) use file::{CONTEXT, EXPERTS, Random, Recipe};
pub(crate) use forward::Reference;
pub(crate) use steps::{deviation, worst_difference, worst_difference_with};

/// The folder below `cache_dir` in which a server's user caches models.
pub(crate) fn private_folder(cache_dir: &Path) -> PathBuf {
    let mut folders = std::fs::read_dir(cache_dir).unwrap().map(|entry| entry.unwrap().path());
    folders.find(|path| path.is_dir()).expect("loading a model creates the folder")
}

/// Tokens of a test's sequence: past two blocks of 32, and more than twice gemma's window.
pub(crate) const LENGTH: usize = 80;

/// What computes exactly: f32 throughout, and activations not quantised on their way into a projection.
pub(crate) const EXACT: [(&str, &str); 3] = [
    ("INFERENCE_PRECISION_HINT", "f32"),
    ("KV_CACHE_PRECISION", "f32"),
    ("DYNAMIC_QUANTIZATION_GROUP_SIZE", "0"),
];

/// As the processor likes it best: in bf16 if it has that, with rows rounded to 8 bits by our own kernels if it multiplies these.
pub(crate) const ROUNDED: [(&str, &str); 1] = [EXACT[1]];

/// The largest difference that this is to make (seen: 0.04 to 0.1). A wrong graph gives 0.4 and more.
pub(crate) const ROUNDED_DIFFERENCE_MAX: f64 = 0.2;

/// A file of a recipe, its tokens, and the logits that its weights give.
pub(crate) struct Case {
    file: tempfile::NamedTempFile,
    tokens: Vec<u32>,
    logits: Vec<Vec<f32>>,
    context: Option<u32>,
}

impl Case {
    pub(crate) fn new(recipe: &Recipe) -> Self {
        Self::within(recipe, None)
    }

    /// The same, served with this longest sequence.
    pub(crate) fn within(recipe: &Recipe, context: Option<u32>) -> Self {
        let file = tempfile::Builder::new().suffix(".gguf").tempfile().unwrap();
        recipe.write(file.path());
        let reference = Reference::open(file.path(), context.unwrap_or(CONTEXT));
        let tokens = recipe.tokens(LENGTH);
        let logits = reference.logits(&tokens);
        Self { file, tokens, logits, context }
    }

    pub(crate) fn path(&self) -> &Path {
        self.file.path()
    }

    /// Loads the file in `form` and gives the largest difference between its logits and the reference's, as a
    /// part of the reference's standard deviation.
    pub(crate) fn difference(&self, form: Form, properties: &[(&str, &str)]) -> f64 {
        self.loaded_difference(config(self.path(), form, properties)).0
    }

    /// The difference with the file as it is loaded the first time, with what was compiled then, and with the graph that was
    /// kept; or always the first if nothing `is_kept`.
    pub(crate) fn differences_cold_and_warm(&self, properties: &[(&str, &str)], is_kept: bool) -> [f64; 3] {
        let folder = tempfile::tempdir().unwrap();
        let compiled = || {
            let files =
                std::fs::read_dir(private_folder(folder.path())).unwrap().map(|entry| entry.unwrap().path());
            files.filter(|path| path.to_str().unwrap().contains("compiled-")).collect::<Vec<_>>()
        };
        ["cold", "compiled", "graph"].map(|kept| {
            if kept == "graph" {
                compiled().iter().for_each(|path| std::fs::remove_file(path).unwrap());
            }
            let graph_folder = Some(folder.path().to_owned());
            let config = Config { graph_folder, ..config(self.path(), Form::Compact, properties) };
            let (difference, warm, stages) = self.loaded_difference(config);
            assert_eq!(compiled().len(), usize::from(is_kept));
            let compiles = kept != "compiled" || !is_kept;
            assert_eq!((warm, stages.contains(&"compile")), (kept != "cold" && is_kept, compiles), "{kept}");
            difference
        })
    }

    /// Answers also whether anything was kept, and the stages of loading.
    fn loaded_difference(&self, config: Config) -> (f64, bool, Vec<&'static str>) {
        let config = Config { context_tokens_max: self.context, ..config };
        let mut stages = Vec::new();
        let (mut runner, loaded) = load(&config, &mut |stage| stages.push(stage.name)).unwrap();
        (worst_difference(&mut runner, &self.tokens, &self.logits), loaded.warm, stages)
    }
}

pub(crate) fn load_file(
    path: &Path,
    form: Form,
    properties: &[(&str, &str)],
) -> Result<(OpenVinoRunner, Loaded), server_openvino::Error> {
    load(&config(path, form, properties), &mut |_| {})
}

pub(crate) fn config(path: &Path, form: Form, properties: &[(&str, &str)]) -> Config {
    Config {
        model: path.to_owned(),
        device: "CPU".to_owned(),
        properties: properties.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect(),
        weights: Weights::As(form),
        unpack: Unpack::Never,
        graph_folder: None,
        context_tokens_max: None,
        cache_bytes: Some(32 << 20),
        cache_tokens_max: 0,
        adapters: Vec::new(),
        attention: Attention::default(),
    }
}

/// The recipe of an architecture with every matrix of `kind`.
pub(crate) fn recipe(architecture: &'static str, kind: TensorType) -> Recipe {
    Recipe {
        architecture,
        kind,
        values_kind: kind,
        experts_used: if architecture == "qwen3moe" { 2 } else { 0 },
        rope_factors: false,
        original_context: None,
        tied: matches!(architecture, "qwen2" | "gemma3"),
        biased: architecture == "qwen2",
    }
}

/// The default 8-bit cache, all else exact.
pub(crate) const DEFAULT_CACHE: [(&str, &str); 2] = [EXACT[0], EXACT[2]];

/// The largest difference that is no fault, as a part of the logits' standard deviation.
///
/// Types without minima: rounding in f32, and the attention's scale, which the front end keeps in f16 (seen:
/// 3e-6 to 5e-4). Compact rounds zero points near 8 to f16, 1/512 of a step (seen: 3e-3 to 8e-3). Fine rounds
/// them to some thousandths of a step (seen: 2e-2 to 3.4e-2, the latter over gemma's seven layers). A wrong
/// graph gives 0.4 and more.
pub(crate) fn difference_allowed(kind: TensorType, form: Form) -> f64 {
    let has_minima = matches!(kind, TensorType::Q4_1 | TensorType::Q5_1 | TensorType::Q4K | TensorType::Q5K);
    match form {
        _ if !has_minima => 1e-3,
        Form::Compact => 1.5e-2,
        Form::Fine => 5e-2,
        Form::Rounded => f64::INFINITY,
    }
}
