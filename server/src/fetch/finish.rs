//! Completes a fetch: writes the manifest and the link `current` to the model. Both exist only while the model is
//! complete, so they are removed before one of its files is replaced.

use std::collections::HashSet;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::args::Format;
use super::error::Error;
use super::parts;
use super::source::File;

/// The subdirectory of the target directory that contains the files.
pub(crate) const FILES: &str = "files";
/// The link to the model.
const CURRENT: &str = "current";
/// The manifest, which exists once all files are complete.
const MANIFEST: &str = "manifest.json";
/// The possible names of the file with the graph of an OpenVINO IR: the first is for a text model, the second for the
/// language model of a vision-language model.
const IR_NAMES: [&str; 2] = ["openvino_model.xml", "openvino_language_model.xml"];

/// A file that has been downloaded and verified.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct FetchedFile {
    /// The path of the file relative to the directory of the model's files.
    pub(crate) path: String,
    /// The size of the file in bytes.
    pub(crate) bytes: u64,
    /// The SHA-256 digest of the file.
    pub(crate) sha256: String,
}

/// A complete model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FetchedModel {
    /// The digest of all files: `sha256:…`.
    pub(crate) digest: String,
    /// The path of the link to the model.
    pub(crate) current: PathBuf,
    /// The commit of the files, if the source has commits.
    pub(crate) revision: Option<String>,
    files: Vec<FetchedFile>,
}

/// The model that an earlier fetch, possibly from another source, has completed in the directory.
#[derive(Debug)]
pub(crate) struct PreviousModel {
    into: PathBuf,
    /// The files of the model. Empty if it is unknown whether the directory contains a complete model.
    files: HashSet<FetchedFile>,
}

/// The source of the files.
#[derive(Debug)]
pub(crate) struct Origin<'a> {
    /// The identity of the source.
    pub(crate) source: &'a str,
    /// The commit of the files, if the source has commits.
    pub(crate) revision: Option<String>,
}

#[derive(Serialize, Deserialize)]
struct Manifest {
    source: String,
    digest: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    revision: Option<String>,
    files: Vec<FetchedFile>,
}

impl FetchedModel {
    /// Returns the total size of the files in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }

    /// Returns the model of an earlier fetch from the same source if it is complete. Only the sizes of files are
    /// checked, because files get their final name only after they have been verified.
    pub(crate) fn load(into: &Path, source: &str) -> Option<Self> {
        let manifest = Manifest::read(into)?;
        let current = into.join(CURRENT);
        let exists = |file: &FetchedFile| {
            std::fs::metadata(into.join(FILES).join(&file.path)).is_ok_and(|found| found.len() == file.bytes)
        };
        let is_complete = manifest.source == source && current.exists() && manifest.files.iter().all(exists);
        let Manifest { digest, revision, files, .. } = manifest;
        is_complete.then_some(Self { digest, current, revision, files })
    }
}

impl PreviousModel {
    /// Reads the manifest of the model.
    pub(crate) fn load(into: &Path) -> Self {
        let files = Manifest::read(into).map(|manifest| manifest.files.into_iter().collect());
        Self { into: into.to_owned(), files: files.unwrap_or_default() }
    }

    /// Prepares the directory for `file`, which is about to be renamed to its final name. Unless the previous model
    /// contains exactly this file, removes the manifest and the link of that model, because the model will no longer be
    /// complete. Processes that have opened the files of the previous model are not affected.
    ///
    /// # Errors
    /// The manifest or the link cannot be removed.
    pub(crate) fn withdraw_unless_it_contains(&mut self, file: &FetchedFile) -> Result<(), Error> {
        if self.files.contains(file) {
            return Ok(());
        }
        self.files.clear();
        // Remove the manifest first: without it, the next fetch does not rely on the files.
        remove(&self.into.join(MANIFEST))?;
        remove(&self.into.join(CURRENT))
    }
}

impl Manifest {
    /// Reads the manifest; returns `None` if it is missing or invalid.
    fn read(into: &Path) -> Option<Self> {
        serde_json::from_slice(&std::fs::read(into.join(MANIFEST)).ok()?).ok()
    }
}

