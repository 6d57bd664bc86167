//! Parses calls in Python notation: `f(a="x", b=1), g()`. A call begins as soon as a part of its first value is
//! certain, or with its `)`. Until then, its text may be prose.

mod ahead;

use std::sync::Arc;

use ahead::{Lookahead, Member, QuoteRole, SkippedMember, begins_key, begins_next_call, continues_key};

use crate::Tools;
use crate::delta_buffer::DeltaBuffer;
use crate::json::{ValueEffect, quoted};
use crate::literal::is_space;
use crate::python::PythonValue;
use crate::tool::Step;
use crate::tool::json_arguments::is_of_name;
use crate::typed::typed;

/// The parser of a list of calls.
#[derive(Debug)]
pub(crate) struct PythonCalls {
    tools: Arc<Tools>,
    ending: CallsEnd,
    state: State,
    name: String,
    key: String,
    has_begun: bool,
    /// Whether the call is the argument of `print`.
    is_printed: bool,
    /// The JSON that precedes the current value, until it is emitted.
    lead: String,
    json: String,
    /// Whether at least one call is complete.
    any: bool,
    /// The lookahead after a quote that may end a string.
    ahead: Option<Lookahead>,
    /// The number of open bytes before the call.
    open: usize,
}

/// The end of the calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CallsEnd {
    /// A closing bracket; commas separate calls.
    Bracket,
    /// A closing bracket of a list after a marker. List elements that are not calls are skipped.
    MarkedBracket,
    /// Any text that is not another call; whitespace separates calls.
    None,
}

#[derive(Debug)]
enum State {
    /// The parser expects a call.
    Call,
    Name,
    /// The parser has read `(`.
    First,
    /// The parser has read a comma between arguments.
    Argument,
    Key,
    /// The parser has read a key and whitespace.
    Equals,
    Value,
    InValue(PythonValue),
    /// The parser has read a value.
    Next,
    /// The parser has read a call in the argument of `print`.
    Printed,
    /// The parser has read a call.
    After,
    /// The parser is in an element of the list that is not a call.
    Skipped(SkippedMember),
    /// The parser has read an element of the list that is not a call.
    AfterSkipped,
}

