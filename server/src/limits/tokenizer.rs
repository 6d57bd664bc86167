//! The memory that tokenizers may use. Before a text is tokenized, it claims the memory of its worst case. A text that
//! does not fit waits for those that are being tokenized.

use std::sync::{Condvar, Mutex, PoisonError};

use server_text::ENCODE_MEMORY_PER_BYTE;

/// Size in bytes up to which texts are tokenized without a claim: the number of threads limits their memory.
pub(crate) const UNCLAIMED_BYTES_MAX: usize = 64 << 10;

/// The memory that all texts that are being tokenized may use together.
#[derive(Debug)]
pub(crate) struct TokenizerMemory {
    text_bytes_max: usize,
    /// Bytes of the texts that are being tokenized.
    text_bytes: Mutex<usize>,
    returned: Condvar,
}

/// The error for a text whose tokenization could need more than all of the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TextTooLong {
    /// Size in bytes of the longest text that can be tokenized.
    pub(crate) bytes_max: usize,
}

/// The memory that one text has claimed. Dropping it returns the memory.
#[derive(Debug)]
pub(crate) struct TextClaim<'a> {
    memory: &'a TokenizerMemory,
    bytes: usize,
}

impl TokenizerMemory {
    /// Creates a budget of this many bytes. At least one text of [`UNCLAIMED_BYTES_MAX`] fits.
    pub(crate) fn new(bytes: usize) -> Self {
        let text_bytes_max = (bytes / ENCODE_MEMORY_PER_BYTE).max(UNCLAIMED_BYTES_MAX);
        Self { text_bytes_max, text_bytes: Mutex::default(), returned: Condvar::new() }
    }

    /// Claims memory for a text of `bytes` bytes, and waits until other texts have returned enough.
    ///
    /// # Errors
    /// The text needs more than all of the memory.
    pub(crate) fn claim(&self, bytes: usize) -> Result<TextClaim<'_>, TextTooLong> {
        if bytes > self.text_bytes_max {
            return Err(TextTooLong { bytes_max: self.text_bytes_max });
        }
        let bytes = if bytes <= UNCLAIMED_BYTES_MAX { 0 } else { bytes };
        if bytes > 0 {
            let claimed = self.text_bytes.lock().unwrap_or_else(PoisonError::into_inner);
            let is_full = |claimed: &mut usize| *claimed + bytes > self.text_bytes_max;
            let claimed = self.returned.wait_while(claimed, is_full);
            *claimed.unwrap_or_else(PoisonError::into_inner) += bytes;
        }
        Ok(TextClaim { memory: self, bytes })
    }
}

impl Drop for TextClaim<'_> {
    fn drop(&mut self) {
        if self.bytes > 0 {
            *self.memory.text_bytes.lock().unwrap_or_else(PoisonError::into_inner) -= self.bytes;
            self.memory.returned.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn concurrent_texts_never_exceed_the_tokenizer_memory() {
        let bytes_max = 4 * UNCLAIMED_BYTES_MAX;
        let memory = TokenizerMemory::new(bytes_max * ENCODE_MEMORY_PER_BYTE);
        let (present, peak) = (AtomicUsize::new(0), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for thread in 1..=8 {
                let (memory, present, peak) = (&memory, &present, &peak);
                scope.spawn(move || {
                    let bytes = UNCLAIMED_BYTES_MAX + thread * 20_000;
                    for _ in 0..200 {
                        let _claim = memory.claim(bytes).unwrap();
                        peak.fetch_max(present.fetch_add(bytes, Ordering::SeqCst) + bytes, Ordering::SeqCst);
                        std::thread::yield_now();
                        present.fetch_sub(bytes, Ordering::SeqCst);
                    }
                });
            }
        });
        assert!(peak.load(Ordering::SeqCst) <= bytes_max);
        assert_eq!(*memory.text_bytes.lock().unwrap(), 0);
    }

    #[test]
    fn a_text_that_can_never_fit_is_rejected_at_once_and_a_short_one_needs_no_claim() {
        let memory = TokenizerMemory::new(1 << 30);
        let bytes_max = (1 << 30) / ENCODE_MEMORY_PER_BYTE;
        assert_eq!(memory.claim(bytes_max + 1).unwrap_err(), TextTooLong { bytes_max });
        let _all = memory.claim(bytes_max).unwrap();
        memory.claim(UNCLAIMED_BYTES_MAX).unwrap();
    }
}
