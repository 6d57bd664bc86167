//! What only completions have.

use super::Parameter;
use super::{ALL, OPENAI_VLLM, OVMS_PARTLY, TOKEN, row};
use crate::limits::{CHOICES_MAX, TOP_LOGPROBS_MAX};
use crate::prepare::parameters::kind::Kind;

pub(super) const TABLE: &[Parameter] = &[
    row("prompt", Kind::Either(PROMPT), "", OVMS_PARTLY)
        .required()
        .note("One string, several, a prompt in tokens, or several. OVMS takes one string."),
    row("suffix", Kind::Text(usize::MAX), "", OPENAI_VLLM).note(
        "Fills in the middle, where the vocabulary has the tokens for it; elsewhere it is a 400. vLLM refuses it always.",
    ),
    row("echo", Kind::Boolean, "false", ALL)
        .note("With `logprobs` the prompt has its own, streamed or not; `max_tokens` may then be 0."),
    row("logprobs", Kind::Integer(0, TOP_LOGPROBS_MAX as i64), "", OVMS_PARTLY)
        .note("OpenAI: 5 at most. OVMS: 1, and not while streaming."),
];

const PROMPT: &[Kind] = &[
    Kind::Text(usize::MAX),
    Kind::Texts(CHOICES_MAX as usize, usize::MAX),
    Kind::Array(&TOKEN, usize::MAX),
    Kind::Array(&Kind::Array(&TOKEN, usize::MAX), CHOICES_MAX as usize),
];
