//! Parses text with markers, in which content, reasoning and calls alternate. The tool formats parse the calls
//! themselves.
//!
//! Whitespace that separates the beginning, reasoning and calls is layout: it is dropped if a call or reasoning follows
//! or a call precedes it, and kept if text follows.

use std::sync::Arc;

use crate::literal::is_space;
use crate::out::Out;
use crate::reasoning::{Reasoning, opened, reasoning};
use crate::scanner::{ScanEvent, Scanner};
use crate::tool::{Calls, Mark, MarkPosition, Step, calls};
use crate::{Formats, Tools};

/// The parser of a response with markers.
#[derive(Debug)]
pub(crate) struct MarkedText {
    calls: Option<Box<dyn Calls>>,
    reasoning: &'static Reasoning,
    signs: Vec<Sign>,
    mode: Mode,
    scanner: Scanner,
    /// Whether only layout has been read since the beginning, the end of reasoning or the end of a call.
    at_start: bool,
    /// The layout that has been read since then.
    layout: String,
    after_call: bool,
    /// Whether a newline that follows belongs to the preceding tag.
    trim: bool,
    in_answer: bool,
    /// Characters to process again, the last one first.
    again: Vec<char>,
}

#[derive(Clone, Copy, Debug)]
enum Mode {
    Text,
    /// The parser is in reasoning between these tags.
    Reasoning {
        tags: usize,
        at_prompt: bool,
    },
    /// The parser is in a text that may contain calls; `before` is the number of earlier calls.
    Calls {
        before: u32,
    },
    /// The parser is after the tag that ends a response.
    AnswerEnd,
}

/// A text that changes the mode.
#[derive(Clone, Copy, Debug)]
struct Sign {
    text: &'static str,
    position: MarkPosition,
    to: SignTarget,
}

#[derive(Clone, Copy, Debug)]
enum SignTarget {
    Calls { mark: usize },
    Reasoning { tags: usize },
    Answer,
    AnswerEnd,
}

impl MarkedText {
    pub(crate) fn new(formats: Formats, tools: &Arc<Tools>, prompt: &str) -> Self {
        let calls = calls(formats.tool, tools);
        let reasoning = reasoning(formats.reasoning);
        let opened = opened(reasoning, prompt);
        Self {
            signs: signs(calls.as_deref(), reasoning),
            calls,
            reasoning,
            mode: opened.map_or(Mode::Text, |opened| Mode::Reasoning { tags: opened.tags, at_prompt: true }),
            scanner: Scanner::default(),
            at_start: true,
            layout: String::new(),
            after_call: false,
            trim: opened.is_some_and(|opened| !opened.newline),
            in_answer: false,
            again: Vec::new(),
        }
    }

    pub(crate) fn is_reasoning(&self) -> bool {
        matches!(self.mode, Mode::Reasoning { .. })
    }

    /// Reads the next character.
    pub(crate) fn push(&mut self, letter: char, out: &mut Out) {
        self.again.push(letter);
        while let Some(letter) = self.again.pop() {
            out.worked(1);
            match self.mode {
                Mode::Calls { .. } => self.step_calls(letter, out),
                Mode::AnswerEnd => self.answer_end(letter, out),
                Mode::Text | Mode::Reasoning { .. } => {
                    if std::mem::take(&mut self.trim) && letter == '\n' {
                        continue;
                    }
                    self.scanner.push(letter);
                    self.scan(out);
                }
            }
        }
    }

    /// Ends the text.
    pub(crate) fn finish(&mut self, out: &mut Out) {
        match self.mode {
            Mode::Text => {
                let held = self.scanner.finish();
                self.text(&held, out);
            }
            Mode::Reasoning { .. } => out.reasoning(&self.scanner.finish()),
            Mode::Calls { .. } => {
                if let Some(calls) = &mut self.calls {
                    out.begin_prepared();
                    calls.finish(out);
                }
                self.leave_calls(0, out);
            }
            Mode::AnswerEnd => return,
        }
        if !self.after_call {
            out.content(&self.layout);
        }
    }

    fn scan(&mut self, out: &mut Out) {
        loop {
            let found = match self.mode {
                Mode::Reasoning { tags, at_prompt } => {
                    let tags = &self.reasoning.tags[tags];
                    let open = if at_prompt { tags.open } else { &[] };
                    self.scanner.settle(tags.close.iter().chain(open).copied().enumerate())
                }
                _ => {
                    let (at_start, in_answer) = (self.at_start, self.in_answer);
                    let counts = |sign: &&Sign| match sign.to {
                        SignTarget::AnswerEnd => in_answer,
                        _ => at_start || sign.position == MarkPosition::Anywhere,
                    };
                    let signs = self.signs.iter().enumerate().filter(|(_, sign)| counts(sign));
                    self.scanner.settle(signs.map(|(index, sign)| (index, sign.text)))
                }
            };
            out.worked(self.scanner.take_work());
            match found {
                None => return,
                Some(ScanEvent::Letter(letter)) => self.letter(letter, out),
                Some(ScanEvent::Marker(index)) => return self.marker(index, out),
            }
        }
    }

