//! A safe interface to the parts of OpenVINO's C API that a runner needs. Every handle is freed on drop. OpenVINO's
//! objects share the ownership of the objects from which they were created.
//!
//! The `openvino` crate is not used, because its types hide the pointers that the shim needs
//! ([decision 0083](../../../docs/decisions/0083-openvino-sys.md)).

use std::ffi::{CStr, CString, c_char};
use std::ptr;

use openvino_sys as ov;
use ov::{ov_element_type_e as ElementType, ov_status_e as Status};

use crate::{Error, library};
pub use profile::NodeTime;
pub(crate) use status::{c_path, c_string};
use status::{check, property};
pub(crate) use tensor::{Element, Flag, Tensor};

mod profile;
mod status;
mod tensor;

/// The OpenVINO runtime, which reads and compiles models.
pub(crate) struct Core(*mut ov::ov_core_t);

// SAFETY: OpenVINO documents its core as thread-safe.
unsafe impl Send for Core {}
// SAFETY: the same as for `Send`.
unsafe impl Sync for Core {}

impl Core {
    /// Loads the C API that belongs to the linked OpenVINO library, and creates a core.
    pub(crate) fn new() -> Result<Self, Error> {
        let library = library::c_library().ok_or_else(|| {
            Error::runtime("find OpenVINO's C API", "the path of the OpenVINO library is unknown")
        })?;
        ov::library::load_from(library)
            .map_err(|message| Error::runtime("load OpenVINO's C API", &message))?;
        let mut core = ptr::null_mut();
        // SAFETY: on success this function owns `core`, which `drop` frees.
        check(unsafe { ov::ov_core_create(&raw mut core) }, "start OpenVINO")?;
        Ok(Self(core))
    }

    /// Returns the value of a device's property, as text.
    pub(crate) fn property(&self, device: &str, key: &str) -> Result<String, Error> {
        let (device, key) = (c_string(device, "read a property")?, c_string(key, "read a property")?);
        property(|value| {
            // SAFETY: the strings are NUL-terminated, and `value` is valid for writes.
            unsafe { ov::ov_core_get_property(self.0, device.as_ptr(), key.as_ptr(), value) }
        })
    }

    /// Compiles a model for a device.
    pub(crate) fn compile(
        &self,
        model: &Model,
        device: &str,
        properties: &[(String, String)],
    ) -> Result<CompiledModel, Error> {
        let device = c_string(device, "read the device's name")?;
        let text = |text: &String| c_string(text, "read a property");
        let owned = properties.iter().map(|(key, value)| Ok((text(key)?, text(value)?)));
        let owned = owned.collect::<Result<Vec<(CString, CString)>, Error>>()?;
        let raw: Vec<ov::ov_property_t> = owned
            .iter()
            .map(|(key, value)| ov::ov_property_t { key: key.as_ptr(), value: value.as_ptr().cast() })
            .collect();
        let mut compiled = ptr::null_mut();
        // SAFETY: `raw` points into `owned`, which outlives the call; on success this function owns `compiled`.
        let status = unsafe {
            ov::ov_core_compile_model_props(
                self.0,
                model.0,
                device.as_ptr(),
                raw.len(),
                raw.as_ptr(),
                &raw mut compiled,
            )
        };
        check(status, "compile the model")?;
        Ok(CompiledModel::from_raw(compiled))
    }

    pub(crate) fn as_ptr(&self) -> *mut ov::ov_core_t {
        self.0
    }
}

/// The version of the OpenVINO runtime.
pub(crate) fn version() -> String {
    let mut version = ov::ov_version_t { buildNumber: ptr::null(), description: ptr::null() };
    // SAFETY: on success the strings are NUL-terminated, and the matching call frees them.
    unsafe {
        if ov::ov_get_openvino_version(&raw mut version) != Status::OK || version.buildNumber.is_null() {
            return String::new();
        }
        let text = CStr::from_ptr(version.buildNumber).to_string_lossy().into_owned();
        ov::ov_version_free(&raw mut version);
        text
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        // SAFETY: the pointer comes from `ov_core_create` and is freed once.
        unsafe { ov::ov_core_free(self.0) }
    }
}

/// The graph of a model.
pub(crate) struct Model(*mut ov::ov_model_t);

// SAFETY: a graph is plain data without ties to a thread, and one thread at a time uses it.
unsafe impl Send for Model {}

