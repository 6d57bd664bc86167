//! The OpenVINO backend.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::available_parallelism;

use anyhow::Context as _;
use server_engine::{ModelRunner, SpillIdentity};
use server_images::ImageProcessor;
use server_openvino as runtime;
use server_text::TextSource;

use super::config::{BackendConfig, OpenVinoConfig};
use super::runners::{ImageBackend, Runners};
use crate::args::{ActivationPrecision, NamedAdapter};

/// The context length that determines the default size of the KV cache if neither a flag nor the model's files specify
/// a context length.
const CONTEXT_DEFAULT: u32 = 8192;

/// Loads the model and, if the configuration has one, its draft model. `context` is the maximum number of tokens of a
/// prompt and its completion together.
pub(super) fn load(config: &BackendConfig, context: Option<u32>) -> anyhow::Result<Runners> {
    let runtime_config = runtime_config(config, context)?;
    let draft_config = |path| draft_config(path, config.max_model_len, &runtime_config);
    let draft_config = config.draft_model.as_deref().map(draft_config).transpose()?;
    let LoadedRunners { model, draft, loaded } = load_runners(&runtime_config, draft_config)?;
    tracing::info!(
        device = runtime_config.device,
        warm = loaded.from_cache,
        native_kernels = loaded.native_kernels,
        kernels = loaded.kernels,
        inference_precision = loaded.inference_precision,
        kv_cache_precision = loaded.kv_cache_precision,
        "compiled the model"
    );
    let mut description = format!(
        "openvino {} {} {}",
        runtime_config.device, loaded.inference_precision, loaded.kv_cache_precision
    );
    for (adapter, digest) in config.adapters.iter().zip(&loaded.adapter_digests) {
        description.push_str(&format!(" {}:{digest:016x}", adapter.name));
    }
    let encoder = runtime::load_image_encoder(&runtime_config).context("failed to load the image encoder")?;
    let image_backend = |encoder: runtime::OpenVinoImageEncoder| {
        tracing::info!(kernels = %encoder.report(), "compiled the image encoder");
        description.push_str(&format!(" {}", encoder.report().precision));
        let processor =
            ImageProcessor::load(&runtime_config.model).context("failed to load the image processor")?;
        anyhow::Ok(ImageBackend {
            processor,
            encoder: Box::new(encoder),
            content: |inputs, feature_rows| Arc::new(runtime::EncoderImage { inputs, feature_rows }),
        })
    };
    let images = encoder.map(image_backend).transpose()?;
    let cache = loaded.cache_identity;
    let identity = SpillIdentity {
        description: cache.description,
        files: cache.files,
        adapters: loaded.adapter_digests,
    };
    Ok(Runners { model, draft, description, identity, images })
}

/// Converts the configuration of the backend to that of the OpenVINO crate.
fn runtime_config(config: &BackendConfig, context: Option<u32>) -> anyhow::Result<runtime::Config> {
    let OpenVinoConfig {
        device,
        kv_cache_size,
        kv_cache_precision: _,
        activation_precision,
        cache_dir,
        plugin_config: _,
        tensor_parallel_size: _,
        sparse_attention,
    } = &config.openvino;
    Ok(runtime::Config {
        model: config.model.as_deref().map(resolved).context("no model is given: use --model")?,
        device: device.clone(),
        plugin_config: properties(&config.openvino)?,
        activation_precision: match activation_precision {
            ActivationPrecision::Auto => runtime::ActivationPrecision::Auto,
            ActivationPrecision::Int8 => runtime::ActivationPrecision::Int8,
        },
        kv_cache_bytes: *kv_cache_size,
        cache_dir: cache_dir.clone(),
        max_model_len: context,
        kv_cache_tokens_max: u64::from(context.unwrap_or(CONTEXT_DEFAULT)) * u64::from(config.max_num_seqs),
        adapters: config.adapters.iter().map(adapter).collect(),
        sparse_attention: *sparse_attention,
        block_scores: config.kv_eviction_tokens.is_some(),
    })
}

/// Returns the configuration of the draft model at `path`: that of the model, except for the path, the adapters and the
/// maximum length. Without `--max-model-len`, the draft model's own context length limits its sequences.
fn draft_config(
    path: &Path,
    max_model_len: Option<u32>,
    model: &runtime::Config,
) -> anyhow::Result<runtime::Config> {
    let trained = TextSource::open(path)
        .and_then(|source| source.context_tokens_max())
        .context("failed to read the context length of the draft model")?;
    Ok(runtime::Config {
        model: resolved(path),
        adapters: Vec::new(),
        max_model_len: max_model_len.or(trained),
        ..model.clone()
    })
}

