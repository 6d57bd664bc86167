//! The formats llama3 and lfm2: a list of Python calls in brackets, or JSON objects, with or without markers.

use std::sync::Arc;

use crate::Tools;
use crate::delta_buffer::DeltaBuffer;
use crate::literal::{Literal, LiteralStep, is_space};
use crate::tool::python_calls::{CallsEnd, PythonCalls};
use crate::tool::{CallMarker, Calls, JsonCalls, ObjectRule, Step};

static LLAMA3: [CallMarker; 4] = [
    CallMarker::anywhere("<|python_tag|>"),
    CallMarker::anywhere("<|python_start|>"),
    CallMarker::bare("{"),
    CallMarker::bare("["),
];
static LFM2: [CallMarker; 1] = [CallMarker::anywhere("<|tool_call_start|>")];

/// The parser of calls in either form.
#[derive(Debug)]
pub(crate) struct BracketedCalls {
    tools: Arc<Tools>,
    markers: &'static [CallMarker],
    /// The optional closing marker of each opening marker.
    closes: &'static [Option<&'static str>],
    close: Option<&'static str>,
    object_rule: ObjectRule,
    state: State,
}

#[derive(Debug)]
enum State {
    Lead,
    /// The parser has read `[`.
    Bracket,
    Json(JsonCalls),
    Python(Box<PythonCalls>),
    /// The parser has read the calls, but not the marker that closes them.
    Tail,
    Close(Literal),
}

impl BracketedCalls {
    pub(crate) fn llama3(tools: &Arc<Tools>) -> Self {
        Self::new(&LLAMA3, &[None, Some("<|python_end|>"), None, None], tools)
    }

    pub(crate) fn lfm2(tools: &Arc<Tools>) -> Self {
        Self::new(&LFM2, &[Some("<|tool_call_end|>")], tools)
    }

    fn new(
        markers: &'static [CallMarker],
        closes: &'static [Option<&'static str>],
        tools: &Arc<Tools>,
    ) -> Self {
        let tools = Arc::clone(tools);
        Self { tools, markers, closes, close: None, object_rule: ObjectRule::Marked, state: State::Lead }
    }

    fn go(&mut self, state: State) -> Step {
        self.state = state;
        Step::More
    }

    /// Begins JSON calls whose beginning, `begun`, has been read.
    fn json(&mut self, begun: &str, out: &mut DeltaBuffer) -> Step {
        let mut json = JsonCalls::plain(self.object_rule);
        for letter in begun.chars() {
            let step = json.step(letter, out);
            debug_assert_eq!(step, Step::More, "brackets begin calls");
        }
        self.go(State::Json(json))
    }

    fn is_between_calls(&self) -> bool {
        matches!(&self.state, State::Python(python) if python.is_between())
    }

    /// Continues after a step of the inner parser.
    fn after(&mut self, step: Step, letter: char, out: &mut DeltaBuffer) -> Step {
        match step {
            Step::Done => {
                out.commit();
                if self.close.is_some() { self.go(State::Tail) } else { Step::Done }
            }
            // The closing marker belongs to the calls, as do the whitespace and the separator before it. The marker may
            // take the place of the closing bracket.
            Step::Stop { again }
                if (again > 0 || self.is_between_calls())
                    && self.close.is_some_and(|close| close.starts_with(letter)) =>
            {
                self.state = State::Tail;
                self.step(letter, out)
            }
            step => step,
        }
    }
}

impl Calls for BracketedCalls {
    fn markers(&self) -> &'static [CallMarker] {
        self.markers
    }

    fn enter(&mut self, marker: usize, _out: &mut DeltaBuffer) {
        self.close = self.closes[marker];
        self.object_rule = if self.markers[marker].is_read { ObjectRule::Bare } else { ObjectRule::Marked };
        self.state = State::Lead;
    }

    fn step(&mut self, letter: char, out: &mut DeltaBuffer) -> Step {
        match &mut self.state {
            State::Json(json) => {
                let step = json.step(letter, out);
                self.after(step, letter, out)
            }
            State::Python(python) => {
                let step = python.step(letter, out);
                self.after(step, letter, out)
            }
            State::Close(literal) => match literal.step(letter) {
                LiteralStep::More => Step::More,
                LiteralStep::Whole => Step::Done,
                LiteralStep::Not => Step::reprocess(out, letter),
            },
            _ if is_space(letter) => Step::More,
            State::Lead if letter == '{' => self.json("{", out),
            State::Lead if letter == '[' => self.go(State::Bracket),
            State::Bracket if letter == '{' => self.json("[{", out),
            State::Bracket => {
                let ending = match self.object_rule {
                    ObjectRule::Marked => CallsEnd::MarkedBracket,
                    ObjectRule::Bare => CallsEnd::Bracket,
                };
                let mut python = PythonCalls::new(ending, Arc::clone(&self.tools));
                let step = python.step(letter, out);
                self.state = State::Python(Box::new(python));
                step
            }
            State::Lead => Step::TEXT,
            State::Tail => match self.close.filter(|close| close.starts_with(letter)) {
                Some(close) => {
                    let mut literal = Literal::new(close);
                    literal.step(letter);
                    self.go(State::Close(literal))
                }
                None => Step::reprocess(out, letter),
            },
        }
    }

    fn finish(&mut self, out: &mut DeltaBuffer) {
        match &mut self.state {
            State::Json(json) => json.finish(out),
            State::Python(python) => python.finish(out),
            _ => {}
        }
    }
}
