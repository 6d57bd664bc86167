//! The names of the formats, which may be combined, and which special tokens they need to see.

use std::fmt;
use std::str::FromStr;

use crate::Tools;

/// How a model writes calls of tools.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ToolFormat {
    /// Calls are text.
    #[default]
    None,
    /// `<tool_call>{"name": …, "arguments": …}</tool_call>`: Hermes, Qwen 2.5, Qwen 3.
    Hermes3,
    /// `{"name": …, "parameters": …}` or `[f(a=1)]`: Llama 3 and 4.
    Llama3,
    /// `[TOOL_CALLS][{"name": …, "arguments": …}]` or `[TOOL_CALLS]f[ARGS]{…}`: Mistral.
    Mistral,
    /// `[TOOL_CALLS]f[ARGS]{…}`: Devstral.
    Devstral,
    /// `functools[{"name": …, "arguments": …}]` or the same between tokens: Phi 4 mini.
    Phi4,
    /// Harmony: gpt-oss.
    Gptoss,
    /// `<tool_call><function=f><parameter=a>…</parameter></function></tool_call>`: Qwen 3 Coder.
    Qwen3Coder,
    /// `<|tool_call_start|>[f(a=1)]<|tool_call_end|>`: LFM 2.
    Lfm2,
    /// `<|tool_call>call:f{a:1}<tool_call|>`: Gemma 4; and Gemma 3's code blocks.
    Gemma4,
    /// `<function name="f"><param name="a">…</param></function>`: MiniCPM 5.
    MiniCpm5,
    /// `<｜tool▁call▁begin｜>function<｜tool▁sep｜>f` and a JSON block: DeepSeek V3 and R1.
    DeepSeek,
    /// `<|tool_call|>[{"name": …, "arguments": …}]` or as Hermes: Granite.
    Granite,
}

/// How a model writes its reasoning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ReasoningFormat {
    /// Reasoning is text.
    #[default]
    None,
    /// `<think>…</think>`: Qwen 3 and many others.
    Qwen3,
    /// `<think>…</think>`: DeepSeek R1.
    DeepSeek,
    /// Harmony's analysis channel: gpt-oss.
    Gptoss,
    /// `<|channel>thought … <channel|>`: Gemma 4.
    Gemma4,
    /// `<think>…</think>`: MiniCPM 5.
    MiniCpm5,
    /// `Here is my thought process:` or `<think>`: Granite.
    Granite,
    /// `[THINK]…[/THINK]`: Magistral.
    Mistral,
}

impl ToolFormat {
    /// All of them.
    pub const ALL: [Self; 13] = [
        Self::None,
        Self::Hermes3,
        Self::Llama3,
        Self::Mistral,
        Self::Devstral,
        Self::Phi4,
        Self::Gptoss,
        Self::Qwen3Coder,
        Self::Lfm2,
        Self::Gemma4,
        Self::MiniCpm5,
        Self::DeepSeek,
        Self::Granite,
    ];

    /// What it is called in flags.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Hermes3 => "hermes3",
            Self::Llama3 => "llama3",
            Self::Mistral => "mistral",
            Self::Devstral => "devstral",
            Self::Phi4 => "phi4",
            Self::Gptoss => "gptoss",
            Self::Qwen3Coder => "qwen3coder",
            Self::Lfm2 => "lfm2",
            Self::Gemma4 => "gemma4",
            Self::MiniCpm5 => "minicpm5",
            Self::DeepSeek => "deepseek",
            Self::Granite => "granite",
        }
    }

    /// Texts of tokens that have to be in the text even if special tokens are left out of it: without them
    /// the format cannot be read.
    pub fn special_tokens(self) -> &'static [&'static str] {
        match self {
            Self::None | Self::Hermes3 | Self::Qwen3Coder => &[],
            Self::Phi4 => &["<|tool_call|>", "<|/tool_call|>"],
            Self::Llama3 => &["<|python_tag|>", "<|python_start|>", "<|python_end|>"],
            Self::Mistral | Self::Devstral => &["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"],
            Self::Gptoss => &HARMONY_TOKENS,
            Self::Lfm2 => &["<|tool_call_start|>", "<|tool_call_end|>"],
            Self::Gemma4 => &["<|tool_call>", "<tool_call|>", "<|\"|>"],
            Self::MiniCpm5 => &["<function name=", "</function>", "<param name=", "</param>"],
            Self::DeepSeek => &[
                "<｜tool▁calls▁begin｜>",
                "<｜tool▁call▁begin｜>",
                "<｜tool▁sep｜>",
                "<｜tool▁call▁end｜>",
                "<｜tool▁calls▁end｜>",
            ],
            Self::Granite => &["<|tool_call|>", "<tool_call>", "</tool_call>"],
        }
    }
}

