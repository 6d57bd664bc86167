//! Tensors in host memory.

use std::ptr;

use openvino_sys as ov;
use ov::ov_element_type_e as ElementType;

use super::status::check;
use crate::Error;

/// An element type that Rust code reads and writes.
pub(crate) trait Element: Copy {
    const TYPE: ElementType;
}

impl Element for i64 {
    const TYPE: ElementType = ElementType::I64;
}

impl Element for i32 {
    const TYPE: ElementType = ElementType::I32;
}

impl Element for u8 {
    const TYPE: ElementType = ElementType::U8;
}

/// A boolean element of a tensor, for which every bit pattern is valid (unlike `bool`).
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct Flag(u8);

impl From<bool> for Flag {
    fn from(is_set: bool) -> Self {
        Self(u8::from(is_set))
    }
}

impl Element for Flag {
    const TYPE: ElementType = ElementType::OV_BOOLEAN;
}

impl Element for f32 {
    const TYPE: ElementType = ElementType::F32;
}

/// A tensor in host memory.
pub(crate) struct Tensor(pub(super) *mut ov::ov_tensor_t);

// SAFETY: a tensor is plain memory behind a handle, and one thread at a time uses it.
unsafe impl Send for Tensor {}

impl Tensor {
    /// Allocates a tensor with undefined content.
    pub(crate) fn new(element: ElementType, shape: &[i64]) -> Result<Self, Error> {
        let mut tensor = ptr::null_mut();
        let raw = ov::ov_shape_t { rank: shape.len() as i64, dims: shape.as_ptr().cast_mut() };
        // SAFETY: the C API copies `rank` dimensions; on success this function owns the tensor.
        check(unsafe { ov::ov_tensor_create(element, raw, &raw mut tensor) }, "allocate a tensor")?;
        Ok(Self(tensor))
    }

    /// Changes the shape. The memory is reallocated only if it is too small.
    pub(crate) fn reshape(&mut self, shape: &[i64]) -> Result<(), Error> {
        let raw = ov::ov_shape_t { rank: shape.len() as i64, dims: shape.as_ptr().cast_mut() };
        // SAFETY: the same as in `new`.
        check(unsafe { ov::ov_tensor_set_shape(self.0, raw) }, "reshape a tensor")
    }

    /// The size in bytes.
    pub(crate) fn bytes(&self) -> Result<usize, Error> {
        let mut bytes = 0;
        // SAFETY: both pointers are valid.
        check(unsafe { ov::ov_tensor_get_byte_size(self.0, &raw mut bytes) }, "read the size of a tensor")?;
        Ok(bytes)
    }

    fn element(&self) -> Result<ElementType, Error> {
        let mut element = ElementType::DYNAMIC;
        // SAFETY: both pointers are valid.
        check(
            unsafe { ov::ov_tensor_get_element_type(self.0, &raw mut element) },
            "read the element type of a tensor",
        )?;
        Ok(element)
    }

    fn pointer(&self) -> Result<*mut u8, Error> {
        let mut data = ptr::null_mut();
        // SAFETY: both pointers are valid.
        check(unsafe { ov::ov_tensor_data(self.0, &raw mut data) }, "read a tensor")?;
        Ok(data.cast())
    }

    /// The elements.
    ///
    /// # Errors
    /// The type of the elements is not `T`, or the tensor has no memory because [`Self::reshape`] failed.
    pub(crate) fn values<T: Element>(&self) -> Result<&[T], Error> {
        let (data, bytes) = self.typed::<T>()?;
        // SAFETY: the tensor has `bytes` bytes of `T` at `data`, aligned by its allocator, and cannot be reshaped while
        // it is borrowed.
        Ok(unsafe { std::slice::from_raw_parts(data, bytes / size_of::<T>()) })
    }

    /// The elements, as a mutable slice.
    ///
    /// # Errors
    /// The type of the elements is not `T`, or the tensor has no memory because [`Self::reshape`] failed.
    pub(crate) fn values_mut<T: Element>(&mut self) -> Result<&mut [T], Error> {
        let (data, bytes) = self.typed::<T>()?;
        // SAFETY: as in `values`; the borrow is exclusive, and every bit pattern is a valid `T`.
        Ok(unsafe { std::slice::from_raw_parts_mut(data, bytes / size_of::<T>()) })
    }

