//! The parameters that several endpoints share.

use super::parameter::{
    ALL, COUNT, NO_PEERS, OPENAI, OPENAI_VLLM, OVMS, OVMS_OPENAI, OVMS_PARTLY, OVMS_VLLM, Parameter, TOKEN,
    VLLM, row,
};
use crate::limits::{
    ALLOWED_TOKENS_MAX, BAD_WORDS_MAX, CHOICES_MAX, NAME_BYTES_MAX, REPETITION_PENALTY_MAX,
    REPETITION_PENALTY_MIN, STOP_BYTES_MAX, STOP_TOKENS_MAX, STOPS_MAX, TOP_LOGPROBS_MAX,
};
use crate::prepare::parameters::kind::Kind;

pub(super) const CONVERSATION: &[Parameter] = &[
    row(
        "tool_choice",
        Kind::Either(&[Kind::OneOf(&["none", "auto", "required"]), Kind::Object]),
        "auto",
        ALL,
    ),
    row("parallel_tool_calls", Kind::Boolean, "true", OPENAI_VLLM),
    row("documents", Kind::Array(&Kind::Object, usize::MAX), "", VLLM)
        .note("For templates that render documents."),
    row("chat_template_kwargs", Kind::Object, "", OVMS_VLLM)
        .note(
            "Additional variables of the template, which override those of the reasoning effort. `messages`, `tools`, \
             `documents`, `add_generation_prompt`, `bos_token` and `eos_token` are rejected.",
        ),
];

/// The parameters of all endpoints that generate text, except for those of sampling, structured output and beam search.
pub(super) const OUTPUT: &[Parameter] = &[
    row("model", Kind::Text(usize::MAX), "", ALL).required().note("One of the names in `/v3/models`."),
    row("stream", Kind::Boolean, "false", ALL),
    row("stream_options", Kind::Fields(STREAM_OPTIONS), "", ALL).note(
        "Only with `stream`. `include_usage`: an additional last chunk with the usage. `continuous_usage_stats` (vLLM): \
         with `include_usage`, every chunk has the usage so far. `include_obfuscation` (OpenAI) has no effect; nothing is \
         padded.",
    ),
    row("max_tokens", COUNT, "see note", ALL).note(
        "Completions: 16, as in OpenAI and vLLM (OVMS: until the end token); chat: up to the context length. \
         `max_new_tokens` of `generation_config.json` overrides both defaults. A default is reduced so that the answer \
         fits after the prompt, and so that the choices together have at most 2,097,152 log probabilities (one for each \
         token with `best_of`, `return_token_ids` or `detokenize: false`). 0 only with `echo`.",
    ),
    row("max_completion_tokens", COUNT, "", ALL)
        .note("The newer name of `max_tokens`. If both are set, `max_tokens` is ignored."),
    row("min_tokens", COUNT, "0", VLLM)
        .note("Before this number of tokens, no end token, stop token or stop string ends a choice."),
    row("n", Kind::Integer(1, CHOICES_MAX as i64), "1", ALL)
        .note("Each choice is sampled independently. OVMS: beam search if `n` is above 1."),
    row("stop", Kind::Either(&[Kind::Text(STOP_BYTES_MAX), Kind::Texts(STOPS_MAX, STOP_BYTES_MAX)]), "", ALL)
        .note("OpenAI: at most 4."),
    row("stop_token_ids", Kind::Array(&TOKEN, STOP_TOKENS_MAX), "", VLLM),
    row("include_stop_str_in_output", Kind::Boolean, "false", OVMS_VLLM)
        .note("OVMS: with `stream` the default is true, and false is rejected."),
    row("ignore_eos", Kind::Boolean, "false", OVMS_VLLM),
    row("skip_special_tokens", Kind::Boolean, "true", OVMS_VLLM)
        .note("With false, calls and reasoning are not parsed and remain text."),
    row("spaces_between_special_tokens", Kind::Boolean, "true", VLLM)
        .accepted("Tokens stand for exact bytes, as in vLLM's fast tokenizers, so no spaces are added."),
    row("detokenize", Kind::Boolean, "true", VLLM)
        .note("With false, choices have `token_ids` instead of text. Not with `stop`."),
    row("return_token_ids", Kind::Boolean, "false", VLLM).note(
        "Choices have `token_ids`, including the stop token or the tokens of the stop string, which texts and log \
         probabilities omit. `prompt_token_ids` is in each choice of completions, and once in chat completions (streamed: \
         in the first chunk of each choice).",
    ),
    row("return_tokens_as_token_ids", Kind::Boolean, "false", VLLM)
        .note("Log probabilities name tokens as `token_id:123`."),
    row("truncate_prompt_tokens", Kind::Integer(-1, u32::MAX as i64), "", VLLM)
        .note(
            "Number of tokens at the end of the prompt that remain. -1 leaves room for the requested length of the answer, \
             otherwise for the default length (at most a quarter of the context length), or for one token if there is no \
             default.",
        ),
    row("prompt_logprobs", Kind::Integer(0, TOP_LOGPROBS_MAX as i64), "", VLLM).note(
        "Not with `stream`. vLLM's -1, the whole vocabulary, is rejected, because it would take gigabytes for a long prompt. \
         Prompts with log probabilities do not use the prefix cache.",
    ),
    row("add_special_tokens", Kind::Boolean, "see note", VLLM)
        .note("Completions: true. Chat: false, because the chat template adds them."),
    row("user", Kind::Text(NAME_BYTES_MAX), "", OPENAI_VLLM).accepted("The server stores nothing about users."),
    row("safety_identifier", Kind::Text(NAME_BYTES_MAX), "", OPENAI).accepted("The server stores nothing about users."),
    row("metadata", Kind::Pairs(16, 64, 512), "", OPENAI).accepted("Chat and completions are not stored, see `store`."),
    row("store", Kind::Boolean, "false", OPENAI).accepted("Chat and completions are never stored."),
    row("service_tier", Kind::OneOf(&["auto", "default", "flex", "scale", "priority", "fast"]), "auto", OPENAI)
        .accepted("The server has one tier. The router's priority classes are set with the header `x-ovfleet-priority`."),
    row("prompt_cache_key", Kind::Text(NAME_BYTES_MAX), "", OPENAI)
        .accepted("The prefix cache finds common prefixes without it. `cache_salt` separates prompts."),
    row("prompt_cache_retention", Kind::OneOf(&["in-memory", "in_memory", "24h"]), "", OPENAI)
        .accepted("Prompts stay cached until their blocks are needed."),
    row("prompt_cache_options", Kind::Fields(CACHE_OPTIONS), "", OPENAI)
        .accepted("The prefix cache finds common prefixes of any length."),
    row("cache_salt", Kind::Text(NAME_BYTES_MAX), "", VLLM)
        .note("Only requests with the same salt share cached prefixes."),
    row("request_id", Kind::Text(NAME_BYTES_MAX), "", VLLM)
        .accepted(
            "The server generates the ID of an answer and sends it in the header `x-request-id`. A router replaces this header \
             with the ID of the request.",
        ),
    row("priority", Kind::Integer(0, 0), "0", VLLM)
        .accepted("Only 0, as in vLLM without priority scheduling. The router's priority classes are set with the header `x-ovfleet-priority`."),
];

