//! Parses a call written as a JSON object with a name and arguments in any order. As soon as the name is known, the
//! arguments are emitted as they arrive.

use crate::delta_buffer::DeltaBuffer;
use crate::json::{JsonString, JsonValue, Pieces, ValueEffect};
use crate::literal::{Literal, LiteralStep, is_space};
use crate::tool::Step;

/// The condition under which an object is a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ObjectRule {
    /// A marker precedes the object, so a name alone makes it a call.
    Marked,
    /// The object must have a name, arguments, and no members that do not belong to calls.
    Bare,
}

/// The members that belong to calls, in addition to the name and the arguments.
const OTHER_MEMBERS: [&str; 3] = ["type", "id", "index"];

/// The parser of an object, after its `{`.
#[derive(Debug)]
pub(crate) struct CallObject {
    rule: ObjectRule,
    state: State,
    key: String,
    name: String,
    arguments: Arguments,
    /// Whether the object has members that do not belong to calls.
    has_others: bool,
    pieces: Pieces,
}

#[derive(Debug)]
enum State {
    FirstKey,
    Key,
    KeyText(JsonString),
    Colon,
    Value,
    Name(JsonString),
    Object(JsonValue),
    /// The parser is in arguments that are a string. The string must contain an object or be blank.
    Text {
        string: JsonString,
        object: TextObject,
    },
    Null(Literal),
    Other(JsonValue),
    Next,
}

/// The position in a string that must contain an object.
#[derive(Debug)]
enum TextObject {
    Before,
    Within(JsonValue),
    After,
}

#[derive(Debug, PartialEq)]
enum Arguments {
    Missing,
    /// The arguments are held back until the name is known.
    Held(String),
    /// The arguments are emitted as they arrive.
    Given,
    /// The call has ended.
    Whole,
}

impl CallObject {
    /// Creates the parser of an object whose `{` has been read.
    pub(crate) fn new(rule: ObjectRule) -> Self {
        Self {
            rule,
            state: State::FirstKey,
            key: String::new(),
            name: String::new(),
            arguments: Arguments::Missing,
            has_others: false,
            pieces: Pieces::default(),
        }
    }

    /// Whether the call is complete, even if the object is not.
    pub(crate) fn is_call(&self) -> bool {
        self.arguments == Arguments::Whole
    }

    /// Reads the next character. Returns [`Step::Done`] if the character closes the object and the object is a call.
    pub(crate) fn step(&mut self, letter: char, out: &mut DeltaBuffer) -> Step {
        match &mut self.state {
            State::KeyText(string) => {
                if string.step(letter, &mut self.pieces) {
                    self.state = State::Colon;
                }
                self.key.push_str(&self.pieces.meant);
                self.clear()
            }
            State::Name(string) => {
                let closed = string.step(letter, &mut self.pieces);
                self.name.push_str(&self.pieces.meant);
                self.clear();
                if closed { self.name_is_whole(out) } else { Step::More }
            }
            State::Object(value) => {
                let effect = value.step(letter, &mut self.pieces.written);
                self.give(out);
                match effect {
                    ValueEffect::Continues => Step::More,
                    ValueEffect::Completes => self.arguments_are_whole(out),
                    ValueEffect::AlreadyComplete | ValueEffect::Invalid => Step::TEXT,
                }
            }
            State::Text { string, .. } => {
                let closed = string.step(letter, &mut self.pieces);
                match self.text(out) {
                    Step::More if closed => self.text_is_whole(out),
                    step => step,
                }
            }
            State::Null(word) => match word.step(letter) {
                LiteralStep::More => Step::More,
                LiteralStep::Whole => self.no_arguments(out),
                LiteralStep::Not => Step::TEXT,
            },
            State::Other(value) => {
                let effect = value.step(letter, &mut self.pieces.written);
                self.clear();
                match effect {
                    ValueEffect::Continues => return Step::More,
                    ValueEffect::Invalid => return Step::TEXT,
                    ValueEffect::Completes | ValueEffect::AlreadyComplete => self.state = State::Next,
                }
                if effect == ValueEffect::AlreadyComplete { self.between(letter, out) } else { Step::More }
            }
            _ => self.between(letter, out),
        }
    }

    /// Ends the text and, if the name is known and the arguments are incomplete, emits the incomplete escape that was
    /// held back in them.
    pub(crate) fn finish(&mut self, out: &mut DeltaBuffer) {
        if self.arguments != Arguments::Given {
            return;
        }
        match &self.state {
            State::Object(value) => out.arguments(&value.held()),
            State::Text { object: TextObject::Within(_), string } => out.arguments(&string.held()),
            _ => {}
        }
    }

    fn clear(&mut self) -> Step {
        self.pieces.written.clear();
        self.pieces.meant.clear();
        Step::More
    }

    fn go(&mut self, state: State) -> Step {
        self.state = state;
        Step::More
    }

    fn between(&mut self, letter: char, out: &mut DeltaBuffer) -> Step {
        if is_space(letter) {
            return Step::More;
        }
        match (&self.state, letter) {
            (State::FirstKey | State::Key, '"') => {
                self.key.clear();
                self.go(State::KeyText(JsonString::default()))
            }
            (State::Colon, ':') => self.go(State::Value),
            (State::Value, letter) => self.value(letter, out),
            (State::Next, ',') => self.go(State::Key),
            (State::Next, '}') => self.object_is_whole(out),
            _ => Step::TEXT,
        }
    }

