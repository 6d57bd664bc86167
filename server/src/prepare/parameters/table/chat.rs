//! What only chat completions have.

use super::Parameter;
use super::shared::{EFFORTS, NO_MODERATION};
use super::{ALL, OPENAI, OPENAI_VLLM, OVMS_PARTLY, OVMS_VLLM, VLLM, row};
use crate::limits::TOP_LOGPROBS_MAX;
use crate::prepare::parameters::kind::Kind;

pub(super) const TABLE: &[Parameter] = &[
    row("messages", Kind::Array(&Kind::Object, usize::MAX), "", ALL).required(),
    row("logprobs", Kind::Boolean, "false", OVMS_PARTLY).note("OVMS: not while streaming."),
    row("top_logprobs", Kind::Integer(0, TOP_LOGPROBS_MAX as i64), "0", OPENAI_VLLM)
        .note("Only with `logprobs`."),
    row("tools", Kind::Array(&Kind::Object, usize::MAX), "", ALL),
    row("add_generation_prompt", Kind::Boolean, "true", OVMS_VLLM),
    row("add_special_tokens", Kind::Boolean, "false", VLLM)
        .accepted("Templates write them themselves, and those that do not want none."),
    row("include_reasoning", Kind::Boolean, "true", VLLM).note("Whether the answer has the reasoning in it."),
    row("functions", Kind::Array(&Kind::Object, usize::MAX), "", OPENAI)
        .note("The former name of `tools`. A call is told as `function_call` then, of which an answer has one at most."),
    row("function_call", Kind::Either(&[Kind::OneOf(&["none", "auto"]), Kind::Object]), "auto", OPENAI)
        .note("The former name of `tool_choice`."),
    row("continue_final_message", Kind::Boolean, "false", VLLM)
        .note("The answer goes on with the last message, which is not told again. `add_generation_prompt` is false then."),
    row("chat_template", Kind::Text(usize::MAX), "", VLLM).refused(
        "a template that comes with a request is not run; give the model's by `chat_template.jinja`",
    ),
    row("reasoning_effort", Kind::OneOf(EFFORTS), "", OPENAI_VLLM)
        .note("Goes to the template, which says what it does with it; `max` as `xhigh`."),
    row("verbosity", Kind::OneOf(&["low", "medium", "high"]), "medium", OPENAI)
        .accepted("No model that is served here is made for it."),
    row("prediction", Kind::Fields(PREDICTION), "", OPENAI).accepted(
        "It changes no answer, only how fast it comes: what is predicted is guessed. With it comes `max_ngram_size`.",
    ),
    row("modalities", Kind::Array(&Kind::OneOf(&["text"]), usize::MAX), "[\"text\"]", OPENAI)
        .accepted("Text is what models here answer in; `audio` is refused."),
    row("audio", Kind::Object, "", OPENAI).refused("no model that is served here answers in audio"),
    row("moderation", Kind::Object, "", OPENAI).refused(NO_MODERATION),
    row("web_search_options", Kind::Object, "", OPENAI).refused("there is no web search here"),
];

const PREDICTION: &[(&str, Kind)] = &[
    ("type", Kind::OneOf(&["content"])),
    ("content", Kind::Either(&[Kind::Text(usize::MAX), Kind::Array(&Kind::Object, usize::MAX)])),
];