/// The reasoning efforts.
pub(super) const EFFORTS: &[&str] = &["none", "minimal", "low", "medium", "high", "xhigh", "max"];
pub(super) const NO_MODERATION: &str = "this server has no moderation model";

const CACHE_OPTIONS: &[(&str, Kind)] =
    &[("mode", Kind::OneOf(&["implicit", "explicit"])), ("ttl", Kind::Text(NAME_BYTES_MAX))];

pub(super) const STREAM_OPTIONS: &[(&str, Kind)] = &[
    ("include_usage", Kind::Boolean),
    ("continuous_usage_stats", Kind::Boolean),
    ("include_obfuscation", Kind::Boolean),
];

pub(super) const SAMPLING: &[Parameter] = &[
    row("temperature", Kind::Number(0.0, 2.0), "1", ALL).note("0 is greedy decoding."),
    row("top_p", Kind::Number(0.0, 1.0), "1", ALL).note("0 selects the most probable token; OVMS and vLLM reject 0."),
    row("top_k", Kind::Integer(-1, i32::MAX as i64), "40", OVMS_VLLM)
        .note("-1 and 0 mean all tokens, which is vLLM's default; 40 is OVMS's default."),
    row("min_p", Kind::Number(0.0, 1.0), "0", OVMS_VLLM),
    row("seed", Kind::Integer(i64::MIN, i64::MAX), "random", ALL)
        .note("OVMS: from 0 to 4294967295. The same seed gives the same random numbers, regardless of the batch."),
    row("repetition_penalty", Kind::Number(REPETITION_PENALTY_MIN, REPETITION_PENALTY_MAX), "1", OVMS_VLLM)
        .note("1 has no effect. Tokens of the prompt and of the answer count. OVMS and vLLM: any positive number."),
    row("frequency_penalty", Kind::Number(-2.0, 2.0), "0", ALL),
    row("presence_penalty", Kind::Number(-2.0, 2.0), "0", ALL),
    row("logit_bias", Kind::Object, "", OPENAI_VLLM)
        .note("Numbers from -100 to 100 by token ID, at most 1024. Unknown tokens are rejected."),
    row("bad_words", Kind::Texts(BAD_WORDS_MAX, STOP_BYTES_MAX), "", VLLM)
        .note("Texts that the answer must not contain: the token that would complete one is excluded."),
    row("allowed_token_ids", Kind::Array(&TOKEN, ALLOWED_TOKENS_MAX), "", VLLM)
        .note("All other tokens are excluded, including the end tokens."),
    row("num_assistant_tokens", Kind::Integer(1, 1024), "5", OVMS).accepted(
        "It affects only the speed: the number of draft tokens at a time, from `--draft-model` or prompt lookup. Not with \
         `assistant_confidence_threshold`.",
    ),
    row("assistant_confidence_threshold", Kind::Number(0.0, 1.0), "", OVMS).accepted(
        "It affects only the speed: a draft model (`--draft-model`) stops at a draft token with a lower probability, and after \
         at most 20 draft tokens. Not with `num_assistant_tokens`.",
    ),
    row("max_ngram_size", Kind::Integer(1, 1024), "3", OVMS).accepted(
        "It affects only the speed: it enables prompt lookup, which proposes the tokens after an earlier occurrence of \
         this number of last tokens. `--prompt-lookup` enables it for all requests. Values above 8 count as 8.",
    ),
    row("response_format", Kind::Object, "", OVMS_PARTLY)
        .note("See [structured output](structured-output.md). An unsupported format is a 400; OVMS ignores it."),
    row("structured_outputs", Kind::Fields(STRUCTURED_OUTPUTS), "", VLLM)
        .note("One of `json`, `regex`, `choice`, `grammar`, `json_object`, `structural_tag`. Not with `response_format`."),
    row("guided_json", SCHEMA, "", NO_PEERS)
        .note("The same as `structured_outputs.json`: a schema, or a string with one. vLLM removed this name in 0.12."),
    row("guided_regex", Kind::Text(usize::MAX), "", NO_PEERS)
        .note("The same as `structured_outputs.regex`. vLLM removed this name in 0.12."),
    row("guided_choice", CHOICE, "", NO_PEERS)
        .note("The same as `structured_outputs.choice`. vLLM removed this name in 0.12."),
    row("guided_grammar", Kind::Text(usize::MAX), "", NO_PEERS)
        .note("The same as `structured_outputs.grammar`: Lark or EBNF. vLLM removed this name in 0.12."),
    row("guided_json_object", Kind::Boolean, "", NO_PEERS)
        .note("The same as `structured_outputs.json_object`. vLLM removed this name in 0.12."),
    row("structural_tag", TAG, "", VLLM).note("The same as `structured_outputs.structural_tag`."),
    row("guided_decoding_backend", Kind::Text(NAME_BYTES_MAX), "", NO_PEERS)
        .accepted("The server has only one backend. vLLM removed this name in 0.12."),
    row("logits_processors", Kind::Any, "", VLLM).refused("this server does not run code from requests"),
];

