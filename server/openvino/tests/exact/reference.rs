//! The helpers that tests of whole models share: small files of random weights, a simple forward pass, and a function
//! that runs the same tokens on a runner. The files and the forward pass do not depend on the crate under test.

mod file;
mod forward;
mod steps;

use std::path::{Path, PathBuf};

use server_gguf::write::write_parts;
use server_gguf::{GgufFile, TensorType};
use server_openvino::{Config, LoadReport, OpenVinoRunner, load};

pub(crate) use file::{CONTEXT, EXPERTS, Recipe, normals};
pub(crate) use forward::Reference;
pub(crate) use steps::{deviation, is_independent_of_the_batch, worst_difference, worst_difference_with};

/// The directory in `cache_dir` that contains the cached models of the current user.
pub(crate) fn private_directory(cache_dir: &Path) -> PathBuf {
    let mut directories = std::fs::read_dir(cache_dir).unwrap().map(|entry| entry.unwrap().path());
    directories.find(|path| path.is_dir()).expect("loading a model creates the directory")
}

/// Number of tokens of a test's sequence: more than two blocks of 32 tokens, and more than three times the sliding
/// window of the files.
pub(crate) const LENGTH: usize = 80;

/// Properties for exact computation, in f32 everywhere. They select the plugin's projections, which do not round
/// activations, so that tests of the graph can use a small tolerance ([`difference_allowed`]), regardless of the
/// processor's kernels.
pub(crate) const EXACT: [(&str, &str); 3] = [
    ("INFERENCE_PRECISION_HINT", "f32"),
    ("KV_CACHE_PRECISION", "f32"),
    ("DYNAMIC_QUANTIZATION_GROUP_SIZE", "0"),
];

/// Properties for the fastest computation with a KV cache in f32: the processor's default precision, and native
/// projections if the processor has them.
pub(crate) const ROUNDED: [(&str, &str); 1] = [EXACT[1]];

/// The largest allowed difference with [`ROUNDED`], as a fraction of the standard deviation of the logits (measured:
/// 0.04 to 0.1). A wrong graph causes a difference of 0.4 or more.
pub(crate) const ROUNDED_DIFFERENCE_MAX: f64 = 0.2;

/// A file that was written from a recipe, the tokens of a sequence, and their logits from the reference.
pub(crate) struct Case {
    file: tempfile::NamedTempFile,
    pub(crate) tokens: Vec<u32>,
    pub(crate) logits: Vec<Vec<f32>>,
    context: Option<u32>,
}

/// The part of a model that is cached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CacheContent {
    CompiledModel,
    Nothing,
}

impl Case {
    pub(crate) fn new(recipe: &Recipe) -> Self {
        Self::within(recipe, None)
    }

    /// Creates a case with a limit on the length of sequences.
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

    /// Loads the file, and returns the largest difference between its logits and those of the reference, as a fraction
    /// of the reference's standard deviation.
    pub(crate) fn difference(&self, properties: &[(&str, &str)]) -> f64 {
        self.loaded_difference(config(self.path(), properties)).0
    }

    /// Returns the difference for a model with the same weights in three files.
    pub(crate) fn difference_in_parts(&self, properties: &[(&str, &str)]) -> f64 {
        let directory = tempfile::tempdir().unwrap();
        let whole = GgufFile::open(self.path()).unwrap();
        let first = write_parts(&whole, directory.path(), "model", 3).unwrap();
        self.loaded_difference(config(&first, properties)).0
    }

    /// Returns the differences for three loads: the first one, one from the cached compiled model, and one after that
    /// compiled model was removed from the cache. If no compiled model is cached, a load reads the file.
    pub(crate) fn differences_cold_and_warm(
        &self,
        properties: &[(&str, &str)],
        cached: CacheContent,
    ) -> [f64; 3] {
        let is_compiled_cached = cached != CacheContent::Nothing;
        let directory = tempfile::tempdir().unwrap();
        let compiled = || {
            let files = std::fs::read_dir(private_directory(directory.path()))
                .unwrap()
                .map(|entry| entry.unwrap().path());
            files.filter(|path| path.to_str().unwrap().contains("compiled-")).collect::<Vec<_>>()
        };
        ["cold", "compiled", "removed"].map(|source| {
            if source == "removed" {
                compiled().iter().for_each(|path| std::fs::remove_file(path).unwrap());
            }
            let cache_dir = Some(directory.path().to_owned());
            let config = Config { cache_dir, ..config(self.path(), properties) };
            let (difference, from_cache, stages) = self.loaded_difference(config);
            assert_eq!(compiled().len(), usize::from(is_compiled_cached));
            let is_cached = source == "compiled" && is_compiled_cached;
            assert_eq!((from_cache, stages.contains(&"compile")), (is_cached, !is_cached), "{source}");
            difference
        })
    }

    /// Returns the difference, whether the graph or the compiled model was read from the cache, and the stages of
    /// loading.
    fn loaded_difference(&self, config: Config) -> (f64, bool, Vec<&'static str>) {
        let config = Config { max_model_len: self.context, ..config };
        let mut stages = Vec::new();
        let (mut runner, loaded) = load(&config, &mut |stage| stages.push(stage.name)).unwrap();
        (worst_difference(&mut runner, &self.tokens, &self.logits), loaded.from_cache, stages)
    }
}

pub(crate) fn load_file(
    path: &Path,
    properties: &[(&str, &str)],
) -> Result<(OpenVinoRunner, LoadReport), server_openvino::Error> {
    load(&config(path, properties), &mut |_| {})
}

pub(crate) fn config(path: &Path, properties: &[(&str, &str)]) -> Config {
    let plugin_config =
        properties.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
    Config { plugin_config, kv_cache_bytes: Some(32 << 20), ..Config::new(path.to_owned()) }
}

/// The recipe of an architecture with matrices of the type `kind` (for exceptions, see [`Recipe::kind`]).
pub(crate) fn recipe(architecture: &'static str, kind: TensorType) -> Recipe {
    Recipe {
        architecture,
        kind,
        values_kind: kind,
        experts_used: if matches!(architecture, "qwen3moe" | "gpt-oss") { 2 } else { 0 },
        rope_factors: false,
        original_context: None,
        tied: matches!(architecture, "qwen2" | "gemma3"),
        biased: matches!(architecture, "qwen2" | "gpt-oss"),
    }
}

/// Properties for the default 8-bit cache and otherwise exact computation.
pub(crate) const DEFAULT_CACHE: [(&str, &str); 2] = [EXACT[0], EXACT[2]];

/// The largest allowed difference, as a fraction of the standard deviation of the logits.
///
/// For types without minima, differences come from rounding in f32 and from the attention's scale, which the front end
/// stores in f16 (measured: 3e-6 to 5e-4). For types with minima, zero points from 4 to 8 are rounded to f16, by up to
/// 1/512 of a step (measured: 3e-3 to 8e-3). A wrong graph causes a difference of 0.4 or more.
pub(crate) fn difference_allowed(kind: TensorType) -> f64 {
    let has_minima = matches!(kind, TensorType::Q4_1 | TensorType::Q5_1 | TensorType::Q4K | TensorType::Q5K);
    if has_minima { 1.5e-2 } else { 1e-3 }
}
