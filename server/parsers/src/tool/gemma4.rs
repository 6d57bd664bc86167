//! The format gemma4: `<|tool_call>call:f{…}<tool_call|>`, and the code blocks of Gemma 3, which contain Python calls.

use std::sync::Arc;

use crate::Tools;
use crate::delta_buffer::DeltaBuffer;
use crate::gemma::{CALLS_END, GemmaObject};
use crate::json::ValueEffect;
use crate::literal::{Literal, LiteralStep, is_space};
use crate::tool::json_arguments::is_of_name;
use crate::tool::python_calls::{CallsEnd, PythonCalls};
use crate::tool::{CallMarker, Calls, Step};

static MARKERS: [CallMarker; 4] = [
    CallMarker::anywhere("<|tool_call>"),
    CallMarker::anywhere("```tool_code"),
    CallMarker::anywhere("<turn|>"),
    CallMarker::anywhere("<|tool_response>"),
];
const FENCE: &str = "```";

/// The parser of the calls.
#[derive(Debug)]
pub(crate) struct Gemma4 {
    tools: Arc<Tools>,
    state: State,
    /// The marker that closes the calls.
    close: &'static str,
    name: String,
    json: String,
}

#[derive(Debug)]
enum State {
    /// The parser is before the first call.
    Lead,
    Call(Literal),
    Name,
    Arguments(GemmaObject),
    /// The parser has read a call.
    Tail,
    Close(Literal),
    Python(PythonCalls),
    /// The parser is in a code block, before its calls.
    Block,
    /// The parser has read a token that ends the turn.
    TurnEnd,
}

impl Gemma4 {
    pub(crate) fn new(tools: &Arc<Tools>) -> Self {
        Self {
            tools: Arc::clone(tools),
            state: State::Lead,
            close: CALLS_END,
            name: String::new(),
            json: String::new(),
        }
    }

    fn go(&mut self, state: State) -> Step {
        self.state = state;
        Step::More
    }

    fn call(&mut self, letter: char) -> Step {
        let mut call = Literal::new("call:");
        if call.step(letter) == LiteralStep::Not {
            return Step::TEXT;
        }
        self.go(State::Call(call))
    }

    fn name(&mut self, letter: char, out: &mut DeltaBuffer) -> Step {
        match letter {
            '{' if !self.name.is_empty() => {
                out.prepare(&self.name);
                self.state = State::Arguments(GemmaObject::new());
                self.arguments(letter, out)
            }
            letter if is_of_name(letter) => {
                self.name.push(letter);
                Step::More
            }
            _ => Step::TEXT,
        }
    }

    fn arguments(&mut self, letter: char, out: &mut DeltaBuffer) -> Step {
        let State::Arguments(object) = &mut self.state else { unreachable!("invariant: within arguments") };
        self.json.clear();
        let effect = object.step(letter, &mut self.json);
        out.add_work(object.take_work());
        if effect == ValueEffect::Invalid {
            return Step::Stop { again: object.token_bytes() };
        }
        if !self.json.is_empty() {
            out.arguments(&self.json);
            // A comma is emitted only together with the text after it. Until then, it stays in the uninterpreted text.
            if letter == ',' && object.is_after_comma() {
                out.read(letter);
            }
        }
        if effect == ValueEffect::Continues {
            return Step::More;
        }
        out.end();
        if object.is_ended() {
            return Step::Done;
        }
        self.go(State::Tail)
    }

    fn tail(&mut self, letter: char, out: &mut DeltaBuffer) -> Step {
        if self.close == CALLS_END && letter == 'c' {
            self.name.clear();
            return self.call(letter);
        }
        let mut close = Literal::new(self.close);
        if close.step(letter) == LiteralStep::Not {
            return Step::reprocess(out, letter);
        }
        self.go(State::Close(close))
    }

    fn python(&mut self, letter: char, out: &mut DeltaBuffer) -> Step {
        let State::Python(python) = &mut self.state else { unreachable!("invariant: within Python") };
        let step = python.step(letter, out);
        let is_over = python.is_between();
        match step {
            Step::Done => {
                out.commit();
                self.go(State::Tail)
            }
            Step::Stop { .. } if letter == '`' && is_over => {
                self.state = State::Tail;
                self.tail(letter, out)
            }
            step => step,
        }
    }
}

impl Calls for Gemma4 {
    fn markers(&self) -> &'static [CallMarker] {
        &MARKERS
    }

    fn enter(&mut self, marker: usize, out: &mut DeltaBuffer) {
        self.name.clear();
        self.close = if marker == 0 { CALLS_END } else { FENCE };
        self.state = match marker {
            0 => State::Lead,
            1 => State::Block,
            _ => {
                // Drop the token, because it is markup.
                out.commit();
                State::TurnEnd
            }
        };
    }

    fn step(&mut self, letter: char, out: &mut DeltaBuffer) -> Step {
        match &mut self.state {
            State::Arguments(_) => self.arguments(letter, out),
            State::Python(_) => self.python(letter, out),
            State::Lead | State::Block | State::Tail if is_space(letter) => Step::More,
            State::Lead => self.call(letter),
            State::Block if letter == '[' => {
                let python = PythonCalls::new(CallsEnd::Bracket, Arc::clone(&self.tools));
                self.go(State::Python(python))
            }
            State::Block => {
                self.state = State::Python(PythonCalls::new(CallsEnd::None, Arc::clone(&self.tools)));
                self.python(letter, out)
            }
            State::Call(call) => match call.step(letter) {
                LiteralStep::More => Step::More,
                LiteralStep::Whole => self.go(State::Name),
                LiteralStep::Not => Step::reprocess(out, letter),
            },
            State::Name => self.name(letter, out),
            State::Tail => self.tail(letter, out),
            State::Close(close) => match close.step(letter) {
                LiteralStep::More => Step::More,
                LiteralStep::Whole => Step::Done,
                LiteralStep::Not => Step::reprocess(out, letter),
            },
            State::TurnEnd => Step::TEXT,
        }
    }

    fn finish(&mut self, out: &mut DeltaBuffer) {
        match &mut self.state {
            State::Arguments(object) => {
                self.json.clear();
                object.finish(&mut self.json);
                out.arguments(&self.json);
            }
            State::Python(python) => python.finish(out),
            _ => {}
        }
    }
}
