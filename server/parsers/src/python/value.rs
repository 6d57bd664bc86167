//! Parses a Python value one character at a time and writes JSON. Comments, expressions and concatenated strings are
//! not supported.

use super::number;
use super::string::{Escapes, PythonString, Text};
use crate::json::{NESTING_MAX, ValueEffect, escape, quoted};
use crate::literal::is_space;
use crate::schema::Types;

/// The parser of a value.
#[derive(Debug)]
pub(crate) struct PythonValue {
    open: Vec<Frame>,
    state: State,
    /// The types that the tool allows for the whole value, which do not apply to its parts.
    types: Types,
    /// Converts a string to JSON of a type that the tool allows, if the tool does not allow strings.
    convert: fn(&str, Types) -> String,
    /// The text that will be emitted when it is complete.
    held: String,
    /// Whether a comma is due before the next item in the brackets.
    is_comma_due: bool,
    /// A buffer that is reused to avoid allocations.
    meant: String,
}

/// A bracket that is still open.
#[derive(Debug)]
struct Frame {
    close: char,
    /// Whether the brackets contain an item.
    any: bool,
}

#[derive(Debug)]
enum State {
    Value,
    /// The parser is in brackets, where a value or a key may begin or the brackets may close.
    Item,
    Colon,
    /// The parser has read a value in brackets.
    Next,
    Text {
        string: PythonString,
        role: Role,
    },
    /// The parser is in a number, a word, or the prefix of a string.
    Word {
        part: Part,
    },
}

/// The role of a number or a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Key,
    Value,
}

/// The role of a string.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Key,
    Text,
    /// The string is the value, but the tool does not allow strings. It is converted when it is complete.
    Held,
}

/// The context of the end of a string.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ClosingContext {
    /// The string is the whole value.
    Argument,
    /// The string is a key of a dictionary.
    Key,
    /// The string is in brackets that this character closes.
    Item(char),
}

impl PythonValue {
    /// Creates the parser of a value, which whitespace may precede.
    pub(crate) fn new(types: Types, convert: fn(&str, Types) -> String) -> Self {
        Self {
            open: Vec::new(),
            state: State::Value,
            types,
            convert,
            held: String::new(),
            is_comma_due: false,
            meant: String::new(),
        }
    }

    /// Reads the next character, and appends to `to`, as JSON, the part of the value that later characters cannot
    /// change. After [`ValueEffect::Completes`], `AlreadyComplete` or `Invalid`, no more characters may follow.
    pub(crate) fn step(&mut self, letter: char, to: &mut String) -> ValueEffect {
        match &mut self.state {
            State::Text { string, role } => {
                let role = *role;
                let end = string.step(letter, &mut self.meant);
                self.text(role, to);
                match end {
                    Text::More => ValueEffect::Continues,
                    Text::Done => self.text_is_whole(role, to),
                    Text::Over => match self.text_is_whole(role, to) {
                        ValueEffect::Completes => ValueEffect::AlreadyComplete,
                        _ => self.step(letter, to),
                    },
                }
            }
            State::Word { part } => {
                let part = *part;
                if letter.is_alphanumeric() || matches!(letter, '_' | '.' | '+' | '-') {
                    self.held.push(letter);
                    return ValueEffect::Continues;
                }
                if matches!(letter, '"' | '\'') {
                    return self.prefixed(letter, part, to);
                }
                match self.word_is_whole(part, to) {
                    ValueEffect::Completes => ValueEffect::AlreadyComplete,
                    ValueEffect::Continues => self.step(letter, to),
                    effect => effect,
                }
            }
            _ => self.between(letter, to),
        }
    }

    /// Ends the text. Emits a word that was held back if it is a number, or the beginning of `true` or `false`.
    pub(crate) fn finish(&mut self, to: &mut String) {
        if !matches!(self.state, State::Word { part: Part::Value }) {
            return;
        }
        if number(&self.held).is_some() {
            self.word_is_whole(Part::Value, to);
        } else if ["True", "False", "true", "false"].iter().any(|word| word.starts_with(&self.held)) {
            self.comma(to);
            to.push_str(&self.held.to_ascii_lowercase());
        }
    }

    /// Returns the context of the string that `letter` would close, or `None` if it does not close a string.
    pub(crate) fn closing(&self, letter: char) -> Option<ClosingContext> {
        let State::Text { string, role } = &self.state else { return None };
        let closing = match (self.open.last(), role) {
            (None, _) => ClosingContext::Argument,
            (Some(_), Role::Key) => ClosingContext::Key,
            (Some(frame), _) => ClosingContext::Item(frame.close),
        };
        string.is_closed_by(letter).then_some(closing)
    }

    /// Treats the quote that would have closed a string as text.
    pub(crate) fn keep_quote(&mut self, to: &mut String) {
        let State::Text { string, role } = &mut self.state else { return };
        let role = *role;
        string.keep_quote(&mut self.meant);
        self.text(role, to);
    }

    /// Whether the last character other than whitespace was a comma or an opening bracket.
    pub(crate) fn is_before_item(&self) -> bool {
        matches!(self.state, State::Item)
    }

