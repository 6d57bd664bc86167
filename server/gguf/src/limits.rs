//! The named limits of what a file may claim. Far above any real file, far below what exhausts memory.

/// Bytes before the tensor data: metadata and tensor directory.
pub const HEADER_BYTES_MAX: u64 = 512 << 20;
/// Metadata keys.
pub const METADATA_KEYS_MAX: u64 = 1 << 16;
/// Bytes of a metadata key.
pub const KEY_BYTES_MAX: u64 = 1 << 16;
/// Elements of a metadata array.
pub const ARRAY_ELEMENTS_MAX: u64 = 1 << 24;
/// Tensors.
pub const TENSORS_MAX: u64 = 1 << 20;
/// Bytes of a tensor's name. (ggml itself stops at 64.)
pub const TENSOR_NAME_BYTES_MAX: u64 = 1 << 10;
/// Dimensions of a tensor.
pub const DIMENSIONS_MAX: u32 = 4;
/// Alignment of tensor data, bytes.
pub const ALIGNMENT_MAX: u64 = 1 << 20;
