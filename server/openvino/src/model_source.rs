//! The files from which a model is loaded.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use server_gguf::GgufFile;

use crate::Error;
use crate::config::Config;
use crate::model_cache::{GraphCacheEntry, GraphOptions};
use crate::vision::VisionFiles;

/// The files of a model.
pub(crate) enum ModelSource {
    Gguf(Arc<GgufFile>),
    Ir(PathBuf),
    Vision(VisionFiles),
}

impl ModelSource {
    /// Finds the model at a path.
    ///
    /// # Errors
    /// The path is neither a file nor a directory with an IR or a vision-language model, the file or another part of a
    /// GGUF model cannot be read or is invalid, or a vision-language model is incomplete or not supported.
    pub(crate) fn find(path: &Path) -> Result<Self, Error> {
        let missing = |fault| Error::Missing { path: path.to_owned(), fault };
        if path.is_dir() {
            let ir = path.join("openvino_model.xml");
            if ir.is_file() {
                return Ok(Self::Ir(ir));
            }
            let vision = VisionFiles::find(path)?;
            let missing =
                || missing("the directory has no openvino_model.xml or openvino_language_model.xml");
            return vision.map(Self::Vision).ok_or_else(missing);
        }
        if !path.is_file() {
            return Err(missing("neither a GGUF file nor the directory of an OpenVINO IR"));
        }
        Ok(Self::Gguf(Arc::new(GgufFile::open(path)?)))
    }

    /// The files that contain the model.
    pub(crate) fn files(&self) -> Vec<PathBuf> {
        match self {
            Self::Gguf(file) => file.paths().map(Path::to_owned).collect(),
            Self::Ir(path) => vec![path.clone(), path.with_extension("bin")],
            Self::Vision(files) => files.paths(),
        }
    }

    /// The entry of the model's graph in the cache directory, if one is configured. The graph of an IR is not cached,
    /// but the models compiled from it are.
    pub(crate) fn cache_entry(&self, config: &Config) -> Option<GraphCacheEntry> {
        let options =
            GraphOptions { max_model_len: config.max_model_len, is_merged: config.adapters.is_empty() };
        GraphCacheEntry::new(config.cache_dir.as_deref()?, &self.files(), options)
    }
}
