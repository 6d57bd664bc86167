//! Rewritten graphs of GGUF files, kept for the next start, and compiled models (`kept/compiled.rs`). What is kept is a
//! convenience: whatever is wrong with it or with its folder costs time, never the start.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::UNIX_EPOCH;

use xxhash_rust::xxh3::Xxh3Default;

use crate::runtime::{CompiledModel, Core, Model};
use crate::weights::Form;
use crate::{Error, shim};
pub(crate) use compiled::{Facts, KeptCompiled};

mod compiled;
mod probe;

/// Changes whenever the rewriting does: graphs of another version are not read.
pub(crate) const VERSION: u64 = 9;

/// Bytes of the file's head that go into its fingerprint: the metadata and the tensor directory of most.
const HEAD_BYTES: u64 = 1 << 22;

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
        if graph.is_none() && compiled.is_none() {
            return None;
        }
        let write = move || {
            if let Some((kept, mut model)) = graph
                && let Err(error) = kept.try_write(&core, &mut model)
            {
                tracing::warn!(error, folder = %kept.folder.display(), "cannot keep the rewritten graph");
            }
            if let Some((kept, compiled, facts)) = compiled {
                kept.write(&core, compiled, facts);
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
    folder: PathBuf,
    name: String,
}

impl Kept {
    /// `None` if the file cannot be told from others. A graph whose projections are merged is kept apart from one in
    /// which they are not.
    pub(crate) fn of(
        folder: &Path,
        file: &Path,
        form: Option<Form>,
        (context_tokens_max, is_merged): (Option<u32>, bool),
    ) -> Option<Self> {
        let mut hash = Xxh3Default::new();
        add(&mut hash, file)?;
        match form {
            Some(form) => hash.update(&(form as u64).to_le_bytes()),
            // An IR's weights are in a file of their own.
            None => add(&mut hash, &file.with_extension("bin"))?,
        }
        for number in [VERSION, u64::from(context_tokens_max.unwrap_or(0))] {
            hash.update(&number.to_le_bytes());
        }
        if !is_merged {
            hash.update(b"apart");
        }
        Some(Self { folder: folder.to_owned(), name: format!("graph-{:032x}", hash.digest128()) })
    }

    fn file(&self, ending: &str) -> PathBuf {
        self.folder.join(format!("{}.{ending}", self.name))
    }

    /// The kept graph, if there is a readable one.
    pub(crate) fn read(&self, core: &Core) -> Option<Model> {
        let xml = self.file("xml");
        if !xml.is_file() {
            return None;
        }
        match core.read_model(&xml) {
            Ok(model) => Some(model),
            Err(error) => {
                tracing::warn!(error = error.chain(), file = %xml.display(), "cannot read the kept graph");
                None
            }
        }
    }

    /// The weights get their name first, the graph, whose presence decides, last.
    fn try_write(&self, core: &Core, model: &mut Model) -> Result<(), String> {
        fs::create_dir_all(&self.folder).map_err(|error| error.to_string())?;
        // The weights are found by the graph's name, so both parts of an unfinished one share theirs.
        let part =
            Self { folder: self.folder.clone(), name: format!("part-{}-{}", std::process::id(), self.name) };
        let (xml, bin) = (part.file("xml"), part.file("bin"));
        let written = shim::save(model, &xml, &bin)
            // A stream that ran into a full disk does not say so; a graph that can be read is whole.
            .and_then(|()| core.read_model(&xml).map(drop))
            .map_err(|error: Error| error.chain())
            .and_then(|()| rename(&bin, &self.file("bin")))
            .and_then(|()| rename(&xml, &self.file("xml")));
        if written.is_err() {
            // Nothing to be done if even this fails.
            let _ = fs::remove_file(&xml);
            let _ = fs::remove_file(&bin);
        }
        written
    }
}

/// Adds what tells a file from others, and from itself before it was changed.
fn add(hash: &mut Xxh3Default, path: &Path) -> Option<()> {
    let file = File::open(path).ok()?;
    let metadata = file.metadata().ok()?;
    let modified = metadata.modified().ok()?.duration_since(UNIX_EPOCH).ok()?;
    let mut head = Vec::new();
    file.take(HEAD_BYTES).read_to_end(&mut head).ok()?;
    hash.update(&head);
    hash.update(&metadata.len().to_le_bytes());
    hash.update(&modified.as_nanos().to_le_bytes());
    hash.update(fs::canonicalize(path).ok()?.as_os_str().as_encoded_bytes());
    Some(())
}

fn rename(from: &Path, to: &Path) -> Result<(), String> {
    fs::rename(from, to).map_err(|error| error.to_string())
}