impl Model {
    /// Takes ownership of a model that the C API or the shim has created.
    pub(crate) fn from_raw(model: *mut ov::ov_model_t) -> Self {
        assert!(!model.is_null(), "invariant: a successful call returns a model");
        Self(model)
    }

    pub(crate) fn as_mut_ptr(&mut self) -> *mut ov::ov_model_t {
        self.0
    }
}

impl Drop for Model {
    fn drop(&mut self) {
        // SAFETY: the pointer comes from the C API or the shim and is freed once.
        unsafe { ov::ov_model_free(self.0) }
    }
}

/// A model that is compiled for a device.
pub(crate) struct CompiledModel(*mut ov::ov_compiled_model_t);

// SAFETY: OpenVINO documents compiled models as thread-safe.
unsafe impl Send for CompiledModel {}
// SAFETY: the same as for `Send`.
unsafe impl Sync for CompiledModel {}

/// An input or output of a compiled model.
#[derive(Clone, Debug)]
pub(crate) struct Port {
    pub(crate) name: String,
    pub(crate) element: ElementType,
    /// The dimensions. `None` for a dynamic dimension.
    pub(crate) shape: Vec<Option<i64>>,
}

impl CompiledModel {
    /// Takes ownership of a compiled model that the C API or the shim has created.
    pub(crate) fn from_raw(compiled: *mut ov::ov_compiled_model_t) -> Self {
        assert!(!compiled.is_null(), "invariant: a successful call returns a compiled model");
        Self(compiled)
    }

    pub(crate) fn as_ptr(&self) -> *mut ov::ov_compiled_model_t {
        self.0
    }

    /// The inputs, in the order of the model.
    pub(crate) fn inputs(&self) -> Result<Vec<Port>, Error> {
        let mut count = 0;
        // SAFETY: both pointers are valid.
        check(unsafe { ov::ov_compiled_model_inputs_size(self.0, &raw mut count) }, "count the inputs")?;
        (0..count)
            .map(|index| {
                read_port("read an input", |port| {
                    // SAFETY: the index is below the count, and `port` is valid for writes.
                    unsafe { ov::ov_compiled_model_input_by_index(self.0, index, port) }
                })
            })
            .collect()
    }

    /// The only output.
    pub(crate) fn output(&self) -> Result<Port, Error> {
        // SAFETY: both pointers are valid.
        read_port("read the output", |port| unsafe { ov::ov_compiled_model_output(self.0, port) })
    }

    /// Returns the first output of the model.
    pub(crate) fn first_output(&self) -> Result<Port, Error> {
        read_port("read an output", |port| {
            // SAFETY: both pointers are valid.
            unsafe { ov::ov_compiled_model_output_by_index(self.0, 0, port) }
        })
    }

    /// Creates a request that runs the model.
    pub(crate) fn request(&self) -> Result<InferRequest, Error> {
        let mut request = ptr::null_mut();
        // SAFETY: on success this function owns the request.
        let status = unsafe { ov::ov_compiled_model_create_infer_request(self.0, &raw mut request) };
        check(status, "create an inference request")?;
        Ok(InferRequest(request))
    }

    /// Number of tokens in the vocabulary of a language model: the last dimension of its output.
    ///
    /// # Errors
    /// The dimension is dynamic.
    pub(crate) fn vocabulary(&self) -> Result<u32, Error> {
        let output = self.output()?;
        let size = output.shape.last().copied().flatten().and_then(|size| u32::try_from(size).ok());
        size.ok_or_else(|| Error::Unsupported("the size of its vocabulary is not static".to_owned()))
    }

    /// Returns the value of a property of the compiled model, as text.
    pub(crate) fn property(&self, key: &str) -> Result<String, Error> {
        let key = c_string(key, "read a property")?;
        property(|value| {
            // SAFETY: the strings are NUL-terminated, and `value` is valid for writes.
            unsafe { ov::ov_compiled_model_get_property(self.0, key.as_ptr(), value) }
        })
    }
}

impl Drop for CompiledModel {
    fn drop(&mut self) {
        // SAFETY: the pointer comes from the C API or the shim and is freed once.
        unsafe { ov::ov_compiled_model_free(self.0) }
    }
}

