//! The memory of JSON values, estimated from their text before they are parsed.

use std::io::Write;

/// Memory for the text and the parsed JSON values of a request body, with the default `--max-body-bytes` and
/// `--max-buffered-body-bytes`. If `--max-body-bytes` is above 32 MiB, the limit is twice the value of this flag. The
/// limit is never more than half of the difference between `--max-buffered-body-bytes` and `--max-body-bytes`, so that
/// there is also memory for the items that the response retains. The server estimates the memory from the length of the
/// text and the numbers of objects, arrays and elements.
///
/// If exceeded: 400, `too_many_values`.
const VALUES_BYTES_MAX: usize = 64 << 20;

/// Returns the maximum memory in bytes for the values of a body of at most `body_bytes_max` bytes, if all bodies and
/// their values together may take `all_bytes_max` bytes.
pub(super) fn values_bytes_max(body_bytes_max: usize, all_bytes_max: usize) -> usize {
    VALUES_BYTES_MAX
        .max(body_bytes_max.saturating_mul(2))
        .min(all_bytes_max.saturating_sub(body_bytes_max) / 2)
}

/// Memory in bytes of an object. It includes room for four members and their index, and the struct into which an input
/// item of a response is parsed.
const OBJECT_BYTES: usize = 512;
/// Memory in bytes of an array, with room for four elements.
const ARRAY_BYTES: usize = 384;
/// Memory in bytes of each element or member after the first.
const ELEMENT_BYTES: usize = 128;

/// Estimates the memory of JSON values from their text, which may arrive in pieces or be written by a serializer.
///
/// A byte of text can become more than 60 bytes of values, so the size of a body does not limit the memory of the
/// request. A request is parsed into two representations, so its peak memory is about twice the estimate.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ValuesMemory {
    bytes: usize,
    is_in_string: bool,
    is_escaped: bool,
}

impl ValuesMemory {
    /// Adds the next piece of the text, which need not be valid JSON.
    pub(crate) fn add(&mut self, mut text: &[u8]) {
        self.bytes = self.bytes.saturating_add(text.len());
        while !text.is_empty() {
            let rest = if std::mem::take(&mut self.is_escaped) {
                &text[1..]
            } else if self.is_in_string {
                self.skip_string(text)
            } else {
                self.count_values(text)
            };
            text = rest;
        }
    }

    /// Skips the text up to and including the quote that ends the string or the backslash that escapes a character.
    /// Returns the rest.
    fn skip_string<'t>(&mut self, text: &'t [u8]) -> &'t [u8] {
        let Some(end) = memchr::memchr2(b'"', b'\\', text) else { return &[] };
        (self.is_in_string, self.is_escaped) = (text[end] == b'\\', text[end] == b'\\');
        &text[end + 1..]
    }

    /// Counts the values up to the next string. Returns the rest, which begins within that string.
    fn count_values<'t>(&mut self, text: &'t [u8]) -> &'t [u8] {
        let end = memchr::memchr(b'"', text);
        self.is_in_string = end.is_some();
        let (values, rest) = end.map_or((text, &[][..]), |end| (&text[..end], &text[end + 1..]));
        for (byte, bytes) in [(b'{', OBJECT_BYTES), (b'[', ARRAY_BYTES), (b',', ELEMENT_BYTES)] {
            let count = memchr::memchr_iter(byte, values).count();
            self.bytes = self.bytes.saturating_add(count.saturating_mul(bytes));
        }
        rest
    }

    /// Returns the estimated size in bytes of the text so far and of its values.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

/// The memory of a parsed value is estimated by serializing the value into this writer.
impl Write for ValuesMemory {
    fn write(&mut self, text: &[u8]) -> std::io::Result<usize> {
        self.add(text);
        Ok(text.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use rand::rngs::StdRng;
    use rand::{RngExt as _, SeedableRng as _};
    use serde_json::{Value, json};

    use super::*;

    fn estimate(text: &[u8]) -> usize {
        let mut memory = ValuesMemory::default();
        memory.add(text);
        memory.bytes()
    }

    #[test]
    fn a_text_of_the_largest_size_has_memory_for_its_values() {
        const MIB: usize = 1 << 20;
        assert_eq!(values_bytes_max(32 * MIB, 1024 * MIB), 64 * MIB);
        assert_eq!(values_bytes_max(8 * MIB, 1024 * MIB), 64 * MIB);
        assert_eq!(values_bytes_max(128 * MIB, 1024 * MIB), 256 * MIB);
        assert_eq!(values_bytes_max(64 * MIB, 256 * MIB), 96 * MIB);
    }

    #[test]
    fn objects_arrays_and_elements_count_and_the_contents_of_strings_do_not() {
        let text = json!({"a": [1, 2, 3], "[{,\\\"[{,\\": {"b": "\"{[,"}}).to_string();
        assert_eq!(
            estimate(text.as_bytes()),
            text.len() + 2 * OBJECT_BYTES + ARRAY_BYTES + 3 * ELEMENT_BYTES
        );
    }

    #[test]
    fn the_division_into_pieces_does_not_change_the_estimate() {
        let mut random = StdRng::seed_from_u64(7);
        let texts = ["\\", "\"", "{", "[", ",", "x", "é", "0", ":", "]", "}"];
        for _ in 0..1000 {
            let text: String = (0..40).map(|_| texts[random.random_range(0..texts.len())]).collect();
            let cut = random.random_range(0..=text.len());
            let mut memory = ValuesMemory::default();
            memory.add(&text.as_bytes()[..cut]);
            memory.add(&text.as_bytes()[cut..]);
            assert_eq!(memory.bytes(), estimate(text.as_bytes()), "{text} cut at {cut}");
        }
    }

    /// Returns a lower bound for the memory of a parsed value: its own size and the sizes of everything in it.
    fn occupied(value: &Value) -> usize {
        let within = match value {
            Value::Array(elements) => elements.iter().map(occupied).sum(),
            Value::Object(members) => {
                members.iter().map(|(name, value)| 32 + name.len() + occupied(value)).sum()
            }
            Value::String(text) => text.len(),
            _ => 0,
        };
        size_of::<Value>() + within
    }

    #[test]
    fn the_estimate_is_at_least_the_size_of_the_values() {
        let values = [json!([]), json!({}), json!({"": 0}), json!([0]), json!([[], {}, "", 0, null])];
        for value in values {
            let many = Value::Array(vec![value; 100]);
            let text = many.to_string();
            assert!(estimate(text.as_bytes()) >= occupied(&many), "{text}");
        }
    }
}
