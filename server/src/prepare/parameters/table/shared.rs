//! What several endpoints have in common.

use super::Parameter;
use super::{
    ALL, COUNT, NOBODY, OPENAI, OPENAI_VLLM, OVMS, OVMS_OPENAI, OVMS_PARTLY, OVMS_VLLM, TOKEN, VLLM, row,
};
use crate::limits::{
    ALLOWED_TOKENS_MAX, BAD_WORDS_MAX, CHOICES_MAX, NAME_BYTES_MAX, REPETITION_PENALTY_MAX,
    REPETITION_PENALTY_MIN, STOP_BYTES_MAX, STOP_TOKENS_MAX, STOPS_MAX, TOP_LOGPROBS_MAX,
};
use crate::prepare::parameters::kind::Kind;

/// What goes to the chat template, where there is one.
pub(super) const CONVERSATION: &[Parameter] = &[
    row(
        "tool_choice",
        Kind::Either(&[Kind::OneOf(&["none", "auto", "required"]), Kind::Object]),
        "auto",
        ALL,
    ),
    row("parallel_tool_calls", Kind::Boolean, "true", OPENAI_VLLM),
    row("documents", Kind::Array(&Kind::Object, usize::MAX), "", VLLM).note("For templates that quote them."),
    row("chat_template_kwargs", Kind::Object, "", OVMS_VLLM)
        .note("More variables for the template. Those that are parameters of their own are refused here."),
];

/// How long answers are and how they are put.
pub(super) const OUTPUT: &[Parameter] = &[
    row("model", Kind::Text(usize::MAX), "", ALL).required().note("One of the names in `/v3/models`."),
    row("stream", Kind::Boolean, "false", ALL),
    row("stream_options", Kind::Fields(STREAM_OPTIONS), "", ALL).note(
        "Only with `stream`. `include_usage`: a last chunk with the usage. `continuous_usage_stats` (vLLM): every \
         chunk has the usage so far. `include_obfuscation` (OpenAI) is accepted; nothing is ever padded.",
    ),
    row("max_tokens", COUNT, "see note", ALL).note(
        "Completions: 16, as with OpenAI and vLLM (OVMS: until the end token); chat: what the model has room for. \
         `max_new_tokens` of `generation_config.json` goes before both. 0 only with `echo`.",
    ),
    row("max_completion_tokens", COUNT, "", ALL).note("The same under its later name, which goes first."),
    row("min_tokens", COUNT, "0", VLLM)
        .note("Until then no end token, stop token or stop string ends a choice."),
    row("n", Kind::Integer(1, CHOICES_MAX as i64), "1", ALL)
        .note("Each choice is sampled by itself. With OVMS `n` above 1 is always beams."),
    row("stop", Kind::Either(&[Kind::Text(STOP_BYTES_MAX), Kind::Texts(STOPS_MAX, STOP_BYTES_MAX)]), "", ALL)
        .note("OpenAI takes 4."),
    row("stop_token_ids", Kind::Array(&TOKEN, STOP_TOKENS_MAX), "", VLLM),
    row("include_stop_str_in_output", Kind::Boolean, "false", OVMS_VLLM)
        .note("OVMS: true while streaming, where false is refused."),
    row("ignore_eos", Kind::Boolean, "false", OVMS_VLLM),
    row("skip_special_tokens", Kind::Boolean, "true", OVMS_VLLM)
        .note("With false calls and reasoning are not told apart from the text."),
    row("spaces_between_special_tokens", Kind::Boolean, "true", VLLM)
        .accepted("Tokens stand for exact bytes here, as in vLLM's fast tokenizers: there is nothing to put spaces between."),
    row("detokenize", Kind::Boolean, "true", VLLM)
        .note("With false choices have no text, but their `token_ids`. Not with `stop`."),
    row("return_token_ids", Kind::Boolean, "false", VLLM)
        .note("Choices have `token_ids`, and completions `prompt_token_ids`, the prompt's."),
    row("return_tokens_as_token_ids", Kind::Boolean, "false", VLLM)
        .note("Log probabilities name tokens as `token_id:123`."),
    row("truncate_prompt_tokens", Kind::Integer(-1, u32::MAX as i64), "", VLLM)
        .note("The prompt's last so many tokens are kept; with -1 as many as leave room for the answer."),
    row("prompt_logprobs", Kind::Integer(0, TOP_LOGPROBS_MAX as i64), "", VLLM).note(
        "Not with `stream`. vLLM's -1, all of the vocabulary, is refused: that is gigabytes for a long prompt. Prompts \
         whose log probabilities are asked for are computed whole.",
    ),
    row("add_special_tokens", Kind::Boolean, "see note", VLLM)
        .note("Completions: true. Chat: false, since templates write them themselves."),
    row("user", Kind::Text(NAME_BYTES_MAX), "", OPENAI_VLLM).accepted("Nothing is kept of who asks."),
    row("safety_identifier", Kind::Text(NAME_BYTES_MAX), "", OPENAI).accepted("Nothing is kept of who asks."),
    row("metadata", Kind::Pairs(16, 64, 512), "", OPENAI).accepted("Chat and completions are not kept: see `store`."),
    row("store", Kind::Boolean, "false", OPENAI).accepted("Chat and completions are not kept, whatever it says."),
    row("service_tier", Kind::OneOf(&["auto", "default", "flex", "scale", "priority", "fast"]), "auto", OPENAI)
        .accepted("There is one tier; the router's classes are a header, `x-ovfleet-priority`."),
    row("prompt_cache_key", Kind::Text(NAME_BYTES_MAX), "", OPENAI)
        .accepted("Whatever prompts have in common is found without it; to keep them apart there is `cache_salt`."),
    row("prompt_cache_retention", Kind::OneOf(&["in-memory", "in_memory", "24h"]), "", OPENAI)
        .accepted("What is cached is kept until its room is needed."),
    row("prompt_cache_options", Kind::Fields(CACHE_OPTIONS), "", OPENAI)
        .accepted("Whatever prompts have in common is found, wherever they part."),
    row("cache_salt", Kind::Text(NAME_BYTES_MAX), "", VLLM)
        .note("What is cached of a prompt is found by requests with the same salt only."),
    row("request_id", Kind::Text(NAME_BYTES_MAX), "", VLLM)
        .accepted("Answers have an id of their own, which is in the header `x-request-id` too."),
    row("priority", Kind::Integer(0, 0), "0", VLLM)
        .accepted("Only 0, as with vLLM where its priority scheduling is off. The router's classes are a header, `x-ovfleet-priority`."),
];