    fn value(&mut self, letter: char, out: &mut DeltaBuffer) -> Step {
        match self.key.as_str() {
            "name" if letter == '"' => {
                self.name.clear();
                self.go(State::Name(JsonString::default()))
            }
            "arguments" | "parameters" if self.arguments == Arguments::Missing => self.begin(letter, out),
            "name" => Step::TEXT,
            key => {
                self.has_others |= !OTHER_MEMBERS.contains(&key);
                if self.has_others && self.rule == ObjectRule::Bare {
                    return Step::TEXT;
                }
                let mut value = JsonValue::new();
                if value.step(letter, &mut self.pieces.written) == ValueEffect::Invalid {
                    return Step::TEXT;
                }
                self.clear();
                self.go(State::Other(value))
            }
        }
    }

    /// Begins the arguments.
    fn begin(&mut self, letter: char, out: &mut DeltaBuffer) -> Step {
        match letter {
            '{' => {
                let mut object = JsonValue::new();
                object.step(letter, &mut self.pieces.written);
                self.begin_call(out);
                self.give(out);
                self.go(State::Object(object))
            }
            '"' => self.go(State::Text { string: JsonString::default(), object: TextObject::Before }),
            'n' => self.go(State::Null(Literal::new("ull"))),
            _ => Step::TEXT,
        }
    }

    fn begin_call(&mut self, out: &mut DeltaBuffer) {
        if self.name.is_empty() {
            self.arguments = Arguments::Held(String::new());
        } else {
            self.arguments = Arguments::Given;
            out.prepare(&self.name);
        }
    }

    /// Emits the arguments, or holds them back while the name is unknown.
    fn give(&mut self, out: &mut DeltaBuffer) {
        if let Arguments::Held(held) = &mut self.arguments {
            held.push_str(&self.pieces.written);
        } else {
            out.arguments(&self.pieces.written);
        }
        self.clear();
    }

    /// Processes the next part, `pieces.meant`, of the string that contains the arguments.
    fn text(&mut self, out: &mut DeltaBuffer) -> Step {
        let mut meant = std::mem::take(&mut self.pieces.meant);
        self.clear();
        for letter in meant.drain(..) {
            if !self.text_letter(letter, out) {
                return Step::TEXT;
            }
        }
        // Reuse the buffer to avoid an allocation.
        self.pieces.meant = meant;
        Step::More
    }

    /// Ends the string that contains the arguments.
    fn text_is_whole(&mut self, out: &mut DeltaBuffer) -> Step {
        let State::Text { object, .. } = &self.state else { unreachable!("invariant: within a string") };
        match object {
            TextObject::Before => self.no_arguments(out),
            TextObject::Within(_) => Step::TEXT,
            TextObject::After => self.arguments_are_whole(out),
        }
    }

    /// Processes a character of the string that contains the arguments; returns false if the character is not valid
    /// there.
    fn text_letter(&mut self, letter: char, out: &mut DeltaBuffer) -> bool {
        let State::Text { object, .. } = &mut self.state else { unreachable!("invariant: within a string") };
        match object {
            TextObject::Before | TextObject::After if is_space(letter) => true,
            TextObject::Before if letter == '{' => {
                let mut value = JsonValue::new();
                value.step(letter, &mut self.pieces.written);
                *object = TextObject::Within(value);
                self.begin_call(out);
                self.give(out);
                true
            }
            TextObject::Before | TextObject::After => false,
            TextObject::Within(value) => {
                let effect = value.step(letter, &mut self.pieces.written);
                if effect == ValueEffect::Completes {
                    *object = TextObject::After;
                }
                self.give(out);
                matches!(effect, ValueEffect::Continues | ValueEffect::Completes)
            }
        }
    }

    fn name_is_whole(&mut self, out: &mut DeltaBuffer) -> Step {
        self.state = State::Next;
        if self.name.is_empty() {
            return Step::TEXT;
        }
        if let Arguments::Held(held) = &self.arguments {
            out.begin(&self.name);
            out.arguments(held);
            out.end();
            self.arguments = Arguments::Whole;
        }
        Step::More
    }

    fn arguments_are_whole(&mut self, out: &mut DeltaBuffer) -> Step {
        self.state = State::Next;
        if self.arguments == Arguments::Given {
            out.end();
            self.arguments = Arguments::Whole;
        }
        Step::More
    }

    /// Completes a call whose arguments are `null` or a blank string.
    fn no_arguments(&mut self, out: &mut DeltaBuffer) -> Step {
        self.begin_call(out);
        self.pieces.written.push_str("{}");
        self.give(out);
        self.arguments_are_whole(out)
    }

    fn object_is_whole(&mut self, out: &mut DeltaBuffer) -> Step {
        match self.arguments {
            Arguments::Whole => Step::Done,
            // An object with other members is not a call without arguments, because these members may be intended as
            // arguments.
            Arguments::Missing
                if self.rule == ObjectRule::Marked && !self.has_others && !self.name.is_empty() =>
            {
                out.call_without_arguments(&self.name);
                Step::Done
            }
            _ => Step::TEXT,
        }
    }
}
