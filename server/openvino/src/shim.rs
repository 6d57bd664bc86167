//! A safe interface to the C++ shim in `shim/`: graph rewrites on models of the C API.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::marker::PhantomData;
use std::mem::offset_of;
use std::path::Path;

use openvino_sys::{ov_compiled_model_t, ov_core_t, ov_model_t};

use crate::Error;
use crate::cpu::Isa;
use crate::gguf::TensorSource;
use crate::kernels::{
    ExpertKernels, ExpertSupport, KernelPlan, NativeAttention, NativeProjections, Precision, ProductPrecision,
};
use crate::runtime::{CompiledModel, Core, Model, c_path, c_string};
use crate::weights::{Matrix, MatrixShape, Quants, Zeros};

/// The same as `ovfleet_tensor_rows` in `shim/shim.h`.
#[repr(C)]
struct RawTensorRows {
    tensor: usize,
    first: usize,
    count: usize,
    quants: *mut c_void,
    scales: *mut f32,
    zeros: *mut c_void,
    message: *mut c_char,
    message_size: usize,
}

/// The same as `ovfleet_tensor_source` in `shim/shim.h`.
#[repr(C)]
struct RawTensorSource {
    context: *mut c_void,
    read: unsafe extern "C" fn(*const c_void, *const RawTensorRows) -> c_int,
    free: unsafe extern "C" fn(*mut c_void),
}

/// The same as `ovfleet_weight` in `shim/shim.h`.
#[repr(C)]
struct RawWeight {
    tensor: *const c_char,
    number: usize,
    kind: u32,
    zeros_kind: u32,
    has_zeros: c_int,
    rows: usize,
    columns: usize,
    group: usize,
    fits_six_bits: c_int,
    has_super_scales: c_int,
}

/// The same as `ovfleet_weights_t` in `shim/shim.h`, whose content is opaque.
#[repr(C)]
struct RawWeights {
    opaque: [u8; 0],
}

/// The same as `ovfleet_lora` in `shim/shim.h`.
#[repr(C)]
struct RawLora {
    projection: *const c_char,
    ranks: usize,
    down: *const f32,
    up: *const f32,
    adapters: *const i32,
}

