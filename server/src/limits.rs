//! The limits of the server, and the means of enforcing them: admission, budgets and slots.
//!
//! Every queue and buffer has a limit, which is defined in this module, next to the code that it protects, or in the
//! engine's configuration. The documentation of a limit says what happens if it is exceeded, for example whether a
//! request is rejected or waits. Most limits in this file apply to values in requests and answers.

mod admission;
mod budget;
mod fair_slots;
mod json;
mod listeners;
mod preparation;
mod tokenizer;
mod trial;
mod waiting;

pub use admission::RETRY_AFTER_MAX;
pub(crate) use admission::{Admission, AdmittedRequest};
pub(crate) use budget::{BudgetExhausted, ByteBudget, ByteReservation};
pub(crate) use fair_slots::{FairSlot, FairSlots, NoSlot};
pub(crate) use json::ValuesMemory;
pub use listeners::HttpLimits;
pub(crate) use preparation::{PreparationSlots, preparation_slots};
pub(crate) use tokenizer::TokenizerMemory;
pub(crate) use trial::{InvalidGrammar, TrialProcesses, run_trial};
pub(crate) use waiting::{AboveBudget, WaitingBudget};

/// The default of `--max-tokenizer-memory` in bytes.
pub(crate) const TOKENIZER_MEMORY_DEFAULT: usize = 512 << 20;

/// Number of generated choices of one request (`n` or `best_of`), across all its prompts.
///
/// If exceeded: 400, `integer_above_max_value`; if the request has more prompts than this, 400,
/// `array_above_max_length`.
pub(crate) const CHOICES_MAX: u32 = 128;
/// Number of log probabilities in a response, for the prompts and for the generated text separately: each token of each
/// choice counts as one plus the number of alternatives.
///
/// If exceeded: 400, `integer_above_max_value`; if the request does not limit the length of the output, the choices end
/// with the finish reason `length` before they exceed the limit.
pub(crate) const LOGPROBS_TOTAL_MAX: u64 = 1 << 21;
/// Total size of the prompts that the choices of a request repeat with `echo`.
///
/// If exceeded: 400, `integer_above_max_value`.
pub(crate) const ECHO_BYTES_MAX: u64 = 64 << 20;
/// Number of stop strings of a request (`stop`).
///
/// If exceeded: 400, `array_above_max_length`.
pub(crate) const STOPS_MAX: usize = 16;
/// Size of a stop string or of a bad word.
///
/// If exceeded: 400, `string_above_max_length`.
pub(crate) const STOP_BYTES_MAX: usize = 1024;
/// Number of stop tokens of a request (`stop_token_ids`).
///
/// If exceeded: 400, `array_above_max_length`.
pub(crate) const STOP_TOKENS_MAX: usize = 256;
/// Number of tokens in `logit_bias`.
///
/// If exceeded: 400, `object_above_max_properties`.
pub(crate) const BIASES_MAX: usize = 1024;
/// Number of texts in `bad_words`. Each has at most [`STOP_BYTES_MAX`] bytes.
///
/// If exceeded: 400, `array_above_max_length`.
pub(crate) const BAD_WORDS_MAX: usize = 256;
/// Number of tokens in `allowed_token_ids`.
///
/// If exceeded: 400, `array_above_max_length`.
pub(crate) const ALLOWED_TOKENS_MAX: usize = 1 << 18;
/// Size of an identifier in a request, such as `user`, `cache_salt` or `request_id`.
///
/// If exceeded: 400, `string_above_max_length`.
pub(crate) const NAME_BYTES_MAX: usize = 512;
/// Number of texts in one tokenize request.
///
/// If exceeded: 400, `array_above_max_length`.
pub(crate) const TEXTS_MAX: usize = 1024;
/// Minimum `repetition_penalty`. With smaller values, logits that are divided by the penalty could become infinite.
pub(crate) const REPETITION_PENALTY_MIN: f64 = 0.001;
/// Maximum `repetition_penalty`.
///
/// If exceeded: 400, `decimal_above_max_value`.
pub(crate) const REPETITION_PENALTY_MAX: f64 = 1000.0;
/// Number of most probable tokens reported at a position (`top_logprobs`, `logprobs`, `prompt_logprobs`).
///
/// If exceeded: 400, `integer_above_max_value`.
pub(crate) const TOP_LOGPROBS_MAX: u32 = 20;

/// Number of concurrent requests to the endpoints for stored responses and conversations.
///
/// If exceeded: 429, `too_many_requests`, with `Retry-After`.
pub(crate) const STORED_OBJECT_REQUESTS_MAX: usize = 64;
/// Total size of unread answers from the endpoints for tokenizing, detokenizing, stored responses and conversations;
/// answers of up to 64 KiB do not count.
///
/// If exceeded: 429, `answer_buffer_full`, with `Retry-After`; a single answer that is larger is rejected with 400,
/// `answer_too_large`.
pub(crate) const UNREAD_ANSWER_BYTES_MAX: usize = 64 << 20;
