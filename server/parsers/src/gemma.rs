//! Converts the arguments in Gemma's notation to JSON, one character at a time: keys have no quotes, strings are
//! enclosed in special tokens and have no escapes, and everything else is as in JSON. The parser also accepts keys and
//! strings in JSON notation, and the constants of Python. Any other text without quotes is a string.

use crate::json::{JsonString, NESTING_MAX, Number, Pieces, ValueEffect, escape, quoted};
use crate::literal::is_space;
use crate::scanner::{ScanEvent, Scanner};
use crate::schema::Types;
use crate::typed::partial;

const QUOTE: &str = "<|\"|>";
/// The marker that ends calls. It also closes brackets that are still open.
pub(crate) const CALLS_END: &str = "<tool_call|>";

/// An object that is being parsed.
#[derive(Debug)]
pub(crate) struct GemmaObject {
    /// The open brackets: true for braces of an object, false for brackets of an array.
    open: Vec<bool>,
    state: State,
    scanner: Scanner,
    /// The key or the value without quotes that is being parsed.
    word: String,
    is_comma_due: bool,
    pieces: Pieces,
}

#[derive(Debug)]
enum State {
    /// The parser is before the object.
    Begin,
    /// The parser is in brackets, where a key or a value may begin or the brackets may close.
    Item,
    /// The parser has read a key in quotes or special tokens.
    Colon,
    Value,
    /// The parser has read a value.
    Next,
    Key,
    Word,
    /// The parser is in a text that may be the marker that ends the calls. The text follows a value without quotes (in
    /// `word`), another value, a comma, or an opening brace.
    End {
        read: String,
    },
    /// The parser has read the marker that ends the calls.
    Ended,
    /// The parser is in a string that is enclosed in special tokens.
    Text {
        part: Part,
    },
    /// The parser is in a string in JSON notation.
    Json {
        string: JsonString,
        part: Part,
    },
}

/// The role of a string or a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Key,
    Value,
}

impl Part {
    /// Returns the state for reading a word in this role.
    fn state(self) -> State {
        match self {
            Self::Key => State::Key,
            Self::Value => State::Word,
        }
    }
}

impl GemmaObject {
    /// Creates the parser of an object whose `{` has not been read.
    pub(crate) fn new() -> Self {
        Self {
            open: Vec::new(),
            state: State::Begin,
            scanner: Scanner::default(),
            word: String::new(),
            is_comma_due: false,
            pieces: Pieces::default(),
        }
    }

    /// Reads the next character, and appends to `to` the JSON that later characters cannot change. After
    /// [`ValueEffect::Completes`] or `Invalid`, no more characters may follow; the result is never `AlreadyComplete`.
    pub(crate) fn step(&mut self, letter: char, to: &mut String) -> ValueEffect {
        match &mut self.state {
            State::Json { string, part } => {
                let part = *part;
                let closed = string.step(letter, &mut self.pieces);
                to.push_str(&self.pieces.written);
                self.pieces.written.clear();
                self.pieces.meant.clear();
                if closed { self.text_is_whole(part, to) } else { ValueEffect::Continues }
            }
            State::Text { .. } => self.text(letter, to),
            State::Key if letter == ':' => {
                self.comma(to);
                to.push_str(&quoted(self.word.trim()));
                to.push(':');
                self.go(State::Value)
            }
            State::Word if matches!(letter, ',' | '}' | ']') => {
                self.word_is_whole(to);
                self.between(letter, to)
            }
            State::Word if letter == '<' && !self.word.starts_with('<') => self.end(letter, to),
            State::End { .. } => self.end(letter, to),
            State::Key | State::Word => self.word(letter, to),
            _ => self.between(letter, to),
        }
    }

    /// Ends the text. A value without quotes that was held back may be cut off, so it is emitted as the beginning of a
    /// value.
    pub(crate) fn finish(&mut self, to: &mut String) {
        let is_word = matches!(self.state, State::Word | State::End { .. });
        if is_word && !self.word.is_empty() && !self.word.starts_with('<') {
            self.comma(to);
            to.push_str(&partial(
                &self.word,
                Types { text: true, number: true, boolean: true, null: true, ..Types::default() },
            ));
        }
    }

    /// Returns the number of elementary steps in strings since the last call.
    pub(crate) fn take_work(&mut self) -> usize {
        self.scanner.take_work()
    }

    /// Whether the last character other than whitespace was a comma.
    pub(crate) fn is_after_comma(&self) -> bool {
        matches!(self.state, State::Item) && self.is_comma_due
    }

    /// The number of bytes that were read as the beginning of a token, before the last character showed that they do
    /// not begin one.
    pub(crate) fn token_bytes(&self) -> usize {
        if let State::End { read } = &self.state {
            return read.len() - read.chars().next_back().map_or(0, char::len_utf8);
        }
        let is_token = matches!(self.state, State::Key | State::Word) && self.word.starts_with('<');
        let last = self.word.chars().next_back().map_or(0, char::len_utf8);
        if is_token { self.word.len() - last } else { 0 }
    }

    /// Whether the marker that ends the calls has closed the object.
    pub(crate) fn is_ended(&self) -> bool {
        matches!(self.state, State::Ended)
    }