/// The same as `ovfleet_kernel_plan` in `shim/shim.h`.
#[repr(C)]
struct RawKernelPlan {
    projection_isa: u32,
    projection_activations: u32,
    attention_isa: u32,
    attention_activations: u32,
    kv_cache: u32,
    attention_mass: f32,
    block_scores: u32,
    projection_terms: u32,
    native_experts: u32,
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

/// Number of terms of 8 bits in which activations are multiplied. The bf16 kernels do not split activations into terms.
fn terms(products: ProductPrecision) -> u32 {
    match products {
        ProductPrecision::Int8 | ProductPrecision::Bf16 => 1,
        ProductPrecision::Int16 => 2,
    }
}

/// `OVFLEET_PLUGIN` in `shim/shim.h`: the value of an instruction set that selects the plugin's kernels.
const PLUGIN: u32 = 0;

impl From<&KernelPlan> for RawKernelPlan {
    fn from(plan: &KernelPlan) -> Self {
        let (projection_isa, projection_activations, products) = match plan.projections {
            Some(NativeProjections { isa, activations, products }) => (isa as u32, activations, products),
            None => (PLUGIN, Precision::F32, ProductPrecision::Int16),
        };
        let raw = Self {
            projection_isa,
            projection_activations: projection_activations as u32,
            attention_isa: PLUGIN,
            attention_activations: Precision::F32 as u32,
            kv_cache: Precision::F32 as u32,
            attention_mass: 0.0,
            block_scores: 0,
            projection_terms: terms(products),
            native_experts: u32::from(plan.experts == Some(ExpertKernels::Native)),
        };
        let Some(attention) = plan.attention else { return raw };
        let NativeAttention { isa, kv_cache, activations, attention_mass, block_scores } = attention;
        Self {
            attention_isa: isa as u32,
            attention_activations: activations as u32,
            kv_cache: kv_cache as u32,
            attention_mass: attention_mass.unwrap_or(0.0),
            block_scores: u32::from(block_scores),
            ..raw
        }
    }
}

unsafe extern "C" {
    fn ovfleet_last_error() -> *const c_char;
    fn ovfleet_read_ir(core: *const ov_core_t, path: *const c_char, model: *mut *mut ov_model_t) -> c_int;
    fn ovfleet_read_gguf(path: *const c_char, model: *mut *mut ov_model_t) -> c_int;
    fn ovfleet_find_weights(
        model: *const ov_model_t,
        source: *const RawTensorSource,
        weights: *mut *mut RawWeights,
    ) -> c_int;
    fn ovfleet_free_weights(weights: *mut RawWeights);
    fn ovfleet_set_weight(weights: *mut RawWeights, weight: *const RawWeight, found: *mut c_int) -> c_int;
    fn ovfleet_divide_frequencies(
        model: *mut ov_model_t,
        base: f64,
        factors: *const f32,
        count: usize,
        applied: *mut usize,
    ) -> c_int;
    fn ovfleet_scale_rotary(model: *mut ov_model_t, factor: f32, count: usize, applied: *mut usize) -> c_int;
    fn ovfleet_set_sliding_window(model: *mut ov_model_t, tokens: u32) -> c_int;
    fn ovfleet_rewrite_rotary(
        model: *mut ov_model_t,
        permuted: unsafe extern "C" fn(*mut c_void, *const c_char, usize),
        context: *mut c_void,
    ) -> c_int;
    fn ovfleet_rotate_halves(model: *mut ov_model_t, rotated: *mut usize) -> c_int;
    fn ovfleet_fix_experts(model: *mut ov_model_t, layers: *mut usize) -> c_int;
    fn ovfleet_list_projections(
        model: *const ov_model_t,
        found: unsafe extern "C" fn(*mut c_void, *const c_char, usize, usize, usize),
        context: *mut c_void,
        unknown: *mut usize,
    ) -> c_int;
    fn ovfleet_add_adapters(
        model: *mut ov_model_t,
        loras: *const RawLora,
        count: usize,
        in_native_projections: c_int,
        content: *const c_char,
    ) -> c_int;
    fn ovfleet_merge_projections(model: *mut ov_model_t, merged: *mut usize) -> c_int;
    fn ovfleet_remove_attention_masks(model: *mut ov_model_t, replaced: *mut usize) -> c_int;
    fn ovfleet_replace_patch_convolutions(model: *mut ov_model_t, replaced: *mut usize) -> c_int;
    fn ovfleet_replace_encoder_attention(model: *mut ov_model_t, isa: u32, replaced: *mut usize) -> c_int;
    fn ovfleet_replace_encoder_projections(
        model: *mut ov_model_t,
        isa: u32,
        terms: u32,
        replaced: *mut usize,
    ) -> c_int;
    fn ovfleet_supports_native_projections(
        model: *mut ov_model_t,
        supported: *mut c_int,
        experts: *mut c_int,
    ) -> c_int;
    fn ovfleet_make_paged(model: *mut ov_model_t, supports_native_attention: *mut c_int) -> c_int;
    fn ovfleet_resolve_length_conditions(
        model: *mut ov_model_t,
        max_model_len: u32,
        resolved: *mut usize,
    ) -> c_int;
    fn ovfleet_apply_kernel_plan(
        model: *mut ov_model_t,
        plan: *const RawKernelPlan,
        projections: *mut usize,
    ) -> c_int;
    fn ovfleet_save(model: *mut ov_model_t, xml: *const c_char, bin: *const c_char) -> c_int;
    fn ovfleet_enable_import(core: *mut ov_core_t) -> c_int;
    fn ovfleet_export(compiled: *const ov_compiled_model_t, path: *const c_char) -> c_int;
    fn ovfleet_import(
        core: *mut ov_core_t,
        path: *const c_char,
        bytes: usize,
        device: *const c_char,
        properties: *const *const c_char,
        count: usize,
        compiled: *mut *mut ov_compiled_model_t,
    ) -> c_int;
}

/// A projection whose rows must be permuted within each head.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PermutedProjection {
    pub(crate) tensor: String,
    pub(crate) head_size: usize,
}

