//! A JSON string a character at a time, both as it was written and as it is meant. What models get wrong in
//! strings, and what no reader would accept, is put right without a loss: control characters are escaped, a
//! backslash that escapes nothing is one, half of a surrogate pair is U+FFFD.

use super::escape;

/// A JSON string from its opening quote on.
#[derive(Debug, Default)]
pub(crate) struct JsonString {
    /// An escape that is not whole yet.
    escape: String,
    /// The first half of a surrogate pair.
    high: Option<u32>,
}

/// What is certain of a string so far.
#[derive(Debug, Default)]
pub(crate) struct Pieces {
    /// As it stands between the quotes of a JSON string.
    pub(crate) written: String,
    /// What it means.
    pub(crate) meant: String,
}

impl Pieces {
    fn push(&mut self, written: &str, meant: char) {
        self.written.push_str(written);
        self.meant.push(meant);
    }

    fn plain(&mut self, letter: char) {
        escape(letter, &mut self.written);
        self.meant.push(letter);
    }
}

impl JsonString {
    /// Takes the next character, and says whether it was the closing quote.
    pub(crate) fn step(&mut self, letter: char, to: &mut Pieces) -> bool {
        if self.escape.is_empty() {
            match letter {
                '"' => {
                    self.settle_high(to);
                    return true;
                }
                '\\' => self.escape.push(letter),
                letter => {
                    self.settle_high(to);
                    to.plain(letter);
                }
            }
            return false;
        }
        if self.escape.len() == 1 {
            return self.escaped(letter, to);
        }
        if letter.is_ascii_hexdigit() {
            self.escape.push(letter);
            if self.escape.len() == 6 {
                self.code(to);
            }
            return false;
        }
        self.not_an_escape(letter, to)
    }

    /// What has been read and not been passed on, as it was written.
    pub(crate) fn held(&self) -> String {
        let high = self.high.map(|code| format!("\\u{code:04x}")).unwrap_or_default();
        high + &self.escape
    }

    fn escaped(&mut self, letter: char, to: &mut Pieces) -> bool {
        let (written, meant) = match letter {
            '"' => ("\\\"", '"'),
            '\\' => ("\\\\", '\\'),
            '/' => ("\\/", '/'),
            'b' => ("\\b", '\u{8}'),
            'f' => ("\\f", '\u{c}'),
            'n' => ("\\n", '\n'),
            'r' => ("\\r", '\r'),
            't' => ("\\t", '\t'),
            'u' => {
                self.escape.push('u');
                return false;
            }
            letter => return self.not_an_escape(letter, to),
        };
        self.escape.clear();
        self.settle_high(to);
        to.push(written, meant);
        false
    }

    /// The backslash was meant as one.
    fn not_an_escape(&mut self, letter: char, to: &mut Pieces) -> bool {
        self.settle_high(to);
        for letter in std::mem::take(&mut self.escape).chars() {
            to.plain(letter);
        }
        // At most one level deep: no escape is open any more.
        self.step(letter, to)
    }

    /// Four digits of an escape are there.
    fn code(&mut self, to: &mut Pieces) {
        let written = std::mem::take(&mut self.escape);
        let code = u32::from_str_radix(&written[2..], 16).expect("invariant: four hexadecimal digits");
        let is_low = (0xDC00..0xE000).contains(&code);
        if let Some(high) = self.high.take_if(|_| is_low) {
            let both = 0x10000 + ((high - 0xD800) << 10) + (code - 0xDC00);
            let meant = char::from_u32(both).expect("invariant: a surrogate pair is a character");
            to.push(&format!("\\u{high:04x}{written}"), meant);
            return;
        }
        self.settle_high(to);
        match char::from_u32(code) {
            Some(meant) => to.push(&written, meant),
            None if is_low => to.plain(char::REPLACEMENT_CHARACTER),
            None => self.high = Some(code),
        }
    }

    fn settle_high(&mut self, to: &mut Pieces) {
        if self.high.take().is_some() {
            to.plain(char::REPLACEMENT_CHARACTER);
        }
    }
}