/// What may be said of how much is thought.
pub(super) const EFFORTS: &[&str] = &["none", "minimal", "low", "medium", "high", "xhigh", "max"];
pub(super) const NO_MODERATION: &str = "no model is served here that could judge what is said";

const CACHE_OPTIONS: &[(&str, Kind)] =
    &[("mode", Kind::OneOf(&["implicit", "explicit"])), ("ttl", Kind::Text(NAME_BYTES_MAX))];

pub(super) const STREAM_OPTIONS: &[(&str, Kind)] = &[
    ("include_usage", Kind::Boolean),
    ("continuous_usage_stats", Kind::Boolean),
    ("include_obfuscation", Kind::Boolean),
];

/// How tokens are chosen.
pub(super) const SAMPLING: &[Parameter] = &[
    row("temperature", Kind::Number(0.0, 2.0), "1", ALL).note("0 is greedy."),
    row("top_p", Kind::Number(0.0, 1.0), "1", ALL).note("OVMS and vLLM refuse 0, which is the most probable token."),
    row("top_k", Kind::Integer(-1, i32::MAX as i64), "40", OVMS_VLLM)
        .note("-1 and 0 are all tokens, which is vLLM's default; 40 is OVMS's."),
    row("min_p", Kind::Number(0.0, 1.0), "0", OVMS_VLLM),
    row("seed", Kind::Integer(i64::MIN, i64::MAX), "random", ALL)
        .note("OVMS: from 0 to 4294967295. The same seed gives the same draws, whatever else is in the batch."),
    row("repetition_penalty", Kind::Number(REPETITION_PENALTY_MIN, REPETITION_PENALTY_MAX), "1", OVMS_VLLM)
        .note("1 does nothing. Prompt and answer count. OVMS and vLLM take any positive number."),
    row("frequency_penalty", Kind::Number(-2.0, 2.0), "0", ALL),
    row("presence_penalty", Kind::Number(-2.0, 2.0), "0", ALL),
    row("logit_bias", Kind::Object, "", OPENAI_VLLM)
        .note("Numbers from -100 to 100 by tokens, at most 1024. A token that is not in the vocabulary is refused."),
    row("bad_words", Kind::Texts(BAD_WORDS_MAX, STOP_BYTES_MAX), "", VLLM)
        .note("Texts whose last token is not chosen where it would complete them."),
    row("allowed_token_ids", Kind::Array(&TOKEN, ALLOWED_TOKENS_MAX), "", VLLM)
        .note("No other token is chosen, the end tokens among them."),
    row("num_assistant_tokens", Kind::Integer(1, 1024), "5", OVMS).accepted(
        "It changes no answer, only how fast it comes: most tokens that are guessed at a time, by `--draft-model` or from \
         what was there before. Not with `assistant_confidence_threshold`.",
    ),
    row("assistant_confidence_threshold", Kind::Number(0.0, 1.0), "", OVMS).accepted(
        "It changes no answer, only how fast it comes: a draft model (`--draft-model`) guesses no further once its guess is \
         less probable. Then 20 tokens are guessed at most. Not with `num_assistant_tokens`.",
    ),
    row("max_ngram_size", Kind::Integer(1, 1024), "3", OVMS).accepted(
        "It changes no answer, only how fast it comes: what comes next is guessed from where as many of the last tokens \
         were before. For all requests with `--prompt-lookup`. More than 8 are as 8.",
    ),
    row("response_format", Kind::Object, "", OVMS_PARTLY)
        .note("See [structured output](structured-output.md). OVMS drops a format that it cannot follow; here it is a 400."),
    row("structured_outputs", Kind::Fields(STRUCTURED_OUTPUTS), "", VLLM)
        .note("One of `json`, `regex`, `choice`, `grammar`, `json_object`, `structural_tag`. Not with `response_format`."),
    row("guided_json", SCHEMA, "", NOBODY)
        .note("As `structured_outputs.json`: a schema, or one in a string. vLLM removed this name in 0.12."),
    row("guided_regex", Kind::Text(usize::MAX), "", NOBODY)
        .note("As `structured_outputs.regex`. vLLM removed this name in 0.12."),
    row("guided_choice", CHOICE, "", NOBODY)
        .note("As `structured_outputs.choice`. vLLM removed this name in 0.12."),
    row("guided_grammar", Kind::Text(usize::MAX), "", NOBODY)
        .note("As `structured_outputs.grammar`: Lark or EBNF. vLLM removed this name in 0.12."),
    row("guided_json_object", Kind::Boolean, "", NOBODY)
        .note("As `structured_outputs.json_object`. vLLM removed this name in 0.12."),
    row("structural_tag", TAG, "", VLLM).note("As `structured_outputs.structural_tag`."),
    row("guided_decoding_backend", Kind::Text(NAME_BYTES_MAX), "", NOBODY)
        .accepted("There is only one backend. vLLM removed this name in 0.12."),
    row("logits_processors", Kind::Any, "", VLLM).refused("code that comes with a request is not run"),
];