/// A projection of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Projection {
    /// The name of the projection's weight in the GGUF file, or otherwise that of its node in the graph.
    pub(crate) name: String,
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    /// The head size, if a rotary embedding rotates adjacent pairs of the projection's output.
    pub(crate) paired: Option<usize>,
}

/// The low-rank matrices of all adapters at one projection. For each token, `up * (down * x)` is added to the output,
/// restricted to the ranks of the token's adapter.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct LoraWeights {
    pub(crate) projection: Projection,
    /// The matrix of shape `[ranks, columns]`.
    pub(crate) down: Vec<f32>,
    /// The matrix of shape `[rows, ranks]`.
    pub(crate) up: Vec<f32>,
    /// The number of the adapter to which each rank belongs.
    pub(crate) adapters: Vec<i32>,
}

/// Turns the return code of a call into a result. `what` is the operation, as a verb with its object.
fn check(code: c_int, what: &'static str) -> Result<(), Error> {
    if code == 0 {
        return Ok(());
    }
    // SAFETY: after a failed call the message is a NUL-terminated string that this thread's shim owns.
    let message = unsafe { CStr::from_ptr(ovfleet_last_error()) };
    Err(Error::runtime(what, &message.to_string_lossy()))
}

/// Reads an OpenVINO IR. If `core` comes from [`import_core`], the IR may contain native operations.
pub(crate) fn read_ir(core: &Core, path: &Path) -> Result<Model, Error> {
    let path = c_path(path)?;
    let mut model = std::ptr::null_mut();
    // SAFETY: `core` is valid and `path` is NUL-terminated; on success this function owns `model`, which `Model` frees.
    check(unsafe { ovfleet_read_ir(core.as_ptr(), path.as_ptr(), &raw mut model) }, "read the model")?;
    Ok(Model::from_raw(model))
}

/// Reads a GGUF file as a stateful model.
pub(crate) fn read_gguf(path: &Path) -> Result<Model, Error> {
    let name = c_path(path)?;
    let mut model = std::ptr::null_mut();
    // SAFETY: `name` is NUL-terminated; on success this function owns `model`, which `Model` frees.
    check(unsafe { ovfleet_read_gguf(name.as_ptr(), &raw mut model) }, "read the model")?;
    Ok(Model::from_raw(model))
}

/// Reads rows for the shim.
///
/// # Safety
/// `context` is a [`TensorSource`], and the pointers of the rows are null or have the space that `ovfleet_tensor_rows`
/// describes.
unsafe extern "C" fn read_tensor(context: *const c_void, rows: *const RawTensorRows) -> c_int {
    // SAFETY: as above; the source is shared, and `TensorSource` is `Sync`.
    let (source, rows) = unsafe { (&*context.cast::<TensorSource>(), &*rows) };
    let RawTensorRows { tensor, first, count, quants, scales, zeros, message, message_size } = *rows;
    let read = || {
        let matrix = source.read(tensor, first..first + count).map_err(|error| error.chain())?;
        matrix.assert_lengths();
        Ok(matrix)
    };
    let read = std::panic::catch_unwind(std::panic::AssertUnwindSafe(read));
    let matrix = match read.unwrap_or_else(|_| Err("the reader has panicked".to_owned())) {
        Ok(matrix) => matrix,
        Err(error) => {
            let bytes = &error.as_bytes()[..error.len().min(message_size.saturating_sub(1))];
            if message_size > 0 {
                // SAFETY: the bytes and their NUL fit into the space.
                unsafe {
                    std::ptr::copy_nonoverlapping(bytes.as_ptr().cast(), message, bytes.len());
                    message.add(bytes.len()).write(0);
                }
            }
            return 1;
        }
    };
    let quant_bytes = match &matrix.quants {
        Quants::U4(bytes)
        | Quants::U8(bytes)
        | Quants::I8(bytes)
        | Quants::F16(bytes)
        | Quants::Bf16(bytes)
        | Quants::F32(bytes)
        | Quants::F4E2M1(bytes) => bytes,
    };
    let (zero_bytes, zeros_from): (usize, *const c_void) = match &matrix.zeros {
        Zeros::None => (0, std::ptr::null()),
        Zeros::U4(bytes) => (bytes.len(), bytes.as_ptr().cast()),
        Zeros::F16(values) => (size_of_val(values.as_slice()), values.as_ptr().cast()),
    };
    let copy = |from: *const c_void, to: *mut c_void, bytes: usize| {
        if !to.is_null() && bytes > 0 {
            // SAFETY: the shim has allocated `to` for the matrix's rows, columns and form.
            unsafe { std::ptr::copy_nonoverlapping(from.cast::<u8>(), to.cast(), bytes) }
        }
    };
    copy(quant_bytes.as_ptr().cast(), quants, quant_bytes.len());
    copy(matrix.scales.as_ptr().cast(), scales.cast(), size_of_val(matrix.scales.as_slice()));
    copy(zeros_from, zeros, zero_bytes);
    0
}

