//! The parameters of responses that the `shared` tables do not contain, or that override shared parameters.

use super::parameter::{ALL, COUNT, OPENAI, OPENAI_VLLM, OVMS, OVMS_PARTLY, Parameter, VLLM, row};
use super::shared::{EFFORTS, NO_MODERATION, STREAM_OPTIONS};
use crate::limits::{NAME_BYTES_MAX, TOP_LOGPROBS_MAX};
use crate::prepare::parameters::kind::Kind;

/// The values of `include`. Only the first value has an effect.
const INCLUDABLE: &[&str] = &[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
];

pub(super) const TABLE: &[Parameter] = &[
    row("input", Kind::Either(&[Kind::Text(usize::MAX), Kind::Array(&Kind::Object, usize::MAX)]), "", ALL).note(
        "The text of a user message, or items: `message`, `reasoning`, `function_call`, `function_call_output`, \
         `custom_tool_call`, `custom_tool_call_output`, `item_reference`. User messages can contain images.",
    ),
    row("instructions", Kind::Text(usize::MAX), "", OPENAI_VLLM)
        .note("The first system message. Later responses do not inherit it. OVMS ignores it."),
    row("previous_response_id", Kind::Text(usize::MAX), "", OPENAI_VLLM)
        .note("The server returns 404 with the code `previous_response_not_found` if the response is not stored."),
    row("conversation", Kind::Either(&[Kind::Text(usize::MAX), Kind::Object]), "", OPENAI)
        .note("A conversation of `/conversations`. Not with `previous_response_id`."),
    row("max_output_tokens", COUNT, "", ALL).note("At least 1. Reasoning and tool calls count toward the limit."),
    row("max_tokens", COUNT, "", OVMS).accepted("Ignored, as in OVMS: use `max_output_tokens`."),
    row("max_completion_tokens", COUNT, "", OVMS).accepted("Ignored, as in OVMS: use `max_output_tokens`."),
    row("max_tool_calls", Kind::Integer(1, u32::MAX as i64), "", OPENAI_VLLM)
        .accepted("It limits calls of built-in tools, which this server does not have."),
    row("tools", Kind::Array(&Kind::Object, usize::MAX), "", OVMS_PARTLY)
        .note(
            "Functions, flat or in the form of chat completions, custom tools and namespaces. Built-in tools are ignored; \
             `warnings` in the response lists them. [Details](responses.md#tools).",
        ),
    row("text", Kind::Fields(TEXT), "", OPENAI_VLLM)
        .note("`format` is the `response_format` of chat completions with a flat schema. `verbosity` has no effect, but the response repeats it."),
    row("reasoning", Kind::Fields(REASONING), "", OVMS_PARTLY).note(
        "`effort` is a variable of the chat template; `max` is passed as `xhigh`. `summary`, `context` and `mode` have no \
         effect: the summary is always the whole reasoning, and the template receives the reasoning of earlier turns.",
    ),
    row("truncation", Kind::OneOf(&["auto", "disabled"]), "disabled", OPENAI_VLLM).note(
        "`auto` removes the beginning of the conversation, up to a user message, until the rest and the answer fit. \
         Without `max_output_tokens`, a quarter of the context length is left for the answer, if the last turn permits it.",
    ),
    row("include", Kind::Array(&Kind::OneOf(INCLUDABLE), usize::MAX), "", OPENAI_VLLM)
        .note("Only `message.output_text.logprobs` has an effect."),
    row("top_logprobs", Kind::Integer(0, TOP_LOGPROBS_MAX as i64), "0", OPENAI_VLLM)
        .note("A value above 0 enables log probabilities, whether or not `include` does."),
    row("logprobs", Kind::Boolean, "false", OVMS).note("The same as `message.output_text.logprobs` in `include`."),
    row("background", Kind::Boolean, "false", OPENAI_VLLM)
        .note("The server answers at once. Retrieve the response later, follow its events with `stream`, or cancel it."),
    row("store", Kind::Boolean, "true", OPENAI_VLLM)
        .note("Responses are stored within the server's limits; the least recently used are evicted."),
    row("metadata", Kind::Pairs(16, 64, 512), "", OPENAI_VLLM).note("The response repeats it."),
    row("prompt", Kind::Object, "", OPENAI)
        .refused("this server does not store prompt templates; send the text as instructions and input"),
    row("context_management", Kind::Array(&Kind::Object, usize::MAX), "", OPENAI)
        .accepted("Only an empty list: this server does not summarize conversations. See `truncation`."),
    row("moderation", Kind::Object, "", OPENAI).refused(NO_MODERATION),
    row("access_programs", Kind::Object, "", OPENAI).accepted("This server has no access programs."),
    row("image", Kind::Object, "", OPENAI).accepted("The server reads images in `input`."),
    row("detokenize", Kind::Boolean, "true", VLLM).accepted("Responses always have text."),
    row("return_token_ids", Kind::Boolean, "false", VLLM).accepted("Responses have no field for token IDs."),
    row("prompt_logprobs", Kind::Integer(0, TOP_LOGPROBS_MAX as i64), "", VLLM)
        .accepted("Responses have no field for log probabilities of the prompt."),
    row("stream_options", Kind::Fields(STREAM_OPTIONS), "", OPENAI)
        .accepted("Only with `stream`. The usage is always in the last event, and nothing is padded. OVMS rejects it."),
    row("add_special_tokens", Kind::Boolean, "false", VLLM)
        .accepted("The chat template adds the special tokens that the model needs."),
];

const VERBOSITIES: Kind = Kind::OneOf(&["low", "medium", "high"]);
const TEXT: &[(&str, Kind)] = &[("format", Kind::Object), ("verbosity", VERBOSITIES)];

const SUMMARIES: Kind = Kind::OneOf(&["auto", "concise", "detailed"]);
const REASONING: &[(&str, Kind)] = &[
    ("effort", Kind::OneOf(EFFORTS)),
    ("summary", SUMMARIES),
    ("generate_summary", SUMMARIES),
    ("context", Kind::OneOf(&["auto", "current_turn", "all_turns"])),
    ("mode", Kind::Text(NAME_BYTES_MAX)),
];
