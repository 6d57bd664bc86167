//! The formats qwen3coder and minicpm5: calls as tags, with a tag for each argument. The parser recognizes a call when
//! it has read the tag of the first argument or, if there are no arguments, the end of the function. Until then, the
//! text may be prose.

use std::collections::HashSet;
use std::sync::Arc;

use crate::Tools;
use crate::delta_buffer::DeltaBuffer;
use crate::json::quoted;
use crate::literal::{ChoiceStep, LiteralChoice, is_space};
use crate::tool::tagged_value::{TaggedValue, ValueRule, ValueStep};
use crate::tool::{CallMarker, Calls, Step};

/// The tags of a format.
#[derive(Debug)]
struct Dialect {
    markers: &'static [CallMarker],
    /// The beginning of a function's tag, up to the function's name. It must follow a marker that is not itself such a
    /// beginning.
    function: &'static [&'static str],
    /// The tags that may follow a function's tag or an argument: the first begins an argument, the others end the
    /// function. If `closes` is set, the last one also ends the calls.
    parts: &'static [&'static str],
    closes: bool,
    value: ValueRule,
    /// Whether a name without quotes may contain whitespace.
    space_in_names: bool,
}

static QWEN3CODER: Dialect = Dialect {
    markers: &[CallMarker::anywhere("<tool_call>"), CallMarker::anywhere("<function=")],
    function: &["<function="],
    parts: &["<parameter=", "</function>", "</tool_call>"],
    closes: true,
    value: ValueRule {
        ends: &[
            ("</parameter>", &["<parameter=", "</function>", "</tool_call>"]),
            // This ending is for arguments whose closing tag is missing.
            ("</function>", &["</tool_call>"]),
        ],
        has_cdata: false,
    },
    space_in_names: true,
};

static MINICPM5: Dialect = Dialect {
    markers: &[CallMarker::anywhere("<function name=")],
    function: &["<function name="],
    parts: &["<param name=", "</function>"],
    closes: false,
    value: ValueRule { ends: &[("</param>", &["<param name=", "</function>"])], has_cdata: true },
    space_in_names: false,
};

/// The parser of the calls.
#[derive(Debug)]
pub(crate) struct TaggedCalls {
    dialect: &'static Dialect,
    tools: Arc<Tools>,
    state: State,
    function: String,
    /// The names of the function's arguments so far. If two arguments have the same name, the first one is used.
    names: HashSet<String>,
    has_begun: bool,
    json: String,
}

#[derive(Debug)]
enum State {
    /// The parser is before the tag of a function.
    Lead,
    Function(LiteralChoice),
    FunctionName(Name),
    /// The parser is before an argument or the end of the function.
    Between,
    Part(LiteralChoice),
    ArgumentName(Name),
    Value(TaggedValue),
    /// The parser has read a function. The tag that ends the calls may follow.
    Tail,
    Close(LiteralChoice),
}

/// A name in a tag.
#[derive(Debug, Default)]
struct Name {
    text: String,
    quote: Option<char>,
    /// Whether the name is complete, so that only the end of the tag may follow.
    is_whole: bool,
    /// Whether the tag ends with a slash.
    is_alone: bool,
}

impl Name {
    /// Reads the next character. Returns [`Step::Done`] at the end of the tag.
    fn step(&mut self, letter: char, space_in_names: bool) -> Step {
        match letter {
            '\n' | '<' => return Step::TEXT,
            letter if Some(letter) == self.quote && !self.is_whole => self.is_whole = true,
            letter if self.quote.is_some() && !self.is_whole => self.text.push(letter),
            '>' => {
                let text = self.text.trim();
                return if text.is_empty() { Step::TEXT } else { Step::Done };
            }
            '/' if self.is_whole => self.is_alone = true,
            letter if is_space(letter) && (self.is_whole || !space_in_names) => self.is_whole = true,
            _ if self.is_whole => return Step::TEXT,
            '"' | '\'' if self.text.is_empty() => self.quote = Some(letter),
            letter => self.text.push(letter),
        }
        Step::More
    }
}

impl TaggedCalls {
    /// Creates a parser of `<tool_call><function=f><parameter=a>…</parameter></function></tool_call>`.
    pub(crate) fn qwen3coder(tools: &Arc<Tools>) -> Self {
        Self::new(&QWEN3CODER, tools)
    }

    /// Creates a parser of `<function name="f"><param name="a">…</param></function>`.
    pub(crate) fn minicpm5(tools: &Arc<Tools>) -> Self {
        Self::new(&MINICPM5, tools)
    }

    fn new(dialect: &'static Dialect, tools: &Arc<Tools>) -> Self {
        Self {
            dialect,
            tools: Arc::clone(tools),
            state: State::Lead,
            function: String::new(),
            names: HashSet::new(),
            has_begun: false,
            json: String::new(),
        }
    }

    fn go(&mut self, state: State) -> Step {
        self.state = state;
        Step::More
    }