// The shim reads on several threads, and frees the source on any of them.
const _: () = {
    const fn check<T: Send + Sync>() {}
    check::<TensorSource>();
};

/// Frees a source.
///
/// # Safety
/// `context` comes from `Box::into_raw` of a [`TensorSource`], and is freed once.
unsafe extern "C" fn free_tensors(context: *mut c_void) {
    // SAFETY: as above.
    drop(unsafe { Box::from_raw(context.cast::<TensorSource>()) });
}

/// A weight that replaces one of the graph.
#[derive(Clone, Copy)]
pub(crate) struct WeightForm<'a> {
    /// The number of the weight in the source.
    pub(crate) number: usize,
    pub(crate) shape: MatrixShape,
    /// A matrix whose types, group size and properties are those of the weight. Its values and its shape are not used.
    pub(crate) form: &'a Matrix,
}

/// An index of the weights of a model from [`read_gguf`]. The exclusive borrow ensures that no other code changes the
/// model.
pub(crate) struct GraphWeights<'a> {
    raw: *mut RawWeights,
    model: PhantomData<&'a mut Model>,
}

impl<'a> GraphWeights<'a> {
    /// Finds the weights in the graph. `source` reads the weights that replace them.
    pub(crate) fn find(model: &'a mut Model, source: TensorSource) -> Result<Self, Error> {
        let context = Box::into_raw(Box::new(source)).cast();
        let source = RawTensorSource { context, read: read_tensor, free: free_tensors };
        let mut raw = std::ptr::null_mut();
        // SAFETY: the model lives while it is borrowed; the shim frees the source; on success this function owns
        // `raw`, which `drop` frees.
        let code = unsafe { ovfleet_find_weights(model.as_mut_ptr(), &raw const source, &raw mut raw) };
        check(code, "find the weights")?;
        Ok(Self { raw, model: PhantomData })
    }

    /// Replaces a matrix, or a stack of matrices. Returns false if the graph has no such tensor.
    pub(crate) fn set(&mut self, tensor: &str, weight: WeightForm<'_>) -> Result<bool, Error> {
        let name = c_string(tensor, "write a weight")?;
        let WeightForm { number, shape, form } = weight;
        let kind = match &form.quants {
            Quants::U4(_) => 0,
            Quants::U8(_) => 1,
            Quants::I8(_) => 2,
            Quants::F16(_) => 3,
            Quants::Bf16(_) => 4,
            Quants::F32(_) => 5,
            Quants::F4E2M1(_) => 6,
        };
        let (zeros_kind, has_zeros) = match &form.zeros {
            Zeros::None => (0, 0),
            Zeros::U4(_) => (0, 1),
            Zeros::F16(_) => (3, 1),
        };
        let raw = RawWeight {
            tensor: name.as_ptr(),
            number,
            kind,
            zeros_kind,
            has_zeros,
            rows: shape.rows,
            columns: shape.columns,
            group: form.group,
            fits_six_bits: c_int::from(form.fits_six_bits),
            has_super_scales: c_int::from(form.has_super_scales),
        };
        let mut found = 0;
        // SAFETY: the pointers are valid for the call; `self.raw` is valid until it is dropped. `read_tensor` writes
        // matrices of this form.
        let code = unsafe { ovfleet_set_weight(self.raw, &raw const raw, &raw mut found) };
        check(code, "write a weight")?;
        Ok(found != 0)
    }
}

