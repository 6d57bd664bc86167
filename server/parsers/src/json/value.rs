//! A JSON value a character at a time.

use super::{JsonString, NESTING_MAX, Number, Pieces};
use crate::literal::{Literal, Matched, is_space};

/// What a character made of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// It belongs to the value, which goes on.
    More,
    /// It belongs to the value, which is whole.
    Done,
    /// The value was whole before it.
    Over,
    /// There is no value that goes on like this.
    Bad,
}

/// A value on its way.
#[derive(Debug)]
pub(crate) struct JsonValue {
    /// The brackets that are open: true for those of an object.
    open: Vec<bool>,
    state: State,
    pieces: Pieces,
}

#[derive(Debug)]
enum State {
    Value,
    /// After `[`.
    FirstItem,
    /// After `{`.
    FirstKey,
    /// After a comma in an object.
    Key,
    Colon,
    /// After a value within brackets.
    Next,
    Text {
        string: JsonString,
        part: Part,
    },
    Number(Number),
    Word(Literal),
}

/// What a string is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Key,
    Value,
}

impl JsonValue {
    /// Nothing of it has come. Space may precede it.
    pub(crate) fn new() -> Self {
        Self { open: Vec::new(), state: State::Value, pieces: Pieces::default() }
    }

    /// Takes the next character, and appends to `to` what is certain of the value as it was written. After
    /// [`Verdict::Done`], `Over` or `Bad` nothing may follow.
    pub(crate) fn step(&mut self, letter: char, to: &mut String) -> Verdict {
        match &mut self.state {
            State::Text { string, part } => {
                let closed = string.step(letter, &mut self.pieces);
                to.push_str(&self.pieces.written);
                self.pieces.written.clear();
                self.pieces.meant.clear();
                if !closed {
                    return Verdict::More;
                }
                to.push('"');
                if *part == Part::Key {
                    self.state = State::Colon;
                    return Verdict::More;
                }
                self.value_is_whole()
            }
            State::Number(number) => {
                if let Some(next) = number.next(letter) {
                    *number = next;
                    to.push(letter);
                    return Verdict::More;
                }
                if !number.is_whole() {
                    return Verdict::Bad;
                }
                if self.value_is_whole() == Verdict::Done {
                    return Verdict::Over;
                }
                self.step(letter, to)
            }
            State::Word(word) => match word.step(letter) {
                Matched::Not => Verdict::Bad,
                Matched::More => {
                    to.push(letter);
                    Verdict::More
                }
                Matched::Whole => {
                    to.push(letter);
                    self.value_is_whole()
                }
            },
            _ => self.between(letter, to),
        }
    }

    /// What has been read and not been passed on.
    pub(crate) fn held(&self) -> String {
        if let State::Text { string, .. } = &self.state { string.held() } else { String::new() }
    }

    /// A character outside of strings, numbers and words.
    fn between(&mut self, letter: char, to: &mut String) -> Verdict {
        if is_space(letter) {
            to.push(letter);
            return Verdict::More;
        }
        let in_object = self.open.last() == Some(&true);
        let verdict = match (&self.state, letter) {
            (State::FirstItem, ']') | (State::FirstKey, '}') => self.close(),
            (State::Next, ']') if !in_object => self.close(),
            (State::Next, '}') if in_object => self.close(),
            (State::Next, ',') => self.go(if in_object { State::Key } else { State::Value }),
            (State::Colon, ':') => self.go(State::Value),
            (State::Key | State::FirstKey, '"') => {
                self.go(State::Text { string: JsonString::default(), part: Part::Key })
            }
            (State::Value | State::FirstItem, letter) => self.value(letter),
            _ => Verdict::Bad,
        };
        if verdict != Verdict::Bad {
            to.push(letter);
        }
        verdict
    }

    fn value(&mut self, letter: char) -> Verdict {
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
                None => Verdict::Bad,
            },
        }
    }

    fn go(&mut self, state: State) -> Verdict {
        self.state = state;
        Verdict::More
    }

    fn close(&mut self) -> Verdict {
        self.open.pop();
        self.value_is_whole()
    }

    fn value_is_whole(&mut self) -> Verdict {
        self.state = State::Next;
        if self.open.is_empty() { Verdict::Done } else { Verdict::More }
    }
}
