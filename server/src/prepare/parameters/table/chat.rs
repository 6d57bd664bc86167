//! The parameters of chat completions that the `shared` tables do not contain, or that override shared parameters.

use super::parameter::{ALL, OPENAI, OPENAI_VLLM, OVMS_PARTLY, OVMS_VLLM, Parameter, VLLM, row};
use super::shared::{EFFORTS, NO_MODERATION};
use crate::limits::TOP_LOGPROBS_MAX;
use crate::prepare::parameters::kind::Kind;

pub(super) const TABLE: &[Parameter] = &[
    row("messages", Kind::Array(&Kind::Object, usize::MAX), "", ALL)
        .note("User messages can contain images.")
        .required(),
    row("logprobs", Kind::Boolean, "false", OVMS_PARTLY).note("OVMS: not with `stream`."),
    row("top_logprobs", Kind::Integer(0, TOP_LOGPROBS_MAX as i64), "0", OPENAI_VLLM)
        .note("Only with `logprobs`."),
    row("tools", Kind::Array(&Kind::Object, usize::MAX), "", ALL),
    row("add_generation_prompt", Kind::Boolean, "true", OVMS_VLLM),
    row("add_special_tokens", Kind::Boolean, "false", VLLM)
        .accepted("The chat template adds the special tokens that the model needs."),
    row("include_reasoning", Kind::Boolean, "true", VLLM).note("Whether the answer contains the reasoning."),
    row("functions", Kind::Array(&Kind::Object, usize::MAX), "", OPENAI)
        .note("The deprecated form of `tools`. An answer then has at most one call, which is reported as `function_call`."),
    row("function_call", Kind::Either(&[Kind::OneOf(&["none", "auto"]), Kind::Object]), "auto", OPENAI)
        .note("The deprecated form of `tool_choice`."),
    row("continue_final_message", Kind::Boolean, "false", VLLM)
        .note("The answer continues the last message and does not repeat it. `add_generation_prompt` is then false."),
    row("chat_template", Kind::Text(usize::MAX), "", VLLM).refused(
        "this server does not run templates from requests; set the model's template with `chat_template.jinja`",
    ),
    row("reasoning_effort", Kind::OneOf(EFFORTS), "", OPENAI_VLLM)
        .note("A variable of the chat template, which defines its effect; `max` is passed as `xhigh`."),
    row("verbosity", Kind::OneOf(&["low", "medium", "high"]), "medium", OPENAI)
        .accepted("No supported model uses it."),
    row("prediction", Kind::Fields(PREDICTION), "", OPENAI).accepted(
        "It affects only the speed: the prediction provides draft tokens. It enables prompt lookup, see `max_ngram_size`.",
    ),
    row("modalities", Kind::Array(&Kind::OneOf(&["text"]), usize::MAX), "[\"text\"]", OPENAI)
        .accepted("Models answer in text; `audio` is rejected."),
    row("audio", Kind::Object, "", OPENAI).refused("this server does not generate audio"),
    row("moderation", Kind::Object, "", OPENAI).refused(NO_MODERATION),
    row("web_search_options", Kind::Object, "", OPENAI).refused("this server has no web search"),
];

const PREDICTION: &[(&str, Kind)] = &[
    ("type", Kind::OneOf(&["content"])),
    ("content", Kind::Either(&[Kind::Text(usize::MAX), Kind::Array(&Kind::Object, usize::MAX)])),
];
