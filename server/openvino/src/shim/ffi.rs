//! The C interface of the shim, as `shim/shim.h` declares it.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::offset_of;

use openvino_sys::{ov_compiled_model_t, ov_core_t, ov_model_t};

use crate::Error;

/// The same as `ovfleet_tensor_rows` in `shim/shim.h`.
#[repr(C)]
pub(super) struct RawTensorRows {
    pub(super) tensor: usize,
    pub(super) first: usize,
    pub(super) count: usize,
    pub(super) quants: *mut c_void,
    pub(super) scales: *mut f32,
    pub(super) zeros: *mut c_void,
    pub(super) message: *mut c_char,
    pub(super) message_size: usize,
}

/// The same as `ovfleet_tensor_source` in `shim/shim.h`.
#[repr(C)]
pub(super) struct RawTensorSource {
    pub(super) context: *mut c_void,
    pub(super) read: unsafe extern "C" fn(*const c_void, *const RawTensorRows) -> c_int,
    pub(super) free: unsafe extern "C" fn(*mut c_void),
}

/// The same as `ovfleet_weight` in `shim/shim.h`.
#[repr(C)]
pub(super) struct RawWeight {
    pub(super) tensor: *const c_char,
    pub(super) number: usize,
    pub(super) kind: u32,
    pub(super) zeros_kind: u32,
    pub(super) has_zeros: c_int,
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) group: usize,
    pub(super) fits_six_bits: c_int,
    pub(super) has_super_scales: c_int,
}

/// The same as `ovfleet_weights_t` in `shim/shim.h`, whose content is opaque.
#[repr(C)]
pub(super) struct RawWeights {
    pub(super) opaque: [u8; 0],
}

/// The same as `ovfleet_lora` in `shim/shim.h`.
#[repr(C)]
pub(super) struct RawLora {
    pub(super) projection: *const c_char,
    pub(super) ranks: usize,
    pub(super) down: *const f32,
    pub(super) up: *const f32,
    pub(super) adapters: *const i32,
}

/// The same as `ovfleet_kernel_plan` in `shim/shim.h`.
#[repr(C)]
pub(super) struct RawKernelPlan {
    pub(super) projection_isa: u32,
    pub(super) projection_activations: u32,
    pub(super) attention_isa: u32,
    pub(super) attention_activations: u32,
    pub(super) kv_cache: u32,
    pub(super) attention_mass: f32,
    pub(super) block_scores: u32,
    pub(super) projection_terms: u32,
    pub(super) native_experts: u32,
}

// `shim/graph/kernel_plan.cpp` asserts the same layout for the C struct.
const _: () = {
    assert!(size_of::<RawKernelPlan>() == 36 && align_of::<RawKernelPlan>() == 4);
    assert!(offset_of!(RawKernelPlan, projection_isa) == 0);
    assert!(offset_of!(RawKernelPlan, projection_activations) == 4);
    assert!(offset_of!(RawKernelPlan, attention_isa) == 8);
    assert!(offset_of!(RawKernelPlan, attention_activations) == 12);
    assert!(offset_of!(RawKernelPlan, kv_cache) == 16);
    assert!(offset_of!(RawKernelPlan, attention_mass) == 20);
    assert!(offset_of!(RawKernelPlan, block_scores) == 24);
    assert!(offset_of!(RawKernelPlan, projection_terms) == 28);
    assert!(offset_of!(RawKernelPlan, native_experts) == 32);
};

