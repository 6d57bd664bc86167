//! Parses Harmony, the format of gpt-oss: the whole text consists of messages, each with a header that names its
//! channel and, for a call, its recipient. A message to a recipient is a call in any channel, any other message in the
//! analysis channel is reasoning, and all other text is content, including text outside of messages.

mod header;

use crate::delta_buffer::DeltaBuffer;
use crate::json::{JsonValue, ValueEffect};
use crate::literal::is_space;
use crate::scanner::{ScanEvent, Scanner};
use crate::{Formats, ReasoningFormat, ToolFormat};
use header::{CHANNEL, CONSTRAIN, Header, START};

/// Largest size of a header, in bytes. A longer header is text.
const HEADER_BYTES_MAX: usize = 512;

const MESSAGE: &str = "<|message|>";
const MARKERS: [&str; 7] = [START, CHANNEL, CONSTRAIN, MESSAGE, "<|end|>", "<|call|>", "<|return|>"];

/// The parser of a response in Harmony.
#[derive(Debug)]
pub(crate) struct Harmony {
    has_tools: bool,
    has_reasoning: bool,
    state: State,
    scanner: Scanner,
    /// The header that is being read or, in a call whose arguments have not begun, the text of the message so far.
    header: String,
    /// Whether the message is reasoning, according to its channel, if the message turns out not to be a call.
    is_reasoned: bool,
    /// Whitespace outside of messages, which is content only if text outside of messages follows or if the response
    /// contains nothing else.
    layout: String,
    content: MessageSeparator,
    reasoning: MessageSeparator,
    /// A buffer that is reused to avoid allocations.
    written: String,
}

#[derive(Debug)]
enum State {
    /// The parser is at the beginning, where the prompt may have opened the header.
    Lead,
    Outside,
    Header,
    Content,
    Reasoning,
    /// The parser is in a message of the analysis channel while reasoning is not parsed: its header and its end marker
    /// are content, too.
    Unread,
    /// The parser is in a call, before its arguments.
    Call {
        name: String,
    },
    Arguments(JsonValue),
}

/// Decides whether a newline separates two messages of the same kind.
#[derive(Debug, Default)]
struct MessageSeparator {
    given: bool,
    due: bool,
}

impl MessageSeparator {
    /// Whether a newline precedes the next text.
    fn takes_newline(&mut self) -> bool {
        let takes = self.given && self.due;
        self.given = true;
        self.due = false;
        takes
    }
}

impl Harmony {
    pub(crate) fn new(formats: Formats) -> Self {
        Self {
            has_tools: formats.tool == ToolFormat::Gptoss,
            has_reasoning: formats.reasoning == ReasoningFormat::Gptoss,
            state: State::Lead,
            scanner: Scanner::default(),
            header: String::new(),
            is_reasoned: false,
            layout: String::new(),
            content: MessageSeparator::default(),
            reasoning: MessageSeparator::default(),
            written: String::new(),
        }
    }

    pub(crate) fn is_reasoning(&self) -> bool {
        matches!(self.state, State::Reasoning)
    }

    /// Reads the next character.
    pub(crate) fn push(&mut self, letter: char, out: &mut DeltaBuffer) {
        out.add_work(1);
        if let State::Arguments(value) = &mut self.state {
            // The arguments bypass the scanner, because a marker within a string does not end the call.
            let effect = value.step(letter, &mut self.written);
            out.arguments(&self.written);
            self.written.clear();
            match effect {
                ValueEffect::Continues => {
                    if out.is_prepared() {
                        self.header.push(letter);
                    }
                    return;
                }
                ValueEffect::Completes => {
                    out.end();
                    self.state = State::Outside;
                    return;
                }
                ValueEffect::AlreadyComplete | ValueEffect::Invalid if out.is_prepared() => {
                    out.drop_prepared();
                    self.unread(out);
                }
                ValueEffect::AlreadyComplete | ValueEffect::Invalid => self.state = State::Outside,
            }
        }
        self.scanner.push(letter);
        loop {
            let found = self.scanner.settle(MARKERS.iter().copied().enumerate());
            out.add_work(self.scanner.take_work());
            match found {
                None => return,
                Some(ScanEvent::Letter(letter)) => self.letter(letter, out),
                Some(ScanEvent::Marker(index)) => self.marker(MARKERS[index], out),
            }
        }
    }

    /// Ends the text.
    pub(crate) fn finish(&mut self, out: &mut DeltaBuffer) {
        for letter in self.scanner.finish().chars() {
            self.letter(letter, out);
        }
        match std::mem::replace(&mut self.state, State::Outside) {
            State::Lead | State::Header => self.header_is_text(out),
            State::Call { name } => out.call_at_end(&name),
            State::Arguments(value) => {
                out.begin_prepared();
                out.arguments(&value.held());
            }
            State::Outside | State::Content | State::Reasoning | State::Unread => {}
        }
        if !self.content.given && !self.reasoning.given && out.calls() == 0 {
            out.content(&std::mem::take(&mut self.layout));
        }
    }