/// A schema, or a string that contains one.
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

/// The parameters that select the returned choices.
pub(super) const CANDIDATES: &[Parameter] = &[
    row("best_of", Kind::Integer(1, CHOICES_MAX as i64), "n", OVMS_OPENAI).note(
        "Number of generated choices, of which the `n` with the greatest log probability per token are returned. Not with \
         `stream`. OVMS: the width of a beam search. vLLM removed it with its engine V0.",
    ),
    row("use_beam_search", Kind::Boolean, "false", VLLM).note(
        "Beam search with `best_of` beams, or `n`. Not with `stream`. Biases, penalties and excluded tokens apply; \
         `temperature` and other parameters of random sampling do not. OVMS: enabled if `best_of` is above 1.",
    ),
    row("length_penalty", Kind::Number(-1000.0, 1000.0), "1", OVMS_VLLM)
        .note("Beam search: the score of a text is divided by its length to this power."),
    row("early_stopping", Kind::Either(&[Kind::Boolean, Kind::OneOf(&["never"])]), "false", VLLM).note(
        "Beam search: the search ends as soon as there are as many texts as beams (true), when no beam is likely to become \
         better (false), or when no beam can become better (\"never\").",
    ),
    row("num_beam_groups", Kind::Integer(1, CHOICES_MAX as i64), "1", NO_PEERS)
        .note("Beam search: number of groups of equal size, which search one after the other."),
    row("diversity_penalty", Kind::Number(-1000.0, 1000.0), "0", NO_PEERS)
        .note("Beam search: the penalty on tokens that an earlier group has selected in the same step."),
];
