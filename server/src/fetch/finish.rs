//! What is done when all files are there: a manifest says so, and `current` leads to the model.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::download::Fetched;
use super::{Error, Format};

/// The folder of the files, in the one that was given.
pub(crate) const FILES: &str = "files";
/// What leads to the model.
const CURRENT: &str = "current";
/// What says that everything is there.
const MANIFEST: &str = "manifest.json";

/// A model that is there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Finished {
    /// The digest of all files: `sha256:…`.
    pub(crate) digest: String,
    /// What leads to the model.
    pub(crate) current: PathBuf,
    /// The commit that they are of, if the source has commits.
    pub(crate) revision: Option<String>,
    files: Vec<Fetched>,
}

/// Where files are from.
#[derive(Debug)]
pub(crate) struct Origin<'a> {
    /// What distinguishes the source from others.
    pub(crate) source: &'a str,
    /// The commit that the files are of, if the source has commits.
    pub(crate) revision: Option<String>,
}

#[derive(Serialize, Deserialize)]
struct Manifest {
    source: String,
    digest: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    revision: Option<String>,
    files: Vec<Fetched>,
}

impl Finished {
    /// Bytes of all files.
    pub(crate) fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }

    /// What an earlier fetch from the same source has left, if all of it is there. Files that were placed are whole, so
    /// their sizes are looked at and not their content.
    pub(crate) fn load(into: &Path, source: &str) -> Option<Self> {
        let manifest: Manifest = serde_json::from_slice(&std::fs::read(into.join(MANIFEST)).ok()?).ok()?;
        let current = into.join(CURRENT);
        let is_there = |file: &Fetched| {
            std::fs::metadata(into.join(FILES).join(&file.path)).is_ok_and(|found| found.len() == file.bytes)
        };
        let whole = manifest.source == source && current.exists() && manifest.files.iter().all(is_there);
        let Manifest { digest, revision, files, .. } = manifest;
        whole.then_some(Self { digest, current, revision, files })
    }
}

/// Makes known that all `files` are there.
///
/// # Errors
/// There is no model among them, or the disk fails.
pub(crate) fn finish(
    into: &Path,
    origin: Origin<'_>,
    files: Vec<Fetched>,
    format: Format,
) -> Result<Finished, Error> {
    let model = PathBuf::from(FILES).join(model(&files, format)?);
    let digest = digest(&files);
    let Origin { source, revision } = origin;
    let manifest = Manifest {
        source: source.to_owned(),
        digest: digest.clone(),
        revision: revision.clone(),
        files: files.clone(),
    };
    let text = serde_json::to_vec(&manifest).expect("invariant: texts and numbers are JSON");
    let current = into.join(CURRENT);
    // The link first: who sees a manifest may rely on it.
    let part = into.join("current.part");
    let _ = std::fs::remove_file(&part);
    std::os::unix::fs::symlink(&model, &part).map_err(|source| Error::disk("create", &part, source))?;
    std::fs::rename(&part, &current).map_err(|source| Error::disk("rename", &part, source))?;
    let part = into.join("manifest.json.part");
    std::fs::write(&part, text).map_err(|source| Error::disk("write", &part, source))?;
    std::fs::rename(&part, into.join(MANIFEST)).map_err(|source| Error::disk("rename", &part, source))?;
    Ok(Finished { digest, current, revision, files })
}

/// One digest for all files.
fn digest(files: &[Fetched]) -> String {
    let mut lines: Vec<String> =
        files.iter().map(|file| format!("{}  {}\n", file.sha256, file.path)).collect();
    lines.sort();
    let hash = Sha256::digest(lines.concat());
    format!("sha256:{}", hash.iter().map(|byte| format!("{byte:02x}")).collect::<String>())
}

/// Where among the files the model is.
fn model(files: &[Fetched], format: Format) -> Result<PathBuf, Error> {
    let ggufs: Vec<&str> =
        files.iter().map(|file| file.path.as_str()).filter(|path| path.ends_with(".gguf")).collect();
    let ir = files.iter().map(|file| Path::new(&file.path)).find(|path| path.ends_with("openvino_model.xml"));
    let folder = ir.map(|path| path.parent().unwrap_or(Path::new("")).to_owned());
    match (format, &ggufs[..], folder, files) {
        (Format::Auto | Format::Gguf, [gguf], ..) => Ok(PathBuf::from(gguf)),
        // A file of any name, of which it is said that it is one.
        (Format::Gguf, [], _, [file]) => Ok(PathBuf::from(&file.path)),
        (Format::Auto | Format::Gguf, [_, _, ..], ..) => {
            Err(Error::Wrong(format!("there are {} GGUF files: name the one to serve", ggufs.len())))
        }
        (Format::Auto | Format::OpenvinoIr, _, Some(folder), _) => Ok(folder),
        (Format::Auto, ..) => Err(Error::Wrong(format!(
            "there is no model among the {} files: neither a GGUF file nor an openvino_model.xml",
            files.len()
        ))),
        (Format::Gguf, ..) => {
            Err(Error::Wrong(format!("there is no GGUF file among the {} files", files.len())))
        }
        (Format::OpenvinoIr, ..) => {
            Err(Error::Wrong(format!("there is no openvino_model.xml among the {} files", files.len())))
        }
    }
}
