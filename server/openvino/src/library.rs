//! The files of the OpenVINO runtime that this process is linked against.

use std::ffi::{CStr, c_char};
use std::path::PathBuf;

unsafe extern "C" {
    fn ovfleet_library_path() -> *const c_char;
}

/// Returns the path of the C API that belongs to the linked OpenVINO library, or `None` if the path of this library is
/// unknown or does not have the expected form.
pub(crate) fn c_library() -> Option<PathBuf> {
    // SAFETY: the function has no parameters and returns null or a NUL-terminated string that the loader owns.
    let linked = unsafe {
        let path = ovfleet_library_path();
        (!path.is_null()).then(|| PathBuf::from(CStr::from_ptr(path).to_string_lossy().into_owned()))?
    };
    let name = linked.file_name()?.to_str()?.strip_prefix("libopenvino")?.to_owned();
    Some(linked.with_file_name(format!("libopenvino_c{name}")))
}

/// The library files of the runtime that this process has loaded or may load.
pub(crate) fn files() -> Vec<PathBuf> {
    let directory = c_library().and_then(|library| std::fs::read_dir(library.parent()?).ok());
    let files = directory.into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()));
    let is_runtime = |path: &PathBuf| {
        path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with("libopenvino"))
    };
    let mut files: Vec<PathBuf> = files.filter(is_runtime).collect();
    files.sort_unstable();
    files
}
