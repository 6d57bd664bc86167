//! Rewritten graphs of GGUF files in the model cache.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use xxhash_rust::xxh3::Xxh3Default;

use super::directory::PrivateDirectory;
use super::fingerprint;
use crate::runtime::{Core, Model};
use crate::{Error, shim};

/// The version of graph rewriting and of the formats of native operations and of files with compiled models. Graphs,
/// compiled models and KV cache blocks on disk that have another version are not read.
pub(crate) const VERSION: u64 = 23;

/// The inputs on which a rewritten graph depends besides the content of the model's files.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GraphOptions {
    pub(crate) max_model_len: Option<u32>,
    /// Whether projections that read the same input are merged.
    pub(crate) is_merged: bool,
}

/// The entry of one graph in the cache. The names of the models that are compiled from the graph depend on the name of
/// this entry.
pub(crate) struct GraphCacheEntry {
    directory: Arc<PrivateDirectory>,
    name: String,
}

impl GraphCacheEntry {
    /// Returns the entry of a model in a cache directory, or `None`, with a warning, if the directory or one of the
    /// model's files cannot be used.
    pub(crate) fn new(cache_dir: &Path, files: &[PathBuf], options: GraphOptions) -> Option<Self> {
        let unusable = |path: &Path, error: std::io::Error| {
            tracing::warn!(%error, path = %path.display(), "models are not cached");
        };
        let directory = PrivateDirectory::open(cache_dir).map_err(|error| unusable(cache_dir, error)).ok()?;
        let name = Self::hashed_name(&directory, files, options)
            .map_err(|(file, error)| unusable(file, error))
            .ok()?;
        Some(Self { directory: Arc::new(directory), name })
    }

    fn hashed_name<'a>(
        directory: &PrivateDirectory,
        files: &'a [PathBuf],
        options: GraphOptions,
    ) -> Result<String, (&'a Path, std::io::Error)> {
        let GraphOptions { max_model_len, is_merged } = options;
        let mut hash = Xxh3Default::new();
        for file in files {
            let fingerprint =
                fingerprint::of_file(directory, file).map_err(|error| (file.as_path(), error))?;
            hash.update(&fingerprint.to_le_bytes());
        }
        for number in [VERSION, u64::from(max_model_len.unwrap_or(0))] {
            hash.update(&number.to_le_bytes());
        }
        if !is_merged {
            hash.update(b"apart");
        }
        Ok(format!("graph-{:032x}", hash.digest128()))
    }

    pub(super) fn directory(&self) -> &Arc<PrivateDirectory> {
        &self.directory
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Reads the cached graph. Returns `None` if the graph does not exist or, with a warning, if it cannot be read.
    pub(crate) fn read(&self, core: &Core) -> Option<Model> {
        let name = format!("{}.xml", self.name);
        let xml = self.directory.file(&name);
        if !xml.is_file() {
            return None;
        }
        match shim::read_ir(core, &xml) {
            Ok(model) => {
                self.directory.touch(&name);
                Some(model)
            }
            Err(error) => {
                let file = self.directory.shown(&name);
                tracing::warn!(error = error.chain(), file = %file.display(), "failed to read a cached graph");
                None
            }
        }
    }

    /// Writes the graph, and reads it back. If the graph cannot be written or read back, the failure is logged, the
    /// unfinished files are removed, and the result is `None`.
    pub(crate) fn write(&self, core: &Core, model: &mut Model) -> Option<Model> {
        let written = self.try_write(core, model);
        self.directory.evict_old_files();
        written
            .inspect_err(|error| {
                let file = self.directory.shown(&self.name);
                tracing::warn!(error, file = %file.display(), "failed to cache the rewritten graph");
            })
            .ok()
    }

    /// Writes unfinished files and renames them: first the weights and then the graph, because readers look for the
    /// graph.
    fn try_write(&self, core: &Core, model: &mut Model) -> Result<Model, String> {
        // The reader derives the name of the weights file from that of the graph file, so the names of the unfinished
        // files also differ only in the extension.
        let part = self.directory.unfinished(&self.name);
        let [xml, bin] = ["xml", "bin"].map(|ending| format!("{part}.{ending}"));
        let finish = |part: &str, ending: &str| {
            let name = format!("{}.{ending}", self.name);
            self.directory.finish(part, &name).map_err(|error| error.to_string())
        };
        let written = shim::save(model, &self.directory.file(&xml), &self.directory.file(&bin))
            // Read the graph to verify that it is complete, because the serializer does not report a full disk.
            .and_then(|()| shim::read_ir(core, &self.directory.file(&xml)))
            .map_err(|error: Error| error.chain())
            .and_then(|model| {
                finish(&bin, "bin")?;
                finish(&xml, "xml")?;
                Ok(model)
            });
        if written.is_err() {
            // Files that cannot be removed now are evicted later.
            let _ = fs::remove_file(self.directory.file(&xml));
            let _ = fs::remove_file(self.directory.file(&bin));
        }
        written
    }
}
