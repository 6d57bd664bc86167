//! The model as the API shows it: its names, its text side, its fingerprint.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use server_text::ModelText;

/// A model that is served.
#[derive(Debug)]
pub struct Model {
    names: Vec<String>,
    /// Its tokenizer, chat template and defaults.
    pub(crate) text: ModelText,
    /// When it was loaded, in seconds since 1970.
    pub(crate) created: u64,
    /// Changes with what may change its answers.
    pub(crate) fingerprint: String,
}

impl Model {
    /// A model under `names`. `computed` describes how it is computed: backend, precisions and the like.
    ///
    /// # Panics
    /// If it has no name.
    pub fn new(names: Vec<String>, text: ModelText, computed: &str) -> Self {
        assert!(!names.is_empty(), "a model has a name");
        let mut hasher = DefaultHasher::new();
        (&names, &text.name, computed, env!("CARGO_PKG_VERSION")).hash(&mut hasher);
        let fingerprint = format!("fp_{:012x}", hasher.finish() & 0xffff_ffff_ffff);
        Self { names, text, created: unix_time(), fingerprint }
    }

    /// The name in the list of models.
    pub fn name(&self) -> &str {
        &self.names[0]
    }

    /// All names, the first as in [`Self::name`].
    pub fn names(&self) -> &[String] {
        &self.names
    }

    pub(crate) fn has_name(&self, name: &str) -> bool {
        self.names.iter().any(|known| known == name)
    }
}

/// The name of a model that was given none: that of its file or directory.
pub(crate) fn name_of(path: &Path) -> String {
    let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let name = if path.is_dir() { path.file_name() } else { path.file_stem() };
    name.map_or_else(|| "model".to_owned(), |name| name.to_string_lossy().into_owned())
}

/// Seconds since 1970.
pub(crate) fn unix_time() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}
