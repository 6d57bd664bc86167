//! Detects the formats of a model by markers in its chat template. Specific markers are checked before general ones,
//! because some markers occur in several families.

use crate::{Formats, ReasoningFormat, ToolFormat};

/// A model family, identified by its template.
struct Family {
    /// A template belongs to the family if it contains all texts of one of these lists.
    detected_by: &'static [&'static [&'static str]],
    tool: ToolFormat,
    /// The candidates for the reasoning format. The first candidate with a text that the template contains is
    /// selected.
    reasoning: &'static [(ReasoningFormat, &'static [&'static str])],
}

const THINK: &[&str] = &["<think>", "</think>"];
/// The reasoning tags of Magistral.
const MAGISTRAL: &[&str] = &["[THINK]", "[/THINK]"];
/// The reasoning formats of models that write calls as Mistral does, or in no known format.
const MISTRAL: &[(ReasoningFormat, &[&str])] =
    &[(ReasoningFormat::Mistral, MAGISTRAL), (ReasoningFormat::Qwen3, THINK)];

const FAMILIES: [Family; 14] = [
    Family {
        detected_by: &[&["<|channel|>", "<|message|>"]],
        tool: ToolFormat::Gptoss,
        reasoning: &[(ReasoningFormat::Gptoss, &["<|channel|>"])],
    },
    Family {
        detected_by: &[&["<|tool_call>"], &["<|channel>"], &["<start_of_turn>", "tool_code"]],
        tool: ToolFormat::Gemma4,
        reasoning: &[(ReasoningFormat::Gemma4, &["<|channel>"])],
    },
    Family {
        detected_by: &[&["<function=", "<parameter="]],
        tool: ToolFormat::Qwen3Coder,
        reasoning: &[(ReasoningFormat::Qwen3, THINK)],
    },
    Family {
        detected_by: &[&["<param name="]],
        tool: ToolFormat::MiniCpm5,
        reasoning: &[(ReasoningFormat::MiniCpm5, THINK)],
    },
    Family {
        // The last text identifies LFM 2.5, whose template contains none of the tokens above it.
        detected_by: &[
            &["<|tool_call_start|>"],
            &["<|tool_list_start|>"],
            &["<|tool_response_start|>"],
            &["List of tools: ["],
        ],
        tool: ToolFormat::Lfm2,
        reasoning: &[(ReasoningFormat::Qwen3, THINK)],
    },
    Family {
        detected_by: &[&["functools"], &["<|tool|>", "<|/tool|>"]],
        tool: ToolFormat::Phi4,
        reasoning: &[(ReasoningFormat::Qwen3, THINK)],
    },
    Family { detected_by: &[&["[TOOL_CALLS]", "[ARGS]"]], tool: ToolFormat::Devstral, reasoning: MISTRAL },
    Family {
        detected_by: &[&["[TOOL_CALLS]"], &["[AVAILABLE_TOOLS]"]],
        tool: ToolFormat::Mistral,
        reasoning: MISTRAL,
    },
    Family {
        detected_by: &[&["<｜tool▁calls▁begin｜>"], &["<｜tool▁call▁begin｜>"]],
        tool: ToolFormat::DeepSeek,
        reasoning: &[(ReasoningFormat::DeepSeek, THINK)],
    },
    Family {
        detected_by: &[&["<|start_of_role|>", "tool"], &["<|tool_call|>"]],
        tool: ToolFormat::Granite,
        reasoning: &[(ReasoningFormat::Granite, &["Here is my thought process", "<think>", "</think>"])],
    },
    Family {
        detected_by: &[&["<|python_tag|>"], &["<|python_start|>"]],
        tool: ToolFormat::Llama3,
        reasoning: &[(ReasoningFormat::Qwen3, THINK)],
    },
    Family {
        detected_by: &[&["<tool_call>"]],
        tool: ToolFormat::Hermes3,
        reasoning: &[(ReasoningFormat::Qwen3, THINK)],
    },
    Family {
        detected_by: &[&["<|start_header_id|>", "tools"], &["<|header_start|>", "tools"]],
        tool: ToolFormat::Llama3,
        reasoning: &[(ReasoningFormat::Qwen3, THINK)],
    },
    Family { detected_by: &[&[]], tool: ToolFormat::None, reasoning: MISTRAL },
];

impl Formats {
    /// Detects the formats of a model from the source of its chat template; `none` if they cannot be detected.
    pub fn detect(template: &str) -> Self {
        let has_all = |texts: &&[&str]| texts.iter().all(|text| template.contains(text));
        let family = FAMILIES.iter().find(|family| family.detected_by.iter().any(has_all));
        let Some(Family { tool, reasoning, .. }) = family else { return Self::default() };
        let is_used = |(_, signs): &&(_, &[&str])| signs.iter().any(|sign| template.contains(sign));
        let reasoning = reasoning.iter().find(is_used).map_or(ReasoningFormat::None, |(format, _)| *format);
        Self { tool: *tool, reasoning }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the names of the detected formats, as flags use them.
    fn detected(template: &str) -> (&'static str, &'static str) {
        let formats = Formats::detect(template);
        formats.check().unwrap();
        (formats.tool.name(), formats.reasoning.name())
    }

    #[test]
    fn a_family_is_detected_from_its_template() {
        for (template, tool, reasoning) in [
            (
                "{{- \"<|start|>assistant<|channel|>\" + channel + \"<|message|>\" + text + \"<|end|>\" }}",
                "gptoss",
                "gptoss",
            ),
            (
                "{%- if thinking %}{{- '<|channel>thought\\n' + thinking + '<channel|>' }}{%- endif %}{{- '<|tool_call>call:' + f.name + '{' }}",
                "gemma4",
                "gemma4",
            ),
            ("{{- '<|tool_call>call:' ~ f.name ~ '{' }}", "gemma4", "none"),
            ("{{ '<start_of_turn>user\\nWrite calls in ```tool_code' }}", "gemma4", "none"),
            (
                "{{- '<tool_call>\\n<function=' + f.name + '>\\n' }}{{- '<parameter=' + name + '>\\n' }}",
                "qwen3coder",
                "none",
            ),
            (
                "{{- '<tool_call>\\n<function=' + f.name + '>\\n<parameter=' }}{{- '<think>\\n' }}",
                "qwen3coder",
                "qwen3",
            ),
            (
                "{{- '<function name=\"' ~ f.name ~ '\"><param name=\"' ~ key ~ '\">' }}{{ '<think>' }}",
                "minicpm5",
                "minicpm5",
            ),
            ("{{- 'List of tools: <|tool_list_start|>[' }}", "lfm2", "none"),
            ("{{- 'List of tools: [' }}{{- text.split('</think>')[-1] }}", "lfm2", "qwen3"),
            ("{{- '<|tool_call_start|>[' }}{%- set text = text.split('</think>')[-1] %}", "lfm2", "qwen3"),
            ("{{ 'Answer with functools[{\"name\": ...}]' }}", "phi4", "none"),
            ("{{ '<|system|>' + text + '<|tool|>' + tools + '<|/tool|>' }}", "phi4", "none"),
            ("{{- '[TOOL_CALLS]' + f.name + '[ARGS]' + f.arguments }}", "devstral", "none"),
            (
                "{{- '[TOOL_CALLS]' + f.name + '[ARGS]' }}{{- '[THINK]' + text + '[/THINK]' }}",
                "devstral",
                "mistral",
            ),
            ("{{- 'Think between [THINK] and [/THINK].' }}", "none", "mistral"),
            ("{{- '[AVAILABLE_TOOLS] [' }}{{- '[TOOL_CALLS] [' }}", "mistral", "none"),
            (
                "{{'<｜Assistant｜><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + type + '<｜tool▁sep｜>'}}{{'<think>\\n'}}",
                "deepseek",
                "deepseek",
            ),
            ("{{- '<|start_of_role|>tools<|end_of_role|>' }}", "granite", "none"),
            (
                "{{- '<|start_of_role|>assistant' }}You may write <tool_call>. Write your thoughts after 'Here is my thought process:'",
                "granite",
                "granite",
            ),
            ("{{- '<|start_header_id|>ipython' }}{{- '<|python_tag|>' + call }}", "llama3", "none"),
            (
                "{{- '<|start_header_id|>' }}{%- if tools is not none %}answer with JSON{%- endif %}",
                "llama3",
                "none",
            ),
            ("{{- '<|header_start|>' }}{%- if tools is not none %}[f(a=1)]{%- endif %}", "llama3", "none"),
            ("{{- '<|im_start|>' }}{{- '<tool_call>\\n{\"name\": \"' }}", "hermes3", "none"),
            (
                "{{- '<|im_start|>' }}{{- '<tool_call>\\n' }}{{- '<think>\\n\\n</think>' }}",
                "hermes3",
                "qwen3",
            ),
            ("{{- '<|im_start|>assistant\\n<think>\\n' }}", "none", "qwen3"),
            ("{{- '<|im_start|>' + message.role }}", "none", "none"),
            ("", "none", "none"),
        ] {
            assert_eq!(detected(template), (tool, reasoning), "{template}");
        }
    }

    #[test]
    fn every_format_can_be_detected() {
        for tool in ToolFormat::ALL {
            assert!(FAMILIES.iter().any(|family| family.tool == tool), "{}", tool.name());
        }
        for reasoning in ReasoningFormat::ALL.into_iter().filter(|format| *format != ReasoningFormat::None) {
            assert!(
                FAMILIES.iter().any(|family| family.reasoning.iter().any(|(format, _)| *format == reasoning)),
                "{}",
                reasoning.name()
            );
        }
    }
}
