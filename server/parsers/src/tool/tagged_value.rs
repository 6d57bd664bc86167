//! Parses a value between tags: text without escapes. A tag ends the value only if an expected tag or the end of the
//! text follows, so that a value may contain tags.

use crate::json::escape;
use crate::literal::{ChoiceStep, LiteralChoice, is_space};
use crate::scanner::{ScanEvent, Scanner};
use crate::schema::Types;
use crate::typed::{partial, typed};

const CDATA: &str = "<![CDATA[";
const CDATA_END: &str = "]]>";

/// Largest size of a text that may be `null` with whitespace around it, in bytes.
const NULL_BYTES_MAX: usize = 32;

/// The tags that end the values of a format.
#[derive(Debug)]
pub(crate) struct ValueRule {
    /// The tags that may end a value, each with a list of tags. One tag of the list must follow unless the text ends.
    pub(crate) ends: &'static [(&'static str, &'static [&'static str])],
    pub(crate) has_cdata: bool,
}

/// The effect of a character on the value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ValueStep {
    More,
    /// The value has ended with the tag at index `end`. The tag that follows this end tag is at index `next` of the
    /// list of tags that may follow it.
    End {
        end: usize,
        next: usize,
    },
}

/// The parser of a value, which writes JSON.
#[derive(Debug)]
pub(crate) struct TaggedValue {
    rule: &'static ValueRule,
    types: Types,
    form: Form,
    state: State,
    scanner: Scanner,
    /// Whether nothing has been read, so that a newline would not be part of the value.
    is_first: bool,
    /// Whether the last character was a newline, which is part of the value only if more text follows.
    has_newline: bool,
    /// The text that has not been emitted yet.
    held: String,
}

/// Determines when a value is emitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    /// The value is emitted as it arrives.
    Text,
    /// The value is emitted as it arrives, once it can no longer be `null`.
    TextOrNull,
    /// The value is emitted when it is complete.
    Whole,
    /// The value is dropped.
    Dropped,
}

#[derive(Debug)]
enum State {
    Within,
    Cdata,
    /// The parser has read a tag that may end the value.
    Ended(TextAfterTag),
}

/// The text after a tag that may end the value.
#[derive(Debug)]
struct TextAfterTag {
    /// The index of the tag in [`ValueRule::ends`].
    end: usize,
    /// The whole text after the tag.
    read: String,
    /// The expected tags. `None` until a character that is not whitespace has been read.
    next: Option<LiteralChoice>,
}

impl TaggedValue {
    /// Creates the parser of a value.
    pub(crate) fn new(rule: &'static ValueRule, types: Types, to: &mut String) -> Self {
        let nullable = Types { text: true, null: true, ..Types::default() };
        let form = if types.is_text_only() {
            to.push('"');
            Form::Text
        } else if types == nullable {
            Form::TextOrNull
        } else {
            Form::Whole
        };
        Self { types, form, ..Self::dropped(rule) }
    }

    /// Creates the parser of a value that is dropped.
    pub(crate) fn dropped(rule: &'static ValueRule) -> Self {
        Self {
            rule,
            types: Types::default(),
            form: Form::Dropped,
            state: State::Within,
            scanner: Scanner::default(),
            is_first: true,
            has_newline: false,
            held: String::new(),
        }
    }

    /// Reads the next character, and appends the part of the value that is now certain to `to`. This method must not be
    /// called after the end of the value.
    pub(crate) fn step(&mut self, letter: char, to: &mut String) -> ValueStep {
        let State::Ended(after) = &mut self.state else {
            self.scan(letter, to);
            return ValueStep::More;
        };
        if after.next.is_none() && is_space(letter) {
            after.read.push(letter);
            return ValueStep::More;
        }
        let next = after.next.get_or_insert_with(|| LiteralChoice::new(self.rule.ends[after.end].1));
        match next.step(letter) {
            ChoiceStep::More => {
                after.read.push(letter);
                ValueStep::More
            }
            ChoiceStep::Whole(next) => {
                let end = after.end;
                self.close(to);
                ValueStep::End { end, next }
            }
            ChoiceStep::Not => {
                // The tag was text. Process the text after it again, because another tag may begin there. This text is
                // whitespace and the beginning of one tag, so the work remains linear.
                let (end, read) = (after.end, std::mem::take(&mut after.read));
                self.state = State::Within;
                self.rule.ends[end].0.chars().for_each(|letter| self.text(letter, to));
                read.chars().chain([letter]).for_each(|letter| {
                    self.step(letter, to);
                });
                ValueStep::More
            }
        }
    }

    /// Returns the number of elementary steps since the last call.
    pub(crate) fn take_work(&mut self) -> usize {
        self.scanner.take_work()
    }

    /// Ends the text. Returns the index of the tag that ended the value, if one did.
    pub(crate) fn finish(&mut self, to: &mut String) -> Option<usize> {
        if let State::Ended(after) = &self.state {
            let end = after.end;
            self.close(to);
            return Some(end);
        }
        if matches!(self.form, Form::Whole | Form::TextOrNull) {
            to.push_str(&partial(&self.held, self.types));
        }
        None
    }

    fn scan(&mut self, letter: char, to: &mut String) {
        self.scanner.push(letter);
        loop {
            let in_cdata = matches!(self.state, State::Cdata);
            let ends = self.rule.ends.iter().map(|(end, _)| *end).filter(|_| !in_cdata);
            let cdata = if in_cdata { CDATA_END } else { CDATA };
            let cdata = Some(cdata).filter(|_| self.rule.has_cdata);
            let markers = cdata.map(|cdata| (usize::MAX, cdata)).into_iter().chain(ends.enumerate());
            match self.scanner.settle(markers) {
                None => return,
                Some(ScanEvent::Letter(letter)) => self.text(letter, to),
                Some(ScanEvent::Marker(usize::MAX)) => {
                    self.cdata(if in_cdata { State::Within } else { State::Cdata }, to)
                }
                Some(ScanEvent::Marker(end)) => {
                    self.state = State::Ended(TextAfterTag { end, read: String::new(), next: None });
                }
            }
        }
    }

    /// Begins or ends a CDATA section, in which newlines are part of the value.
    fn cdata(&mut self, state: State, to: &mut String) {
        self.state = state;
        self.is_first = false;
        if std::mem::take(&mut self.has_newline) {
            self.put('\n', to);
        }
    }

    /// Adds a character to the value, unless the character is a newline at the beginning or end of the value.
    fn text(&mut self, letter: char, to: &mut String) {
        if std::mem::take(&mut self.is_first) && letter == '\n' {
            return;
        }
        if std::mem::take(&mut self.has_newline) {
            self.put('\n', to);
        }
        if letter == '\n' {
            self.has_newline = true;
        } else {
            self.put(letter, to);
        }
    }

    fn put(&mut self, letter: char, to: &mut String) {
        match self.form {
            Form::Text => escape(letter, to),
            Form::Whole => self.held.push(letter),
            Form::TextOrNull => {
                self.held.push(letter);
                let held = self.held.trim();
                let may_be_null = ["null", "None", "NULL"].iter().any(|null| null.starts_with(held));
                if !may_be_null || self.held.len() > NULL_BYTES_MAX {
                    to.push('"');
                    std::mem::take(&mut self.held).chars().for_each(|letter| escape(letter, to));
                    self.form = Form::Text;
                }
            }
            Form::Dropped => {}
        }
    }

    fn close(&mut self, to: &mut String) {
        match self.form {
            Form::Text => to.push('"'),
            Form::TextOrNull | Form::Whole => to.push_str(&typed(&self.held, self.types)),
            Form::Dropped => {}
        }
    }
}
