//! Replaces the weights of a graph. The shim reads the new weights from a [`TensorSource`], on several threads.

use std::ffi::{c_int, c_void};
use std::marker::PhantomData;

use super::ffi::{self, RawTensorRows, RawTensorSource, RawWeight, RawWeights, check};
use crate::Error;
use crate::gguf::TensorSource;
use crate::runtime::{Model, c_string};
use crate::weights::{Matrix, MatrixShape, Quants, Zeros};

/// A weight that replaces a weight of the graph.
#[derive(Clone, Copy)]
pub(crate) struct WeightForm<'a> {
    /// The number of the weight in the source.
    pub(crate) number: usize,
    pub(crate) shape: MatrixShape,
    /// A matrix whose types, group size and properties are those of the weight. Its values and its shape are not used.
    pub(crate) form: &'a Matrix,
}

/// An index of the weights of a model from [`super::read_gguf`]. The exclusive borrow ensures that no other code
/// changes the model.
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
        let code = unsafe { ffi::ovfleet_find_weights(model.as_mut_ptr(), &raw const source, &raw mut raw) };
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
        // SAFETY: the pointers are valid for the call; `self.raw` is valid until `self` is dropped. `read_tensor`
        // writes matrices of this form.
        let code = unsafe { ffi::ovfleet_set_weight(self.raw, &raw const raw, &raw mut found) };
        check(code, "write a weight")?;
        Ok(found != 0)
    }
}

impl Drop for GraphWeights<'_> {
    fn drop(&mut self) {
        // SAFETY: the pointer comes from `ovfleet_find_weights` and is freed once.
        unsafe { ffi::ovfleet_free_weights(self.raw) };
    }
}

/// Reads rows for the shim.
///
/// # Safety
/// `context` points to a [`TensorSource`], and the pointers of the rows are null or have the space that
/// `ovfleet_tensor_rows` describes.
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
                // SAFETY: the bytes and the terminating NUL fit into the `message_size` bytes of the buffer.
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

/// Frees a source.
///
/// # Safety
/// `context` comes from `Box::into_raw` of a [`TensorSource`], and is freed once.
unsafe extern "C" fn free_tensors(context: *mut c_void) {
    // SAFETY: as above.
    drop(unsafe { Box::from_raw(context.cast::<TensorSource>()) });
}

// The shim reads on several threads, and may free the source on any of them.
const _: () = {
    const fn check<T: Send + Sync>() {}
    check::<TensorSource>();
};
