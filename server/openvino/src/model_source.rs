//! Where a model comes from, and in which format its weights are stored in memory.

use std::path::{Path, PathBuf};

use crate::config::Config;
use crate::kernels::ProjectionKernels;
use crate::model_cache::{GraphCacheEntry, GraphOptions};
use crate::weights::WeightFormat;
use crate::{Error, memory};

/// The file of a model.
pub(crate) enum ModelSource {
    Gguf(PathBuf),
    Ir(PathBuf),
}

impl ModelSource {
    /// The model at a path.
    ///
    /// # Errors
    /// The path holds neither a GGUF file nor an IR.
    pub(crate) fn find(path: &Path) -> Result<Self, Error> {
        let missing = |fault| Error::Missing { path: path.to_owned(), fault };
        if path.is_dir() {
            let ir = path.join("openvino_model.xml");
            return if ir.is_file() {
                Ok(Self::Ir(ir))
            } else {
                Err(missing("the directory has no openvino_model.xml"))
            };
        }
        if !path.is_file() {
            return Err(missing("neither a GGUF file nor the directory of an OpenVINO IR"));
        }
        Ok(Self::Gguf(path.to_owned()))
    }

    /// The format of the weights. `None` for an IR, whose weights are served as they are.
    ///
    /// Unless a format is configured, it is exact, and the fastest for `kernels` that memory allows.
    pub(crate) fn weight_format(
        &self,
        configured: Option<WeightFormat>,
        kernels: ProjectionKernels,
    ) -> Option<WeightFormat> {
        let Self::Gguf(path) = self else { return None };
        Some(configured.unwrap_or_else(|| {
            // In 8 bits, the weights are at most twice as large as the file, and compiling briefly needs them twice.
            let needed = path.metadata().map_or(0, |file| file.len()) * 4;
            let fits = memory::available_bytes().is_none_or(|free| needed < free / 2);
            if kernels == ProjectionKernels::PluginInt8 && fits {
                WeightFormat::Fine
            } else {
                WeightFormat::Compact
            }
        }))
    }

    /// The entry of the model's graph in the cache directory, if there is a cache directory. The graph of an IR is not cached,
    /// but the models compiled from it are.
    pub(crate) fn cache_entry(
        &self,
        config: &Config,
        weight_format: Option<WeightFormat>,
    ) -> Option<GraphCacheEntry> {
        let (Self::Gguf(path) | Self::Ir(path)) = self;
        let options = GraphOptions {
            weight_format,
            max_model_len: config.max_model_len,
            is_merged: config.adapters.is_empty(),
        };
        GraphCacheEntry::new(config.cache_dir.as_deref()?, path, options)
    }
}
