//! Removes the files of earlier fetches in sibling directories of the target directory, to make room for the new model.
//! The caller names the directories that are still in use.

use std::io;
use std::path::Path;

/// The prefix of the names of directories that are being removed.
const REMOVED: &str = ".previous-";
/// The names of the files and directories that a fetch creates in its target directory.
const FETCHED: [&str; 6] =
    ["files", "current", "manifest.json", "current.part", "manifest.json.part", "lock"];

/// Removes the sibling directories of `into` that contain earlier fetches, except those whose names are in `keep`. If a
/// directory cannot be removed, the error is logged and the fetch continues.
pub(crate) fn remove(into: &Path, keep: &[String]) {
    let (Some(beside), Some(own)) = (into.parent(), into.file_name()) else { return };
    let entries = match beside.read_dir() {
        Ok(entries) => entries,
        // The parent directory does not exist yet: this is the first fetch.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return,
        Err(error) => {
            tracing::warn!(path = %beside.display(), %error, "failed to list earlier fetches");
            return;
        }
    };
    for entry in entries.flatten() {
        let (path, name) = (entry.path(), entry.file_name());
        let is_directory = entry.file_type().is_ok_and(|kind| kind.is_dir());
        let is_kept = name == own || keep.iter().any(|keep| name == keep.as_str());
        let is_half_removed = name.to_string_lossy().starts_with(REMOVED);
        if !is_directory || is_kept || !(is_half_removed || is_of_a_fetch(&path)) {
            continue;
        }
        let doomed = if is_half_removed {
            path
        } else {
            // Unlike the removal, the rename is atomic, so no process sees an incomplete model.
            let doomed = beside.join(format!("{REMOVED}{}", name.to_string_lossy()));
            if let Err(error) = std::fs::rename(&path, &doomed) {
                tracing::warn!(path = %path.display(), %error, "failed to remove an earlier fetch");
                continue;
            }
            doomed
        };
        match std::fs::remove_dir_all(&doomed) {
            Ok(()) => tracing::info!(name = %name.display(), "removed an earlier fetch"),
            Err(error) => {
                tracing::warn!(path = %doomed.display(), %error, "failed to remove an earlier fetch");
            }
        }
    }
}

/// Whether a directory contains the files of a model, and only entries that a fetch creates.
fn is_of_a_fetch(directory: &Path) -> bool {
    let Ok(entries) = directory.read_dir() else { return false };
    let names: Vec<_> = entries.flatten().map(|entry| entry.file_name()).collect();
    let is_fetched = |name: &std::ffi::OsString| FETCHED.iter().any(|fetched| name == fetched);
    names.iter().any(|name| name == FETCHED[0]) && names.iter().all(is_fetched)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn earlier_fetches_are_removed_except_those_in_use_and_other_files() {
        let directory = tempfile::tempdir().unwrap();
        let of_a_fetch = |name: &str| {
            std::fs::create_dir_all(directory.path().join(name).join("files")).unwrap();
            std::fs::write(directory.path().join(name).join("files/model.gguf"), "model").unwrap();
            std::fs::write(directory.path().join(name).join("manifest.json"), "{}").unwrap();
            std::fs::write(directory.path().join(name).join("lock"), "").unwrap();
        };
        for name in ["own", "used", "previous", "half", ".previous-killed"] {
            of_a_fetch(name);
        }
        std::fs::remove_file(directory.path().join("half/manifest.json")).unwrap();
        for name in ["lost+found", "mine/files"] {
            std::fs::create_dir_all(directory.path().join(name)).unwrap();
        }
        std::fs::write(directory.path().join("mine/notes"), "").unwrap();
        std::fs::write(directory.path().join("file"), "").unwrap();
        remove(&directory.path().join("own"), &["used".to_owned(), "never".to_owned()]);
        let mut left: Vec<String> = directory
            .path()
            .read_dir()
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        left.sort();
        assert_eq!(left, ["file", "lost+found", "mine", "own", "used"]);
        // Before the first fetch, the parent directory does not exist.
        remove(&directory.path().join("new/own"), &[]);
    }
}