const HARMONY_TOKENS: [&str; 7] =
    ["<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"];

impl ReasoningFormat {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::None,
        Self::Qwen3,
        Self::DeepSeek,
        Self::Gptoss,
        Self::Gemma4,
        Self::MiniCpm5,
        Self::Granite,
        Self::Mistral,
    ];

    /// What it is called in flags.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Qwen3 => "qwen3",
            Self::DeepSeek => "deepseek",
            Self::Gptoss => "gptoss",
            Self::Gemma4 => "gemma4",
            Self::MiniCpm5 => "minicpm5",
            Self::Granite => "granite",
            Self::Mistral => "mistral",
        }
    }

    /// Texts of tokens that have to be in the text even if special tokens are left out of it: without them
    /// the format cannot be read.
    pub fn special_tokens(self) -> &'static [&'static str] {
        match self {
            Self::None => &[],
            Self::Qwen3 | Self::DeepSeek | Self::MiniCpm5 => &["<think>", "</think>"],
            Self::Granite => &["<think>", "</think>", "<response>", "</response>"],
            Self::Gptoss => &HARMONY_TOKENS,
            Self::Gemma4 => &["<|channel>", "<channel|>"],
            Self::Mistral => &["[THINK]", "[/THINK]"],
        }
    }
}

/// How a model writes calls and reasoning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Formats {
    /// Calls of tools.
    pub tool: ToolFormat,
    /// Reasoning.
    pub reasoning: ReasoningFormat,
}

impl Formats {
    /// Whether the two can be read together.
    ///
    /// # Errors
    /// Harmony frames the whole text: it goes with itself and with `none`.
    pub fn check(self) -> Result<(), Incompatible> {
        let tool_fits = matches!(self.tool, ToolFormat::None | ToolFormat::Gptoss);
        let reasoning_fits = matches!(self.reasoning, ReasoningFormat::None | ReasoningFormat::Gptoss);
        if self.is_harmony() && !(tool_fits && reasoning_fits) {
            return Err(Incompatible { tool: self.tool, reasoning: self.reasoning });
        }
        Ok(())
    }

    /// What of it is read in an answer to a request with these tools: without tools no calls.
    #[must_use]
    pub fn with_tools(self, tools: &Tools) -> Self {
        if tools.is_empty() { Self { tool: ToolFormat::None, ..self } } else { self }
    }

    /// Texts of tokens that have to be in the text that is parsed, even if other special tokens are left out
    /// of it: see [`Formats::with_tools`] for those of a request. Those of them that a tokenizer does not have, or does not hold for special, do not matter.
    pub fn special_tokens(self) -> impl Iterator<Item = &'static str> {
        self.tool.special_tokens().iter().chain(self.reasoning.special_tokens()).copied()
    }

    /// Whether a special token with this text has to stay in the text that is parsed: whether it is one of
    /// [`Formats::special_tokens`] or a part of one, since tokenizers differ in where a marker ends.
    pub fn needs_token(self, text: &str) -> bool {
        !text.is_empty() && self.special_tokens().any(|marker| marker.contains(text))
    }

    /// Whether the whole text is messages in channels.
    pub(crate) fn is_harmony(self) -> bool {
        self.tool == ToolFormat::Gptoss || self.reasoning == ReasoningFormat::Gptoss
    }
}

