//! Rewritten graphs of GGUF files, kept for the next start, and compiled models (`kept/compiled.rs`). What is kept is a
//! convenience: whatever is wrong with it or with its folder costs time, never the start.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;

use xxhash_rust::xxh3::Xxh3Default;

use crate::runtime::{CompiledModel, Core, Model};
use crate::weights::Form;
use crate::{Error, shim};
pub(crate) use compiled::{Facts, KeptCompiled};
use folder::PrivateFolder;

mod compiled;
mod fingerprint;
mod folder;
mod probe;

/// Changes whenever the rewriting does: graphs of another version are not read.
pub(crate) const VERSION: u64 = 10;

/// What is to be kept of a model.
#[derive(Default)]
pub(crate) struct ToKeep {
    pub(crate) graph: Option<(Kept, Model)>,
    pub(crate) compiled: Option<(KeptCompiled, Arc<CompiledModel>, Facts)>,
}

impl ToKeep {
    /// Keeps it, in the background. A failure (a full disk) is logged and leaves nothing behind.
    pub(crate) fn keep(self, core: Arc<Core>) -> Option<Keeping> {
        let Self { graph, compiled } = self;
        let folder = match (&graph, &compiled) {
            (Some((kept, _)), _) => Arc::clone(&kept.folder),
            (None, Some((kept, ..))) => Arc::clone(kept.folder()),
            (None, None) => return None,
        };
        let write = move || {
            if let Some((kept, mut model)) = graph
                && let Err(error) = kept.try_write(&core, &mut model)
            {
                let file = kept.folder.shown(&kept.name);
                tracing::warn!(error, file = %file.display(), "failed to cache the rewritten graph");
            }
            if let Some((kept, compiled, facts)) = compiled {
                kept.write(compiled, facts);
            }
            if let Err(error) = folder.evict() {
                let folder = folder.shown("");
                tracing::warn!(%error, folder = %folder.display(), "failed to remove old files of the model cache");
            }
        };
        let thread = std::thread::Builder::new().name("keep".to_owned()).spawn(write);
        Some(Keeping(thread.inspect_err(|error| tracing::warn!(%error, "no thread to keep the graph")).ok()))
    }
}

/// What is being kept. Dropping it waits until that is done.
pub(crate) struct Keeping(Option<JoinHandle<()>>);

impl Drop for Keeping {
    fn drop(&mut self) {
        // A panic has been told, and costs only the next start's time.
        let _ = self.0.take().map(JoinHandle::join);
    }
}

/// Where the graph of one file in one form is kept, and by which name what is compiled of it is told.
pub(crate) struct Kept {
    folder: Arc<PrivateFolder>,
    name: String,
}

/// What a rewritten graph depends on besides the content of the model's files.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GraphOptions {
    pub(crate) form: Option<Form>,
    pub(crate) context_tokens_max: Option<u32>,
    /// Whether projections that read the same input are merged.
    pub(crate) is_merged: bool,
}

impl Kept {
    /// The entry of a model's file in a cache directory; `None`, with a warning, if the directory or the file cannot be used.
    pub(crate) fn of(cache_dir: &Path, file: &Path, options: GraphOptions) -> Option<Self> {
        let unusable = |path: &Path, error: std::io::Error| {
            tracing::warn!(%error, path = %path.display(), "models are not cached");
        };
        let folder = PrivateFolder::open(cache_dir).map_err(|error| unusable(cache_dir, error)).ok()?;
        let name = Self::name(&folder, file, options).map_err(|error| unusable(file, error)).ok()?;
        Some(Self { folder: Arc::new(folder), name })
    }

    fn name(folder: &PrivateFolder, file: &Path, options: GraphOptions) -> std::io::Result<String> {
        let GraphOptions { form, context_tokens_max, is_merged } = options;
        let mut hash = Xxh3Default::new();
        hash.update(&fingerprint::of_file(folder, file)?.to_le_bytes());
        match form {
            Some(form) => hash.update(&(form as u64).to_le_bytes()),
            // An IR's weights are in a file of their own.
            None => hash.update(&fingerprint::of_file(folder, &file.with_extension("bin"))?.to_le_bytes()),
        }
        for number in [VERSION, u64::from(context_tokens_max.unwrap_or(0))] {
            hash.update(&number.to_le_bytes());
        }
        if !is_merged {
            hash.update(b"apart");
        }
        Ok(format!("graph-{:032x}", hash.digest128()))
    }

    /// The kept graph, if there is a readable one.
    pub(crate) fn read(&self, core: &Core) -> Option<Model> {
        let name = format!("{}.xml", self.name);
        let xml = self.folder.file(&name);
        if !xml.is_file() {
            return None;
        }
        match core.read_model(&xml) {
            Ok(model) => {
                self.folder.touch(&name);
                Some(model)
            }
            Err(error) => {
                let file = self.folder.shown(&name);
                tracing::warn!(error = error.chain(), file = %file.display(), "failed to read a cached graph");
                None
            }
        }
    }

    /// The weights get their name first, the graph, whose presence decides, last.
    fn try_write(&self, core: &Core, model: &mut Model) -> Result<(), String> {
        // The weights are found by the graph's name, so both parts of an unfinished one share theirs.
        let part = self.folder.unfinished(&self.name);
        let [xml, bin] = ["xml", "bin"].map(|ending| format!("{part}.{ending}"));
        let finish = |part: &str, ending: &str| {
            let name = format!("{}.{ending}", self.name);
            self.folder.finish(part, &name).map_err(|error| error.to_string())
        };
        let written = shim::save(model, &self.folder.file(&xml), &self.folder.file(&bin))
            // A stream that ran into a full disk does not say so; a graph that can be read is whole.
            .and_then(|()| core.read_model(&self.folder.file(&xml)).map(drop))
            .map_err(|error: Error| error.chain())
            .and_then(|()| finish(&bin, "bin"))
            .and_then(|()| finish(&xml, "xml"));
        if written.is_err() {
            // Nothing to be done if even this fails.
            let _ = fs::remove_file(self.folder.file(&xml));
            let _ = fs::remove_file(self.folder.file(&bin));
        }
        written
    }
}
