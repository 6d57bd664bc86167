//! A safe interface to the C++ shim in `shim/`: graph rewrites on models of the C API.

mod ffi;
mod graph_weights;
mod kernel_plan;

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;

use crate::Error;
use crate::cpu::Isa;
use crate::kernels::{ExpertSupport, KernelPlan, NativeProjections};
use crate::runtime::{CompiledModel, Core, Model, c_path, c_string};
use ffi::{RawKernelPlan, RawLora, check};
pub(crate) use graph_weights::{GraphWeights, WeightForm};
use kernel_plan::{PLUGIN, terms};

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

/// Reads an OpenVINO IR. If `core` comes from [`import_core`], the IR may contain native operations.
pub(crate) fn read_ir(core: &Core, path: &Path) -> Result<Model, Error> {
    let path = c_path(path)?;
    let mut model = std::ptr::null_mut();
    // SAFETY: `core` is valid and `path` is NUL-terminated; on success this function owns `model`, which `Model` frees.
    check(unsafe { ffi::ovfleet_read_ir(core.as_ptr(), path.as_ptr(), &raw mut model) }, "read the model")?;
    Ok(Model::from_raw(model))
}

/// Reads a GGUF file as a stateful model.
pub(crate) fn read_gguf(path: &Path) -> Result<Model, Error> {
    let name = c_path(path)?;
    let mut model = std::ptr::null_mut();
    // SAFETY: `name` is NUL-terminated; on success this function owns `model`, which `Model` frees.
    check(unsafe { ffi::ovfleet_read_gguf(name.as_ptr(), &raw mut model) }, "read the model")?;
    Ok(Model::from_raw(model))
}

/// Divides the frequencies of the rotary embeddings that have `factors.len()` pairs and this base by `factors`. If
/// `base` is `None`, embeddings with any base are changed. Returns the number of changed frequency tables, or 1 if the
/// front end has already divided the frequencies.
pub(crate) fn divide_frequencies(
    model: &mut Model,
    base: Option<f64>,
    factors: &[f32],
) -> Result<usize, Error> {
    let mut applied = 0;
    // SAFETY: the call reads `factors.len()` factors before it returns.
    let code = unsafe {
        ffi::ovfleet_divide_frequencies(
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

/// Multiplies the cosines and sines of the rotary embeddings with `pairs` pairs by `factor`. Returns the number of
/// changed tables.
pub(crate) fn scale_rotary(model: &mut Model, factor: f32, pairs: usize) -> Result<usize, Error> {
    let mut applied = 0;
    // SAFETY: both pointers are valid for the call.
    let code = unsafe { ffi::ovfleet_scale_rotary(model.as_mut_ptr(), factor, pairs, &raw mut applied) };
    check(code, "scale the rotary embeddings")?;
    Ok(applied)
}

/// Sets the sliding window of all attention layers. [`make_paged`] applies it.
pub(crate) fn set_sliding_window(model: &mut Model, tokens: u32) -> Result<(), Error> {
    // SAFETY: the pointer is valid for the call.
    check(unsafe { ffi::ovfleet_set_sliding_window(model.as_mut_ptr(), tokens) }, "set the sliding window")
}

/// Rewrites rotary embeddings that rotate adjacent pairs so that they rotate halves, if the rotated projections are
/// pairs of a q and a k with the same head size. The rows of the returned projections must then be permuted.
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
    let code = unsafe { ffi::ovfleet_rewrite_rotary(model.as_mut_ptr(), push, (&raw mut all).cast()) };
    check(code, "rewrite the rotary embeddings")?;
    Ok(all)
}

/// Replaces rotary embeddings that rotate adjacent pairs with embeddings that rotate halves. Returns the number of
/// replaced embeddings.
pub(crate) fn rotate_halves(model: &mut Model) -> Result<usize, Error> {
    let mut rotated = 0;
    // SAFETY: both pointers are valid for the call.
    let code = unsafe { ffi::ovfleet_rotate_halves(model.as_mut_ptr(), &raw mut rotated) };
    check(code, "rewrite the rotary embeddings")?;
    Ok(rotated)
}

/// Changes the shape of the experts' output to that of their input, and normalizes the weights of a token's experts.
/// Returns the number of changed layers.
pub(crate) fn fix_experts(model: &mut Model) -> Result<usize, Error> {
    let mut layers = 0;
    // SAFETY: both pointers are valid for the call.
    let code = unsafe { ffi::ovfleet_fix_experts(model.as_mut_ptr(), &raw mut layers) };
    check(code, "fix the graph of the experts")?;
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
        ffi::ovfleet_list_projections(
            model.as_mut_ptr(),
            push,
            (&raw mut all).cast(),
            &raw mut unknown_rotations,
        )
    };
    check(code, "list the projections")?;
    Ok(Projections { all, unknown_rotations })
}

/// The method by which adapters become part of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AdapterMethod {
    /// The adapters become operations of the graph.
    Graph,
    /// The adapters become parts of the native projections that [`apply_kernel_plan`] creates. Native projections must
    /// then replace all projections.
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
        assert_eq!(
            (down.len(), up.len()),
            (ranks * columns, rows * ranks),
            "invariant: the matrices have the size of the projection"
        );
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
    // SAFETY: the pointers in `raw` point into `names` and into the vectors of `loras`. The lengths of these vectors
    // have just been checked against the ranks, rows and columns of the projection, which the shim finds by the same
    // name. The shim copies the data before it returns.
    let code = unsafe {
        ffi::ovfleet_add_adapters(
            model.as_mut_ptr(),
            raw.as_ptr(),
            raw.len(),
            in_native_projections,
            content.as_ptr(),
        )
    };
    check(code, "add the adapters")
}

