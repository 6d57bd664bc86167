//! Tensors in host memory.

use std::ptr;

use openvino_sys as ov;
use ov::ov_element_type_e as ElementType;

use super::check;
use crate::Error;

/// Elements Rust reads and writes.
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

impl Element for f32 {
    const TYPE: ElementType = ElementType::F32;
}

/// A tensor in host memory.
pub(crate) struct Tensor(pub(super) *mut ov::ov_tensor_t);

// SAFETY: plain memory behind a handle; used by one thread at a time.
unsafe impl Send for Tensor {}

impl Tensor {
    /// Memory for `shape` elements, with no defined content.
    pub(crate) fn new(element: ElementType, shape: &[i64]) -> Result<Self, Error> {
        let mut tensor = ptr::null_mut();
        let raw = ov::ov_shape_t { rank: shape.len() as i64, dims: shape.as_ptr().cast_mut() };
        // SAFETY: the C API reads `rank` dims and keeps nothing; on success the tensor is ours to free.
        check(unsafe { ov::ov_tensor_create(element, raw, &raw mut tensor) }, "allocate a tensor")?;
        Ok(Self(tensor))
    }

    /// Changes the shape, keeping the memory while it suffices.
    pub(crate) fn reshape(&mut self, shape: &[i64]) -> Result<(), Error> {
        let raw = ov::ov_shape_t { rank: shape.len() as i64, dims: shape.as_ptr().cast_mut() };
        // SAFETY: as in `new`.
        check(unsafe { ov::ov_tensor_set_shape(self.0, raw) }, "reshape a tensor")
    }

    /// Size in bytes.
    pub(crate) fn bytes(&self) -> Result<usize, Error> {
        let mut bytes = 0;
        // SAFETY: both pointers are valid.
        check(unsafe { ov::ov_tensor_get_byte_size(self.0, &raw mut bytes) }, "measure a tensor")?;
        Ok(bytes)
    }

    fn element(&self) -> Result<ElementType, Error> {
        let mut element = ElementType::DYNAMIC;
        // SAFETY: both pointers are valid.
        check(unsafe { ov::ov_tensor_get_element_type(self.0, &raw mut element) }, "read a tensor's type")?;
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
    /// They are of another type.
    pub(crate) fn values<T: Element>(&self) -> Result<&[T], Error> {
        let (data, bytes) = (self.typed::<T>()?, self.bytes()?);
        // SAFETY: the tensor holds `bytes` bytes of T at `data`, aligned by its allocator; the borrow keeps
        // it from being reshaped.
        Ok(unsafe { std::slice::from_raw_parts(data, bytes / size_of::<T>()) })
    }

    /// The elements, to be written.
    ///
    /// # Errors
    /// They are of another type.
    pub(crate) fn values_mut<T: Element>(&mut self) -> Result<&mut [T], Error> {
        let (data, bytes) = (self.typed::<T>()?, self.bytes()?);
        // SAFETY: as in `values`; the borrow is exclusive, and every bit pattern is a T.
        Ok(unsafe { std::slice::from_raw_parts_mut(data, bytes / size_of::<T>()) })
    }

    fn typed<T: Element>(&self) -> Result<*mut T, Error> {
        if self.element()? == T::TYPE {
            Ok(self.pointer()?.cast())
        } else {
            Err(Error::runtime("read a tensor", "it is of an unexpected element type"))
        }
    }

    /// Gives the whole pages of its memory back to the system, which makes zeros of them when they are touched again.
    pub(crate) fn discard(&mut self) -> Result<(), Error> {
        let (data, bytes) = (self.pointer()?, self.bytes()?);
        // SAFETY: it reads a constant of the system.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        let page = usize::try_from(page).unwrap_or(1 << 16);
        let before = data.align_offset(page);
        let length = bytes.saturating_sub(before) / page * page;
        if length == 0 {
            return Ok(());
        }
        // SAFETY: these pages lie within the tensor's memory, which is the process's own (it was allocated by the C++
        // library's allocator); nobody reads it meanwhile, since the borrow is exclusive and no request runs.
        let status = unsafe { libc::madvise(data.add(before).cast(), length, libc::MADV_DONTNEED) };
        if status == 0 {
            return Ok(());
        }
        Err(Error::runtime("give memory back", &std::io::Error::last_os_error().to_string()))
    }

    /// Copies the bytes from `at` on.
    ///
    /// # Panics
    /// If there are not so many.
    pub(crate) fn copy_out(&self, at: usize, to: &mut [u8]) -> Result<(), Error> {
        let (data, bytes) = (self.pointer()?, self.bytes()?);
        assert!(at + to.len() <= bytes, "invariant: blocks lie inside the cache");
        // SAFETY: the run is inside the tensor's memory, as just checked, which a slice of Rust's is not part of; its bytes
        // are initialised once something was computed into them, and any are a byte.
        unsafe { ptr::copy_nonoverlapping(data.add(at), to.as_mut_ptr(), to.len()) };
        Ok(())
    }

    /// Writes bytes from `at` on.
    ///
    /// # Panics
    /// If there is no room for so many.
    pub(crate) fn copy_in(&mut self, at: usize, from: &[u8]) -> Result<(), Error> {
        let (data, bytes) = (self.pointer()?, self.bytes()?);
        assert!(at + from.len() <= bytes, "invariant: blocks lie inside the cache");
        // SAFETY: as in `copy_out`; the borrow is exclusive.
        unsafe { ptr::copy_nonoverlapping(from.as_ptr(), data.add(at), from.len()) };
        Ok(())
    }

    /// Copies `length` bytes at `from` over those at `to`.
    ///
    /// # Panics
    /// If either run leaves the tensor, or they overlap.
    pub(crate) fn copy_within(&mut self, from: usize, to: usize, length: usize) -> Result<(), Error> {
        let (data, bytes) = (self.pointer()?, self.bytes()?);
        assert!(from + length <= bytes && to + length <= bytes, "invariant: blocks lie inside the cache");
        assert!(from.abs_diff(to) >= length, "invariant: a block is copied to another one");
        // SAFETY: both runs are inside the tensor's memory and do not overlap, as just checked.
        unsafe { ptr::copy_nonoverlapping(data.add(from), data.add(to), length) };
        Ok(())
    }
}

impl Drop for Tensor {
    fn drop(&mut self) {
        // SAFETY: made by the C API, freed once.
        unsafe { ov::ov_tensor_free(self.0) }
    }
}
