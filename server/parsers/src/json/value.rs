//! Parses a JSON value one character at a time.

use super::{JsonString, Number, Pieces};
use crate::literal::{Literal, LiteralStep, is_space};

/// Nesting depth of the arguments in a tool call that the model generates.
///
/// If exceeded: the rest is not parsed as arguments and is returned as text.
pub const NESTING_MAX: usize = 128;

/// The effect of a character on a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ValueEffect {
    /// The character belongs to the value, which continues.
    Continues,
    /// The character completes the value.
    Completes,
    /// The value was complete before the character.
    AlreadyComplete,
    /// The value cannot continue with this character.
    Invalid,
}

/// The parser of a value.
#[derive(Debug)]
pub(crate) struct JsonValue {
    /// The open brackets: true for braces of an object, false for brackets of an array.
    open: Vec<bool>,
    state: State,
    pieces: Pieces,
}

#[derive(Debug)]
enum State {
    Value,
    /// The parser has read `[`.
    FirstItem,
    /// The parser has read `{`.
    FirstKey,
    /// The parser has read a comma in an object.
    Key,
    Colon,
    /// The parser has read a value within brackets.
    Next,
    Text {
        string: JsonString,
        part: Part,
    },
    Number(Number),
    Word(Literal),
}

/// The role of a string.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Key,
    Value,
}

impl JsonValue {
    /// Creates the parser of a value, which whitespace may precede.
    pub(crate) fn new() -> Self {
        Self { open: Vec::new(), state: State::Value, pieces: Pieces::default() }
    }

    /// Reads the next character and appends to `to` the part of the value that later characters cannot change, as it
    /// was written except for corrections of malformed strings. After [`ValueEffect::Completes`], `AlreadyComplete` or
    /// `Invalid`, no more characters may follow.
    pub(crate) fn step(&mut self, letter: char, to: &mut String) -> ValueEffect {
        match &mut self.state {
            State::Text { string, part } => {
                let closed = string.step(letter, &mut self.pieces);
                to.push_str(&self.pieces.written);
                self.pieces.written.clear();
                self.pieces.meant.clear();
                if !closed {
                    return ValueEffect::Continues;
                }
                to.push('"');
                if *part == Part::Key {
                    self.state = State::Colon;
                    return ValueEffect::Continues;
                }
                self.value_is_whole()
            }
            State::Number(number) => {
                if let Some(next) = number.next(letter) {
                    *number = next;
                    to.push(letter);
                    return ValueEffect::Continues;
                }
                if !number.is_whole() {
                    return ValueEffect::Invalid;
                }
                if self.value_is_whole() == ValueEffect::Completes {
                    return ValueEffect::AlreadyComplete;
                }
                self.step(letter, to)
            }
            State::Word(word) => match word.step(letter) {
                LiteralStep::Not => ValueEffect::Invalid,
                LiteralStep::More => {
                    to.push(letter);
                    ValueEffect::Continues
                }
                LiteralStep::Whole => {
                    to.push(letter);
                    self.value_is_whole()
                }
            },
            _ => self.between(letter, to),
        }
    }

    /// The text that has been read but not emitted yet.
    pub(crate) fn held(&self) -> String {
        if let State::Text { string, .. } = &self.state { string.held() } else { String::new() }
    }

    /// Reads a character outside of strings, numbers and words.
    fn between(&mut self, letter: char, to: &mut String) -> ValueEffect {
        if is_space(letter) {
            to.push(letter);
            return ValueEffect::Continues;
        }
        let in_object = self.open.last() == Some(&true);
        let effect = match (&self.state, letter) {
            (State::FirstItem, ']') | (State::FirstKey, '}') => self.close(),
            (State::Next, ']') if !in_object => self.close(),
            (State::Next, '}') if in_object => self.close(),
            (State::Next, ',') => self.go(if in_object { State::Key } else { State::Value }),
            (State::Colon, ':') => self.go(State::Value),
            (State::Key | State::FirstKey, '"') => {
                self.go(State::Text { string: JsonString::default(), part: Part::Key })
            }
            (State::Value | State::FirstItem, letter) => self.value(letter),
            _ => ValueEffect::Invalid,
        };
        if effect != ValueEffect::Invalid {
            to.push(letter);
        }
        effect
    }

    fn value(&mut self, letter: char) -> ValueEffect {
        match letter {
            '{' | '[' if self.open.len() < NESTING_MAX => {
                let is_object = letter == '{';
                self.open.push(is_object);
                self.go(if is_object { State::FirstKey } else { State::FirstItem })
            }
            '"' => self.go(State::Text { string: JsonString::default(), part: Part::Value }),
            't' => self.go(State::Word(Literal::new("rue"))),
            'f' => self.go(State::Word(Literal::new("alse"))),
            'n' => self.go(State::Word(Literal::new("ull"))),
            letter => match Number::begin(letter) {
                Some(number) => self.go(State::Number(number)),
                None => ValueEffect::Invalid,
            },
        }
    }

    fn go(&mut self, state: State) -> ValueEffect {
        self.state = state;
        ValueEffect::Continues
    }

    fn close(&mut self) -> ValueEffect {
        self.open.pop();
        self.value_is_whole()
    }

    fn value_is_whole(&mut self) -> ValueEffect {
        self.state = State::Next;
        if self.open.is_empty() { ValueEffect::Completes } else { ValueEffect::Continues }
    }
}