unsafe extern "C" {
    pub(super) fn ovfleet_last_error() -> *const c_char;
    pub(super) fn ovfleet_read_ir(
        core: *const ov_core_t,
        path: *const c_char,
        model: *mut *mut ov_model_t,
    ) -> c_int;
    pub(super) fn ovfleet_read_gguf(path: *const c_char, model: *mut *mut ov_model_t) -> c_int;
    pub(super) fn ovfleet_find_weights(
        model: *const ov_model_t,
        source: *const RawTensorSource,
        weights: *mut *mut RawWeights,
    ) -> c_int;
    pub(super) fn ovfleet_free_weights(weights: *mut RawWeights);
    pub(super) fn ovfleet_set_weight(
        weights: *mut RawWeights,
        weight: *const RawWeight,
        found: *mut c_int,
    ) -> c_int;
    pub(super) fn ovfleet_divide_frequencies(
        model: *mut ov_model_t,
        base: f64,
        factors: *const f32,
        count: usize,
        applied: *mut usize,
    ) -> c_int;
    pub(super) fn ovfleet_scale_rotary(
        model: *mut ov_model_t,
        factor: f32,
        count: usize,
        applied: *mut usize,
    ) -> c_int;
    pub(super) fn ovfleet_set_sliding_window(model: *mut ov_model_t, tokens: u32) -> c_int;
    pub(super) fn ovfleet_rewrite_rotary(
        model: *mut ov_model_t,
        permuted: unsafe extern "C" fn(*mut c_void, *const c_char, usize),
        context: *mut c_void,
    ) -> c_int;
    pub(super) fn ovfleet_rotate_halves(model: *mut ov_model_t, rotated: *mut usize) -> c_int;
    pub(super) fn ovfleet_fix_experts(model: *mut ov_model_t, layers: *mut usize) -> c_int;
    pub(super) fn ovfleet_list_projections(
        model: *const ov_model_t,
        found: unsafe extern "C" fn(*mut c_void, *const c_char, usize, usize, usize),
        context: *mut c_void,
        unknown: *mut usize,
    ) -> c_int;
    pub(super) fn ovfleet_add_adapters(
        model: *mut ov_model_t,
        loras: *const RawLora,
        count: usize,
        in_native_projections: c_int,
        content: *const c_char,
    ) -> c_int;
    pub(super) fn ovfleet_merge_projections(model: *mut ov_model_t, merged: *mut usize) -> c_int;
    pub(super) fn ovfleet_remove_attention_masks(model: *mut ov_model_t, replaced: *mut usize) -> c_int;
    pub(super) fn ovfleet_replace_patch_convolutions(model: *mut ov_model_t, replaced: *mut usize) -> c_int;
    pub(super) fn ovfleet_replace_encoder_attention(
        model: *mut ov_model_t,
        isa: u32,
        replaced: *mut usize,
    ) -> c_int;
    pub(super) fn ovfleet_replace_encoder_projections(
        model: *mut ov_model_t,
        isa: u32,
        terms: u32,
        replaced: *mut usize,
    ) -> c_int;
    pub(super) fn ovfleet_supports_native_projections(
        model: *mut ov_model_t,
        supported: *mut c_int,
        experts: *mut c_int,
    ) -> c_int;
    pub(super) fn ovfleet_make_paged(model: *mut ov_model_t, supports_native_attention: *mut c_int) -> c_int;
    pub(super) fn ovfleet_resolve_length_conditions(
        model: *mut ov_model_t,
        max_model_len: u32,
        resolved: *mut usize,
    ) -> c_int;
    pub(super) fn ovfleet_apply_kernel_plan(
        model: *mut ov_model_t,
        plan: *const RawKernelPlan,
        projections: *mut usize,
    ) -> c_int;
    pub(super) fn ovfleet_save(model: *mut ov_model_t, xml: *const c_char, bin: *const c_char) -> c_int;
    pub(super) fn ovfleet_enable_import(core: *mut ov_core_t) -> c_int;
    pub(super) fn ovfleet_export(compiled: *const ov_compiled_model_t, path: *const c_char) -> c_int;
    pub(super) fn ovfleet_import(
        core: *mut ov_core_t,
        path: *const c_char,
        bytes: usize,
        device: *const c_char,
        properties: *const *const c_char,
        count: usize,
        compiled: *mut *mut ov_compiled_model_t,
    ) -> c_int;
}

/// Turns the return code of a call into a result. `what` is the operation, as a verb with its object.
pub(super) fn check(code: c_int, what: &'static str) -> Result<(), Error> {
    if code == 0 {
        return Ok(());
    }
    // SAFETY: after a failed call the message is a NUL-terminated string that the shim stores for this thread.
    let message = unsafe { CStr::from_ptr(ovfleet_last_error()) };
    Err(Error::runtime(what, &message.to_string_lossy()))
}