/// Reads the port that `get` returns.
fn read_port(
    what: &'static str,
    get: impl FnOnce(*mut *mut ov::ov_output_const_port_t) -> Status,
) -> Result<Port, Error> {
    let mut port = ptr::null_mut();
    check(get(&raw mut port), what)?;
    let read = describe_port(port);
    // SAFETY: on success this function owns the port.
    unsafe { ov::ov_output_const_port_free(port) };
    read
}

fn describe_port(port: *const ov::ov_output_const_port_t) -> Result<Port, Error> {
    let mut name: *mut c_char = ptr::null_mut();
    // SAFETY: `port` is valid; this function owns the string.
    let name = unsafe {
        check(ov::ov_port_get_any_name(port, &raw mut name), "read the name of an input or output")?;
        let text = CStr::from_ptr(name).to_string_lossy().into_owned();
        ov::ov_free(name);
        text
    };
    let mut element = ElementType::DYNAMIC;
    // SAFETY: both pointers are valid.
    check(
        unsafe { ov::ov_port_get_element_type(port, &raw mut element) },
        "read the type of an input or output",
    )?;
    let mut partial =
        ov::ov_partial_shape { rank: ov::ov_dimension_t { min: 0, max: 0 }, dims: ptr::null_mut() };
    // SAFETY: both pointers are valid; on success there are `rank` dimensions (if the rank is static), which the
    // matching call frees.
    let shape = unsafe {
        check(ov::ov_port_get_partial_shape(port, &raw mut partial), "read the shape of an input or output")?;
        let rank = if partial.rank.min == partial.rank.max {
            usize::try_from(partial.rank.min).unwrap_or(0)
        } else {
            0
        };
        let dims = if rank == 0 { &[] } else { std::slice::from_raw_parts(partial.dims, rank) };
        let shape = dims.iter().map(|dim| (dim.min == dim.max).then_some(dim.min)).collect();
        ov::ov_partial_shape_free(&raw mut partial);
        shape
    };
    Ok(Port { name, element, shape })
}

/// A request that runs a compiled model.
pub(crate) struct InferRequest(*mut ov::ov_infer_request_t);

// SAFETY: a request has no ties to a thread, and one thread at a time uses it.
unsafe impl Send for InferRequest {}

impl InferRequest {
    /// Binds a tensor to an input. The tensor may be written and reshaped between runs.
    pub(crate) fn set(&mut self, name: &str, tensor: &Tensor) -> Result<(), Error> {
        let name = c_string(name, "read an input's name")?;
        // SAFETY: the request shares ownership of the tensor's memory.
        check(unsafe { ov::ov_infer_request_set_tensor(self.0, name.as_ptr(), tensor.0) }, "set an input")
    }

    /// Runs the model, and blocks until it is done.
    pub(crate) fn infer(&mut self) -> Result<(), Error> {
        // SAFETY: the request is valid, and the exclusive borrow prevents another run.
        check(unsafe { ov::ov_infer_request_infer(self.0) }, "run the model")
    }

    /// Returns the execution times of the nodes. The list is empty unless the model was compiled with `PERF_COUNT`.
    pub(crate) fn node_times(&self) -> Result<Vec<NodeTime>, Error> {
        // SAFETY: the request is valid, and a run would need an exclusive borrow.
        unsafe { profile::node_times(self.0) }
    }

    /// Returns the output with this index that the last run has computed.
    pub(crate) fn output_at(&self, index: usize) -> Result<Tensor, Error> {
        let mut tensor = ptr::null_mut();
        // SAFETY: on success this function owns the tensor handle.
        let status =
            unsafe { ov::ov_infer_request_get_output_tensor_by_index(self.0, index, &raw mut tensor) };
        check(status, "read an output")?;
        Ok(Tensor(tensor))
    }

    /// Returns the only output of the last run.
    pub(crate) fn output(&self) -> Result<Tensor, Error> {
        let mut tensor = ptr::null_mut();
        // SAFETY: on success this function owns the tensor handle.
        check(unsafe { ov::ov_infer_request_get_output_tensor(self.0, &raw mut tensor) }, "read the output")?;
        Ok(Tensor(tensor))
    }
}

impl Drop for InferRequest {
    fn drop(&mut self) {
        // SAFETY: the pointer comes from `ov_compiled_model_create_infer_request` and is freed once.
        unsafe { ov::ov_infer_request_free(self.0) }
    }
}
