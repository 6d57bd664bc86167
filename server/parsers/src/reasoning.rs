//! Formats of reasoning: tags around it.

use crate::ReasoningFormat;
use crate::tool::Place;

/// A way of writing reasoning.
#[derive(Debug)]
pub(crate) struct Tags {
    /// Any of these opens it.
    pub(crate) open: &'static [&'static str],
    /// Any of these closes it.
    pub(crate) close: &'static [&'static str],
    pub(crate) place: Place,
}

/// What a format knows.
#[derive(Debug)]
pub(crate) struct Reasoning {
    pub(crate) tags: &'static [Tags],
    /// Tags around what follows the reasoning. They are no text.
    pub(crate) answer: Option<(&'static str, &'static str)>,
}

const THINK: Tags = Tags { open: &["<think>"], close: &["</think>"], place: Place::Start };

static NONE: Reasoning = Reasoning { tags: &[], answer: None };

static THINKING: Reasoning = Reasoning { tags: &[THINK], answer: None };

static MAGISTRAL: Reasoning = Reasoning {
    tags: &[Tags { open: &["[THINK]"], close: &["[/THINK]"], place: Place::Start }],
    answer: None,
};

static GEMMA: Reasoning = Reasoning {
    // The tags are tokens of their own: they are written for their meaning only, wherever they stand.
    tags: &[Tags { open: &["<|channel>thought"], close: &["<channel|>"], place: Place::Anywhere }],
    answer: None,
};

static GRANITE: Reasoning = Reasoning {
    tags: &[
        THINK,
        Tags {
            open: &["Here is my thought process:", "Here's my thought process:"],
            close: &["Here is my response:", "Here's my response:"],
            place: Place::Start,
        },
    ],
    answer: Some(("<response>", "</response>")),
};

/// What is known of a format. Harmony has no tags: it is a format for the whole text.
pub(crate) fn reasoning(format: ReasoningFormat) -> &'static Reasoning {
    match format {
        ReasoningFormat::None | ReasoningFormat::Gptoss => &NONE,
        ReasoningFormat::Qwen3 | ReasoningFormat::DeepSeek | ReasoningFormat::MiniCpm5 => &THINKING,
        ReasoningFormat::Gemma4 => &GEMMA,
        ReasoningFormat::Granite => &GRANITE,
        ReasoningFormat::Mistral => &MAGISTRAL,
    }
}

/// Reasoning that a prompt has opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Opened {
    /// Which of the format's tags.
    pub(crate) tags: usize,
    /// Whether the newline after the tag is there as well.
    pub(crate) newline: bool,
}

/// Whether `prompt` ends with a tag that opens reasoning.
pub(crate) fn opened(reasoning: &Reasoning, prompt: &str) -> Option<Opened> {
    let tag = prompt.trim_end();
    let tags = reasoning.tags.iter().position(|tags| tags.open.iter().any(|open| tag.ends_with(open)))?;
    Some(Opened { tags, newline: prompt[tag.len()..].contains('\n') })
}
