//! The format deepseek: calls between special tokens, with the arguments in a JSON code block (V3, R1) or without one
//! (V3.1).

use crate::delta_buffer::DeltaBuffer;
use crate::literal::{ChoiceStep, Literal, LiteralChoice, LiteralStep, is_space};
use crate::tool::json_arguments::is_of_name;
use crate::tool::{CallMarker, Calls, JsonArguments, Step};

static MARKERS: [CallMarker; 2] =
    [CallMarker::anywhere("<｜tool▁calls▁begin｜>"), CallMarker::anywhere(CALL_BEGIN)];
const CALL_BEGIN: &str = "<｜tool▁call▁begin｜>";
/// The tokens that may follow the arguments of a call.
const NEXT: [&str; 3] = ["<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", CALL_BEGIN];

/// The type of a call in the older notation.
const FUNCTION: &str = "function";

/// The parser of the calls.
#[derive(Debug)]
pub(crate) struct DeepSeek {
    state: State,
    /// The text before the separator: the name, or a type if the name follows.
    head: String,
    name: String,
    /// The language of the block.
    language: String,
}

#[derive(Debug)]
enum State {
    /// The parser is before the first call.
    Lead,
    CallBegin(Literal),
    Head,
    /// The parser has read the text before the separator, and whitespace.
    AfterHead,
    /// The parser is in the separator. The number is how many bytes before the separator are open.
    Separator(Literal, usize),
    /// The parser has read the separator.
    Body,
    /// The parser is in the name in the older notation.
    Name,
    /// The parser has read the name, but not the opening of a block or the arguments.
    Block,
    Fence(Literal),
    /// The parser is in the language of the block, or `null`.
    Language,
    /// The parser is in the fence that closes a block without arguments.
    EmptyFence(Literal),
    /// The parser has read a call without arguments. Only a token may follow.
    Empty,
    /// The parser is in the token after a call without arguments; `open` is the number of open bytes before it.
    EmptyToken(LiteralChoice, usize),
    Arguments(JsonArguments),
    /// The parser has read the arguments.
    Tail,
    TailFence(Literal),
    Token(LiteralChoice),
}

impl DeepSeek {
    pub(crate) fn new() -> Self {
        Self { state: State::Lead, head: String::new(), name: String::new(), language: String::new() }
    }

    fn go(&mut self, state: State) -> Step {
        self.state = state;
        Step::More
    }

    fn begin(&mut self, name: &str, out: &mut DeltaBuffer) -> Step {
        self.state = State::Arguments(JsonArguments::begin(name, out));
        Step::More
    }

    fn head(&mut self) -> Step {
        self.head.clear();
        self.name.clear();
        self.language.clear();
        self.go(State::Head)
    }

    /// Returns the name of a call whose arguments are missing or `null`, or `None` if the name is missing as well.
    fn name_without_arguments(&self) -> Option<&str> {
        let is_older = self.head == FUNCTION;
        match self.name.as_str() {
            "" | "null" if !is_older => Some(self.head.as_str()),
            "" => None,
            name => Some(name),
        }
        .filter(|name| !name.is_empty())
    }

    /// Begins a token that stands in place of the arguments.
    fn empty(&mut self, letter: char, out: &DeltaBuffer) -> Step {
        let mut token = LiteralChoice::new(&NEXT);
        if letter != '<' || self.name_without_arguments().is_none() {
            return Step::TEXT;
        }
        token.step(letter);
        self.go(State::EmptyToken(token, out.open_bytes() - 1))
    }

    fn empty_token(&mut self, chosen: ChoiceStep, letter: char, open: usize, out: &mut DeltaBuffer) -> Step {
        let ChoiceStep::Whole(_) = chosen else {
            return match chosen {
                ChoiceStep::More => Step::More,
                _ => Step::Stop { again: out.open_bytes() - letter.len_utf8() - open },
            };
        };
        if let Some(name) = self.name_without_arguments().map(str::to_owned) {
            out.call_without_arguments(&name);
        }
        self.token(chosen, letter, out)
    }

    /// Reads the language of the block. A block without arguments is empty or contains `null`.
    fn in_language(&mut self, letter: char, out: &mut DeltaBuffer) -> Step {
        match letter {
            '{' => {
                let name = std::mem::take(&mut self.name);
                self.begin(&name, out)
            }
            '`' => {
                let mut words = self.language.split_ascii_whitespace();
                let is_empty = match words.next() {
                    None => true,
                    Some("null") => words.next().is_none(),
                    Some(_) => words.next().is_none_or(|word| word == "null") && words.next().is_none(),
                };
                if is_empty { self.go(State::EmptyFence(Literal::new("``"))) } else { Step::TEXT }
            }
            letter if is_space(letter) || letter.is_alphanumeric() => {
                self.language.push(letter);
                Step::More
            }
            _ => Step::TEXT,
        }
    }

    fn body(&mut self, letter: char, out: &mut DeltaBuffer) -> Step {
        match letter {
            '{' if !self.head.is_empty() => {
                let name = std::mem::take(&mut self.head);
                self.begin(&name, out)
            }
            letter if is_of_name(letter) => {
                self.name.clear();
                self.name.push(letter);
                self.go(State::Name)
            }
            letter => self.empty(letter, out),
        }
    }

