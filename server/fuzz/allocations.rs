//! Limits the memory that a reader may allocate for an input.

use peak_alloc::PeakAlloc;

/// Maximum number of bytes that a check may have allocated at the same time: a constant, plus a multiple of the size of
/// its input. A byte of JSON, such as a digit in an array, becomes a value of 32 bytes. While a list grows, its values
/// may be in memory twice, and a check compares several lists.
const BYTES_MAX: usize = 1 << 20;
const BYTES_PER_INPUT_BYTE_MAX: usize = 512;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

/// Runs `check`, and panics if `check` has more memory allocated at the same time than the size of its input allows.
pub(crate) fn bounded(input: &[u8], check: impl FnOnce(&[u8])) {
    let before = ALLOCATOR.current_usage();
    ALLOCATOR.reset_peak_usage();
    check(input);
    let peak = ALLOCATOR.peak_usage().saturating_sub(before);
    let bytes_max = BYTES_MAX + BYTES_PER_INPUT_BYTE_MAX * input.len();
    assert!(
        peak <= bytes_max,
        "the check allocated {peak} bytes for {} bytes of input (limit: {bytes_max} bytes)",
        input.len()
    );
}
