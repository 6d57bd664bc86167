//! Tool formats: the markers that begin calls in the text, and the state machines that parse the calls and determine
//! where they end. The module `marked` decides where content, reasoning and calls begin.

mod bracketed;
mod call_object;
mod deepseek;
mod gemma4;
mod json_arguments;
mod json_calls;
mod machine;
mod mistral;
mod python_calls;
mod tagged;
mod tagged_value;

pub(crate) use call_object::{CallObject, ObjectRule};
pub(crate) use json_arguments::JsonArguments;
pub(crate) use json_calls::JsonCalls;
pub(crate) use machine::{CallMarker, Calls, MarkerPosition, Step};

use bracketed::BracketedCalls;
use deepseek::DeepSeek;
use gemma4::Gemma4;
use mistral::Mistral;
use tagged::TaggedCalls;

use std::sync::Arc;

use crate::{ToolFormat, Tools};

/// Returns the state machine of a format, or `None` for `none` and for Harmony, which is a format of the whole text.
pub(crate) fn calls(format: ToolFormat, tools: &Arc<Tools>) -> Option<Box<dyn Calls>> {
    Some(match format {
        ToolFormat::Hermes3 => Box::new(JsonCalls::hermes3()),
        ToolFormat::Mistral => Box::new(Mistral::with_bare_array()),
        ToolFormat::Devstral => Box::new(Mistral::marked()),
        ToolFormat::Phi4 => Box::new(JsonCalls::phi4()),
        ToolFormat::Granite => Box::new(JsonCalls::granite()),
        ToolFormat::Llama3 => Box::new(BracketedCalls::llama3(tools)),
        ToolFormat::Lfm2 => Box::new(BracketedCalls::lfm2(tools)),
        ToolFormat::Gemma4 => Box::new(Gemma4::new(tools)),
        ToolFormat::Qwen3Coder => Box::new(TaggedCalls::qwen3coder(tools)),
        ToolFormat::MiniCpm5 => Box::new(TaggedCalls::minicpm5(tools)),
        ToolFormat::DeepSeek => Box::new(DeepSeek::new()),
        ToolFormat::None | ToolFormat::Gptoss => return None,
    })
}
