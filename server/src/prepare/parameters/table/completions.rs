//! The parameters of completions that the `shared` tables do not contain.

use super::parameter::{ALL, OPENAI_VLLM, OVMS_PARTLY, Parameter, TOKEN, row};
use crate::limits::{CHOICES_MAX, TOP_LOGPROBS_MAX};
use crate::prepare::parameters::kind::Kind;

pub(super) const TABLE: &[Parameter] = &[
    row("prompt", Kind::Either(PROMPT), "", OVMS_PARTLY)
        .required()
        .note("A string, several strings, a list of token IDs, or several lists. OVMS: one string."),
    row("suffix", Kind::Text(usize::MAX), "", OPENAI_VLLM)
        .note("Fill-in-the-middle. The server returns 400 if the vocabulary has no tokens for it. vLLM always rejects it."),
    row("echo", Kind::Boolean, "false", ALL).note(
        "With `echo`, `max_tokens` may be 0. With `logprobs`, the prompt has log probabilities too, streamed or not.",
    ),
    row("logprobs", Kind::Integer(0, TOP_LOGPROBS_MAX as i64), "", OVMS_PARTLY)
        .note("OpenAI: at most 5. OVMS: 1, and not with `stream`."),
];

const PROMPT: &[Kind] = &[
    Kind::Text(usize::MAX),
    Kind::Texts(CHOICES_MAX as usize, usize::MAX),
    Kind::Array(&TOKEN, usize::MAX),
    Kind::Array(&Kind::Array(&TOKEN, usize::MAX), CHOICES_MAX as usize),
];
