//! The parameters of the tokenize and detokenize endpoints.

use super::parameter::{ALL, NO_PEERS, OVMS, OVMS_VLLM, Parameter, TOKEN, VLLM, row};
use crate::limits::TEXTS_MAX;
use crate::prepare::parameters::kind::Kind;

const TEXTS: Kind = Kind::Either(&[Kind::Text(usize::MAX), Kind::Texts(TEXTS_MAX, usize::MAX)]);

pub(super) const TOKENIZE: &[Parameter] = &[
    row("model", Kind::Text(usize::MAX), "the served model", ALL),
    row("text", TEXTS, "", OVMS).note("One of `text`, `prompt` and `messages` is required."),
    row("prompt", TEXTS, "", VLLM).note("vLLM's name for `text`."),
    row("messages", Kind::Array(&Kind::Object, usize::MAX), "", VLLM)
        .note("A conversation, as in chat completions."),
    row("add_special_tokens", Kind::Boolean, "true", OVMS_VLLM)
        .note("No effect on a conversation, as in chat completions."),
    row("max_length", Kind::Integer(1, u32::MAX as i64), "", OVMS)
        .note("Returns at most this number of tokens of each text, from its beginning."),
    row("pad_to_max_length", Kind::Boolean, "false", OVMS)
        .note("Pads shorter lists to `max_length`, which is then required."),
    row("padding_side", Kind::OneOf(&["left", "right"]), "right", OVMS),
    row("return_token_strs", Kind::Boolean, "false", VLLM)
        .note("Returns the texts of the tokens in `token_strs`."),
    row("tools", Kind::Array(&Kind::Object, usize::MAX), "", VLLM).note("As in chat completions."),
    row("chat_template_kwargs", Kind::Object, "", VLLM).note("As in chat completions."),
    row("add_generation_prompt", Kind::Boolean, "true", VLLM).note("As in chat completions."),
];

pub(super) const DETOKENIZE: &[Parameter] = &[
    row("model", Kind::Text(usize::MAX), "the served model", VLLM),
    row("tokens", Kind::Array(&TOKEN, usize::MAX), "", VLLM).required(),
    row("skip_special_tokens", Kind::Boolean, "false", NO_PEERS)
        .note("Whether the text omits special tokens."),
];
