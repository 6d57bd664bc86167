//! Reasoning formats: the tags around reasoning.

use crate::ReasoningFormat;
use crate::tool::MarkerPosition;

/// A pair of tags around reasoning.
#[derive(Debug)]
pub(crate) struct Tags {
    /// The alternatives for the opening tag.
    pub(crate) open: &'static [&'static str],
    /// The alternatives for the closing tag.
    pub(crate) close: &'static [&'static str],
    pub(crate) position: MarkerPosition,
}

/// The tags of a reasoning format.
#[derive(Debug)]
pub(crate) struct Reasoning {
    pub(crate) tags: &'static [Tags],
    /// The tags around the response after the reasoning, which are not part of the text.
    pub(crate) answer: Option<(&'static str, &'static str)>,
}

const THINK: Tags = Tags { open: &["<think>"], close: &["</think>"], position: MarkerPosition::Start };

static NONE: Reasoning = Reasoning { tags: &[], answer: None };

static THINKING: Reasoning = Reasoning { tags: &[THINK], answer: None };

static MAGISTRAL: Reasoning = Reasoning {
    tags: &[Tags { open: &["[THINK]"], close: &["[/THINK]"], position: MarkerPosition::Start }],
    answer: None,
};

static GEMMA: Reasoning = Reasoning {
    // The tags contain special tokens, so they are tags wherever they occur.
    tags: &[Tags {
        open: &["<|channel>thought"],
        close: &["<channel|>"],
        position: MarkerPosition::Anywhere,
    }],
    answer: None,
};

static GRANITE: Reasoning = Reasoning {
    tags: &[
        THINK,
        Tags {
            open: &["Here is my thought process:", "Here's my thought process:"],
            close: &["Here is my response:", "Here's my response:"],
            position: MarkerPosition::Start,
        },
    ],
    answer: Some(("<response>", "</response>")),
};

/// Returns the tags of a format. Harmony has no tags, because it is a format of the whole text.
pub(crate) fn reasoning(format: ReasoningFormat) -> &'static Reasoning {
    match format {
        ReasoningFormat::None | ReasoningFormat::Gptoss => &NONE,
        ReasoningFormat::Qwen3 | ReasoningFormat::DeepSeek | ReasoningFormat::MiniCpm5 => &THINKING,
        ReasoningFormat::Gemma4 => &GEMMA,
        ReasoningFormat::Granite => &GRANITE,
        ReasoningFormat::Mistral => &MAGISTRAL,
    }
}

/// Reasoning that begins in the prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OpenedReasoning {
    /// The index of the tags in the format.
    pub(crate) tags: usize,
    /// Whether a newline follows the tag in the prompt.
    pub(crate) newline: bool,
}

/// Returns the reasoning that a tag at the end of `prompt` opens, if there is one.
pub(crate) fn opened(reasoning: &Reasoning, prompt: &str) -> Option<OpenedReasoning> {
    let tag = prompt.trim_end();
    let tags = reasoning.tags.iter().position(|tags| tags.open.iter().any(|open| tag.ends_with(open)))?;
    Some(OpenedReasoning { tags, newline: prompt[tag.len()..].contains('\n') })
}