    fn named(&mut self, name: &Name, out: &mut DeltaBuffer) -> Step {
        name.text.trim().clone_into(&mut self.function);
        self.has_begun = false;
        self.names.clear();
        if name.is_alone {
            return self.function_is_whole(out);
        }
        self.go(State::Between)
    }

    /// Processes the tag with this index in [`Dialect::parts`].
    fn part(&mut self, part: usize, out: &mut DeltaBuffer) -> Step {
        if part == 0 {
            return self.go(State::ArgumentName(Name::default()));
        }
        let step = self.function_is_whole(out);
        // `</tool_call>` also ends the calls.
        if part == 2 { Step::Done } else { step }
    }

    /// Completes the function. The tag that ends the calls may follow.
    fn function_is_whole(&mut self, out: &mut DeltaBuffer) -> Step {
        if self.has_begun {
            out.arguments("}");
            out.end();
        } else {
            out.call_without_arguments(&self.function);
        }
        self.has_begun = false;
        self.state = State::Tail;
        if self.dialect.closes { Step::More } else { Step::Done }
    }

    fn argument(&mut self, name: &str, out: &mut DeltaBuffer) -> Step {
        let lead = if self.has_begun { "," } else { "{" };
        if !self.has_begun {
            out.begin(&self.function);
            self.has_begun = true;
        }
        if !self.names.insert(name.to_owned()) {
            out.commit();
            return self.go(State::Value(TaggedValue::dropped(&self.dialect.value)));
        }
        self.json.clear();
        let types = self.tools.types(&self.function, name);
        let value = TaggedValue::new(&self.dialect.value, types, &mut self.json);
        out.arguments(&format!("{lead}{}:{}", quoted(name), self.json));
        self.go(State::Value(value))
    }

    fn value(&mut self, letter: char, out: &mut DeltaBuffer) -> Step {
        let State::Value(value) = &mut self.state else { unreachable!("invariant: within a value") };
        self.json.clear();
        let step = value.step(letter, &mut self.json);
        out.add_work(value.take_work());
        // Text that a value holds back becomes part of the value, never content.
        out.arguments(&self.json);
        match step {
            ValueStep::More => Step::More,
            ValueStep::End { end: 0, next } => {
                // The tag after the value is not part of the arguments, so return it to the text that is not
                // interpreted yet.
                self.dialect.parts[next].chars().for_each(|letter| out.read(letter));
                self.part(next, out)
            }
            ValueStep::End { .. } => {
                self.function_is_whole(out);
                Step::Done
            }
        }
    }
}

impl Calls for TaggedCalls {
    fn markers(&self) -> &'static [CallMarker] {
        self.dialect.markers
    }

    fn enter(&mut self, marker: usize, _out: &mut DeltaBuffer) {
        let is_function = self.dialect.markers.len() == marker + 1;
        self.has_begun = false;
        self.state = if is_function { State::FunctionName(Name::default()) } else { State::Lead };
    }

    fn step(&mut self, letter: char, out: &mut DeltaBuffer) -> Step {
        match &mut self.state {
            State::Value(_) => self.value(letter, out),
            State::FunctionName(name) => match name.step(letter, self.dialect.space_in_names) {
                Step::Done => {
                    let name = std::mem::take(name);
                    self.named(&name, out)
                }
                step => step,
            },
            State::ArgumentName(name) => match name.step(letter, self.dialect.space_in_names) {
                Step::Done => {
                    let name = std::mem::take(name);
                    self.argument(name.text.trim(), out)
                }
                step => step,
            },
            State::Lead | State::Between | State::Tail if is_space(letter) => Step::More,
            State::Lead => {
                self.state = State::Function(LiteralChoice::new(self.dialect.function));
                self.step(letter, out)
            }
            State::Between => {
                self.state = State::Part(LiteralChoice::new(self.dialect.parts));
                self.step(letter, out)
            }
            State::Tail => {
                self.state = State::Close(LiteralChoice::new(&self.dialect.parts[2..]));
                self.step(letter, out)
            }
            State::Function(tag) => match tag.step(letter) {
                ChoiceStep::More => Step::More,
                ChoiceStep::Whole(_) => self.go(State::FunctionName(Name::default())),
                ChoiceStep::Not => Step::reprocess(out, letter),
            },
            State::Part(tag) => match tag.step(letter) {
                ChoiceStep::More => Step::More,
                ChoiceStep::Whole(part) => self.part(part, out),
                ChoiceStep::Not => Step::Stop { again: tag.matched_bytes() },
            },
            State::Close(tag) => match tag.step(letter) {
                ChoiceStep::More => Step::More,
                ChoiceStep::Whole(_) => Step::Done,
                ChoiceStep::Not => Step::reprocess(out, letter),
            },
        }
    }

    fn finish(&mut self, out: &mut DeltaBuffer) {
        if let State::Value(value) = &mut self.state {
            self.json.clear();
            let end = value.finish(&mut self.json);
            out.arguments(&self.json);
            if end == Some(1) {
                self.function_is_whole(out);
            }
        }
        // If a call has begun, the remaining text is at most the beginning of a tag, so it must not become content.
        if self.has_begun {
            out.commit();
        }
    }
}