    /// Returns the address of the elements, and their total size in bytes.
    fn typed<T: Element>(&self) -> Result<(*mut T, usize), Error> {
        let element = self.element()?;
        if element != T::TYPE {
            let message = format!("its element type is {element:?} instead of {:?}", T::TYPE);
            return Err(Error::runtime("read a tensor", &message));
        }
        let (data, bytes) = (self.pointer()?, self.bytes()?);
        // If `reshape` fails to allocate memory, the tensor has its new shape, but no memory.
        if data.is_null() && bytes > 0 {
            return Err(Error::runtime("read a tensor", "its memory could not be allocated"));
        }
        Ok((data.cast(), bytes))
    }

    /// Returns the whole pages of the tensor's memory to the system. They contain zeros when they are accessed again.
    pub(crate) fn discard(&mut self) -> Result<(), Error> {
        let (data, bytes) = (self.pointer()?, self.bytes()?);
        let page = rustix::param::page_size();
        let before = data.align_offset(page);
        let length = bytes.saturating_sub(before) / page * page;
        if length == 0 {
            return Ok(());
        }
        // SAFETY: these pages lie within the tensor's memory, which the C++ allocator has obtained from the system. No
        // other code reads them in the meantime, because the borrow is exclusive and no request runs.
        let status = unsafe { libc::madvise(data.add(before).cast(), length, libc::MADV_DONTNEED) };
        if status == 0 {
            return Ok(());
        }
        Err(Error::runtime("return the memory of a tensor", &std::io::Error::last_os_error().to_string()))
    }

    /// Fills `to` with the bytes that start at the offset `at`.
    ///
    /// # Panics
    /// Panics if the bytes are not within the tensor.
    pub(crate) fn copy_out(&self, at: usize, to: &mut [u8]) -> Result<(), Error> {
        let (data, bytes) = (self.pointer()?, self.bytes()?);
        assert!(at + to.len() <= bytes, "invariant: blocks lie inside the cache");
        // SAFETY: the source is within the tensor, as just checked, and cannot overlap a Rust slice. The runner reads
        // only blocks that have been written, so the bytes are initialized.
        unsafe { ptr::copy_nonoverlapping(data.add(at), to.as_mut_ptr(), to.len()) };
        Ok(())
    }

    /// Writes `from` to the tensor, starting at the offset `at`.
    ///
    /// # Panics
    /// Panics if the bytes do not fit into the tensor.
    pub(crate) fn copy_in(&mut self, at: usize, from: &[u8]) -> Result<(), Error> {
        let (data, bytes) = (self.pointer()?, self.bytes()?);
        assert!(at + from.len() <= bytes, "invariant: blocks lie inside the cache");
        // SAFETY: the destination is within the tensor, as just checked, and cannot overlap a Rust slice; the borrow is
        // exclusive.
        unsafe { ptr::copy_nonoverlapping(from.as_ptr(), data.add(at), from.len()) };
        Ok(())
    }

    /// Copies `length` bytes from the offset `from` to the offset `to`.
    ///
    /// # Panics
    /// Panics if either range is not within the tensor, or the ranges overlap.
    pub(crate) fn copy_within(&mut self, from: usize, to: usize, length: usize) -> Result<(), Error> {
        let (data, bytes) = (self.pointer()?, self.bytes()?);
        assert!(from + length <= bytes && to + length <= bytes, "invariant: blocks lie inside the cache");
        assert!(from.abs_diff(to) >= length, "invariant: a block is copied to a different block");
        // SAFETY: both ranges are within the tensor and do not overlap, as just checked.
        unsafe { ptr::copy_nonoverlapping(data.add(from), data.add(to), length) };
        Ok(())
    }
}

impl Drop for Tensor {
    fn drop(&mut self) {
        // SAFETY: the pointer comes from the C API and is freed once.
        unsafe { ov::ov_tensor_free(self.0) }
    }
}
