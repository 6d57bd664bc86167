//! The programs, directories and model that `ovfleet-operator local` uses on this machine.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail, ensure};
use serde_json::json;
use tempfile::TempDir;

use super::child::{Child, Program};
use super::console::print;
use crate::args::LocalArgs;
use crate::desired::flags::{self, Expansion};
use crate::manifest::digest;
use crate::valid_deployment::{FetchedModel, ModelFiles, ValidDeployment};

/// The programs and directories on this machine.
pub(super) struct Installation {
    pub(super) args: LocalArgs,
    /// The program of the server.
    pub(super) server: PathBuf,
    /// The program of the router.
    pub(super) router: PathBuf,
    /// The directory for files that exist only while the processes run.
    pub(super) directory: TempDir,
}

impl Installation {
    /// Finds the programs of the server and the router.
    ///
    /// # Errors
    /// An argument that sets the path of a program does not name a file.
    pub(super) fn new(args: LocalArgs, directory: TempDir) -> anyhow::Result<Self> {
        let server = program(args.server.as_deref(), "ovfleet-server")?;
        let router = program(args.router.as_deref(), "ovfleet-router")?;
        Ok(Self { args, server, router, directory })
    }

    /// Returns the path of the model, and fetches the model if necessary.
    ///
    /// # Errors
    /// The model does not exist, or this machine cannot fetch it or mount its source.
    pub(super) async fn model(&self, valid: &ValidDeployment) -> anyhow::Result<String> {
        if let Some(model) = &self.args.model {
            ensure!(model.exists(), "--model: {} does not exist", model.display());
            return Ok(model.display().to_string());
        }
        match &valid.files {
            ModelFiles::Fetched(fetched) => self.fetch(fetched).await,
            ModelFiles::Mounted(_) => bail!(
                "model.source is pvc or oci, which can be mounted only on a cluster: pass the path of the model with \
                 --model"
            ),
        }
    }

    async fn fetch(&self, fetched: &FetchedModel) -> anyhow::Result<String> {
        let source = flags::source(fetched, Expansion::None);
        let into = self.cache()?.join("models").join(digest(&json!(source)));
        std::fs::create_dir_all(&into).with_context(|| format!("failed to create {}", into.display()))?;
        let mut flags = vec!["fetch".to_owned(), format!("--into={}", into.display())];
        match (&self.args.credentials, &fetched.credentials) {
            (Some(credentials), _) => flags.push(format!("--credentials={}", credentials.display())),
            (None, Some(secret)) => {
                bail!(
                    "fetching the model requires the Secret {secret}: set --credentials to a directory with \
                     one file for each key of the Secret"
                );
            }
            (None, None) => {}
        }
        flags.extend(source);
        print("Fetching the model");
        let program = Program { name: "fetch".to_owned(), path: self.server.clone(), flags };
        let (status, reason) = Child::start(program)?.wait().await?;
        ensure!(status.success(), "failed to fetch the model: {reason}");
        Ok(into.join("current").display().to_string())
    }

    /// Returns the directory for fetched and compiled models.
    ///
    /// # Errors
    /// `--cache` is not set, and neither `XDG_CACHE_HOME` nor `HOME` is an absolute path.
    pub(super) fn cache(&self) -> anyhow::Result<PathBuf> {
        if let Some(cache) = &self.args.cache {
            return Ok(cache.clone());
        }
        let directory =
            |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
        let base = directory("XDG_CACHE_HOME").or_else(|| Some(directory("HOME")?.join(".cache")));
        Ok(base.context("neither XDG_CACHE_HOME nor HOME is an absolute path: set --cache")?.join("ovfleet"))
    }
}

/// Returns the path of a program: the given path, or else the program in the directory of this
/// executable or in PATH.
fn program(given: Option<&Path>, name: &str) -> anyhow::Result<PathBuf> {
    if let Some(given) = given {
        ensure!(given.is_file(), "the program {} does not exist or is not a file", given.display());
        return Ok(given.to_owned());
    }
    let own = std::env::current_exe().context("failed to determine the path of this program")?;
    let beside = own.with_file_name(name);
    Ok(if beside.is_file() { beside } else { PathBuf::from(name) })
}
