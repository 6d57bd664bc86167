//! What fetches of former sources have left in folders beside the one that is fetched into: removed, so that there is room
//! for the next, but for what somebody still uses. Who does is for the caller to know.

use std::io;
use std::path::Path;

/// How folders are called that are being removed: nobody looks for a model there.
const REMOVED: &str = ".former-";
/// What a fetch leaves.
const LEFT: [&str; 5] = ["files", "current", "manifest.json", "current.part", "manifest.json.part"];

/// Removes what former fetches have left beside `into`, but for the folders called as in `keep`. What cannot be removed
/// is told of, and no reason not to fetch.
pub(crate) fn remove(into: &Path, keep: &[String]) {
    let (Some(beside), Some(own)) = (into.parent(), into.file_name()) else { return };
    let entries = match beside.read_dir() {
        Ok(entries) => entries,
        // Nobody has fetched anything yet.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return,
        Err(error) => {
            tracing::warn!(path = %beside.display(), %error, "failed to look for former sources");
            return;
        }
    };
    for entry in entries.flatten() {
        let (path, name) = (entry.path(), entry.file_name());
        let is_folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
        let is_kept = name == own || keep.iter().any(|keep| name == keep.as_str());
        let is_half_removed = name.to_string_lossy().starts_with(REMOVED);
        if !is_folder || is_kept || !(is_half_removed || is_of_a_fetch(&path)) {
            continue;
        }
        let doomed = if is_half_removed {
            path
        } else {
            // At once, so that nobody ever finds half a model.
            let doomed = beside.join(format!("{REMOVED}{}", name.to_string_lossy()));
            if let Err(error) = std::fs::rename(&path, &doomed) {
                tracing::warn!(path = %path.display(), %error, "failed to remove a former source");
                continue;
            }
            doomed
        };
        match std::fs::remove_dir_all(&doomed) {
            Ok(()) => tracing::info!(name = %name.display(), "removed a former source"),
            Err(error) => {
                tracing::warn!(path = %doomed.display(), %error, "failed to remove a former source");
            }
        }
    }
}

/// Whether a folder has what a fetch leaves and nothing else, so that nothing is removed that is somebody else's.
fn is_of_a_fetch(folder: &Path) -> bool {
    let Ok(entries) = folder.read_dir() else { return false };
    let names: Vec<_> = entries.flatten().map(|entry| entry.file_name()).collect();
    let is_left = |name: &std::ffi::OsString| LEFT.iter().any(|left| name == left);
    names.iter().any(|name| name == LEFT[0]) && names.iter().all(is_left)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_former_fetches_left_goes_and_what_is_used_or_others_stays() {
        let folder = tempfile::tempdir().unwrap();
        let of_a_fetch = |name: &str| {
            std::fs::create_dir_all(folder.path().join(name).join("files")).unwrap();
            std::fs::write(folder.path().join(name).join("files/model.gguf"), "model").unwrap();
            std::fs::write(folder.path().join(name).join("manifest.json"), "{}").unwrap();
        };
        for name in ["own", "used", "former", "half", ".former-killed"] {
            of_a_fetch(name);
        }
        std::fs::remove_file(folder.path().join("half/manifest.json")).unwrap();
        for name in ["lost+found", "mine/files"] {
            std::fs::create_dir_all(folder.path().join(name)).unwrap();
        }
        std::fs::write(folder.path().join("mine/notes"), "").unwrap();
        std::fs::write(folder.path().join("file"), "").unwrap();
        remove(&folder.path().join("own"), &["used".to_owned(), "never".to_owned()]);
        let mut left: Vec<String> = folder
            .path()
            .read_dir()
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        left.sort();
        assert_eq!(left, ["file", "lost+found", "mine", "own", "used"]);
        // Before anything was fetched there is nothing to look at.
        remove(&folder.path().join("new/own"), &[]);
    }
}
