//! Errors and strings of OpenVINO's C API.

use std::ffi::{CStr, CString, c_char};
use std::path::Path;
use std::ptr;

use openvino_sys as ov;
use ov::ov_status_e as Status;

use crate::Error;

/// Turns a status into a result. `what` is the operation, as a verb with its object. OpenVINO stores only the last
/// message of the process, so if calls of several threads fail at the same time, an error can have the message of
/// another thread.
pub(super) fn check(status: Status, what: &'static str) -> Result<(), Error> {
    if status == Status::OK {
        return Ok(());
    }
    // SAFETY: the call returns null or a NUL-terminated string that this function owns.
    let message = unsafe {
        let message = ov::ov_get_last_err_msg();
        let text = if message.is_null() {
            String::new()
        } else {
            CStr::from_ptr(message).to_string_lossy().into_owned()
        };
        ov::ov_free(message);
        text
    };
    let message = if message.is_empty() { format!("{status:?}") } else { message };
    Err(Error::runtime(what, &message))
}

pub(crate) fn c_string(text: &str, what: &'static str) -> Result<CString, Error> {
    CString::new(text).map_err(|_| Error::runtime(what, &format!("{text:?} contains a NUL byte")))
}

pub(crate) fn c_path(path: &Path) -> Result<CString, Error> {
    CString::new(path.as_os_str().as_encoded_bytes())
        .map_err(|_| Error::runtime("pass a path to OpenVINO", &format!("{path:?} contains a NUL byte")))
}

/// Returns the value of a property, which `read` stores as a C string.
pub(super) fn property(read: impl FnOnce(*mut *mut c_char) -> Status) -> Result<String, Error> {
    let mut value: *mut c_char = ptr::null_mut();
    check(read(&raw mut value), "read a property")?;
    // SAFETY: on success `value` is a NUL-terminated string that this function owns.
    unsafe {
        let text = CStr::from_ptr(value).to_string_lossy().into_owned();
        ov::ov_free(value);
        Ok(text)
    }
}
