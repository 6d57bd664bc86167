//! The names of the formats, their compatible combinations and the special tokens that they need.

use std::fmt;
use std::str::FromStr;

use crate::Tools;

/// Defines an enum of formats: the variants with their documentation and names, in the order of the documentation.
macro_rules! formats {
    ($(#[$about:meta])* $format:ident { $($(#[$of_variant:meta])* $variant:ident => $name:literal,)* }) => {
        $(#[$about])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
        pub enum $format { $($(#[$of_variant])* $variant,)* }

        impl $format {
            /// All formats, in the order of their documentation.
            pub const ALL: [Self; [$($name),*].len()] = [$(Self::$variant),*];

            /// The name of the format in flags.
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }
        }

        impl FromStr for $format {
            type Err = UnknownFormat;

            fn from_str(name: &str) -> Result<Self, UnknownFormat> {
                let unknown = || UnknownFormat { name: name.to_owned(), known: vec![$($name),*] };
                Self::ALL.into_iter().find(|format| format.name() == name).ok_or_else(unknown)
            }
        }
    };
}

formats! {
    /// The format in which a model writes tool calls.
    ToolFormat {
        /// The model has no tool format: calls are ordinary text.
        #[default]
        None => "none",
        /// The format of Hermes, Qwen 2.5 and Qwen 3: `<tool_call>{"name": …, "arguments": …}</tool_call>`.
        Hermes3 => "hermes3",
        /// The formats of Llama 3 and 4: `{"name": …, "parameters": …}` or `[f(a=1)]`.
        Llama3 => "llama3",
        /// The formats of Mistral: `[TOOL_CALLS][{"name": …, "arguments": …}]` or `[TOOL_CALLS]f[ARGS]{…}`.
        Mistral => "mistral",
        /// The format of Devstral: `[TOOL_CALLS]f[ARGS]{…}`.
        Devstral => "devstral",
        /// The format of Phi 4 mini: `functools[{"name": …, "arguments": …}]`, or the same list between special tokens.
        Phi4 => "phi4",
        /// The Harmony format of gpt-oss.
        Gptoss => "gptoss",
        /// The format of Qwen 3 Coder: `<tool_call><function=f><parameter=a>…</parameter></function></tool_call>`.
        Qwen3Coder => "qwen3coder",
        /// The format of LFM 2: `<|tool_call_start|>[f(a=1)]<|tool_call_end|>`.
        Lfm2 => "lfm2",
        /// The format of Gemma 4, `<|tool_call>call:f{a:1}<tool_call|>`, and the code blocks of Gemma 3.
        Gemma4 => "gemma4",
        /// The format of MiniCPM 5: `<function name="f"><param name="a">…</param></function>`.
        MiniCpm5 => "minicpm5",
        /// The formats of DeepSeek: `<｜tool▁call▁begin｜>function<｜tool▁sep｜>f` and a JSON block (V3, R1), or
        /// `<｜tool▁call▁begin｜>f<｜tool▁sep｜>{…}` (V3.1).
        DeepSeek => "deepseek",
        /// The formats of Granite: `<|tool_call|>[{"name": …, "arguments": …}]`, or the format of Hermes.
        Granite => "granite",
    }
}

formats! {
    /// The format in which a model writes its reasoning.
    ReasoningFormat {
        /// The model has no reasoning format: reasoning is ordinary text.
        #[default]
        None => "none",
        /// The tags `<think>…</think>` of Qwen 3 and many other models.
        Qwen3 => "qwen3",
        /// The tags `<think>…</think>` of DeepSeek R1.
        DeepSeek => "deepseek",
        /// The analysis channel of Harmony, the format of gpt-oss.
        Gptoss => "gptoss",
        /// The channel of Gemma 4: `<|channel>thought … <channel|>`.
        Gemma4 => "gemma4",
        /// The tags `<think>…</think>` of MiniCPM 5.
        MiniCpm5 => "minicpm5",
        /// The phrase `Here is my thought process:` or the tag `<think>` of Granite.
        Granite => "granite",
        /// The tags `[THINK]…[/THINK]` of Magistral.
        Mistral => "mistral",
    }
}

impl ToolFormat {
    /// The texts of the special tokens that must remain in the text even if other special tokens are omitted, because
    /// the format cannot be parsed without them.
    pub fn special_tokens(self) -> &'static [&'static str] {
        match self {
            Self::None => &[],
            Self::Hermes3 | Self::Qwen3Coder => &["<tool_call>", "</tool_call>"],
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
    /// The texts of the special tokens that must remain in the text even if other special tokens are omitted, because
    /// the format cannot be parsed without them.
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

/// The formats in which a model writes tool calls and reasoning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Formats {
    /// The format of tool calls.
    pub tool: ToolFormat,
    /// The format of the reasoning.
    pub reasoning: ReasoningFormat,
}

impl Formats {
    /// Checks that the two formats can be parsed together.
    ///
    /// # Errors
    /// One of the formats is Harmony, and the other is neither Harmony nor `none`. Harmony frames the whole text.
    pub fn check(self) -> Result<(), IncompatibleFormats> {
        let tool_fits = matches!(self.tool, ToolFormat::None | ToolFormat::Gptoss);
        let reasoning_fits = matches!(self.reasoning, ReasoningFormat::None | ReasoningFormat::Gptoss);
        if self.is_harmony() && !(tool_fits && reasoning_fits) {
            return Err(IncompatibleFormats { tool: self.tool, reasoning: self.reasoning });
        }
        Ok(())
    }

    /// The formats to parse in a response. The tool format is `none` if the request has no tools.
    #[must_use]
    pub fn with_tools(self, tools: &Tools) -> Self {
        if tools.is_empty() { Self { tool: ToolFormat::None, ..self } } else { self }
    }

    /// The texts of the special tokens that must remain in the parsed text even if other special tokens are omitted;
    /// see [`Formats::with_tools`] for those of a request. Texts that are not special tokens of the tokenizer have no
    /// effect.
    pub fn special_tokens(self) -> impl Iterator<Item = &'static str> {
        self.tool.special_tokens().iter().chain(self.reasoning.special_tokens()).copied()
    }

    /// Whether a special token with this text must remain in the parsed text: whether it is one of
    /// [`Formats::special_tokens`] or a part of one, because tokenizers split markers differently.
    pub fn needs_token(self, text: &str) -> bool {
        !text.is_empty() && self.special_tokens().any(|marker| marker.contains(text))
    }

    /// Whether the whole text consists of messages in channels.
    pub(crate) fn is_harmony(self) -> bool {
        self.tool == ToolFormat::Gptoss || self.reasoning == ReasoningFormat::Gptoss
    }
}

/// The error of combining two incompatible formats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IncompatibleFormats {
    /// The tool format that was requested.
    pub tool: ToolFormat,
    /// The reasoning format that was requested.
    pub reasoning: ReasoningFormat,
}

impl fmt::Display for IncompatibleFormats {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (tool, reasoning) = (self.tool.name(), self.reasoning.name());
        write!(
            to,
            "tool parser {tool} is not compatible with reasoning parser {reasoning}: gptoss requires gptoss or none"
        )
    }
}

impl std::error::Error for IncompatibleFormats {}

/// The error of an unknown format name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownFormat {
    /// The name that was requested.
    pub name: String,
    /// The names of all formats.
    pub known: Vec<&'static str>,
}

impl fmt::Display for UnknownFormat {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(to, "unknown parser {:?}; supported parsers: {}", self.name, self.known.join(", "))
    }
}

