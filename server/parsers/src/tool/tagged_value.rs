//! A value between tags: text that knows no escapes. Its end is a tag that what may follow a value follows,
//! so that a value may speak of tags.

use crate::json::escape;
use crate::literal::{ChoiceStep, LiteralChoice, is_space};
use crate::scanner::{ScanEvent, Scanner};
use crate::schema::Types;
use crate::typed::{partial, typed};

const CDATA: &str = "<![CDATA[";
const CDATA_END: &str = "]]>";

/// Longest text that may be a `null` with space around it.
const NULL_BYTES_MAX: usize = 32;

/// How the values of a format end.
#[derive(Debug)]
pub(crate) struct ValueRule {
    /// The tags that may end a value, each with what has to follow it, or the end of the text.
    pub(crate) ends: &'static [(&'static str, &'static [&'static str])],
    pub(crate) has_cdata: bool,
}

/// What became of a character.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ValueStep {
    More,
    /// The value ended, and this tag follows, which is the one at `next` in the list of the end at `end`.
    End {
        end: usize,
        next: usize,
    },
}

/// A value on its way, as JSON.
#[derive(Debug)]
pub(crate) struct TaggedValue {
    rule: &'static ValueRule,
    types: Types,
    form: Form,
    state: State,
    scanner: Scanner,
    /// Nothing has come: a newline now is not of the value.
    is_first: bool,
    /// A newline that is of the value if something follows.
    has_newline: bool,
    /// Text that is not passed on yet.
    held: String,
}

/// How a value is passed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    /// As it comes.
    Text,
    /// As it comes, once it cannot be `null` any more.
    TextOrNull,
    /// When it is whole.
    Whole,
    /// Not at all.
    Dropped,
}

#[derive(Debug)]
enum State {
    Within,
    Cdata,
    /// After a tag that may end the value.
    Ended(After),
}

/// What follows a tag that may end the value.
#[derive(Debug)]
struct After {
    /// The place of the tag in the list.
    end: usize,
    /// All of it.
    read: String,
    /// What has to follow, once there was more than space.
    next: Option<LiteralChoice>,
}

impl TaggedValue {
    /// Nothing of it has come.
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

    /// A value that nobody will see.
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

    /// Takes the next character, and appends to `to` what is certain. After the end nothing may follow.
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
                // The tag was text. What follows it may begin another one, which is no longer than a tag: what
                // is looked at anew is bounded, but for space, which begins nothing.
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

    /// How much work the value took since this was last asked.
    pub(crate) fn take_work(&mut self) -> usize {
        self.scanner.take_work()
    }

    /// The text ends. Returns the place of the tag that ended the value, if one did.
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
                    self.state = State::Ended(After { end, read: String::new(), next: None });
                }
            }
        }
    }

    /// Verbatim text begins or ends: newlines in it are of the value.
    fn cdata(&mut self, state: State, to: &mut String) {
        self.state = state;
        self.is_first = false;
        if std::mem::take(&mut self.has_newline) {
            self.put('\n', to);
        }
    }

    /// A character of the value, unless it is a newline at its beginning or end.
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
