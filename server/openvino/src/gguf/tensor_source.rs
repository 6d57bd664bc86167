//! Reads the weights of a GGUF file for the graph, some rows at a time.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;

use server_gguf::{GgufFile, TensorEntry, TensorType};

use crate::Error;
use crate::weights::{Matrix, MatrixShape, permute_rows};

/// The rows of a tensor that form a weight of the graph.
#[derive(Clone, Debug)]
pub(crate) struct SourceTensor {
    /// The name of the tensor in the file.
    pub(crate) name: String,
    pub(crate) kind: TensorType,
    /// The first row of the tensor that belongs to the weight.
    pub(crate) first_row: usize,
    pub(crate) shape: MatrixShape,
    /// The head size, if the rows are permuted within each head.
    pub(crate) head_size: Option<usize>,
}

impl SourceTensor {
    /// All rows of a tensor.
    pub(super) fn whole(entry: &TensorEntry, head_size: Option<usize>) -> Self {
        let shape = MatrixShape { rows: entry.rows() as usize, columns: entry.shape[0] as usize };
        Self { name: entry.name.clone(), kind: entry.kind, first_row: 0, shape, head_size }
    }
}

/// The weights of a graph, by number. Several threads can read weights at the same time.
#[derive(Debug)]
pub(crate) struct TensorSource {
    file: Arc<GgufFile>,
    tensors: Vec<SourceTensor>,
}

impl TensorSource {
    pub(super) fn new(file: Arc<GgufFile>, tensors: Vec<SourceTensor>) -> Self {
        Self { file, tensors }
    }

    /// Reads rows of a weight, and returns them in the format of the shim.
    ///
    /// # Errors
    /// The file cannot be read.
    ///
    /// # Panics
    /// Panics if no weight has this number, or if the weight does not have these rows.
    pub(crate) fn read(&self, number: usize, rows: Range<usize>) -> Result<Matrix, Error> {
        thread_local! {
            static BYTES: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
        }
        let tensor = &self.tensors[number];
        assert!(
            rows.start <= rows.end && rows.end <= tensor.shape.rows,
            "invariant: the weight has these rows"
        );
        // Read whole heads, because the rows are permuted within each head.
        let head = tensor.head_size.unwrap_or(1);
        let whole = rows.start / head * head..rows.end.next_multiple_of(head).min(tensor.shape.rows);
        BYTES.with_borrow_mut(|bytes| {
            let in_file = |row: usize| (tensor.first_row + row) as u64;
            self.file.read_tensor_rows(&tensor.name, in_file(whole.start)..in_file(whole.end), bytes)?;
            let row_bytes = bytes.len() / whole.len().max(1);
            if let Some(head_size) = tensor.head_size {
                permute_rows(bytes, row_bytes, head_size);
            }
            let wanted = (rows.start - whole.start) * row_bytes..(rows.end - whole.start) * row_bytes;
            let shape = MatrixShape { rows: rows.len(), columns: tensor.shape.columns };
            Ok(Matrix::new(tensor.kind, shape, &bytes[wanted])?)
        })
    }
}
