//! The safe face of the C++ shim in `shim/`: graph rewrites on models of the C API.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::marker::PhantomData;
use std::path::{Path, PathBuf};

use openvino_sys::{ov_compiled_model_t, ov_core_t, ov_model_t};

use crate::Error;
use crate::attention::OwnAttention;
use crate::runtime::{CompiledModel, Core, Model};
use crate::weights::{Matrix, Quants, Zeros};

/// As `ovfleet_weight` in `shim/shim.h`.
#[repr(C)]
struct RawWeight {
    tensor: *const c_char,
    kind: u32,
    zeros_kind: u32,
    rows: usize,
    columns: usize,
    group: usize,
    quants: *const c_void,
    scales: *const f32,
    zeros: *const c_void,
}

/// As `ovfleet_weights_t` in `shim/shim.h`, which says nothing of its content.
#[repr(C)]
struct RawWeights {
    opaque: [u8; 0],
}

/// As `ovfleet_adapted` in `shim/shim.h`.
#[repr(C)]
struct RawAdapted {
    projection: *const c_char,
    ranks: usize,
    down: *const f32,
    up: *const f32,
    owners: *const i32,
}

unsafe extern "C" {
    fn ovfleet_last_error() -> *const c_char;
    fn ovfleet_read_gguf(path: *const c_char, model: *mut *mut ov_model_t) -> c_int;
    fn ovfleet_find_weights(model: *const ov_model_t, weights: *mut *mut RawWeights) -> c_int;
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
    fn ovfleet_set_window(model: *mut ov_model_t, tokens: u32) -> c_int;
    fn ovfleet_rewrite_rotary(
        model: *mut ov_model_t,
        permuted: unsafe extern "C" fn(*mut c_void, *const c_char, usize),
        context: *mut c_void,
    ) -> c_int;
    fn ovfleet_rotate_halves(model: *mut ov_model_t, rotated: *mut usize) -> c_int;
    fn ovfleet_mend_experts(model: *mut ov_model_t, aligned: *mut usize) -> c_int;
    fn ovfleet_each_projection(
        model: *const ov_model_t,
        found: unsafe extern "C" fn(*mut c_void, *const c_char, usize, usize, usize),
        context: *mut c_void,
        unknown: *mut usize,
    ) -> c_int;
    fn ovfleet_adapt(
        model: *mut ov_model_t,
        adapted: *const RawAdapted,
        count: usize,
        own: c_int,
        content: *const c_char,
    ) -> c_int;
    fn ovfleet_merge_projections(model: *mut ov_model_t, merged: *mut usize) -> c_int;
    fn ovfleet_make_paged(
        model: *mut ov_model_t,
        own_cache: c_int,
        compute: c_int,
        share: f32,
        weighs: c_int,
        own: *mut c_int,
    ) -> c_int;
    fn ovfleet_own_projections(model: *mut ov_model_t, in_bf16: c_int, replaced: *mut usize) -> c_int;
    fn ovfleet_has_own_projections() -> c_int;
    fn ovfleet_can_own_projections(model: *mut ov_model_t, all: *mut c_int) -> c_int;
    fn ovfleet_unpacked_bytes(model: *const ov_model_t, bytes: *mut u64) -> c_int;
    fn ovfleet_unpack_weights(model: *mut ov_model_t) -> c_int;
    fn ovfleet_clone(model: *const ov_model_t, copy: *mut *mut ov_model_t) -> c_int;
    fn ovfleet_save(model: *mut ov_model_t, xml: *const c_char, bin: *const c_char) -> c_int;
    fn ovfleet_read_compiled(core: *mut ov_core_t) -> c_int;
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
    fn ovfleet_library_path() -> *const c_char;
}

/// A projection whose rows are to be permuted, and the size of the heads within which.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Permuted {
    pub(crate) tensor: String,
    pub(crate) head_size: usize,
}

/// A projection of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Projection {
    /// That of its weight in a GGUF file, else its own in the graph.
    pub(crate) name: String,
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    /// The size of the heads, if a rotary embedding turns adjacent pairs of what it gives.
    pub(crate) paired: Option<usize>,
}