impl PythonCalls {
    pub(crate) fn new(ending: CallsEnd, tools: Arc<Tools>) -> Self {
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
            ahead: None,
            open: 0,
        }
    }

    /// Reads the next character. Returns [`Step::Done`] for the closing bracket.
    pub(crate) fn step(&mut self, letter: char, out: &mut DeltaBuffer) -> Step {
        if self.ahead.is_some() {
            return self.resolve_quote(letter, out);
        }
        match self.call_step(letter, out) {
            stop @ Step::Stop { .. } => self.skipped(out).unwrap_or(stop),
            step => step,
        }
    }

    fn call_step(&mut self, letter: char, out: &mut DeltaBuffer) -> Step {
        let is_list = self.is_list();
        match &mut self.state {
            State::Skipped(skipped) => match skipped.step(letter) {
                Member::More => Step::More,
                Member::Over => self.go(State::AfterSkipped),
                Member::Last => Step::TEXT,
            },
            State::InValue(_) => self.in_value(letter, out),
            State::Name => self.name(letter),
            State::Key => self.key(letter),
            _ if is_space(letter) => Step::More,
            State::Call if begins_name(letter, self.ending) => {
                self.open = out.open_bytes().saturating_sub(letter.len_utf8());
                self.begin_name(letter)
            }
            State::AfterSkipped if is_of_name(letter) => {
                // The skipped text becomes content.
                self.open = 0;
                self.begin_name(letter);
                Step::Skip { kept: letter.len_utf8() }
            }
            State::Call if letter == ']' && is_list && self.any => Step::Done,
            State::First | State::Argument if begins_key(letter) => {
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

    /// Whether a call has ended, and neither a comma nor another call has followed.
    pub(crate) fn is_between(&self) -> bool {
        matches!(self.state, State::After)
    }

    /// Ends the text. If a call has begun, its uncertain end is dropped.
    pub(crate) fn finish(&mut self, out: &mut DeltaBuffer) {
        if let Some(ahead) = self.ahead.take() {
            out.unread_bytes(ahead.held.len());
            self.value_letter(ahead.quote, out);
            self.step_again(ahead.held.chars(), out);
        }
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

    fn is_list(&self) -> bool {
        matches!(self.ending, CallsEnd::Bracket | CallsEnd::MarkedBracket)
    }

    fn begin_name(&mut self, letter: char) -> Step {
        self.name.clear();
        self.name.push(letter);
        self.has_begun = false;
        self.is_printed = false;
        self.go(State::Name)
    }

    /// Skips an element of a marked list that is not a call, by matching its brackets, so that the other elements can
    /// still be calls. Returns `None` if the end of the element cannot be determined, or if a call has begun.
    fn skipped(&mut self, out: &DeltaBuffer) -> Option<Step> {
        let is_in_call =
            !matches!(self.state, State::Call | State::After | State::Skipped(_) | State::AfterSkipped);
        if self.ending != CallsEnd::MarkedBracket || self.has_begun || !is_in_call {
            return None;
        }
        let mut skipped = SkippedMember::default();
        let mut member = Member::More;
        for letter in out.open_from(self.open)?.chars() {
            if member != Member::More {
                return None;
            }
            member = skipped.step(letter);
        }
        self.state = match member {
            Member::More => State::Skipped(skipped),
            Member::Over => State::AfterSkipped,
            Member::Last => return None,
        };
        Some(Step::More)
    }

    /// Reads a character after a quote, until it is known whether the quote closes the string.
    fn resolve_quote(&mut self, letter: char, out: &mut DeltaBuffer) -> Step {
        let Some(mut ahead) = self.ahead.take() else { return Step::TEXT };
        let role = ahead.step(letter);
        if role == QuoteRole::Undecided {
            self.ahead = Some(ahead);
            return Step::More;
        }
        // Only the quote is consumed: the text after it is read again.
        out.unread_bytes(ahead.held.len() + letter.len_utf8());
        if role == QuoteRole::Closes {
            let step = self.value_letter(ahead.quote, out);
            debug_assert_eq!(step, Step::More, "a quote ends a string");
        } else if let State::InValue(value) = &mut self.state {
            self.json.clear();
            value.keep_quote(&mut self.json);
            self.give(out);
        }
        self.step_again(ahead.held.chars().chain([letter]), out)
    }

    fn step_again(&mut self, letters: impl Iterator<Item = char>, out: &mut DeltaBuffer) -> Step {
        let mut last = Step::More;
        for letter in letters {
            debug_assert_eq!(last, Step::More, "the lookahead continues a call or text");
            out.read(letter);
            last = self.step(letter, out);
        }
        last
    }

    fn name(&mut self, letter: char) -> Step {
        match letter {
            '(' => self.go(State::First),
            letter if is_of_name(letter) => {
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
            letter if continues_key(letter) => {
                self.key.push(letter);
                Step::More
            }
            _ => Step::TEXT,
        }
    }

    /// Begins a value with its first character.
    fn value(&mut self, letter: char, out: &mut DeltaBuffer) -> Step {
        self.lead.clear();
        self.lead.push_str(if self.has_begun { "," } else { "{" });
        self.lead.push_str(&quoted(&self.key));
        self.lead.push(':');
        self.state = State::InValue(PythonValue::new(self.tools.types(&self.name, &self.key), typed));
        self.in_value(letter, out)
    }

    fn in_value(&mut self, letter: char, out: &mut DeltaBuffer) -> Step {
        if let State::InValue(value) = &self.state
            && let Some(closing) = value.closing(letter)
        {
            let parentheses = 1 + u8::from(self.is_printed);
            self.ahead = Some(Lookahead::new(letter, closing, parentheses, self.is_list()));
            return Step::More;
        }
        self.value_letter(letter, out)
    }

    fn value_letter(&mut self, letter: char, out: &mut DeltaBuffer) -> Step {
        let State::InValue(value) = &mut self.state else { unreachable!("invariant: within a value") };
        self.json.clear();
        let effect = value.step(letter, &mut self.json);
        if effect == ValueEffect::Invalid {
            return Step::TEXT;
        }
        // A comma stays in the open text, because it is emitted together with the text after it. The character after a
        // complete value stays there, too, because it is not part of the value.
        let is_open = effect == ValueEffect::AlreadyComplete || letter == ',' && value.is_before_item();
        if self.give(out) && is_open {
            out.read(letter);
        }
        match effect {
            ValueEffect::Continues | ValueEffect::Invalid => Step::More,
            ValueEffect::Completes => self.go(State::Next),
            ValueEffect::AlreadyComplete => {
                self.state = State::Next;
                self.step(letter, out)
            }
        }
    }

    /// Emits the JSON before the value and the part of the value that is certain. Returns false if no part is certain.
    fn give(&mut self, out: &mut DeltaBuffer) -> bool {
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

    fn call_is_whole(&mut self, out: &mut DeltaBuffer) -> Step {
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

    fn is_over(&mut self, out: &mut DeltaBuffer) -> Step {
        out.commit();
        self.any = true;
        self.has_begun = false;
        self.go(State::After)
    }

    fn after(&mut self, letter: char, out: &mut DeltaBuffer) -> Step {
        match self.ending {
            CallsEnd::Bracket | CallsEnd::MarkedBracket if letter == ']' => Step::Done,
            CallsEnd::Bracket | CallsEnd::MarkedBracket if letter == ',' => self.go(State::Call),
            CallsEnd::None if begins_next_call(letter) => {
                self.state = State::Call;
                self.step(letter, out)
            }
            _ => Step::reprocess(out, letter),
        }
    }
}

/// Whether a call can begin with this letter. Names of tools may begin with a digit or `-`, but an unmarked list that
/// begins with one of these characters is more likely to be text, such as `[0-9()]`.
fn begins_name(letter: char, ending: CallsEnd) -> bool {
    is_of_name(letter) && (ending != CallsEnd::Bracket || letter.is_alphabetic() || letter == '_')
}