/// A schema, or one in a string.
const SCHEMA: Kind = Kind::Either(&[Kind::Object, Kind::Boolean, Kind::Text(usize::MAX)]);
const TAG: Kind = Kind::Either(&[Kind::Object, Kind::Text(usize::MAX)]);
const CHOICE: Kind = Kind::Texts(usize::MAX, usize::MAX);

const STRUCTURED_OUTPUTS: &[(&str, Kind)] = &[
    ("json", SCHEMA),
    ("regex", Kind::Text(usize::MAX)),
    ("choice", CHOICE),
    ("grammar", Kind::Text(usize::MAX)),
    ("json_object", Kind::Boolean),
    ("structural_tag", TAG),
];

/// What choices are chosen from.
pub(super) const CANDIDATES: &[Parameter] = &[
    row("best_of", Kind::Integer(1, CHOICES_MAX as i64), "n", OVMS_OPENAI).note(
        "So many choices are generated and the `n` with the greatest log probability per token are returned. Not \
         while streaming. OVMS: the width of a beam search. vLLM removed it with its engine V0.",
    ),
    row("use_beam_search", Kind::Boolean, "false", VLLM).note(
        "With `best_of` beams, or `n`. Not while streaming. Bias, penalties and bans count, `temperature` and what else \
         is for drawing does not. OVMS searches where `best_of` is above 1.",
    ),
    row("length_penalty", Kind::Number(-1000.0, 1000.0), "1", OVMS_VLLM)
        .note("Of beams: a score is divided by the text's length to the power of this."),
    row("early_stopping", Kind::Either(&[Kind::Boolean, Kind::OneOf(&["never"])]), "false", VLLM).note(
        "Of beams: whether the search ends as soon as there are as many texts as beams (true), when no beam is likely \
         to (false) or can (\"never\") become better than these.",
    ),
    row("num_beam_groups", Kind::Integer(1, CHOICES_MAX as i64), "1", NOBODY)
        .note("Of beams: groups of as many each, that search one after the other."),
    row("diversity_penalty", Kind::Number(-1000.0, 1000.0), "0", NOBODY)
        .note("Of beams: makes what an earlier group has just taken less probable for a group."),
];
