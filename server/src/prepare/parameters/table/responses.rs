//! What only responses have, or have otherwise.

use super::Parameter;
use super::shared::{EFFORTS, NO_MODERATION, STREAM_OPTIONS};
use super::{ALL, COUNT, OPENAI, OPENAI_VLLM, OVMS, OVMS_PARTLY, VLLM, row};
use crate::limits::{NAME_BYTES_MAX, TOP_LOGPROBS_MAX};
use crate::prepare::parameters::kind::Kind;

/// What `include` may ask for: the first alone has anything to it where tools are the client's.
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
        "A text of the user's, or items: `message`, `reasoning`, `function_call`, `function_call_output`, \
         `custom_tool_call`, `custom_tool_call_output`, `item_reference`. Images are refused: models here read text.",
    ),
    row("instructions", Kind::Text(usize::MAX), "", OPENAI_VLLM)
        .note("What the system says first. Not carried over to responses that follow. OVMS ignores it."),
    row("previous_response_id", Kind::Text(usize::MAX), "", OPENAI_VLLM)
        .note("One that is not kept any more is a 404, code `previous_response_not_found`."),
    row("conversation", Kind::Either(&[Kind::Text(usize::MAX), Kind::Object]), "", OPENAI)
        .note("Of `/conversations`. Not with `previous_response_id`."),
    row("max_output_tokens", COUNT, "", ALL).note("Reasoning and calls count. At least 1."),
    row("max_tokens", COUNT, "", OVMS).accepted("Ignored, as with OVMS: here it is `max_output_tokens`."),
    row("max_completion_tokens", COUNT, "", OVMS).accepted("Ignored, as with OVMS: here it is `max_output_tokens`."),
    row("max_tool_calls", Kind::Integer(1, u32::MAX as i64), "", OPENAI_VLLM)
        .accepted("It bounds calls of built-in tools, of which there are none here."),
    row("tools", Kind::Array(&Kind::Object, usize::MAX), "", OVMS_PARTLY)
        .note(
            "Functions, flat or as chats have them, custom tools and namespaces. Built-in tools are ignored; \
             `warnings` in the response lists them. [Details](responses.md#tools).",
        ),
    row("text", Kind::Fields(TEXT), "", OPENAI_VLLM)
        .note("`format` as `response_format` of chats, its schema flat. `verbosity` is accepted and told again."),
    row("reasoning", Kind::Fields(REASONING), "", OVMS_PARTLY).note(
        "`effort` goes to the template, `max` as `xhigh`. `summary`, `context` and `mode` change nothing: reasoning is \
         always told, whole, as the summary, and shown to the template, which says what it does with it.",
    ),
    row("truncation", Kind::OneOf(&["auto", "disabled"]), "disabled", OPENAI_VLLM).note(
        "`auto` drops the conversation's beginning, up to a message of the user's, until the rest and the answer fit; \
         without `max_output_tokens` a quarter of the model's room is left for that.",
    ),
    row("include", Kind::Array(&Kind::OneOf(INCLUDABLE), usize::MAX), "", OPENAI_VLLM)
        .note("`message.output_text.logprobs` has an effect; the others are about tools that are not here."),
    row("top_logprobs", Kind::Integer(0, TOP_LOGPROBS_MAX as i64), "0", OPENAI_VLLM)
        .note("More than 0 asks for log probabilities too, whether or not `include` does."),
    row("logprobs", Kind::Boolean, "false", OVMS).note("As `include` with `message.output_text.logprobs`."),
    row("background", Kind::Boolean, "false", OPENAI_VLLM)
        .note("The answer comes at once; ask again, follow its events with `stream`, or cancel it."),
    row("store", Kind::Boolean, "true", OPENAI_VLLM)
        .note("Kept within the server's bounds, least recently used first to go."),
    row("metadata", Kind::Pairs(16, 64, 512), "", OPENAI_VLLM).note("Told again with the response."),
    row("prompt", Kind::Object, "", OPENAI)
        .refused("templates are not kept here; send the text as instructions and input"),
    row("context_management", Kind::Array(&Kind::Object, usize::MAX), "", OPENAI)
        .accepted("Only an empty list: conversations are not summed up here. See `truncation`."),
    row("moderation", Kind::Object, "", OPENAI).refused(NO_MODERATION),
    row("access_programs", Kind::Object, "", OPENAI).accepted("There are none here."),
    row("image", Kind::Object, "", OPENAI).accepted("How images are treated; models here read text."),
    row("detokenize", Kind::Boolean, "true", VLLM).accepted("Responses are made of text: there is always some."),
    row("return_token_ids", Kind::Boolean, "false", VLLM).accepted("Responses have no place for tokens."),
    row("prompt_logprobs", Kind::Integer(0, TOP_LOGPROBS_MAX as i64), "", VLLM)
        .accepted("Responses have no place for those of the prompt."),
    row("stream_options", Kind::Fields(STREAM_OPTIONS), "", OPENAI)
        .accepted("Only with `stream`. The usage is always in the last event, and nothing is ever padded. OVMS refuses it."),
    row("add_special_tokens", Kind::Boolean, "false", VLLM)
        .accepted("Templates write them themselves, and those that do not want none."),
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
