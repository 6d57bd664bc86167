//! What a tool format is: signs in the text that lead to a machine, and the machine. It decides how calls are
//! written; where text, reasoning and calls take turns is `marked`'s decision.

mod bracketed;
mod call_object;
mod deepseek;
mod gemma4;
mod json_arguments;
mod json_calls;
mod mistral;
mod python_calls;
mod tagged;
mod tagged_value;

pub(crate) use call_object::{CallObject, ObjectRule};
pub(crate) use json_arguments::JsonArguments;
pub(crate) use json_calls::JsonCalls;

use bracketed::Bracketed;
use deepseek::DeepSeek;
use gemma4::Gemma4;
use mistral::Mistral;
use tagged::Tagged;

use std::fmt::Debug;
use std::sync::Arc;

use crate::out::Out;
use crate::{ToolFormat, Tools};

/// Text that leads to calls.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mark {
    pub(crate) text: &'static str,
    pub(crate) place: Place,
    /// Whether its text is the beginning of what the machine reads, and not a marker before it.
    pub(crate) is_read: bool,
}

/// Where a sign counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// Everywhere.
    Anywhere,
    /// Where nothing but space precedes it: at the beginning, after reasoning, after a call.
    Start,
}

impl Mark {
    pub(crate) const fn anywhere(text: &'static str) -> Self {
        Self { text, place: Place::Anywhere, is_read: false }
    }

    pub(crate) const fn bare(text: &'static str) -> Self {
        Self { text, place: Place::Start, is_read: true }
    }
}

/// What became of a character.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// It belongs to the calls, which go on.
    More,
    /// It belongs to the calls, which are over.
    Done,
    /// It does not belong to the calls. What was read and led to nothing is text; of it the last `again` bytes
    /// are looked at anew, since they may begin something else.
    Stop { again: usize },
    /// It belongs to the calls, which go on. What was read is text, but for its last `kept` bytes.
    Skip { kept: usize },
}

impl Step {
    /// What was read and led to nothing is text.
    pub(crate) const TEXT: Self = Self::Stop { again: 0 };

    /// What was read and led to nothing, without the character that did not fit, is looked at anew.
    pub(crate) fn look_again(out: &Out, letter: char) -> Self {
        Self::Stop { again: out.open_bytes() - letter.len_utf8() }
    }
}

/// A machine that reads calls, from one of its signs on, a character at a time.
pub(crate) trait Calls: Debug + Send + Sync {
    /// The signs that lead to it.
    fn marks(&self) -> &'static [Mark];

    /// The sign with this place in the list was found.
    fn enter(&mut self, mark: usize, out: &mut Out);

    /// Takes the next character, which `out` has read.
    fn step(&mut self, letter: char, out: &mut Out) -> Step;

    /// The text ends within the calls: gives out what is certain.
    fn finish(&mut self, _out: &mut Out) {}
}

/// The machine of a format; None for `none` and for Harmony, which is a format for the whole text.
pub(crate) fn calls(format: ToolFormat, tools: &Arc<Tools>) -> Option<Box<dyn Calls>> {
    Some(match format {
        ToolFormat::Hermes3 => Box::new(JsonCalls::hermes3()),
        ToolFormat::Mistral => Box::new(Mistral::with_bare_array()),
        ToolFormat::Devstral => Box::new(Mistral::marked()),
        ToolFormat::Phi4 => Box::new(JsonCalls::phi4()),
        ToolFormat::Granite => Box::new(JsonCalls::granite()),
        ToolFormat::Llama3 => Box::new(Bracketed::llama3(tools)),
        ToolFormat::Lfm2 => Box::new(Bracketed::lfm2(tools)),
        ToolFormat::Gemma4 => Box::new(Gemma4::new(tools)),
        ToolFormat::Qwen3Coder => Box::new(Tagged::qwen3coder(tools)),
        ToolFormat::MiniCpm5 => Box::new(Tagged::minicpm5(tools)),
        ToolFormat::DeepSeek => Box::new(DeepSeek::new()),
        ToolFormat::None | ToolFormat::Gptoss => return None,
    })
}
