//! Calls written as Python: `f(a="x", b=1), g()`. A call begins with the first character of its first value,
//! or with its `)`: until then it may be prose.

use std::sync::Arc;

use crate::Tools;
use crate::json::{Verdict, quoted};
use crate::literal::is_space;
use crate::out::Out;
use crate::python::PythonValue;
use crate::tool::Step;

/// A list of calls on its way.
#[derive(Debug)]
pub(crate) struct PythonCalls {
    tools: Arc<Tools>,
    ending: Ending,
    state: State,
    name: String,
    key: String,
    /// Whether the call has begun.
    has_begun: bool,
    /// Whether the call is what `print` is to print.
    is_printed: bool,
    /// What precedes the value that is read, not given out yet.
    lead: String,
    json: String,
    /// Whether there was a call.
    any: bool,
}

/// What ends the calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// A closing bracket; commas separate calls.
    Bracket,
    /// What is no further call; space separates calls.
    None,
}

#[derive(Debug)]
enum State {
    /// Before a call.
    Call,
    Name,
    /// After `(`.
    First,
    /// After a comma between arguments.
    Argument,
    Key,
    /// After a key and space.
    Equals,
    Value,
    InValue(PythonValue),
    /// After a value.
    Next,
    /// After a call that is printed.
    Printed,
    /// After a call.
    After,
}

impl PythonCalls {
    pub(crate) fn new(ending: Ending, tools: Arc<Tools>) -> Self {
        Self {
            tools,
            ending,
            state: State::Call,
            name: String::new(),
            key: String::new(),
            has_begun: false,
            is_printed: false,
            lead: String::new(),
            json: String::new(),
            any: false,
        }
    }

    /// Takes the next character. [`Step::Done`] is the closing bracket.
    pub(crate) fn step(&mut self, letter: char, out: &mut Out) -> Step {
        match &mut self.state {
            State::InValue(_) => self.in_value(letter, out),
            State::Name => self.name(letter),
            State::Key => self.key(letter),
            _ if is_space(letter) => Step::More,
            State::Call if begins_name(letter) => {
                self.name.clear();
                self.name.push(letter);
                self.has_begun = false;
                self.is_printed = false;
                self.go(State::Name)
            }
            State::Call if letter == ']' && self.ending == Ending::Bracket && self.any => Step::Done,
            State::First | State::Argument if begins_name(letter) => {
                self.key.clear();
                self.key.push(letter);
                self.go(State::Key)
            }
            State::First | State::Argument | State::Next if letter == ')' => self.call_is_whole(out),
            State::Next if letter == ',' => self.go(State::Argument),
            State::Equals if letter == '=' => self.go(State::Value),
            State::Value => self.value(letter, out),
            State::Printed if letter == ')' => self.is_over(out),
            State::After => self.after(letter, out),
            _ => Step::TEXT,
        }
    }

    /// Whether a call is over and no other has begun.
    pub(crate) fn is_between(&self) -> bool {
        matches!(self.state, State::After)
    }

    /// The text ends. Of a call that has begun, what is no JSON yet is left out.
    pub(crate) fn finish(&mut self, out: &mut Out) {
        if let State::InValue(value) = &mut self.state {
            self.json.clear();
            value.finish(&mut self.json);
            self.give(out);
        }
        if self.has_begun {
            out.commit();
        }
    }

    fn go(&mut self, state: State) -> Step {
        self.state = state;
        Step::More
    }

    fn name(&mut self, letter: char) -> Step {
        match letter {
            '(' => self.go(State::First),
            letter if continues_name(letter) => {
                self.name.push(letter);
                Step::More
            }
            _ => Step::TEXT,
        }
    }

    fn key(&mut self, letter: char) -> Step {
        match letter {
            '=' => self.go(State::Value),
            letter if is_space(letter) => self.go(State::Equals),
            '(' if self.name == "print" && !self.has_begun => {
                std::mem::swap(&mut self.name, &mut self.key);
                self.is_printed = true;
                self.go(State::First)
            }
            letter if continues_name(letter) => {
                self.key.push(letter);
                Step::More
            }
            _ => Step::TEXT,
        }
    }

    /// The first character of a value.
    fn value(&mut self, letter: char, out: &mut Out) -> Step {
        self.lead.clear();
        self.lead.push_str(if self.has_begun { "," } else { "{" });
        self.lead.push_str(&quoted(&self.key));
        self.lead.push(':');
        self.state = State::InValue(PythonValue::new(self.tools.types(&self.name, &self.key)));
        self.in_value(letter, out)
    }

    fn in_value(&mut self, letter: char, out: &mut Out) -> Step {
        let State::InValue(value) = &mut self.state else { unreachable!("invariant: within a value") };
        self.json.clear();
        let verdict = value.step(letter, &mut self.json);
        if verdict == Verdict::Bad {
            return Step::TEXT;
        }
        // A comma is passed on with what follows it; what is not of the value is not passed on yet.
        let is_open = verdict == Verdict::Over || letter == ',' && value.is_before_item();
        if self.give(out) && is_open {
            out.read(letter);
        }
        match verdict {
            Verdict::More | Verdict::Bad => Step::More,
            Verdict::Done => self.go(State::Next),
            Verdict::Over => {
                self.state = State::Next;
                self.step(letter, out)
            }
        }
    }

    /// Gives out what is certain of the value, and before it what precedes it; false if there is nothing.
    fn give(&mut self, out: &mut Out) -> bool {
        if self.json.is_empty() {
            return false;
        }
        if !self.has_begun {
            out.begin(&self.name);
            self.has_begun = true;
        }
        out.arguments(&self.lead);
        self.lead.clear();
        out.arguments(&self.json);
        true
    }

    fn call_is_whole(&mut self, out: &mut Out) -> Step {
        if self.has_begun {
            out.arguments("}");
            out.end();
        } else {
            out.call_without_arguments(&self.name);
        }
        if self.is_printed {
            return self.go(State::Printed);
        }
        self.is_over(out)
    }

    fn is_over(&mut self, out: &mut Out) -> Step {
        out.commit();
        self.any = true;
        self.has_begun = false;
        self.go(State::After)
    }

    fn after(&mut self, letter: char, out: &mut Out) -> Step {
        match self.ending {
            Ending::Bracket if letter == ']' => Step::Done,
            Ending::Bracket if letter == ',' => self.go(State::Call),
            Ending::None if begins_name(letter) => {
                self.state = State::Call;
                self.step(letter, out)
            }
            _ => Step::look_again(out, letter),
        }
    }
}

fn begins_name(letter: char) -> bool {
    letter.is_alphabetic() || letter == '_'
}

fn continues_name(letter: char) -> bool {
    letter.is_alphanumeric() || matches!(letter, '_' | '.' | '-')
}
