//! Whether this process may use the tile registers of AMX.

use std::ffi::{CStr, c_char, c_int};

unsafe extern "C" {
    fn ovfleet_tile_support(reason: *mut *const c_char) -> c_int;
}

/// Whether this process may use the tile registers of AMX with bf16.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TileSupport {
    /// The processor does not support AMX with bf16, or the process does not run on Linux on x86-64.
    Absent,
    /// The processor supports AMX with bf16, but the operating system does not let this process use it. The string is
    /// the reason.
    Denied(&'static str),
    Granted,
}

/// Requests the operating system's permission to use AMX, for all threads of the process. Later calls return the same
/// result.
pub(crate) fn tile_support() -> TileSupport {
    let mut reason = std::ptr::null();
    // SAFETY: the pointer is valid for a write.
    match unsafe { ovfleet_tile_support(&raw mut reason) } {
        0 => TileSupport::Absent,
        2 => TileSupport::Granted,
        // SAFETY: the reason is a NUL-terminated string that the shim never changes or frees.
        _ => TileSupport::Denied(unsafe { CStr::from_ptr(reason) }.to_str().unwrap_or("unknown reason")),
    }
}
