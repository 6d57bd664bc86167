//! The file from which the front end reads the graph of a model.
//!
//! All matrices are replaced after the front end has built the graph, so this file contains only the other tensors:
//! vectors such as norms and biases. Thus the front end neither reads nor converts the weights, and it can read the
//! graph of a split model, although it supports only single files. All matrices share one range of the file, which is
//! as long as the largest of them. This range is a hole: it reads as zeros and takes no space on the disk. The
//! matrices, except fused ones, are described as f32, because the front end maps f32 values into memory without a copy.

use std::env;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, symlink};
use std::path::{Path, PathBuf};

use server_gguf::write::{ALIGNMENT, TensorHeader, header};
use server_gguf::{GgufFile, TensorEntry, TensorType};
use tempfile::TempDir;

use crate::Error;

/// The part of a tensor's name that marks the fused weights of q, k and v. The front end splits them.
pub(super) const FUSED: &str = ".attn_qkv.";

/// Total size of the norms, biases and other vectors of a GGUF model, which are copied into a temporary file.
///
/// If exceeded: the server does not start.
const VECTORS_BYTES_MAX: u64 = 1 << 30;

/// A temporary file that is deleted when this value is dropped. If the process is killed, only a directory with a
/// dangling link remains.
#[derive(Debug)]
pub(super) struct GraphFile {
    /// The link to the file. The front end requires a name with the suffix `.gguf`, but only a file without a name is
    /// deleted when the process is killed.
    link: PathBuf,
    _directory: TempDir,
    _file: File,
}

impl GraphFile {
    /// Writes the file for `model`, without the content of tensors that are replaced later.
    pub(super) fn write(model: &GgufFile, is_replaced: impl Fn(&TensorEntry) -> bool) -> Result<Self, Error> {
        let space = |tensor: &TensorEntry| tensor.bytes.next_multiple_of(ALIGNMENT);
        // The front end copies the parts of fused tensors, so these tensors keep their type, which usually takes less
        // memory than f32.
        let hole_kind = |tensor: &TensorEntry| {
            if tensor.name.contains(FUSED) { tensor.kind } else { TensorType::F32 }
        };
        let hole_space = |tensor: &TensorEntry| {
            let bytes = hole_kind(tensor).bytes_of(tensor.values()).unwrap_or(tensor.bytes);
            bytes.next_multiple_of(ALIGNMENT)
        };
        let tensors = model.tensors();
        let hole = tensors.iter().filter(|tensor| is_replaced(tensor)).map(hole_space).max().unwrap_or(0);
        let (mut headers, mut stored, mut end) = (Vec::new(), Vec::new(), hole);
        for tensor in tensors {
            let (mut offset, mut kind) = (0, hole_kind(tensor));
            if !is_replaced(tensor) {
                (offset, kind) = (end, tensor.kind);
                stored.push((tensor, offset));
                end += space(tensor);
            }
            headers.push(TensorHeader { name: &tensor.name, shape: &tensor.shape, kind, offset });
        }
        let bytes = end - hole;
        if bytes > VECTORS_BYTES_MAX {
            return Err(Error::Unsupported(format!(
                "its tensors other than weight matrices have {bytes} bytes (limit: {VECTORS_BYTES_MAX} bytes)"
            )));
        }
        let metadata: Vec<_> = model.metadata().filter(|(key, _)| *key != "general.alignment").collect();
        let header = header(&metadata, &headers);
        let data = header.len() as u64;
        let failed = |error: io::Error| {
            let message = format!("{error} (in {})", env::temp_dir().display());
            Error::runtime("create a temporary file", &message)
        };
        let file = tempfile::tempfile().map_err(failed)?;
        file.write_all_at(&header, 0).map_err(failed)?;
        let mut content = Vec::new();
        for (tensor, offset) in stored {
            model.read_tensor(&tensor.name, &mut content)?;
            file.write_all_at(&content, data + offset).map_err(failed)?;
        }
        // Extend the file to its full length: neither a hole at the end nor the padding of the last tensor has been
        // written.
        file.set_len(data + end).map_err(failed)?;
        let directory = tempfile::tempdir().map_err(failed)?;
        let link = directory.path().join("graph.gguf");
        symlink(format!("/proc/self/fd/{}", file.as_raw_fd()), &link).map_err(failed)?;
        Ok(Self { link, _directory: directory, _file: file })
    }

    pub(super) fn path(&self) -> &Path {
        &self.link
    }
}