impl Drop for GraphWeights<'_> {
    fn drop(&mut self) {
        // SAFETY: the pointer comes from `ovfleet_find_weights` and is freed once.
        unsafe { ovfleet_free_weights(self.raw) };
    }
}

/// Divides the frequencies of rotary embeddings by `factors`, either of those with the given base or of all. Returns
/// the number of changed frequency tables.
pub(crate) fn divide_frequencies(
    model: &mut Model,
    base: Option<f64>,
    factors: &[f32],
) -> Result<usize, Error> {
    let mut applied = 0;
    // SAFETY: the call reads `factors.len()` factors before it returns.
    let code = unsafe {
        ovfleet_divide_frequencies(
            model.as_mut_ptr(),
            base.unwrap_or(0.0),
            factors.as_ptr(),
            factors.len(),
            &raw mut applied,
        )
    };
    check(code, "divide the rotary frequencies")?;
    Ok(applied)
}

/// Multiplies the cosines and sines of rotary embeddings with this number of pairs. Returns the number of changed
/// tables.
pub(crate) fn scale_rotary(model: &mut Model, factor: f32, pairs: usize) -> Result<usize, Error> {
    let mut applied = 0;
    // SAFETY: both pointers are valid for the call.
    let code = unsafe { ovfleet_scale_rotary(model.as_mut_ptr(), factor, pairs, &raw mut applied) };
    check(code, "scale the rotary embeddings")?;
    Ok(applied)
}

/// Sets the sliding window of all attention layers. [`make_paged`] applies it.
pub(crate) fn set_sliding_window(model: &mut Model, tokens: u32) -> Result<(), Error> {
    // SAFETY: the pointer is valid for the call.
    check(unsafe { ovfleet_set_sliding_window(model.as_mut_ptr(), tokens) }, "set the sliding window")
}

/// Rewrites rotary embeddings that rotate adjacent pairs. The rows of the returned projections must then be permuted.
pub(crate) fn rewrite_rotary(model: &mut Model) -> Result<Vec<PermutedProjection>, Error> {
    unsafe extern "C" fn push(context: *mut c_void, tensor: *const c_char, head_size: usize) {
        // SAFETY: `context` is the vector below, which outlives the call that runs this function; `tensor` is
        // NUL-terminated.
        let (all, tensor) =
            unsafe { (&mut *context.cast::<Vec<PermutedProjection>>(), CStr::from_ptr(tensor)) };
        all.push(PermutedProjection { tensor: tensor.to_string_lossy().into_owned(), head_size });
    }
    let mut all = Vec::<PermutedProjection>::new();
    // SAFETY: see `push`; the call does not store the context.
    let code = unsafe { ovfleet_rewrite_rotary(model.as_mut_ptr(), push, (&raw mut all).cast()) };
    check(code, "rewrite the rotary embeddings")?;
    Ok(all)
}

/// Replaces rotary embeddings that rotate adjacent pairs with embeddings that rotate halves. Returns the number of
/// replaced embeddings.
pub(crate) fn rotate_halves(model: &mut Model) -> Result<usize, Error> {
    let mut rotated = 0;
    // SAFETY: both pointers are valid for the call.
    let code = unsafe { ovfleet_rotate_halves(model.as_mut_ptr(), &raw mut rotated) };
    check(code, "rewrite the rotary embeddings")?;
    Ok(rotated)
}