/// What adapters add to a projection: `up * (down * x)`, by those ranks that the token's adapter owns.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Adapted {
    pub(crate) projection: Projection,
    /// `[ranks, columns]`.
    pub(crate) down: Vec<f32>,
    /// `[rows, ranks]`.
    pub(crate) up: Vec<f32>,
    /// The number of the adapter that each rank is of.
    pub(crate) owners: Vec<i32>,
}

fn check(code: c_int, what: &'static str) -> Result<(), Error> {
    if code == 0 {
        return Ok(());
    }
    // SAFETY: after a failed call the message is a NUL-terminated string owned by this thread's shim.
    let message = unsafe { CStr::from_ptr(ovfleet_last_error()) };
    Err(Error::runtime(what, &message.to_string_lossy()))
}

fn c_path(path: &Path) -> Result<CString, Error> {
    CString::new(path.as_os_str().as_encoded_bytes())
        .map_err(|_| Error::runtime("use a path", "it contains a NUL byte"))
}

/// The file of the C API that belongs to the OpenVINO library this process is linked to.
pub(crate) fn c_library() -> Option<PathBuf> {
    // SAFETY: takes nothing, and gives null or a NUL-terminated string that the loader keeps.
    let linked = unsafe {
        let path = ovfleet_library_path();
        (!path.is_null()).then(|| PathBuf::from(CStr::from_ptr(path).to_string_lossy().into_owned()))?
    };
    let name = linked.file_name()?.to_str()?.strip_prefix("libopenvino")?.to_owned();
    Some(linked.with_file_name(format!("libopenvino_c{name}")))
}

/// The files of the runtime that this process has loaded, or may load.
pub(crate) fn libraries() -> Vec<PathBuf> {
    let folder = c_library().and_then(|library| std::fs::read_dir(library.parent()?).ok());
    let files = folder.into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()));
    let is_runtime = |path: &PathBuf| {
        path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with("libopenvino"))
    };
    let mut files: Vec<PathBuf> = files.filter(is_runtime).collect();
    files.sort_unstable();
    files
}

/// Reads a GGUF file as a stateful model.
pub(crate) fn read_gguf(path: &Path) -> Result<Model, Error> {
    let name = c_path(path)?;
    let mut model = std::ptr::null_mut();
    // SAFETY: `name` is NUL-terminated; on success `model` is ours to free, which `Model` does.
    check(unsafe { ovfleet_read_gguf(name.as_ptr(), &raw mut model) }, "read the model")?;
    Ok(Model::from_raw(model))
}

/// Where the weights of a model from [`read_gguf`] are. Nothing else changes the model meanwhile.
pub(crate) struct WeightsOf<'a> {
    raw: *mut RawWeights,
    model: PhantomData<&'a mut Model>,
}

impl<'a> WeightsOf<'a> {
    /// Finds them.
    pub(crate) fn find(model: &'a mut Model) -> Result<Self, Error> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: the model lives while this borrows it; on success `raw` is ours to free, which `drop` does.
        check(unsafe { ovfleet_find_weights(model.as_mut_ptr(), &raw mut raw) }, "find the weights")?;
        Ok(Self { raw, model: PhantomData })
    }

    /// Writes a matrix, or a stack of them, anew; false if the graph has no such tensor.
    pub(crate) fn set(&mut self, tensor: &str, matrix: &Matrix) -> Result<bool, Error> {
        let name = CString::new(tensor).map_err(|_| Error::runtime("write a weight", "NUL in its name"))?;
        let (kind, quants): (u32, *const c_void) = match &matrix.quants {
            Quants::U4(bytes) => (0, bytes.as_ptr().cast()),
            Quants::U8(bytes) => (1, bytes.as_ptr().cast()),
            Quants::I8(bytes) => (2, bytes.as_ptr().cast()),
            Quants::F16(bytes) => (3, bytes.as_ptr().cast()),
            Quants::Bf16(bytes) => (4, bytes.as_ptr().cast()),
            Quants::F32(bytes) => (5, bytes.as_ptr().cast()),
        };
        let (zeros_kind, zeros): (u32, *const c_void) = match &matrix.zeros {
            Zeros::None => (0, std::ptr::null()),
            Zeros::U4(bytes) => (0, bytes.as_ptr().cast()),
            Zeros::U8(bytes) => (1, bytes.as_ptr().cast()),
            Zeros::F16(values) => (3, values.as_ptr().cast()),
        };
        let scales = if matrix.scales.is_empty() { std::ptr::null() } else { matrix.scales.as_ptr() };
        matrix.assert_lengths();
        let (rows, columns, group) = (matrix.rows, matrix.columns, matrix.group);
        let raw = RawWeight {
            tensor: name.as_ptr(),
            kind,
            zeros_kind,
            rows,
            columns,
            group,
            quants,
            scales,
            zeros,
        };
        let mut found = 0;
        // SAFETY: the pointers in `raw` are of vectors whose lengths `assert_lengths` has just checked against
        // rows, columns and group; the shim copies them before it returns. `self.raw` is the shim's until dropped.
        let code = unsafe { ovfleet_set_weight(self.raw, &raw const raw, &raw mut found) };
        check(code, "write a weight")?;
        Ok(found != 0)
    }
}

