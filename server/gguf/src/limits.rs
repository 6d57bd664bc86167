//! Limits on the sizes and counts that a GGUF file may declare. They are far below the values that would exhaust the
//! memory of a server and, except for the number of dimensions, which ggml limits to 4, far above the values of any
//! real file.

/// Size of the header of a GGUF file: the metadata and the tensor directory.
///
/// If exceeded: the server does not start.
pub const HEADER_BYTES_MAX: u64 = 512 << 20;
/// Number of metadata keys of a GGUF file.
///
/// If exceeded: the server does not start.
pub const METADATA_KEYS_MAX: u64 = 1 << 16;
/// Size of a metadata key of a GGUF file.
///
/// If exceeded: the server does not start.
pub const KEY_BYTES_MAX: u64 = 1 << 16;
/// Number of elements of a metadata array of a GGUF file.
///
/// If exceeded: the server does not start.
pub const ARRAY_ELEMENTS_MAX: u64 = 1 << 24;
/// Number of tensors of a GGUF file.
///
/// If exceeded: the server does not start.
pub const TENSORS_MAX: u64 = 1 << 20;
/// Size of the name of a tensor of a GGUF file. The limit of ggml itself is 64 bytes.
///
/// If exceeded: the server does not start.
pub const TENSOR_NAME_BYTES_MAX: u64 = 1 << 10;
/// Number of dimensions of a tensor of a GGUF file.
///
/// If exceeded: the server does not start.
pub const DIMENSIONS_MAX: u32 = 4;
/// Alignment of the tensor data of a GGUF file, in bytes.
///
/// If exceeded: the server does not start.
pub const ALIGNMENT_MAX: u64 = 1 << 20;
/// Number of parts of a split GGUF model.
///
/// If exceeded: the server does not start; `ovfleet-server fetch` fails with exit code 13.
pub const PARTS_MAX: u64 = 256;