/// Changes the shape of the experts' output to that of their input, and normalizes the weights of a token's experts.
/// Returns the number of changed layers.
pub(crate) fn fix_experts(model: &mut Model) -> Result<usize, Error> {
    let mut layers = 0;
    // SAFETY: both pointers are valid for the call.
    check(unsafe { ovfleet_fix_experts(model.as_mut_ptr(), &raw mut layers) }, "fix the experts")?;
    Ok(layers)
}

/// The projections of a model in which none are merged.
pub(crate) struct Projections {
    pub(crate) all: Vec<Projection>,
    /// Number of rotary embeddings that rotate adjacent pairs and whose input comes from none of the projections.
    pub(crate) unknown_rotations: usize,
}

/// Lists the projections of a model in which none are merged.
pub(crate) fn list_projections(model: &mut Model) -> Result<Projections, Error> {
    unsafe extern "C" fn push(
        context: *mut c_void,
        name: *const c_char,
        rows: usize,
        columns: usize,
        paired: usize,
    ) {
        // SAFETY: `context` is the vector below, which outlives the call that runs this function; `name` is
        // NUL-terminated.
        let (all, name) = unsafe { (&mut *context.cast::<Vec<Projection>>(), CStr::from_ptr(name)) };
        let paired = (paired > 0).then_some(paired);
        all.push(Projection { name: name.to_string_lossy().into_owned(), rows, columns, paired });
    }
    let mut all = Vec::<Projection>::new();
    let mut unknown_rotations = 0;
    // SAFETY: see `push`; the call does not store the context.
    let code = unsafe {
        ovfleet_list_projections(model.as_mut_ptr(), push, (&raw mut all).cast(), &raw mut unknown_rotations)
    };
    check(code, "list the projections")?;
    Ok(Projections { all, unknown_rotations })
}

/// The method by which adapters become part of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AdapterMethod {
    /// The adapters become operations of the graph.
    Graph,
    /// The adapters become parts of the native projections when [`apply_kernel_plan`] creates these. Native projections
    /// must then replace all projections.
    NativeProjections,
}

/// Adds adapters to the projections of a model in which none are merged. `content` identifies the adapters.
///
/// # Panics
/// Panics if a matrix does not have the size of its projection.
pub(crate) fn add_adapters(
    model: &mut Model,
    loras: &[LoraWeights],
    method: AdapterMethod,
    content: &str,
) -> Result<(), Error> {
    let content = c_string(content, "add the adapters")?;
    let name = |lora: &LoraWeights| c_string(&lora.projection.name, "add the adapters");
    let names = loras.iter().map(name).collect::<Result<Vec<_>, _>>()?;
    let raw = |(lora, name): (&LoraWeights, &CString)| {
        let LoraWeights { projection: Projection { rows, columns, .. }, down, up, adapters } = lora;
        let ranks = adapters.len();
        assert_eq!((down.len(), up.len()), (ranks * columns, rows * ranks), "invariant: whole matrices");
        RawLora {
            projection: name.as_ptr(),
            ranks,
            down: down.as_ptr(),
            up: up.as_ptr(),
            adapters: adapters.as_ptr(),
        }
    };
    let raw: Vec<_> = loras.iter().zip(&names).map(raw).collect();
    let in_native_projections = c_int::from(method == AdapterMethod::NativeProjections);
    // SAFETY: the pointers in `raw` belong to `names` and to vectors. The lengths of the vectors have just been checked
    // against the ranks, rows and columns of the projection, which the shim finds by the same name. The shim copies
    // before it returns.
    let code = unsafe {
        ovfleet_add_adapters(
            model.as_mut_ptr(),
            raw.as_ptr(),
            raw.len(),
            in_native_projections,
            content.as_ptr(),
        )
    };
    check(code, "add the adapters")
}

/// Merges projections that read the same input. Returns the number of projections that were merged.
pub(crate) fn merge_projections(model: &mut Model) -> Result<usize, Error> {
    let mut merged = 0;
    // SAFETY: both pointers are valid for the call.
    let code = unsafe { ovfleet_merge_projections(model.as_mut_ptr(), &raw mut merged) };
    check(code, "merge the projections")?;
    Ok(merged)
}

