//! What the nodes of a compiled model take, as the plugin counts it.

use std::ffi::{CStr, c_char};
use std::ptr;
use std::time::Duration;

use openvino_sys as ov;

use super::{InferRequest, check};
use crate::Error;

/// What a node of a compiled model took: the mean of all runs.
#[derive(Clone, Debug)]
pub struct NodeTime {
    /// Its name.
    pub name: String,
    /// Its operation, in the plugin's words.
    pub kind: String,
    /// What computed it, in the plugin's words.
    pub kernel: String,
    /// The mean time of a run.
    pub time: Duration,
}

impl InferRequest {
    /// What the nodes took that were run, if the model was compiled with `PERF_COUNT`.
    pub(crate) fn node_times(&self) -> Result<Vec<NodeTime>, Error> {
        let mut list = ov::ov_profiling_info_list_t { profiling_infos: ptr::null_mut(), size: 0 };
        // SAFETY: on success the list is ours to free.
        check(
            unsafe { ov::ov_infer_request_get_profiling_info(self.0, &raw mut list) },
            "read what nodes took",
        )?;
        // SAFETY: the list holds `size` entries, whose strings are NUL-terminated and live as long as it does.
        let times = unsafe {
            let entries = match list.size {
                0 => &[][..],
                size => std::slice::from_raw_parts(list.profiling_infos, size),
            };
            let text = |text: *const c_char| CStr::from_ptr(text).to_string_lossy().into_owned();
            let ran =
                |info: &&ov::ov_profiling_info_t| info.status == ov::ov_profiling_info_t_Status::EXECUTED;
            let time = |info: &ov::ov_profiling_info_t| NodeTime {
                name: text(info.node_name),
                kind: text(info.node_type),
                kernel: text(info.exec_type),
                time: Duration::from_micros(info.real_time.unsigned_abs()),
            };
            entries.iter().filter(ran).map(time).collect()
        };
        // SAFETY: filled by the call above, freed once.
        unsafe { ov::ov_profiling_info_list_free(&raw mut list) };
        Ok(times)
    }
}
