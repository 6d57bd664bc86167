//! Execution times of the nodes of a compiled model, as the plugin measures them.

use std::ffi::{CStr, c_char};
use std::ptr;
use std::time::Duration;

use openvino_sys as ov;

use super::status::check;
use crate::Error;

/// The execution time of one node of a compiled model.
#[derive(Clone, Debug)]
pub struct NodeTime {
    /// The name of the node in the graph.
    pub name: String,
    /// The type of the operation, as the plugin names it.
    pub kind: String,
    /// The implementation that computed the node, as the plugin names it.
    pub kernel: String,
    /// The mean time of the node over all runs.
    pub time: Duration,
}

/// Returns the execution times of the nodes that a request has run. The list is empty unless the model was compiled
/// with `PERF_COUNT`.
///
/// # Safety
/// `request` must be a valid request that no thread is running.
pub(super) unsafe fn node_times(request: *const ov::ov_infer_request_t) -> Result<Vec<NodeTime>, Error> {
    let mut list = ov::ov_profiling_info_list_t { profiling_infos: ptr::null_mut(), size: 0 };
    // SAFETY: the caller guarantees a valid request; on success this function owns the list.
    let status = unsafe { ov::ov_infer_request_get_profiling_info(request, &raw mut list) };
    check(status, "read the execution times")?;
    // SAFETY: the list has `size` entries, whose strings are NUL-terminated and live as long as the list.
    let times = unsafe {
        let entries = match list.size {
            0 => &[][..],
            size => std::slice::from_raw_parts(list.profiling_infos, size),
        };
        let text = |text: *const c_char| CStr::from_ptr(text).to_string_lossy().into_owned();
        let has_run =
            |info: &&ov::ov_profiling_info_t| info.status == ov::ov_profiling_info_t_Status::EXECUTED;
        let time = |info: &ov::ov_profiling_info_t| NodeTime {
            name: text(info.node_name),
            kind: text(info.node_type),
            kernel: text(info.exec_type),
            time: Duration::from_micros(info.real_time.unsigned_abs()),
        };
        entries.iter().filter(has_run).map(time).collect()
    };
    // SAFETY: the call above has filled the list, which is freed once.
    unsafe { ov::ov_profiling_info_list_free(&raw mut list) };
    Ok(times)
}
