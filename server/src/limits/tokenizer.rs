//! The memory that tokenizers may use. Before the server tokenizes a text of more than 64 KiB, it reserves the memory
//! that the text needs in the worst case. If too little memory is left, the text waits until enough other texts have
//! been tokenized.

use server_text::ENCODE_MEMORY_PER_BYTE;

use super::waiting::{AboveBudget, WaitingBudget, WaitingReservation};

/// Maximum size in bytes of a text that is tokenized without a reservation. The number of threads limits the memory of
/// such texts.
pub(crate) const UNRESERVED_BYTES_MAX: usize = 64 << 10;

/// The memory that texts share while they are tokenized.
#[derive(Debug)]
pub(crate) struct TokenizerMemory {
    /// The budget for the sizes of the texts in bytes.
    text_bytes: WaitingBudget,
}

impl TokenizerMemory {
    /// Creates a budget of this many bytes, but with room for at least one text of [`UNRESERVED_BYTES_MAX`] bytes.
    pub(crate) fn new(bytes: usize) -> Self {
        let text_bytes_max = (bytes / ENCODE_MEMORY_PER_BYTE).max(UNRESERVED_BYTES_MAX);
        Self { text_bytes: WaitingBudget::new(text_bytes_max) }
    }

    /// Reserves the memory for a text of `bytes` bytes, and blocks the thread until enough memory is free. Texts of up
    /// to [`UNRESERVED_BYTES_MAX`] bytes need no reservation.
    ///
    /// # Errors
    /// The text could need more memory than the whole budget. The error contains the size of the longest text that can
    /// be tokenized.
    pub(crate) fn reserve(&self, bytes: usize) -> Result<WaitingReservation<'_>, AboveBudget> {
        self.text_bytes.reserve(if bytes <= UNRESERVED_BYTES_MAX { 0 } else { bytes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_that_can_never_fit_is_rejected_at_once_and_a_short_one_needs_no_reservation() {
        let memory = TokenizerMemory::new(1 << 30);
        let max = (1 << 30) / ENCODE_MEMORY_PER_BYTE;
        assert_eq!(memory.reserve(max + 1).unwrap_err(), AboveBudget { max });
        let _all = memory.reserve(max).unwrap();
        memory.reserve(UNRESERVED_BYTES_MAX).unwrap();
    }
}
