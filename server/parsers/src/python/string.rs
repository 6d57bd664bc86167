//! Parses a Python string one character at a time: with single or double quotes, triple-quoted or not, with or without
//! escapes.

/// The parser of a string, after its opening quote.
#[derive(Debug)]
pub(crate) struct PythonString {
    quote: char,
    escapes: Escapes,
    state: State,
    /// An incomplete escape, without its backslash.
    escape: Option<String>,
    /// The first half of a surrogate pair.
    high: Option<u32>,
}

/// The interpretation of escapes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Escapes {
    /// Escapes are decoded.
    Read,
    /// Escapes are text, as in raw strings.
    Kept,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Nothing has been read.
    Begun,
    /// A second quote was read: the string is empty, unless a third quote follows, which opens a triple-quoted string.
    Empty,
    Short,
    Long {
        /// The number of preceding quotes, which may close the string.
        quotes: usize,
    },
}

/// The effect of a character on a string.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Text {
    More,
    /// The character closes the string.
    Done,
    /// The string was closed before the character.
    Over,
}

impl PythonString {
    pub(crate) fn new(quote: char, escapes: Escapes) -> Self {
        Self { quote, escapes, state: State::Begun, escape: None, high: None }
    }

    /// Reads the next character, and appends to `to` the part of the string that later characters cannot change.
    pub(crate) fn step(&mut self, letter: char, to: &mut String) -> Text {
        if self.escape.is_some() {
            return self.escaped(letter, to);
        }
        match self.state {
            State::Begun if letter == self.quote => {
                self.state = State::Empty;
                return Text::More;
            }
            State::Begun => self.state = State::Short,
            State::Empty if letter == self.quote => {
                self.state = State::Long { quotes: 0 };
                return Text::More;
            }
            State::Empty => return Text::Over,
            State::Short if letter == self.quote => {
                self.settle_high(to);
                return Text::Done;
            }
            State::Long { quotes } if letter == self.quote => {
                self.state = State::Long { quotes: quotes + 1 };
                if quotes == 2 {
                    self.settle_high(to);
                    return Text::Done;
                }
                return Text::More;
            }
            State::Long { quotes } => {
                self.state = State::Long { quotes: 0 };
                (0..quotes).for_each(|_| self.push(self.quote, to));
            }
            State::Short => {}
        }
        if letter == '\\' && self.escapes == Escapes::Read {
            self.escape = Some(String::new());
        } else {
            self.push(letter, to);
        }
        Text::More
    }

    /// Whether `letter` is the quote that closes a string that is not triple-quoted.
    pub(crate) fn is_closed_by(&self, letter: char) -> bool {
        let is_escaped = self.escape.as_ref().is_some_and(|escape| !escape.starts_with('0'));
        self.state == State::Short && !is_escaped && letter == self.quote
    }

    /// Treats the quote that would have closed the string as text.
    pub(crate) fn keep_quote(&mut self, to: &mut String) {
        // An escape that is still open is an octal code, which the quote ends (see `is_closed_by`).
        if let Some(digits) = self.escape.take() {
            self.octal_code(&digits, to);
        }
        self.push(self.quote, to);
    }

    fn push(&mut self, letter: char, to: &mut String) {
        self.settle_high(to);
        to.push(letter);
    }

    fn settle_high(&mut self, to: &mut String) {
        if self.high.take().is_some() {
            to.push(char::REPLACEMENT_CHARACTER);
        }
    }

    fn escaped(&mut self, letter: char, to: &mut String) -> Text {
        let Some(mut escape) = self.escape.take() else { return Text::More };
        let digits_wanted = match escape.chars().next() {
            None => return self.escape_begins(letter, to),
            Some('0') => return self.octal(escape, letter, to),
            Some('x') => 2,
            Some('u') => 4,
            Some(_) => 8,
        };
        if !letter.is_ascii_hexdigit() {
            // The backslash is text. No escape is open now, so the recursion is one level deep.
            self.push('\\', to);
            to.push_str(&escape);
            return self.step(letter, to);
        }
        escape.push(letter);
        if escape.len() > digits_wanted {
            let code = u32::from_str_radix(&escape[1..], 16).expect("invariant: at most eight digits");
            self.code(code, to);
        } else {
            self.escape = Some(escape);
        }
        Text::More
    }

    /// Reads the next character of an escape that begins with `\0` and may have two more octal digits.
    fn octal(&mut self, mut escape: String, letter: char, to: &mut String) -> Text {
        let is_digit = letter.is_digit(8);
        if is_digit {
            escape.push(letter);
        }
        if is_digit && escape.len() < 3 {
            self.escape = Some(escape);
            return Text::More;
        }
        self.octal_code(&escape, to);
        // No escape is open now, so the recursion is one level deep.
        if is_digit { Text::More } else { self.step(letter, to) }
    }

    fn octal_code(&mut self, digits: &str, to: &mut String) {
        self.code(u32::from_str_radix(digits, 8).expect("invariant: at most three octal digits"), to);
    }

    /// Reads the character after a backslash.
    fn escape_begins(&mut self, letter: char, to: &mut String) -> Text {
        let meant = match letter {
            // Models write `\1` to `\9` as references to groups, so only octal codes that begin with 0 are read.
            'x' | 'u' | 'U' | '0' => {
                self.escape = Some(letter.to_string());
                return Text::More;
            }
            'n' => '\n',
            't' => '\t',
            'r' => '\r',
            'a' => '\u{7}',
            'b' => '\u{8}',
            'v' => '\u{b}',
            'f' => '\u{c}',
            '\\' | '\'' | '"' => letter,
            // A backslash before a newline is a line continuation, which has no content.
            '\n' => return Text::More,
            letter => {
                self.push('\\', to);
                letter
            }
        };
        self.push(meant, to);
        Text::More
    }

    fn code(&mut self, code: u32, to: &mut String) {
        let is_low = (0xDC00..0xE000).contains(&code);
        if let Some(high) = self.high.take_if(|_| is_low) {
            let both = 0x10000 + ((high - 0xD800) << 10) + (code - 0xDC00);
            to.push(char::from_u32(both).expect("invariant: a surrogate pair is a character"));
            return;
        }
        if (0xD800..0xDC00).contains(&code) {
            self.settle_high(to);
            self.high = Some(code);
        } else {
            self.push(char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER), to);
        }
    }
}