    fn letter(&mut self, letter: char, out: &mut Out) {
        let mut bytes = [0; 4];
        let text = letter.encode_utf8(&mut bytes);
        if let Mode::Reasoning { at_prompt, .. } = &mut self.mode {
            *at_prompt = false;
            out.reasoning(text);
        } else {
            self.text(text, out);
        }
    }

    /// Adds content or layout.
    fn text(&mut self, text: &str, out: &mut Out) {
        for letter in text.chars() {
            if self.at_start && is_space(letter) {
                self.layout.push(letter);
                continue;
            }
            out.content(&std::mem::take(&mut self.layout));
            self.at_start = false;
            self.after_call = false;
            out.content(letter.encode_utf8(&mut [0; 4]));
        }
    }

    fn marker(&mut self, index: usize, out: &mut Out) {
        if let Mode::Reasoning { tags, .. } = self.mode {
            self.trim = true;
            if index < self.reasoning.tags[tags].close.len() {
                self.start(Mode::Text);
            } else {
                // The prompt ends with this tag, and the model has repeated it.
                self.mode = Mode::Reasoning { tags, at_prompt: false };
            }
            return;
        }
        let sign = self.signs[index];
        match sign.to {
            SignTarget::Reasoning { tags } => {
                self.start(Mode::Reasoning { tags, at_prompt: false });
                self.trim = true;
            }
            SignTarget::Answer => {
                self.start(Mode::Text);
                self.trim = true;
                self.in_answer = true;
            }
            SignTarget::AnswerEnd => {
                out.open(sign.text);
                self.mode = Mode::AnswerEnd;
            }
            SignTarget::Calls { mark } => self.enter_calls(mark, out),
        }
    }

    /// Enters a mode before which only layout has been read.
    fn start(&mut self, mode: Mode) {
        self.mode = mode;
        self.layout.clear();
        self.at_start = true;
    }

    fn enter_calls(&mut self, mark: usize, out: &mut Out) {
        let Some(calls) = &mut self.calls else { return };
        let Mark { text, is_read, .. } = calls.marks()[mark];
        self.mode = Mode::Calls { before: out.calls() };
        out.open(text);
        calls.enter(mark, out);
        if is_read {
            for letter in text.chars() {
                let step = calls.step(letter, out);
                debug_assert_eq!(step, Step::More, "a sign that is read fits the machine");
            }
        }
    }

    fn step_calls(&mut self, letter: char, out: &mut Out) {
        let Some(calls) = &mut self.calls else { return };
        out.read(letter);
        match calls.step(letter, out) {
            Step::More => {}
            Step::Done => {
                out.commit();
                self.leave_calls(0, out);
            }
            Step::Skip { kept } => {
                let text = out.split_open(kept);
                self.text(&text, out);
            }
            Step::Stop { again } => {
                out.unread();
                self.again.push(letter);
                self.leave_calls(again, out);
            }
        }
    }

    /// Leaves calls. The open text becomes content, except its last `again` bytes.
    fn leave_calls(&mut self, again: usize, out: &mut Out) {
        if let Mode::Calls { before } = self.mode
            && out.calls() > before
        {
            self.start(Mode::Text);
            self.after_call = true;
        }
        self.mode = Mode::Text;
        let (text, rest) = out.close(again);
        self.text(&text, out);
        out.worked(rest.len());
        self.again.extend(rest.chars().rev());
    }

    /// The tag that ends a response counts only if nothing follows it.
    fn answer_end(&mut self, letter: char, out: &mut Out) {
        out.read(letter);
        if is_space(letter) {
            return;
        }
        out.unread();
        self.mode = Mode::Text;
        self.again.push(letter);
        let (text, _) = out.close(0);
        self.text(&text, out);
    }
}

fn signs(calls: Option<&dyn Calls>, reasoning: &Reasoning) -> Vec<Sign> {
    let marks = calls.map_or(&[][..], |calls| calls.marks());
    let mut signs: Vec<Sign> = marks
        .iter()
        .enumerate()
        .map(|(mark, sign)| Sign { text: sign.text, position: sign.position, to: SignTarget::Calls { mark } })
        .collect();
    for (index, tags) in reasoning.tags.iter().enumerate() {
        let to = SignTarget::Reasoning { tags: index };
        signs.extend(tags.open.iter().map(|text| Sign { text, position: tags.position, to }));
    }
    if let Some((open, close)) = reasoning.answer {
        signs.push(Sign { text: open, position: MarkPosition::Start, to: SignTarget::Answer });
        signs.push(Sign { text: close, position: MarkPosition::Anywhere, to: SignTarget::AnswerEnd });
    }
    signs
}