/// Merges projections that read the same input and have weights of the same form. Returns the number of projections
/// that were merged.
pub(crate) fn merge_projections(model: &mut Model) -> Result<usize, Error> {
    let mut merged = 0;
    // SAFETY: both pointers are valid for the call.
    let code = unsafe { ffi::ovfleet_merge_projections(model.as_mut_ptr(), &raw mut merged) };
    check(code, "merge the projections")?;
    Ok(merged)
}

/// Removes the attention masks, which have an element for each pair of patches, from the encoder of a Qwen model.
/// Returns the number of replaced attention operations: 0 if the graph has another structure and was not changed.
pub(crate) fn remove_attention_masks(model: &mut Model) -> Result<usize, Error> {
    let mut replaced = 0;
    // SAFETY: both pointers are valid for the call.
    let code = unsafe { ffi::ovfleet_remove_attention_masks(model.as_mut_ptr(), &raw mut replaced) };
    check(code, "remove the attention masks")?;
    Ok(replaced)
}

/// Replaces each convolution whose kernel covers the whole input with a matrix multiplication. Returns the number of
/// replaced convolutions.
pub(crate) fn replace_patch_convolutions(model: &mut Model) -> Result<usize, Error> {
    let mut replaced = 0;
    // SAFETY: both pointers are valid for the call.
    let code = unsafe { ffi::ovfleet_replace_patch_convolutions(model.as_mut_ptr(), &raw mut replaced) };
    check(code, "replace the convolutions of patches")?;
    Ok(replaced)
}

/// In an image encoder, replaces the supported attention operations without a mask with the native attention for `isa`.
/// Returns the number of replaced operations: 0 with `None`, which leaves the attention to the plugin.
pub(crate) fn replace_encoder_attention(model: &mut Model, isa: Option<Isa>) -> Result<usize, Error> {
    let mut replaced = 0;
    let isa = isa.map_or(PLUGIN, |isa| isa as u32);
    // SAFETY: both pointers are valid for the call.
    let code = unsafe { ffi::ovfleet_replace_encoder_attention(model.as_mut_ptr(), isa, &raw mut replaced) };
    check(code, "prepare the native attention of the image encoder")?;
    Ok(replaced)
}

/// In an image encoder, replaces the supported multiplications by integer weights with native projections. Returns the
/// number of replaced multiplications.
pub(crate) fn replace_encoder_projections(
    model: &mut Model,
    projections: NativeProjections,
) -> Result<usize, Error> {
    let NativeProjections { isa, products, activations: _ } = projections;
    let mut replaced = 0;
    // SAFETY: both pointers are valid for the call.
    let code = unsafe {
        ffi::ovfleet_replace_encoder_projections(
            model.as_mut_ptr(),
            isa as u32,
            terms(products),
            &raw mut replaced,
        )
    };
    check(code, "prepare the native projections of the image encoder")?;
    Ok(replaced)
}

/// Which multiplications by weights in a model the native kernels support.
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
        ffi::ovfleet_supports_native_projections(model.as_mut_ptr(), &raw mut supported, &raw mut experts)
    };
    check(code, "check the projections")?;
    let experts = ExpertSupport::new(experts as u64).ok_or_else(|| {
        let message =
            format!("the shim returned {experts} as the level of expert support (known: 0, 1 and 2)");
        Error::runtime("check the projections", &message)
    })?;
    Ok(ProjectionSupport { supports_all: supported != 0, experts })
}

/// Turns a stateful language model into a paged one with the plugin's attention. Returns whether the native attention
/// supports all of its attention layers.
pub(crate) fn make_paged(model: &mut Model) -> Result<bool, Error> {
    let mut supported = 0;
    // SAFETY: both pointers are valid for the call.
    let code = unsafe { ffi::ovfleet_make_paged(model.as_mut_ptr(), &raw mut supported) };
    check(code, "convert the model to paged attention")?;
    Ok(supported != 0)
}

/// Replaces the conditions on the length of the longest sequence in a step, which a paged model may contain, with their
/// values for a sequence of `max_model_len` tokens. Returns the number of conditions.
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
        ffi::ovfleet_resolve_length_conditions(
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
    let code =
        unsafe { ffi::ovfleet_apply_kernel_plan(model.as_mut_ptr(), &raw const raw, &raw mut projections) };
    check(code, "prepare the native kernels")?;
    Ok(projections)
}

/// Writes a model whose attention is not paged yet as an IR.
pub(crate) fn save(model: &mut Model, xml: &Path, bin: &Path) -> Result<(), Error> {
    let (xml, bin) = (c_path(xml)?, c_path(bin)?);
    // SAFETY: the strings are NUL-terminated and the pointer is valid for the call.
    let code = unsafe { ffi::ovfleet_save(model.as_mut_ptr(), xml.as_ptr(), bin.as_ptr()) };
    check(code, "save the rewritten model")
}

/// A core that reads compiled models, which may contain the native operations. A core that reads a user's models must
/// not know these operations, because it would let a file choose their attributes.
pub(crate) fn import_core() -> Result<Core, Error> {
    let core = Core::new()?;
    // SAFETY: the pointer is valid for the call.
    check(unsafe { ffi::ovfleet_enable_import(core.as_ptr()) }, "prepare to read compiled models")?;
    Ok(core)
}

/// Writes a model that was compiled for the CPU to a file.
pub(crate) fn export(compiled: &CompiledModel, path: &Path) -> Result<(), Error> {
    let path = c_path(path)?;
    // SAFETY: the string is NUL-terminated and the pointer is valid for the call.
    check(unsafe { ffi::ovfleet_export(compiled.as_ptr(), path.as_ptr()) }, "write the compiled model")
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
        ffi::ovfleet_import(
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