/// Resolves symbolic links, because the runtime detects the format from the suffix of the file name, and the link
/// `current` that `fetch` creates has no suffix. A link with the suffix `.gguf` is not resolved if its target lacks the
/// suffix: in the cache of the Hugging Face Hub, the names of the targets are digests.
fn resolved(path: &Path) -> PathBuf {
    let is_gguf = |path: &Path| path.extension().is_some_and(|suffix| suffix == "gguf");
    match path.canonicalize() {
        Ok(target) if is_gguf(&target) || !is_gguf(path) => target,
        _ => path.to_owned(),
    }
}

/// Returns the properties for the plugin: those of `--plugin-config`, and defaults for properties that
/// `--plugin-config` does not set.
fn properties(config: &OpenVinoConfig) -> anyhow::Result<Vec<(String, String)>> {
    let mut properties: Vec<(String, String)> =
        config.plugin_config.iter().flat_map(|properties| properties.0.iter().cloned()).collect();
    // Sets a property if it is missing. Returns whether it was missing.
    let mut set_default = |key: &str, value: &str| {
        let is_missing = properties.iter().all(|(known, _)| known != key);
        if is_missing {
            properties.push((key.to_owned(), value.to_owned()));
        }
        is_missing
    };
    if let Some(precision) = &config.kv_cache_precision {
        set_default("KV_CACHE_PRECISION", precision);
    }
    if config.tensor_parallel_size > 1 && config.device == "CPU" {
        // With one stream, the plugin uses the processors of all NUMA nodes. The thread groups, not the plugin, bind
        // the threads.
        set_default("NUM_STREAMS", "1");
        set_default("ENABLE_CPU_PINNING", "NO");
    }
    if config.device == "CPU"
        && let Some(threads) = threads_of_quota()
        && set_default("INFERENCE_NUM_THREADS", &threads.to_string())
    {
        tracing::info!(threads, "limited the threads of the model to the CPU limit of the control group");
    }
    if let Some(directory) = &config.cache_dir {
        std::fs::create_dir_all(directory)
            .with_context(|| format!("failed to create {}", directory.display()))?;
        // On CPUs, the runner caches the compiled models itself, because the plugin cannot import paged graphs.
        if config.device != "CPU" {
            set_default("CACHE_DIR", &directory.to_string_lossy());
        }
    }
    Ok(properties)
}

/// Returns the number of threads that the CPU quota of the control group allows. Returns `None` if the quota allows a
/// thread for each processor that this process may use, or if the number of threads or of processors is unknown. The
/// plugin does not know the quota. If the model used more threads than the quota allows, the kernel would throttle all
/// of them in the middle of a step until the next quota period.
fn threads_of_quota() -> Option<usize> {
    let within_quota = available_parallelism().ok()?.get();
    let processors = rustix::thread::sched_getaffinity(None).ok()?.count() as usize;
    (within_quota < processors).then_some(within_quota)
}

fn adapter(NamedAdapter { name, path }: &NamedAdapter) -> runtime::AdapterSource {
    runtime::AdapterSource { name: name.clone(), path: path.clone() }
}

struct LoadedRunners {
    model: Box<dyn ModelRunner>,
    draft: Option<Box<dyn ModelRunner>>,
    loaded: runtime::LoadReport,
}

/// Loads the model of `config` and, if `draft` is given, its draft model.
fn load_runners(config: &runtime::Config, draft: Option<runtime::Config>) -> anyhow::Result<LoadedRunners> {
    let mut progress = |stage: runtime::LoadStage| {
        tracing::info!(
            stage = stage.name,
            ms = stage.duration.as_millis() as u64,
            "finished a stage of loading"
        );
    };
    let Some(draft_config) = draft else {
        let (runner, loaded) = runtime::load(config, &mut progress).context("failed to load the model")?;
        let model = Box::new(runtime::SleepableRunner::new(runner, &loaded, config.clone()));
        return Ok(LoadedRunners { model, draft: None, loaded });
    };
    let [(model, loaded), (draft, draft_loaded)] = runtime::load_pair(config, &draft_config, &mut progress)
        .context("failed to load the model and its draft model")?;
    let model = Box::new(runtime::SleepableRunner::new(model, &loaded, config.clone()));
    let draft = Box::new(runtime::SleepableRunner::new(draft, &draft_loaded, draft_config));
    Ok(LoadedRunners { model, draft: Some(draft), loaded })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn the_runtime_gets_the_path_with_the_suffix() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().canonicalize().unwrap().join(name);
        for name in ["model.gguf", "digest"] {
            std::fs::write(path(name), "").unwrap();
        }
        symlink("model.gguf", path("current")).unwrap();
        symlink("digest", path("part-00001-of-00002.gguf")).unwrap();
        assert_eq!(resolved(&path("current")), path("model.gguf"));
        assert_eq!(resolved(&path("part-00001-of-00002.gguf")), path("part-00001-of-00002.gguf"));
        assert_eq!(resolved(&path("absent.gguf")), path("absent.gguf"));
    }
}