/// Writes the manifest for `files`, and the link to `model`, which is one of these files or the directory of an IR.
///
/// # Errors
/// The manifest or the link cannot be written.
pub(crate) fn finish(
    into: &Path,
    origin: Origin<'_>,
    files: Vec<FetchedFile>,
    model: &Path,
) -> Result<FetchedModel, Error> {
    let model = Path::new(FILES).join(model);
    let digest = digest(&files);
    let Origin { source, revision } = origin;
    let manifest = Manifest {
        source: source.to_owned(),
        digest: digest.clone(),
        revision: revision.clone(),
        files: files.clone(),
    };
    let text = serde_json::to_vec(&manifest).expect("invariant: strings and numbers can be written as JSON");
    let current = into.join(CURRENT);
    // If the manifest exists, the link points to the model that the manifest describes. Therefore, the previous
    // manifest is removed before the link changes, and the new one is written afterward.
    remove(&into.join(MANIFEST))?;
    let part = into.join("current.part");
    let _ = std::fs::remove_file(&part);
    std::os::unix::fs::symlink(&model, &part).map_err(|source| Error::disk("create", &part, source))?;
    std::fs::rename(&part, &current).map_err(|source| Error::disk("rename", &part, source))?;
    let part = into.join("manifest.json.part");
    std::fs::write(&part, text).map_err(|source| Error::disk("write", &part, source))?;
    std::fs::rename(&part, into.join(MANIFEST)).map_err(|source| Error::disk("rename", &part, source))?;
    Ok(FetchedModel { digest, current, revision, files })
}

/// Removes a file if it exists.
fn remove(path: &Path) -> Result<(), Error> {
    match std::fs::remove_file(path) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => Err(Error::disk("remove", path, source)),
        _ => Ok(()),
    }
}

/// Returns a digest of all files.
fn digest(files: &[FetchedFile]) -> String {
    let mut lines: Vec<String> =
        files.iter().map(|file| format!("{}  {}\n", file.sha256, file.path)).collect();
    lines.sort();
    let hash = Sha256::digest(lines.concat());
    format!("sha256:{}", hash.iter().map(|byte| format!("{byte:02x}")).collect::<String>())
}

/// Returns the path of the model among the files of a source: a file, or the directory of an IR.
///
/// # Errors
/// The files contain no model or several models, or the model has too many parts or lacks a part.
pub(crate) fn model_path(files: &[File], format: Format) -> Result<PathBuf, Error> {
    let ggufs: Vec<&str> =
        files.iter().map(|file| file.path.as_str()).filter(|path| path.ends_with(".gguf")).collect();
    let is_ir = |path: &&Path| IR_NAMES.iter().any(|name| path.ends_with(name));
    let ir = files.iter().map(|file| Path::new(&file.path)).find(is_ir);
    let directory = ir.map(|path| path.parent().unwrap_or(Path::new("")).to_owned());
    match (format, &ggufs[..], directory, files) {
        (Format::Auto | Format::Gguf, [_, ..], ..) => match parts::model_path(&ggufs)? {
            Some(path) => Ok(PathBuf::from(path)),
            None => Err(Error::Wrong(format!(
                "the source has {} GGUF files that are not the parts of one model; select one model",
                ggufs.len()
            ))),
        },
        // With an explicit format, a single file may have any name.
        (Format::Gguf, [], _, [file]) => Ok(PathBuf::from(&file.path)),
        (Format::Auto | Format::OpenvinoIr, _, Some(directory), _) => Ok(directory),
        (Format::Auto, ..) => Err(Error::Wrong(format!(
            "none of the {} files is a model (a GGUF file, {})",
            files.len(),
            IR_NAMES.join(" or ")
        ))),
        (Format::Gguf, ..) => Err(Error::Wrong(format!("none of the {} files is a GGUF file", files.len()))),
        (Format::OpenvinoIr, ..) => {
            Err(Error::Wrong(format!("none of the {} files is {}", files.len(), IR_NAMES.join(" or "))))
        }
    }
}