    /// Reads a character of a text that may be the marker that ends the calls.
    fn end(&mut self, letter: char, to: &mut String) -> ValueEffect {
        let mut read = match &mut self.state {
            State::End { read } => std::mem::take(read),
            _ => String::new(),
        };
        read.push(letter);
        let is_end = read == CALLS_END;
        if !is_end {
            let effect =
                if CALLS_END.starts_with(&read) { ValueEffect::Continues } else { ValueEffect::Invalid };
            self.state = State::End { read };
            return effect;
        }
        if !self.word.is_empty() {
            self.word_is_whole(to);
        }
        while let Some(is_object) = self.open.pop() {
            to.push(if is_object { '}' } else { ']' });
        }
        self.state = State::Ended;
        ValueEffect::Completes
    }

    fn go(&mut self, state: State) -> ValueEffect {
        self.state = state;
        ValueEffect::Continues
    }

    fn comma(&mut self, to: &mut String) {
        if std::mem::take(&mut self.is_comma_due) {
            to.push(',');
        }
    }

    fn in_object(&self) -> bool {
        self.open.last() == Some(&true)
    }

    /// Reads a character outside of strings and words.
    fn between(&mut self, letter: char, to: &mut String) -> ValueEffect {
        if is_space(letter) {
            return ValueEffect::Continues;
        }
        let close = if self.in_object() { '}' } else { ']' };
        match (&self.state, letter) {
            (State::Begin, '{') => self.open(letter, to),
            (State::Item | State::Next, letter) if letter == close => {
                self.open.pop();
                to.push(letter);
                self.state = State::Next;
                if self.open.is_empty() { ValueEffect::Completes } else { ValueEffect::Continues }
            }
            (State::Next, ',') => {
                self.is_comma_due = true;
                self.go(State::Item)
            }
            (State::Colon, ':') => {
                to.push(':');
                self.go(State::Value)
            }
            (State::Next, '<') => {
                self.word.clear();
                self.end(letter, to)
            }
            (State::Item | State::Value, letter) => self.begin(letter, to),
            _ => ValueEffect::Invalid,
        }
    }

    /// Begins a key or a value.
    fn begin(&mut self, letter: char, to: &mut String) -> ValueEffect {
        let is_key = matches!(self.state, State::Item) && self.in_object();
        let part = if is_key { Part::Key } else { Part::Value };
        match letter {
            '{' | '[' if part == Part::Value => self.open(letter, to),
            '"' => {
                self.comma(to);
                to.push('"');
                self.go(State::Json { string: JsonString::default(), part })
            }
            '<' => {
                self.word.clear();
                self.state = part.state();
                self.word(letter, to)
            }
            ',' | ':' | '{' | '}' | '[' | ']' => ValueEffect::Invalid,
            letter => {
                self.word.clear();
                self.word.push(letter);
                self.go(part.state())
            }
        }
    }

    fn open(&mut self, letter: char, to: &mut String) -> ValueEffect {
        if self.open.len() == NESTING_MAX {
            return ValueEffect::Invalid;
        }
        self.comma(to);
        to.push(letter);
        self.open.push(letter == '{');
        self.go(State::Item)
    }

    /// Reads a character of a key or a value without quotes, or of the token that begins a string.
    fn word(&mut self, letter: char, to: &mut String) -> ValueEffect {
        let part = if matches!(self.state, State::Key) { Part::Key } else { Part::Value };
        self.word.push(letter);
        if !self.word.starts_with('<') {
            // Keys and values without quotes contain no `<`, because this character begins a token. Keys contain no
            // brackets, commas or newlines either.
            let is_wrong =
                letter == '<' || part == Part::Key && matches!(letter, ',' | '{' | '}' | '[' | ']' | '\n');
            return if is_wrong { ValueEffect::Invalid } else { ValueEffect::Continues };
        }
        if part == Part::Key && !QUOTE.starts_with(&self.word) && CALLS_END.starts_with(&self.word) {
            // This may be the marker that ends the calls. It can follow a comma or an opening brace, in place of the
            // closing brace.
            let read = std::mem::take(&mut self.word);
            self.is_comma_due = false;
            return self.go(State::End { read });
        }
        if self.word == QUOTE {
            self.comma(to);
            to.push('"');
            return self.go(State::Text { part });
        }
        if QUOTE.starts_with(&self.word) { ValueEffect::Continues } else { ValueEffect::Invalid }
    }

    fn text(&mut self, letter: char, to: &mut String) -> ValueEffect {
        let State::Text { part } = self.state else { return ValueEffect::Invalid };
        self.scanner.push(letter);
        loop {
            match self.scanner.settle(std::iter::once((0, QUOTE))) {
                None => return ValueEffect::Continues,
                Some(ScanEvent::Letter(letter)) => escape(letter, to),
                Some(ScanEvent::Marker(_)) => return self.text_is_whole(part, to),
            }
        }
    }

    fn text_is_whole(&mut self, part: Part, to: &mut String) -> ValueEffect {
        to.push('"');
        self.go(if part == Part::Key { State::Colon } else { State::Next })
    }

    fn word_is_whole(&mut self, to: &mut String) {
        self.comma(to);
        self.state = State::Next;
        match self.word.trim() {
            word @ ("true" | "false" | "null") => to.push_str(word),
            "True" => to.push_str("true"),
            "False" => to.push_str("false"),
            "None" => to.push_str("null"),
            word if Number::is(word) => to.push_str(word),
            word => to.push_str(&quoted(word)),
        }
    }
}
