//! What turning text into tokens and back takes.

use super::Parameter;
use super::{ALL, OVMS, OVMS_VLLM, TOKEN, VLLM, row};
use crate::limits::TEXTS_MAX;
use crate::prepare::parameters::kind::Kind;

const TEXTS: Kind = Kind::Either(&[Kind::Text(usize::MAX), Kind::Texts(TEXTS_MAX, usize::MAX)]);

pub(super) const TOKENIZE: &[Parameter] = &[
    row("model", Kind::Text(usize::MAX), "the model served", ALL),
    row("text", TEXTS, "", OVMS).note("One of `text`, `prompt` and `messages` is given."),
    row("prompt", TEXTS, "", VLLM).note("The same, as vLLM calls it."),
    row("messages", Kind::Array(&Kind::Object, usize::MAX), "", VLLM)
        .note("A conversation, as in chat completions."),
    row("add_special_tokens", Kind::Boolean, "true", OVMS_VLLM)
        .note("Of a conversation none are added, as in chat completions."),
    row("max_length", Kind::Integer(1, u32::MAX as i64), "", OVMS)
        .note("No more than the first so many tokens are returned."),
    row("pad_to_max_length", Kind::Boolean, "false", OVMS)
        .note("Shorter lists are filled up to `max_length`; only with it."),
    row("padding_side", Kind::OneOf(&["left", "right"]), "right", OVMS),
    row("return_token_strs", Kind::Boolean, "false", VLLM).note("The tokens' texts, in `token_strs`."),
    row("tools", Kind::Array(&Kind::Object, usize::MAX), "", VLLM).note("As in chat completions."),
    row("chat_template_kwargs", Kind::Object, "", VLLM).note("As in chat completions."),
    row("add_generation_prompt", Kind::Boolean, "true", VLLM).note("As in chat completions."),
];

pub(super) const DETOKENIZE: &[Parameter] = &[
    row("model", Kind::Text(usize::MAX), "the model served", VLLM),
    row("tokens", Kind::Array(&TOKEN, usize::MAX), "", VLLM).required(),
    row("skip_special_tokens", Kind::Boolean, "false", super::NOBODY)
        .note("Whether special tokens have no text."),
];