impl std::error::Error for UnknownFormat {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_format_is_parsed_from_its_name() {
        for format in ToolFormat::ALL {
            assert_eq!(format.name().parse(), Ok(format));
        }
        for format in ReasoningFormat::ALL {
            assert_eq!(format.name().parse(), Ok(format));
        }
        let unknown = "hermes".parse::<ToolFormat>().unwrap_err();
        assert_eq!(
            unknown.to_string(),
            "unknown parser \"hermes\"; supported parsers: none, hermes3, llama3, mistral, devstral, phi4, gptoss, qwen3coder, lfm2, gemma4, minicpm5, deepseek, granite"
        );
    }

    #[test]
    fn harmony_is_compatible_only_with_itself_and_none() {
        let check = |tool, reasoning| Formats { tool, reasoning }.check();
        assert_eq!(check(ToolFormat::Gptoss, ReasoningFormat::Gptoss), Ok(()));
        assert_eq!(check(ToolFormat::Gptoss, ReasoningFormat::None), Ok(()));
        assert_eq!(check(ToolFormat::None, ReasoningFormat::Gptoss), Ok(()));
        assert_eq!(check(ToolFormat::Llama3, ReasoningFormat::Qwen3), Ok(()));
        let error = check(ToolFormat::Hermes3, ReasoningFormat::Gptoss).unwrap_err();
        assert_eq!(
            error.to_string(),
            "tool parser hermes3 is not compatible with reasoning parser gptoss: gptoss requires gptoss or none"
        );
        assert!(check(ToolFormat::Gptoss, ReasoningFormat::Qwen3).is_err());
    }

    #[test]
    fn the_required_special_tokens_are_listed() {
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
