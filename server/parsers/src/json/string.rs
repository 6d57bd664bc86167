//! Parses a JSON string one character at a time, and returns it both as written and decoded. The parser corrects common
//! mistakes in generated strings, which other JSON parsers reject: it escapes control characters, escapes a backslash
//! that is not part of an escape, and replaces an unpaired surrogate with U+FFFD.

/// The parser of a JSON string, after its opening quote.
#[derive(Debug, Default)]
pub(crate) struct JsonString {
    /// An incomplete escape.
    escape: String,
    /// The first half of a surrogate pair.
    high: Option<u32>,
}

/// The part of a string that is certain so far.
#[derive(Debug, Default)]
pub(crate) struct Pieces {
    /// The text between the quotes of a JSON string.
    pub(crate) written: String,
    /// The decoded text.
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
    /// Reads the next character. Returns true if it is the closing quote.
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

    /// The text that has been read but not emitted yet. The hexadecimal digits of a surrogate are in lower case.
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

    /// Treats the incomplete escape as text, and reads the character after it.
    fn not_an_escape(&mut self, letter: char, to: &mut Pieces) -> bool {
        self.settle_high(to);
        for letter in std::mem::take(&mut self.escape).chars() {
            to.plain(letter);
        }
        // The recursion is at most one level deep, because no escape is open now.
        self.step(letter, to)
    }

    /// Completes an escape with four hexadecimal digits.
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

/// Appends `letter` to `text`, escaped for a JSON string.
pub(crate) fn escape(letter: char, text: &mut String) {
    match letter {
        '"' => text.push_str("\\\""),
        '\\' => text.push_str("\\\\"),
        '\n' => text.push_str("\\n"),
        '\r' => text.push_str("\\r"),
        '\t' => text.push_str("\\t"),
        letter if u32::from(letter) < 0x20 => {
            let code = u32::from(letter);
            text.push_str("\\u00");
            for digit in [code >> 4, code & 15] {
                text.push(char::from_digit(digit, 16).expect("invariant: a digit is below 16"));
            }
        }
        letter => text.push(letter),
    }
}

pub(crate) fn quoted(text: &str) -> String {
    let mut json = String::with_capacity(text.len() + 2);
    json.push('"');
    for letter in text.chars() {
        escape(letter, &mut json);
    }
    json.push('"');
    json
}