/// Removes the attention masks, which have an element for each pair of patches, from the encoder of a Qwen model.
/// Returns the number of replaced attention operations: 0 if the graph has another form and was not changed.
pub(crate) fn remove_attention_masks(model: &mut Model) -> Result<usize, Error> {
    let mut replaced = 0;
    // SAFETY: both pointers are valid for the call.
    let code = unsafe { ovfleet_remove_attention_masks(model.as_mut_ptr(), &raw mut replaced) };
    check(code, "remove the attention masks")?;
    Ok(replaced)
}

/// Replaces each convolution whose kernel covers its whole input with a matrix multiplication. Returns their number.
pub(crate) fn replace_patch_convolutions(model: &mut Model) -> Result<usize, Error> {
    let mut replaced = 0;
    // SAFETY: both pointers are valid for the call.
    let code = unsafe { ovfleet_replace_patch_convolutions(model.as_mut_ptr(), &raw mut replaced) };
    check(code, "replace the convolutions of patches")?;
    Ok(replaced)
}

/// Replaces each attention without a mask in an image encoder with the native attention for `isa`. Returns their
/// number: 0 with `None`, which leaves them to the plugin.
pub(crate) fn replace_encoder_attention(model: &mut Model, isa: Option<Isa>) -> Result<usize, Error> {
    let mut replaced = 0;
    let isa = isa.map_or(PLUGIN, |isa| isa as u32);
    // SAFETY: both pointers are valid for the call.
    let code = unsafe { ovfleet_replace_encoder_attention(model.as_mut_ptr(), isa, &raw mut replaced) };
    check(code, "prepare the native attention of the image encoder")?;
    Ok(replaced)
}

/// Replaces the multiplications by integer weights in an image encoder with native projections. Returns their number.
pub(crate) fn replace_encoder_projections(
    model: &mut Model,
    projections: NativeProjections,
) -> Result<usize, Error> {
    let NativeProjections { isa, products, activations: _ } = projections;
    let mut replaced = 0;
    // SAFETY: both pointers are valid for the call.
    let code = unsafe {
        ovfleet_replace_encoder_projections(
            model.as_mut_ptr(),
            isa as u32,
            terms(products),
            &raw mut replaced,
        )
    };
    check(code, "prepare the native projections of the image encoder")?;
    Ok(replaced)
}

/// The multiplications by weights in a model that the native kernels support.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ProjectionSupport {
    /// Whether the native kernels support all of them, including those of experts.
    pub(crate) supports_all: bool,
    pub(crate) experts: ExpertSupport,
}

/// Checks which multiplications by weights the native kernels support.
pub(crate) fn projection_support(model: &mut Model) -> Result<ProjectionSupport, Error> {
    let (mut supported, mut experts) = (0, 0);
    // SAFETY: all pointers are valid for the call.
    let code = unsafe {
        ovfleet_supports_native_projections(model.as_mut_ptr(), &raw mut supported, &raw mut experts)
    };
    check(code, "check the projections")?;
    let experts = ExpertSupport::new(experts as u64)
        .ok_or_else(|| Error::runtime("check the projections", "the support of experts is unknown"))?;
    Ok(ProjectionSupport { supports_all: supported != 0, experts })
}

/// Turns a stateful language model into a paged one with the plugin's attention. Returns whether the native attention
/// supports all of its attention layers.
pub(crate) fn make_paged(model: &mut Model) -> Result<bool, Error> {
    let mut supported = 0;
    // SAFETY: both pointers are valid for the call.
    let code = unsafe { ovfleet_make_paged(model.as_mut_ptr(), &raw mut supported) };
    check(code, "convert the model to paged attention")?;
    Ok(supported != 0)
}

