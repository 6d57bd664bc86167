//! The safe face of OpenVINO's C API, as much of it as a runner needs. Everything is freed on drop; nothing
//! outlives what it was made from.

use std::ffi::{CStr, CString, c_char};
use std::path::Path;
use std::ptr;

use openvino_sys as ov;
use ov::{ov_element_type_e as ElementType, ov_status_e as Status};

use crate::{Error, shim};
pub use profile::NodeTime;
pub(crate) use tensor::{Element, Tensor};

mod profile;
mod tensor;

fn check(status: Status, what: &'static str) -> Result<(), Error> {
    if status == Status::OK {
        return Ok(());
    }
    // SAFETY: gives null or a NUL-terminated string that is ours to free.
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

fn c_string(text: &str, what: &'static str) -> Result<CString, Error> {
    CString::new(text).map_err(|_| Error::runtime(what, "it contains a NUL byte"))
}

/// The property that `read` writes a text for.
fn property(read: impl FnOnce(*mut *mut c_char) -> Status) -> Result<String, Error> {
    let mut value: *mut c_char = ptr::null_mut();
    check(read(&raw mut value), "read a property")?;
    // SAFETY: on success `value` is a NUL-terminated string that is ours to free.
    unsafe {
        let text = CStr::from_ptr(value).to_string_lossy().into_owned();
        ov::ov_free(value);
        Ok(text)
    }
}

/// The runtime.
pub(crate) struct Core(*mut ov::ov_core_t);

// SAFETY: OpenVINO's core may be used from any thread, from several at once too.
unsafe impl Send for Core {}
// SAFETY: as for `Send`.
unsafe impl Sync for Core {}

impl Core {
    /// Loads the C API that belongs to the linked library.
    pub(crate) fn new() -> Result<Self, Error> {
        let library = shim::c_library().ok_or_else(|| Error::runtime("find OpenVINO", "it has no file"))?;
        ov::library::load_from(library)
            .map_err(|message| Error::runtime("load OpenVINO's C API", &message))?;
        let mut core = ptr::null_mut();
        // SAFETY: on success `core` is ours to free, which drop does.
        check(unsafe { ov::ov_core_create(&raw mut core) }, "start OpenVINO")?;
        Ok(Self(core))
    }

    /// A core that reads compiled models, in which the operations of this crate may be. A core that reads a user's models
    /// must not know these operations: it would let a file choose their attributes.
    pub(crate) fn importer() -> Result<Self, Error> {
        let core = Self::new()?;
        shim::read_compiled(&core)?;
        Ok(core)
    }

    /// What a device does by itself.
    pub(crate) fn property(&self, device: &str, key: &str) -> Result<String, Error> {
        let (device, key) = (c_string(device, "read a property")?, c_string(key, "read a property")?);
        property(|value| {
            // SAFETY: the texts are NUL-terminated, and a value is written where one is to be.
            unsafe { ov::ov_core_get_property(self.0, device.as_ptr(), key.as_ptr(), value) }
        })
    }

    /// Reads an IR.
    pub(crate) fn read_model(&self, path: &Path) -> Result<Model, Error> {
        let path = c_string(&path.to_string_lossy(), "read the model's path")?;
        let mut model = ptr::null_mut();
        // SAFETY: the strings are NUL-terminated; a null weights path means the file beside the model.
        let status = unsafe { ov::ov_core_read_model(self.0, path.as_ptr(), ptr::null(), &raw mut model) };
        check(status, "read the model")?;
        Ok(Model::from_raw(model))
    }

    /// Compiles a model for a device.
    pub(crate) fn compile(
        &self,
        model: &Model,
        device: &str,
        properties: &[(String, String)],
    ) -> Result<CompiledModel, Error> {
        let (device, owned) = target(device, properties)?;
        let raw: Vec<ov::ov_property_t> = owned
            .iter()
            .map(|(key, value)| ov::ov_property_t { key: key.as_ptr(), value: value.as_ptr().cast() })
            .collect();
        let mut compiled = ptr::null_mut();
        // SAFETY: `raw` points into `owned`, which lives to the end; on success `compiled` is ours to free.
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

    /// Reads what [`CompiledModel::export`] has written: the first `bytes` of a file, which is not to be changed while the
    /// model lives. `device` and `properties` as when it was compiled.
    pub(crate) fn import(
        &self,
        file: (&Path, usize),
        device: &str,
        properties: &[(String, String)],
    ) -> Result<CompiledModel, Error> {
        let (device, properties) = target(device, properties)?;
        shim::import(self, file, &device, &properties)
    }

    pub(crate) fn as_ptr(&self) -> *mut ov::ov_core_t {
        self.0
    }
}

/// For what to compile, as C wants it.
fn target(
    device: &str,
    properties: &[(String, String)],
) -> Result<(CString, Vec<(CString, CString)>), Error> {
    let property = |text: &String| c_string(text, "read a property");
    let properties = properties.iter().map(|(key, value)| Ok((property(key)?, property(value)?)));
    Ok((c_string(device, "read the device's name")?, properties.collect::<Result<_, Error>>()?))
}

/// The version of the runtime, as it says itself.
pub(crate) fn version() -> String {
    let mut version = ov::ov_version_t { buildNumber: ptr::null(), description: ptr::null() };
    // SAFETY: on success the strings are NUL-terminated, and freed by the matching call.
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
        // SAFETY: made by ov_core_create, freed once.
        unsafe { ov::ov_core_free(self.0) }
    }
}

/// A model's graph.
pub(crate) struct Model(*mut ov::ov_model_t);

// SAFETY: a graph is plain data; it is used by one thread at a time.
unsafe impl Send for Model {}

impl Model {
    /// Takes over a model made by the C API or the shim.
    pub(crate) fn from_raw(model: *mut ov::ov_model_t) -> Self {
        assert!(!model.is_null(), "invariant: a call that succeeded gives a model");
        Self(model)
    }

    pub(crate) fn as_mut_ptr(&mut self) -> *mut ov::ov_model_t {
        self.0
    }
}

impl Drop for Model {
    fn drop(&mut self) {
        // SAFETY: made by the C API or the shim, freed once.
        unsafe { ov::ov_model_free(self.0) }
    }
}

/// A model ready to run on a device.
pub(crate) struct CompiledModel(*mut ov::ov_compiled_model_t);

// SAFETY: as for the core.
unsafe impl Send for CompiledModel {}
// SAFETY: as for the core.
unsafe impl Sync for CompiledModel {}

/// An input or output of a compiled model.
#[derive(Clone, Debug)]
pub(crate) struct Port {
    pub(crate) name: String,
    pub(crate) element: ElementType,
    /// `None` for a dimension that is not fixed.
    pub(crate) shape: Vec<Option<i64>>,
}

impl CompiledModel {
    /// Takes over a compiled model made by the C API or the shim.
    pub(crate) fn from_raw(compiled: *mut ov::ov_compiled_model_t) -> Self {
        assert!(!compiled.is_null(), "invariant: a call that succeeded gives a compiled model");
        Self(compiled)
    }

    pub(crate) fn as_ptr(&self) -> *mut ov::ov_compiled_model_t {
        self.0
    }

    /// Writes it to a file, for [`Core::import`].
    pub(crate) fn export(&self, path: &Path) -> Result<(), Error> {
        shim::export(self, path)
    }

    /// The inputs, in order.
    pub(crate) fn inputs(&self) -> Result<Vec<Port>, Error> {
        let mut count = 0;
        // SAFETY: both pointers are valid.
        check(unsafe { ov::ov_compiled_model_inputs_size(self.0, &raw mut count) }, "count the inputs")?;
        (0..count)
            .map(|index| {
                let mut port = ptr::null_mut();
                // SAFETY: the index is below the count; the port is freed below.
                let status = unsafe { ov::ov_compiled_model_input_by_index(self.0, index, &raw mut port) };
                check(status, "read an input")?;
                let read = read_port(port);
                // SAFETY: made by the call above, freed once.
                unsafe { ov::ov_output_const_port_free(port) };
                read
            })
            .collect()
    }

    /// The only output.
    pub(crate) fn output(&self) -> Result<Port, Error> {
        let mut port = ptr::null_mut();
        // SAFETY: both pointers are valid; the port is freed below.
        check(unsafe { ov::ov_compiled_model_output(self.0, &raw mut port) }, "read the output")?;
        let read = read_port(port);
        // SAFETY: made by the call above, freed once.
        unsafe { ov::ov_output_const_port_free(port) };
        read
    }

    /// A request that runs the model.
    pub(crate) fn request(&self) -> Result<InferRequest, Error> {
        let mut request = ptr::null_mut();
        // SAFETY: on success the request is ours to free.
        let status = unsafe { ov::ov_compiled_model_create_infer_request(self.0, &raw mut request) };
        check(status, "create an inference request")?;
        Ok(InferRequest(request))
    }

    /// A property of the compiled model, as text.
    pub(crate) fn property(&self, key: &str) -> Result<String, Error> {
        let key = c_string(key, "read a property")?;
        property(|value| {
            // SAFETY: the texts are NUL-terminated, and a value is written where one is to be.
            unsafe { ov::ov_compiled_model_get_property(self.0, key.as_ptr(), value) }
        })
    }
}

impl Drop for CompiledModel {
    fn drop(&mut self) {
        // SAFETY: made by the C API or the shim, freed once.
        unsafe { ov::ov_compiled_model_free(self.0) }
    }
}

fn read_port(port: *const ov::ov_output_const_port_t) -> Result<Port, Error> {
    let mut name: *mut c_char = ptr::null_mut();
    // SAFETY: `port` is valid; the string is ours to free.
    let name = unsafe {
        check(ov::ov_port_get_any_name(port, &raw mut name), "read an input's name")?;
        let text = CStr::from_ptr(name).to_string_lossy().into_owned();
        ov::ov_free(name);
        text
    };
    let mut element = ElementType::DYNAMIC;
    // SAFETY: both pointers are valid.
    check(unsafe { ov::ov_port_get_element_type(port, &raw mut element) }, "read an input's type")?;
    let mut partial =
        ov::ov_partial_shape { rank: ov::ov_dimension_t { min: 0, max: 0 }, dims: ptr::null_mut() };
    // SAFETY: both pointers are valid; on success the dims are `rank` long (when the rank is fixed) and freed
    // by the matching call.
    let shape = unsafe {
        check(ov::ov_port_get_partial_shape(port, &raw mut partial), "read an input's shape")?;
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

/// Runs a compiled model.
pub(crate) struct InferRequest(*mut ov::ov_infer_request_t);

// SAFETY: as for the core.
unsafe impl Send for InferRequest {}

impl InferRequest {
    /// Sets an input. The tensor may be written and reshaped between runs.
    pub(crate) fn set(&mut self, name: &str, tensor: &Tensor) -> Result<(), Error> {
        let name = c_string(name, "read an input's name")?;
        // SAFETY: the request shares ownership of the tensor's memory.
        check(unsafe { ov::ov_infer_request_set_tensor(self.0, name.as_ptr(), tensor.0) }, "set an input")
    }

    /// Runs the model; blocks.
    pub(crate) fn infer(&mut self) -> Result<(), Error> {
        // SAFETY: the request is valid and nobody else runs it.
        check(unsafe { ov::ov_infer_request_infer(self.0) }, "infer")
    }

    /// The first output of the last run.
    pub(crate) fn output(&self) -> Result<Tensor, Error> {
        let mut tensor = ptr::null_mut();
        // SAFETY: on success the tensor handle is ours to free.
        check(unsafe { ov::ov_infer_request_get_output_tensor(self.0, &raw mut tensor) }, "read the output")?;
        Ok(Tensor(tensor))
    }
}

impl Drop for InferRequest {
    fn drop(&mut self) {
        // SAFETY: made by create_infer_request, freed once.
        unsafe { ov::ov_infer_request_free(self.0) }
    }
}

#[cfg(test)]
mod tests;