    /// Reads the name in the older notation, or the text after it.
    fn name(&mut self, letter: char, out: &mut DeltaBuffer) -> Step {
        match letter {
            '`' => self.go(State::Fence(Literal::new("``"))),
            '{' => {
                let name = std::mem::take(&mut self.name);
                self.begin(&name, out)
            }
            letter if is_space(letter) => self.go(State::Block),
            letter if is_of_name(letter) && matches!(self.state, State::Name) => {
                self.name.push(letter);
                Step::More
            }
            letter => self.empty(letter, out),
        }
    }

    fn tail(&mut self, letter: char, out: &mut DeltaBuffer) -> Step {
        match letter {
            '`' => self.go(State::TailFence(Literal::new("``"))),
            '<' => {
                let mut token = LiteralChoice::new(&NEXT);
                token.step(letter);
                self.go(State::Token(token))
            }
            _ => Step::reprocess(out, letter),
        }
    }

    fn token(&mut self, chosen: ChoiceStep, letter: char, out: &mut DeltaBuffer) -> Step {
        match chosen {
            ChoiceStep::More => Step::More,
            ChoiceStep::Whole(0) => {
                out.commit();
                self.go(State::Tail)
            }
            ChoiceStep::Whole(1) => Step::Done,
            ChoiceStep::Whole(_) => self.head(),
            ChoiceStep::Not => Step::reprocess(out, letter),
        }
    }
}

impl Calls for DeepSeek {
    fn markers(&self) -> &'static [CallMarker] {
        &MARKERS
    }

    fn enter(&mut self, marker: usize, _out: &mut DeltaBuffer) {
        self.head();
        self.state = if marker == 0 { State::Lead } else { State::Head };
    }

    fn step(&mut self, letter: char, out: &mut DeltaBuffer) -> Step {
        match &mut self.state {
            State::Lead | State::Body | State::Tail | State::Empty if is_space(letter) => Step::More,
            State::Lead => {
                let mut begin = Literal::new(CALL_BEGIN);
                if begin.step(letter) == LiteralStep::Not {
                    return Step::TEXT;
                }
                self.go(State::CallBegin(begin))
            }
            State::CallBegin(begin) => match begin.step(letter) {
                LiteralStep::More => Step::More,
                LiteralStep::Whole => self.head(),
                LiteralStep::Not => Step::reprocess(out, letter),
            },
            State::Head if is_of_name(letter) => {
                self.head.push(letter);
                Step::More
            }
            State::Head if is_space(letter) && self.head.is_empty() => Step::More,
            State::Head if is_space(letter) => self.go(State::AfterHead),
            State::AfterHead if is_space(letter) => Step::More,
            State::Head | State::AfterHead if letter == '<' => {
                self.go(State::Separator(Literal::new("｜tool▁sep｜>"), out.open_bytes() - 1))
            }
            State::Head | State::AfterHead => Step::TEXT,
            State::Separator(separator, open) => match separator.step(letter) {
                LiteralStep::More => Step::More,
                LiteralStep::Whole => self.go(State::Body),
                LiteralStep::Not => Step::Stop { again: out.open_bytes() - letter.len_utf8() - *open },
            },
            State::Body => self.body(letter, out),
            State::Name | State::Block => self.name(letter, out),
            State::Fence(fence) => match fence.step(letter) {
                LiteralStep::More => Step::More,
                LiteralStep::Whole => self.go(State::Language),
                LiteralStep::Not => Step::TEXT,
            },
            State::Language => self.in_language(letter, out),
            State::EmptyFence(fence) => match fence.step(letter) {
                LiteralStep::More => Step::More,
                LiteralStep::Whole => self.go(State::Empty),
                LiteralStep::Not => Step::TEXT,
            },
            State::Empty => self.empty(letter, out),
            State::EmptyToken(token, open) => {
                let (chosen, open) = (token.step(letter), *open);
                self.empty_token(chosen, letter, open, out)
            }
            State::Arguments(arguments) => match arguments.step(letter, out) {
                Step::Done => self.go(State::Tail),
                step => step,
            },
            State::Tail => self.tail(letter, out),
            State::TailFence(fence) => match fence.step(letter) {
                LiteralStep::More => Step::More,
                LiteralStep::Whole => self.go(State::Tail),
                LiteralStep::Not => Step::reprocess(out, letter),
            },
            State::Token(token) => {
                let chosen = token.step(letter);
                self.token(chosen, letter, out)
            }
        }
    }

    fn finish(&mut self, out: &mut DeltaBuffer) {
        match &mut self.state {
            State::Arguments(arguments) => arguments.finish(out),
            State::Body | State::Block | State::Empty => {
                if let Some(name) = self.name_without_arguments() {
                    out.call_at_end(name);
                }
            }
            State::Name => {
                if let Some(name) = self.name_without_arguments() {
                    out.call_at_end_of_name(name);
                }
            }
            _ => {}
        }
    }
}