    fn comma(&mut self, to: &mut String) {
        if std::mem::take(&mut self.is_comma_due) {
            to.push(',');
        }
    }

    fn go(&mut self, state: State) -> ValueEffect {
        self.state = state;
        ValueEffect::Continues
    }

    /// Reads a character outside of strings and words.
    fn between(&mut self, letter: char, to: &mut String) -> ValueEffect {
        if is_space(letter) {
            return ValueEffect::Continues;
        }
        let close = self.open.last().map(|frame| frame.close);
        match (&self.state, letter) {
            (State::Item | State::Next, letter) if close == Some(letter) => {
                self.open.pop();
                to.push(if letter == '}' { '}' } else { ']' });
                self.value_is_whole()
            }
            (State::Next, ',') => self.go(State::Item),
            (State::Colon, ':') => {
                to.push(':');
                self.go(State::Value)
            }
            (State::Item, letter) => {
                if let Some(frame) = self.open.last_mut() {
                    self.is_comma_due = std::mem::replace(&mut frame.any, true);
                }
                if close == Some('}') { self.key(letter, to) } else { self.value(letter, to) }
            }
            (State::Value, letter) => self.value(letter, to),
            _ => ValueEffect::Invalid,
        }
    }

    fn key(&mut self, letter: char, to: &mut String) -> ValueEffect {
        if matches!(letter, '"' | '\'') {
            self.comma(to);
            to.push('"');
            return self
                .go(State::Text { string: PythonString::new(letter, Escapes::Read), role: Role::Key });
        }
        self.word(letter, Part::Key)
    }

    fn value(&mut self, letter: char, to: &mut String) -> ValueEffect {
        let close = match letter {
            '"' | '\'' => return self.string(letter, Escapes::Read, to),
            '{' => '}',
            '[' => ']',
            '(' => ')',
            letter => return self.word(letter, Part::Value),
        };
        if self.open.len() == NESTING_MAX {
            return ValueEffect::Invalid;
        }
        self.comma(to);
        to.push(if close == '}' { '{' } else { '[' });
        self.open.push(Frame { close, any: false });
        self.go(State::Item)
    }

    fn string(&mut self, quote: char, escapes: Escapes, to: &mut String) -> ValueEffect {
        let takes_text = self.types.is_unknown() || self.types.text;
        let role = if self.open.is_empty() && !takes_text { Role::Held } else { Role::Text };
        if role == Role::Text {
            self.comma(to);
            to.push('"');
        }
        self.go(State::Text { string: PythonString::new(quote, escapes), role })
    }

    fn word(&mut self, letter: char, part: Part) -> ValueEffect {
        if !(letter.is_alphanumeric() || matches!(letter, '_' | '.' | '+' | '-')) {
            return ValueEffect::Invalid;
        }
        self.held.clear();
        self.held.push(letter);
        self.go(State::Word { part })
    }

    /// Reads a quote after a word. The word may be the prefix of a string.
    fn prefixed(&mut self, quote: char, part: Part, to: &mut String) -> ValueEffect {
        let prefix = self.held.to_ascii_lowercase();
        if part == Part::Key || !matches!(prefix.as_str(), "r" | "b" | "u" | "f" | "rb" | "br") {
            return ValueEffect::Invalid;
        }
        self.held.clear();
        let escapes = if prefix.contains('r') { Escapes::Kept } else { Escapes::Read };
        self.string(quote, escapes, to)
    }

    /// Emits the decoded text of a string, or holds it back.
    fn text(&mut self, role: Role, to: &mut String) {
        if role == Role::Held {
            self.held.push_str(&self.meant);
        } else {
            self.meant.chars().for_each(|letter| escape(letter, to));
        }
        self.meant.clear();
    }

    fn text_is_whole(&mut self, role: Role, to: &mut String) -> ValueEffect {
        match role {
            Role::Key => {
                to.push('"');
                self.go(State::Colon)
            }
            Role::Text => {
                to.push('"');
                self.value_is_whole()
            }
            Role::Held => {
                to.push_str(&(self.convert)(&self.held, self.types));
                self.value_is_whole()
            }
        }
    }

    fn word_is_whole(&mut self, part: Part, to: &mut String) -> ValueEffect {
        let json = match self.held.as_str() {
            "True" | "true" => "true".to_owned(),
            "False" | "false" => "false".to_owned(),
            "None" | "null" => "null".to_owned(),
            word => match number(word) {
                Some(json) => json,
                None => return ValueEffect::Invalid,
            },
        };
        self.comma(to);
        if part == Part::Key {
            to.push_str(&quoted(&json));
            return self.go(State::Colon);
        }
        let only_text = self.open.is_empty() && self.types.text && self.types.is_text_only();
        if only_text && json != "null" {
            to.push_str(&quoted(&self.held));
        } else {
            to.push_str(&json);
        }
        self.value_is_whole()
    }

    fn value_is_whole(&mut self) -> ValueEffect {
        self.state = State::Next;
        if self.open.is_empty() { ValueEffect::Completes } else { ValueEffect::Continues }
    }
}
