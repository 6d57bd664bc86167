//! Counts the bytes that are allocated, so that a target can bound what an input makes its reader allocate.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes that a check may have allocated at once, whatever its input is, and for each byte of its input. A byte of JSON, such as
/// a digit in an array, becomes a value of 32 bytes, which a growing list may hold twice, in both copies that are compared.
const BYTES_MAX: usize = 1 << 20;
const BYTES_PER_INPUT_BYTE_MAX: usize = 512;

static ALLOCATED: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

/// The system's allocator, counted.
pub(crate) struct Counting;

fn add(bytes: usize) {
    let allocated = ALLOCATED.fetch_add(bytes, Ordering::Relaxed) + bytes;
    PEAK.fetch_max(allocated, Ordering::Relaxed);
}

// SAFETY: all calls are passed to the system's allocator as they are.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        add(layout.size());
        // SAFETY: the caller's promises are those that it asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        add(layout.size());
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        ALLOCATED.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        add(bytes);
        ALLOCATED.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.realloc(pointer, layout, bytes) }
    }
}

/// Runs `check`, which must not allocate more than the size of its input explains.
pub(crate) fn bounded(input: &[u8], check: impl FnOnce(&[u8])) {
    let before = ALLOCATED.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    check(input);
    let peak = PEAK.load(Ordering::Relaxed).saturating_sub(before);
    let bytes_max = BYTES_MAX + BYTES_PER_INPUT_BYTE_MAX * input.len();
    assert!(peak <= bytes_max, "{} bytes of input made it allocate {peak} bytes", input.len());
}
