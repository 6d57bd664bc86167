//! Stores the bytes that each token represents, and whether the token is special.

/// The bytes of every token, and which tokens are special.
#[derive(Debug, Default)]
pub(crate) struct Vocabulary {
    /// The bytes of all tokens, one after the other.
    bytes: Vec<u8>,
    /// The position at which the bytes of each token end.
    ends: Vec<usize>,
    special: Vec<bool>,
}

impl Vocabulary {
    /// Adds the next token.
    pub(crate) fn push(&mut self, bytes: &[u8], special: bool) {
        self.bytes.extend_from_slice(bytes);
        self.ends.push(self.bytes.len());
        self.special.push(special);
    }

    /// The number of tokens.
    pub(crate) fn len(&self) -> usize {
        self.ends.len()
    }

    /// Returns the bytes of a token, or an empty slice for a token that does not exist.
    pub(crate) fn bytes(&self, token: u32) -> &[u8] {
        let index = token as usize;
        let Some(&end) = self.ends.get(index) else { return &[] };
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        &self.bytes[start..end]
    }

    /// Whether a token, such as the end of a turn, does not represent text.
    pub(crate) fn is_special(&self, token: u32) -> bool {
        self.special.get(token as usize).copied().unwrap_or(false)
    }
}

/// The byte that a character of GPT-2's byte-level alphabet represents. That alphabet maps every byte to a visible
/// character: to the character with the same code point if that is visible, and otherwise to a character from U+0100
/// on.
pub(crate) fn byte_of_char(c: char) -> Option<u8> {
    let code = u32::from(c);
    match code {
        0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => Some(code as u8),
        0x100..=0x120 => Some((code - 0x100) as u8),
        0x121..=0x142 => Some((code - 0x121 + 0x7f) as u8),
        0x143 => Some(0xad),
        _ => None,
    }
}

/// The bytes of a token that is spelled in the byte-level alphabet. Other tokens are returned as their UTF-8 bytes.
pub(crate) fn byte_level_bytes(text: &str) -> Vec<u8> {
    text.chars().map(byte_of_char).collect::<Option<_>>().unwrap_or_else(|| text.as_bytes().to_vec())
}

/// The byte that a fallback token such as `<0x0A>` represents.
pub(crate) fn fallback_byte(text: &str) -> Option<u8> {
    let digits = text.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() != 2 || !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return None;
    }
    u8::from_str_radix(digits, 16).ok()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn the_byte_level_alphabet_has_one_character_for_each_byte() {
        let bytes: BTreeSet<u8> = (0..0x200).filter_map(char::from_u32).filter_map(byte_of_char).collect();
        assert_eq!(bytes.len(), 256);
        assert_eq!((0..0x10000).filter_map(char::from_u32).filter_map(byte_of_char).count(), 256);
        assert_eq!(byte_level_bytes("Ġhello"), b" hello");
        assert_eq!(byte_level_bytes("Ċ"), b"\n");
        assert_eq!(byte_level_bytes("ł"), [0xa0]);
        assert_eq!(byte_level_bytes("Ń"), [0xad]);
        assert_eq!(byte_level_bytes("<｜end｜>"), "<｜end｜>".as_bytes());
    }

    #[test]
    fn only_fallback_tokens_have_a_byte() {
        assert_eq!(fallback_byte("<0x0A>"), Some(10));
        assert_eq!(fallback_byte("<0xff>"), Some(255));
        for text in ["<0x0>", "<0x0AB>", "<0xG0>", "0x0A", "<0x+A>", ""] {
            assert_eq!(fallback_byte(text), None, "{text}");
        }
    }
}