    fn letter(&mut self, letter: char, out: &mut DeltaBuffer) {
        match &self.state {
            State::Lead => {
                self.header.push(letter);
                if self.header.len() > HEADER_BYTES_MAX || !header::may_begin_with(&self.header) {
                    self.header_is_text(out);
                }
            }
            State::Outside if is_space(letter) => self.layout.push(letter),
            State::Outside => {
                let layout = std::mem::take(&mut self.layout);
                self.give_content(&layout, out);
                self.give_content(letter.encode_utf8(&mut [0; 4]), out);
            }
            State::Header => {
                self.header.push(letter);
                if self.header.len() > HEADER_BYTES_MAX || letter == '\n' {
                    self.header_is_text(out);
                }
            }
            State::Content | State::Unread => self.give_content(letter.encode_utf8(&mut [0; 4]), out),
            State::Reasoning => {
                if self.reasoning.takes_newline() {
                    out.reasoning("\n");
                }
                out.reasoning(letter.encode_utf8(&mut [0; 4]));
            }
            State::Call { name } if letter == '{' => {
                out.prepare(name);
                self.header.push(letter);
                let mut value = JsonValue::new();
                value.step(letter, &mut self.written);
                out.arguments(&self.written);
                self.written.clear();
                self.state = State::Arguments(value);
            }
            State::Call { .. } if is_space(letter) => self.header.push(letter),
            State::Call { .. } => {
                self.header.push(letter);
                self.unread(out);
            }
            State::Arguments(_) => unreachable!("invariant: arguments do not pass through the scanner"),
        }
    }

    fn marker(&mut self, marker: &'static str, out: &mut DeltaBuffer) {
        match (&self.state, marker) {
            (State::Lead | State::Header, CHANNEL | CONSTRAIN) => {
                self.header.push_str(marker);
                self.state = State::Header;
            }
            (State::Lead | State::Header | State::Outside, MESSAGE) => self.message(out),
            (State::Lead, START) if self.header.trim().is_empty() => self.begin_header(marker),
            (State::Header | State::Lead, START) => {
                self.header_is_text(out);
                self.begin_header(marker);
            }
            (State::Header | State::Lead, _) => {
                self.header.push_str(marker);
                self.header_is_text(out);
            }
            (State::Call { name }, _) => {
                out.call_without_arguments(name);
                self.leave(marker);
            }
            (State::Outside | State::Content | State::Reasoning | State::Unread, CONSTRAIN | MESSAGE) => {
                for letter in marker.chars() {
                    self.letter(letter, out);
                }
            }
            (State::Unread, START | CHANNEL) => self.leave(marker),
            (State::Unread, _) => {
                self.give_content(marker, out);
                self.leave(marker);
            }
            _ => self.leave(marker),
        }
    }

    /// Ends a message, or a text outside of messages, at `marker`.
    fn leave(&mut self, marker: &'static str) {
        self.content.due = true;
        self.reasoning.due = true;
        self.layout.clear();
        self.header.clear();
        self.state = State::Outside;
        if marker == START || marker == CHANNEL {
            self.begin_header(marker);
        }
    }

    fn begin_header(&mut self, marker: &'static str) {
        self.header.clear();
        self.header.push_str(marker);
        self.state = State::Header;
    }

    /// Treats the header as text, because it is not a valid beginning of a message.
    fn header_is_text(&mut self, out: &mut DeltaBuffer) {
        self.state = State::Outside;
        let text = std::mem::take(&mut self.header);
        for letter in text.chars() {
            self.letter(letter, out);
        }
    }

    /// Begins a message after a complete header.
    fn message(&mut self, out: &mut DeltaBuffer) {
        self.layout.clear();
        let Some(Header { channel, recipient }) = Header::read(&self.header) else {
            self.header.push_str(MESSAGE);
            return self.header_is_text(out);
        };
        let is_analysis = channel == Some("analysis");
        self.is_reasoned = is_analysis && self.has_reasoning;
        match recipient {
            Some(name) if self.has_tools => {
                self.state = State::Call { name: name.to_owned() };
                self.header.clear();
            }
            None if is_analysis && !self.has_reasoning => {
                self.state = State::Unread;
                self.header.push_str(MESSAGE);
                let text = std::mem::take(&mut self.header);
                self.give_content(&text, out);
            }
            _ => {
                self.header.clear();
                self.unread(out);
            }
        }
    }

    /// Treats the message as text of its channel, because it is not a call. Its header is dropped as markup.
    fn unread(&mut self, out: &mut DeltaBuffer) {
        self.state = if self.is_reasoned { State::Reasoning } else { State::Content };
        let text = std::mem::take(&mut self.header);
        for letter in text.chars() {
            self.letter(letter, out);
        }
    }

    fn give_content(&mut self, text: &str, out: &mut DeltaBuffer) {
        if text.is_empty() {
            return;
        }
        if self.content.takes_newline() {
            out.content("\n");
        }
        out.content(text);
    }
}