/// Replaces conditions of a paged model on the length of the longest sequence of a step with their values for a
/// sequence of `max_model_len` tokens. Returns the number of conditions.
///
/// # Errors
/// The model has such conditions, and `max_model_len` is unknown or a condition cannot be replaced.
pub(crate) fn resolve_length_conditions(
    model: &mut Model,
    max_model_len: Option<u32>,
) -> Result<usize, Error> {
    const UNKNOWN: u32 = 0;
    let mut resolved = 0;
    // SAFETY: both pointers are valid for the call.
    let code = unsafe {
        ovfleet_resolve_length_conditions(
            model.as_mut_ptr(),
            max_model_len.unwrap_or(UNKNOWN),
            &raw mut resolved,
        )
    };
    check(code, "resolve the conditions on the length of sequences")?;
    Ok(resolved)
}

/// Replaces operations of a paged model with the native kernels of a plan, and limits the logits to the tokens of the
/// new input `logits_indices`. Returns the number of replaced projections.
pub(crate) fn apply_kernel_plan(model: &mut Model, plan: &KernelPlan) -> Result<usize, Error> {
    let raw = RawKernelPlan::from(plan);
    let mut projections = 0;
    // SAFETY: all pointers are valid for the call.
    let code = unsafe { ovfleet_apply_kernel_plan(model.as_mut_ptr(), &raw const raw, &raw mut projections) };
    check(code, "prepare the native kernels")?;
    Ok(projections)
}

/// Writes a model whose attention is not paged yet as an IR.
pub(crate) fn save(model: &mut Model, xml: &Path, bin: &Path) -> Result<(), Error> {
    let (xml, bin) = (c_path(xml)?, c_path(bin)?);
    // SAFETY: the strings are NUL-terminated and the pointer is valid for the call.
    let code = unsafe { ovfleet_save(model.as_mut_ptr(), xml.as_ptr(), bin.as_ptr()) };
    check(code, "save the rewritten model")
}

/// A core that reads compiled models, which may contain the native operations. A core that reads a user's models must
/// not know these operations, because it would let a file choose their attributes.
pub(crate) fn import_core() -> Result<Core, Error> {
    let core = Core::new()?;
    // SAFETY: the pointer is valid for the call.
    check(unsafe { ovfleet_enable_import(core.as_ptr()) }, "prepare to read compiled models")?;
    Ok(core)
}

/// Writes a model that was compiled for the CPU to a file.
pub(crate) fn export(compiled: &CompiledModel, path: &Path) -> Result<(), Error> {
    let path = c_path(path)?;
    // SAFETY: the string is NUL-terminated and the pointer is valid for the call.
    check(unsafe { ovfleet_export(compiled.as_ptr(), path.as_ptr()) }, "write the compiled model")
}

/// A compiled model in the first `bytes` bytes of a file, which must not change while the model lives.
#[derive(Clone, Copy)]
pub(crate) struct CompiledFile<'a> {
    pub(crate) path: &'a Path,
    pub(crate) bytes: usize,
}

/// Reads a compiled model from a file that [`export`] has written. `device` and `properties` must be those with which
/// the model was compiled.
pub(crate) fn import(
    core: &Core,
    file: CompiledFile<'_>,
    device: &str,
    properties: &[(String, String)],
) -> Result<CompiledModel, Error> {
    let (path, device) = (c_path(file.path)?, c_string(device, "read the device's name")?);
    let words = properties.iter().flat_map(|(key, value)| [key, value]);
    let words = words.map(|word| c_string(word, "read a property")).collect::<Result<Vec<_>, _>>()?;
    let raw: Vec<_> = words.iter().map(|word| word.as_ptr()).collect();
    let mut compiled = std::ptr::null_mut();
    // SAFETY: the strings are NUL-terminated, two for each property; on success this function owns `compiled`, which
    // `CompiledModel` frees.
    let code = unsafe {
        ovfleet_import(
            core.as_ptr(),
            path.as_ptr(),
            file.bytes,
            device.as_ptr(),
            raw.as_ptr(),
            properties.len(),
            &raw mut compiled,
        )
    };
    check(code, "read the compiled model")?;
    Ok(CompiledModel::from_raw(compiled))
}
