//! What model is served, and in which form its weights are held.

use std::path::{Path, PathBuf};

use crate::kept::{GraphOptions, Kept};
use crate::load::{Config, Weights};
use crate::runtime::Core;
use crate::weights::Form;
use crate::{Error, memory, projections};

/// Where a model comes from.
pub(crate) enum Source {
    Gguf(PathBuf),
    Ir(PathBuf),
}

impl Source {
    /// What is at a path.
    ///
    /// # Errors
    /// Nothing is there that can be served.
    pub(crate) fn find(path: &Path) -> Result<Self, Error> {
        let missing = |expected| Error::Missing { path: path.to_owned(), expected };
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

    /// The form that its weights are to have; `None` for an IR, which is served as it is.
    pub(crate) fn form(&self, config: &Config, core: &Core) -> Option<Form> {
        match self {
            Self::Gguf(path) => Some(resolve(config, path, core)),
            Self::Ir(_) => None,
        }
    }

    /// Where its graph is kept, if anything is; an IR's is not, but what is compiled of it.
    pub(crate) fn kept(&self, config: &Config, form: Option<Form>) -> Option<Kept> {
        let (Self::Gguf(path) | Self::Ir(path)) = self;
        let is_merged = config.adapters.is_empty();
        let options = GraphOptions { form, context_tokens_max: config.context_tokens_max, is_merged };
        Kept::of(config.graph_folder.as_deref()?, path, options)
    }
}

/// Chooses the form that is exact and, of those, the fastest that memory allows.
fn resolve(config: &Config, path: &Path, core: &Core) -> Form {
    match config.weights {
        Weights::As(form) => form,
        Weights::Auto => {
            // Held in 8 bits the weights are at most twice the file; compiling needs them twice for a moment.
            let needed = path.metadata().map_or(0, |file| file.len()) * 4;
            let fits = memory::available_bytes().is_none_or(|free| needed < free / 2);
            if projections::are_plugins_in_bytes(config.asked(core), config.unpack) && fits {
                Form::Fine
            } else {
                Form::Compact
            }
        }
    }
}
