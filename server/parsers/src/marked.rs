//! Parses text with markers, in which content, reasoning and calls alternate. The state machines of the tool formats
//! parse the calls.
//!
//! Whitespace at the beginning, after reasoning and after a call is layout: it is dropped if a call or reasoning
//! follows, or if the response ends after a call. Otherwise, it is content.

use std::sync::Arc;

use crate::delta_buffer::DeltaBuffer;
use crate::literal::is_space;
use crate::reasoning::{Reasoning, opened, reasoning};
use crate::scanner::{ScanEvent, Scanner};
use crate::tool::{CallMarker, Calls, MarkerPosition, Step, calls};
use crate::{Formats, Tools};

/// The parser of a response with markers.
#[derive(Debug)]
pub(crate) struct MarkedText {
    calls: Option<Box<dyn Calls>>,
    reasoning: &'static Reasoning,
    mode_markers: Vec<ModeMarker>,
    mode: Mode,
    scanner: Scanner,
    /// Whether only layout has been read since the beginning, the end of reasoning or the end of a call.
    at_start: bool,
    /// The layout that has been read while `at_start` is true.
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
    /// The parser has read the tag that ends a response.
    AnswerEnd,
}

/// A text that changes the mode.
#[derive(Clone, Copy, Debug)]
struct ModeMarker {
    text: &'static str,
    position: MarkerPosition,
    to: ModeTarget,
}

#[derive(Clone, Copy, Debug)]
enum ModeTarget {
    Calls { marker: usize },
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
            mode_markers: mode_markers(calls.as_deref(), reasoning),
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
    pub(crate) fn push(&mut self, letter: char, out: &mut DeltaBuffer) {
        self.again.push(letter);
        while let Some(letter) = self.again.pop() {
            out.add_work(1);
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
    pub(crate) fn finish(&mut self, out: &mut DeltaBuffer) {
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

    fn scan(&mut self, out: &mut DeltaBuffer) {
        loop {
            let found = match self.mode {
                Mode::Reasoning { tags, at_prompt } => {
                    let tags = &self.reasoning.tags[tags];
                    let open = if at_prompt { tags.open } else { &[] };
                    self.scanner.settle(tags.close.iter().chain(open).copied().enumerate())
                }
                _ => {
                    let (at_start, in_answer) = (self.at_start, self.in_answer);
                    let counts = |mode_marker: &&ModeMarker| match mode_marker.to {
                        ModeTarget::AnswerEnd => in_answer,
                        _ => at_start || mode_marker.position == MarkerPosition::Anywhere,
                    };
                    let mode_markers =
                        self.mode_markers.iter().enumerate().filter(|(_, mode_marker)| counts(mode_marker));
                    self.scanner.settle(mode_markers.map(|(index, mode_marker)| (index, mode_marker.text)))
                }
            };
            out.add_work(self.scanner.take_work());
            match found {
                None => return,
                Some(ScanEvent::Letter(letter)) => self.letter(letter, out),
                Some(ScanEvent::Marker(index)) => return self.marker(index, out),
            }
        }
    }

    fn letter(&mut self, letter: char, out: &mut DeltaBuffer) {
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
    fn text(&mut self, text: &str, out: &mut DeltaBuffer) {
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

    fn marker(&mut self, index: usize, out: &mut DeltaBuffer) {
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
        let mode_marker = self.mode_markers[index];
        match mode_marker.to {
            ModeTarget::Reasoning { tags } => {
                self.start(Mode::Reasoning { tags, at_prompt: false });
                self.trim = true;
            }
            ModeTarget::Answer => {
                self.start(Mode::Text);
                self.trim = true;
                self.in_answer = true;
            }
            ModeTarget::AnswerEnd => {
                out.open(mode_marker.text);
                self.mode = Mode::AnswerEnd;
            }
            ModeTarget::Calls { marker } => self.enter_calls(marker, out),
        }
    }

    /// Enters a mode and drops the layout before it. Whitespace that follows is layout again.
    fn start(&mut self, mode: Mode) {
        self.mode = mode;
        self.layout.clear();
        self.at_start = true;
    }

    fn enter_calls(&mut self, marker: usize, out: &mut DeltaBuffer) {
        let Some(calls) = &mut self.calls else { return };
        let CallMarker { text, is_read, .. } = calls.markers()[marker];
        self.mode = Mode::Calls { before: out.calls() };
        out.open(text);
        calls.enter(marker, out);
        if is_read {
            for letter in text.chars() {
                let step = calls.step(letter, out);
                debug_assert_eq!(step, Step::More, "the machine accepts each marker that it reads");
            }
        }
    }

    fn step_calls(&mut self, letter: char, out: &mut DeltaBuffer) {
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

    /// Ends the calls. The open text becomes content, except its last `again` bytes.
    fn leave_calls(&mut self, again: usize, out: &mut DeltaBuffer) {
        if let Mode::Calls { before } = self.mode
            && out.calls() > before
        {
            self.start(Mode::Text);
            self.after_call = true;
        }
        self.mode = Mode::Text;
        let (text, rest) = out.close(again);
        self.text(&text, out);
        out.add_work(rest.len());
        self.again.extend(rest.chars().rev());
    }

    /// Reads a character after the tag that ends a response. The tag is recognized only if nothing but whitespace
    /// follows it.
    fn answer_end(&mut self, letter: char, out: &mut DeltaBuffer) {
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

fn mode_markers(calls: Option<&dyn Calls>, reasoning: &Reasoning) -> Vec<ModeMarker> {
    let markers = calls.map_or(&[][..], |calls| calls.markers());
    let mut mode_markers: Vec<ModeMarker> = markers
        .iter()
        .enumerate()
        .map(|(marker, call_marker)| ModeMarker {
            text: call_marker.text,
            position: call_marker.position,
            to: ModeTarget::Calls { marker },
        })
        .collect();
    for (index, tags) in reasoning.tags.iter().enumerate() {
        let to = ModeTarget::Reasoning { tags: index };
        mode_markers.extend(tags.open.iter().map(|text| ModeMarker { text, position: tags.position, to }));
    }
    if let Some((open, close)) = reasoning.answer {
        mode_markers.push(ModeMarker { text: open, position: MarkerPosition::Start, to: ModeTarget::Answer });
        mode_markers.push(ModeMarker {
            text: close,
            position: MarkerPosition::Anywhere,
            to: ModeTarget::AnswerEnd,
        });
    }
    mode_markers
}