impl Drop for WeightsOf<'_> {
    fn drop(&mut self) {
        // SAFETY: it came from `ovfleet_find_weights` and is freed once.
        unsafe { ovfleet_free_weights(self.raw) };
    }
}

/// Divides the frequencies of the rotary embeddings of this base, or of any, by `factors`; answers how many
/// tables there were.
pub(crate) fn divide_frequencies(
    model: &mut Model,
    base: Option<f64>,
    factors: &[f32],
) -> Result<usize, Error> {
    let mut applied = 0;
    // SAFETY: `factors` is as long as is said, and read before the call returns.
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

/// Multiplies the cosines and sines of rotary embeddings of so many pairs; answers how many tables there were.
pub(crate) fn scale_rotary(model: &mut Model, factor: f32, pairs: usize) -> Result<usize, Error> {
    let mut applied = 0;
    // SAFETY: both pointers are valid for the call.
    let code = unsafe { ovfleet_scale_rotary(model.as_mut_ptr(), factor, pairs, &raw mut applied) };
    check(code, "scale the rotary embeddings")?;
    Ok(applied)
}

/// Gives all attentions a window of so many tokens, for [`make_paged`] to put in.
pub(crate) fn set_window(model: &mut Model, tokens: u32) -> Result<(), Error> {
    // SAFETY: the pointer is valid for the call.
    check(unsafe { ovfleet_set_window(model.as_mut_ptr(), tokens) }, "set the sliding window")
}

/// Rewrites rotary embeddings of adjacent pairs; the projections named in the answer are then to be permuted.
pub(crate) fn rewrite_rotary(model: &mut Model) -> Result<Vec<Permuted>, Error> {
    unsafe extern "C" fn push(context: *mut c_void, tensor: *const c_char, head_size: usize) {
        // SAFETY: `context` is the vector below, which outlives the call that this is called from;
        // `tensor` is NUL-terminated.
        let (all, tensor) = unsafe { (&mut *context.cast::<Vec<Permuted>>(), CStr::from_ptr(tensor)) };
        all.push(Permuted { tensor: tensor.to_string_lossy().into_owned(), head_size });
    }
    let mut all = Vec::<Permuted>::new();
    // SAFETY: see `push`; nothing keeps the context after the call.
    let code = unsafe { ovfleet_rewrite_rotary(model.as_mut_ptr(), push, (&raw mut all).cast()) };
    check(code, "rewrite the rotary embeddings")?;
    Ok(all)
}

/// Takes rotary embeddings of adjacent pairs for ones of halves; answers how many there were.
pub(crate) fn rotate_halves(model: &mut Model) -> Result<usize, Error> {
    let mut rotated = 0;
    // SAFETY: both pointers are valid for the call.
    check(
        unsafe { ovfleet_rotate_halves(model.as_mut_ptr(), &raw mut rotated) },
        "rewrite the rotary embeddings",
    )?;
    Ok(rotated)
}

/// Lays out what experts give as what they read, and makes their weights add up to 1; answers in how many layers.
pub(crate) fn mend_experts(model: &mut Model) -> Result<usize, Error> {
    let mut aligned = 0;
    // SAFETY: both pointers are valid for the call.
    check(unsafe { ovfleet_mend_experts(model.as_mut_ptr(), &raw mut aligned) }, "lay out the experts")?;
    Ok(aligned)
}

/// The projections of a model, none of which is merged, and how many rotary embeddings of pairs turn what comes from
/// none of them.
pub(crate) fn projections(model: &mut Model) -> Result<(Vec<Projection>, usize), Error> {
    unsafe extern "C" fn push(
        context: *mut c_void,
        name: *const c_char,
        rows: usize,
        columns: usize,
        paired: usize,
    ) {
        // SAFETY: `context` is the vector below, which outlives the call that this is called from; `name` is
        // NUL-terminated.
        let (all, name) = unsafe { (&mut *context.cast::<Vec<Projection>>(), CStr::from_ptr(name)) };
        let paired = (paired > 0).then_some(paired);
        all.push(Projection { name: name.to_string_lossy().into_owned(), rows, columns, paired });
    }
    let mut all = Vec::<Projection>::new();
    let mut unknown = 0;
    // SAFETY: see `push`; nothing keeps the context after the call.
    let code =
        unsafe { ovfleet_each_projection(model.as_mut_ptr(), push, (&raw mut all).cast(), &raw mut unknown) };
    check(code, "find the projections")?;
    Ok((all, unknown))
}

/// Adds adapters to a model's projections, none of which is merged, and all of which will be our own with `own`: then they are
/// in the graph once [`own_projections`] has made these. `content` is another with other adapters.
///
/// # Panics
/// If matrices are not of the sizes that are said.
pub(crate) fn adapt(model: &mut Model, adapted: &[Adapted], own: bool, content: &str) -> Result<(), Error> {
    let c_string =
        |text: &str| CString::new(text).map_err(|_| Error::runtime("add the adapters", "NUL in a name"));
    let content = c_string(content)?;
    let name = |one: &Adapted| c_string(&one.projection.name);
    let names = adapted.iter().map(name).collect::<Result<Vec<_>, _>>()?;
    let raw = |(one, name): (&Adapted, &CString)| {
        let Adapted { projection: Projection { rows, columns, .. }, down, up, owners } = one;
        let ranks = owners.len();
        assert_eq!((down.len(), up.len()), (ranks * columns, rows * ranks), "invariant: whole matrices");
        RawAdapted {
            projection: name.as_ptr(),
            ranks,
            down: down.as_ptr(),
            up: up.as_ptr(),
            owners: owners.as_ptr(),
        }
    };
    let raw: Vec<_> = adapted.iter().zip(&names).map(raw).collect();
    // SAFETY: the pointers in `raw` are of `names`, and of vectors whose lengths have just been checked against the
    // ranks and, as the shim checks by the name, the projection's rows and columns; the shim copies before it returns.
    let code = unsafe {
        ovfleet_adapt(model.as_mut_ptr(), raw.as_ptr(), raw.len(), c_int::from(own), content.as_ptr())
    };
    check(code, "add the adapters")
}

/// Merges projections that read the same input; answers how many went into merged ones.
pub(crate) fn merge_projections(model: &mut Model) -> Result<usize, Error> {
    let mut merged = 0;
    // SAFETY: both pointers are valid for the call.
    let code = unsafe { ovfleet_merge_projections(model.as_mut_ptr(), &raw mut merged) };
    check(code, "merge the projections")?;
    Ok(merged)
}

/// Turns a stateful language model into a paged one that computes wanted logits only. Its attention is our own if that is
/// wanted and does all that the model needs; answers whether it is.
pub(crate) fn make_paged(model: &mut Model, own: Option<OwnAttention>) -> Result<bool, Error> {
    let mut is_own = 0;
    let cache = own.map_or(-1, |own| own.cache as c_int);
    let compute = own.map_or(0, |own| own.compute as c_int);
    let share = own.and_then(|own| own.share).unwrap_or(0.0);
    let weighs = c_int::from(own.is_some_and(|own| own.weighs));
    // SAFETY: both pointers are valid for the call.
    let code =
        unsafe { ovfleet_make_paged(model.as_mut_ptr(), cache, compute, share, weighs, &raw mut is_own) };
    check(code, "make the attention paged")?;
    Ok(is_own != 0)
}

/// Whether this processor has what projections of our own are made for.
pub(crate) fn has_own_projections() -> bool {
    // SAFETY: it takes nothing.
    unsafe { ovfleet_has_own_projections() != 0 }
}

/// Whether all multiplications by weights of a model can be replaced by our own.
pub(crate) fn can_own_projections(model: &mut Model) -> Result<bool, Error> {
    let mut all = 0;
    // SAFETY: both pointers are valid for the call.
    let code = unsafe { ovfleet_can_own_projections(model.as_mut_ptr(), &raw mut all) };
    check(code, "look at the projections")?;
    Ok(all != 0)
}

/// Replaces multiplications by integer weights in a paged model by our own; answers how many.
pub(crate) fn own_projections(model: &mut Model, in_bf16: bool) -> Result<usize, Error> {
    let mut replaced = 0;
    // SAFETY: both pointers are valid for the call.
    let code =
        unsafe { ovfleet_own_projections(model.as_mut_ptr(), c_int::from(in_bf16), &raw mut replaced) };
    check(code, "replace the projections")?;
    Ok(replaced)
}

/// Bytes that the integer weights of a model's projections take in f32; 0 if there are none.
pub(crate) fn unpacked_bytes(model: &mut Model) -> Result<u64, Error> {
    let mut bytes = 0;
    // SAFETY: both pointers are valid for the call.
    check(unsafe { ovfleet_unpacked_bytes(model.as_mut_ptr(), &raw mut bytes) }, "measure the weights")?;
    Ok(bytes)
}

/// Replaces these weights by their f32 values.
pub(crate) fn unpack_weights(model: &mut Model) -> Result<(), Error> {
    // SAFETY: the pointer is valid for the call.
    check(unsafe { ovfleet_unpack_weights(model.as_mut_ptr()) }, "unpack the weights")
}

/// Another graph over the same weights.
pub(crate) fn clone_model(model: &mut Model) -> Result<Model, Error> {
    let mut copy = std::ptr::null_mut();
    // SAFETY: the pointers are valid for the call; on success `copy` is ours to free, which `Model` does.
    check(unsafe { ovfleet_clone(model.as_mut_ptr(), &raw mut copy) }, "copy the graph")?;
    Ok(Model::from_raw(copy))
}

/// Writes a model, not yet paged, as an IR.
pub(crate) fn save(model: &mut Model, xml: &Path, bin: &Path) -> Result<(), Error> {
    let (xml, bin) = (c_path(xml)?, c_path(bin)?);
    // SAFETY: the strings are NUL-terminated and the pointer valid for the call.
    let code = unsafe { ovfleet_save(model.as_mut_ptr(), xml.as_ptr(), bin.as_ptr()) };
    check(code, "save the rewritten model")
}

/// Lets a core read compiled models that are paged. It has compiled and read none for the CPU yet.
pub(crate) fn read_compiled(core: &Core) -> Result<(), Error> {
    // SAFETY: the pointer is valid for the call.
    check(unsafe { ovfleet_read_compiled(core.as_ptr()) }, "prepare to read compiled models")
}

/// Writes a compiled model of the CPU to a file.
pub(crate) fn export(compiled: &CompiledModel, path: &Path) -> Result<(), Error> {
    let path = c_path(path)?;
    // SAFETY: the string is NUL-terminated and the pointer valid for the call.
    check(unsafe { ovfleet_export(compiled.as_ptr(), path.as_ptr()) }, "write the compiled model")
}

/// Reads a compiled model from the first `bytes` of a file, which is not to be changed while the model lives.
pub(crate) fn import(
    core: &Core,
    (path, bytes): (&Path, usize),
    device: &CStr,
    properties: &[(CString, CString)],
) -> Result<CompiledModel, Error> {
    let path = c_path(path)?;
    let raw: Vec<_> = properties.iter().flat_map(|(key, value)| [key.as_ptr(), value.as_ptr()]).collect();
    let mut compiled = std::ptr::null_mut();
    // SAFETY: the strings are NUL-terminated, two for each property; on success `compiled` is ours to free, which
    // `CompiledModel` does.
    let code = unsafe {
        ovfleet_import(
            core.as_ptr(),
            path.as_ptr(),
            bytes,
            device.as_ptr(),
            raw.as_ptr(),
            properties.len(),
            &raw mut compiled,
        )
    };
    check(code, "read the compiled model")?;
    Ok(CompiledModel::from_raw(compiled))
}