/// Two formats that cannot be read together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Incompatible {
    /// The tool format.
    pub tool: ToolFormat,
    /// The reasoning format.
    pub reasoning: ReasoningFormat,
}

impl fmt::Display for Incompatible {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (tool, reasoning) = (self.tool.name(), self.reasoning.name());
        write!(
            to,
            "tool parser {tool} does not go with reasoning parser {reasoning}: gptoss goes with gptoss or none"
        )
    }
}

impl std::error::Error for Incompatible {}

/// A name that no format has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownFormat {
    /// The name.
    pub name: String,
    /// Those there are.
    pub known: Vec<&'static str>,
}

impl fmt::Display for UnknownFormat {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(to, "unknown parser {:?}: one of {}", self.name, self.known.join(", "))
    }
}

impl std::error::Error for UnknownFormat {}

impl FromStr for ToolFormat {
    type Err = UnknownFormat;

    fn from_str(name: &str) -> Result<Self, UnknownFormat> {
        find(&Self::ALL, Self::name, name)
    }
}

impl FromStr for ReasoningFormat {
    type Err = UnknownFormat;

    fn from_str(name: &str) -> Result<Self, UnknownFormat> {
        find(&Self::ALL, Self::name, name)
    }
}

fn find<T: Copy>(all: &[T], name_of: fn(T) -> &'static str, name: &str) -> Result<T, UnknownFormat> {
    all.iter().copied().find(|format| name_of(*format) == name).ok_or_else(|| UnknownFormat {
        name: name.to_owned(),
        known: all.iter().map(|format| name_of(*format)).collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_format_is_found_by_its_name() {
        for format in ToolFormat::ALL {
            assert_eq!(format.name().parse(), Ok(format));
        }
        for format in ReasoningFormat::ALL {
            assert_eq!(format.name().parse(), Ok(format));
        }
        let unknown = "hermes".parse::<ToolFormat>().unwrap_err();
        assert_eq!(
            unknown.to_string(),
            "unknown parser \"hermes\": one of none, hermes3, llama3, mistral, devstral, phi4, gptoss, qwen3coder, lfm2, gemma4, minicpm5, deepseek, granite"
        );
    }

    #[test]
    fn harmony_goes_with_itself() {
        let check = |tool, reasoning| Formats { tool, reasoning }.check();
        assert_eq!(check(ToolFormat::Gptoss, ReasoningFormat::Gptoss), Ok(()));
        assert_eq!(check(ToolFormat::Gptoss, ReasoningFormat::None), Ok(()));
        assert_eq!(check(ToolFormat::None, ReasoningFormat::Gptoss), Ok(()));
        assert_eq!(check(ToolFormat::Llama3, ReasoningFormat::Qwen3), Ok(()));
        let error = check(ToolFormat::Hermes3, ReasoningFormat::Gptoss).unwrap_err();
        assert_eq!(
            error.to_string(),
            "tool parser hermes3 does not go with reasoning parser gptoss: gptoss goes with gptoss or none"
        );
        assert!(check(ToolFormat::Gptoss, ReasoningFormat::Qwen3).is_err());
    }

    #[test]
    fn the_tokens_that_must_be_seen_are_named() {
        let formats = Formats { tool: ToolFormat::Lfm2, reasoning: ReasoningFormat::Qwen3 };
        let tokens: Vec<&str> = formats.special_tokens().collect();
        assert_eq!(tokens, ["<|tool_call_start|>", "<|tool_call_end|>", "<think>", "</think>"]);
        let tokens: Vec<&str> = formats.with_tools(&Tools::default()).special_tokens().collect();
        assert_eq!(tokens, ["<think>", "</think>"]);
        assert_eq!(Formats::default().special_tokens().count(), 0);
        let formats = Formats { tool: ToolFormat::MiniCpm5, reasoning: ReasoningFormat::None };
        assert!(formats.needs_token("<function") && formats.needs_token("</param>"));
        assert!(!formats.needs_token("<|im_end|>") && !formats.needs_token(""));
    }
}
