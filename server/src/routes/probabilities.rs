//! Converts log probabilities and token IDs to the format of answers.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::{Map, Value};
use server_engine::{ScoredToken, TokenId, TokenLogprob};
use server_openai::{
    ChatLogprobs, ChatTokenLogprob, CompletionLogprobs, PromptLogprob, PromptLogprobs, TopLogprob,
};
use server_text::{DetokenizeOptions, Detokenizer, Tokenizer};

use super::generate::AnswerContext;
use crate::respond::TokenText;

/// Returns the IDs of `tokens`, followed by `end_tokens`, if token IDs are requested.
pub(super) fn token_ids(
    context: &AnswerContext,
    tokens: &[TokenText],
    end_tokens: &[TokenId],
) -> Option<Vec<TokenId>> {
    let ids = tokens.iter().map(|token| token.token).chain(end_tokens.iter().copied());
    context.answer_options.token_ids.then(|| ids.collect())
}

/// Returns the token IDs of a choice's prompt if they are requested.
pub(super) fn prompt_token_ids(context: &AnswerContext, choice: u32) -> Option<Arc<[TokenId]>> {
    if context.answer_options.token_ids { prompt(context, choice).cloned() } else { None }
}

/// Returns the log probabilities of a choice's prompt if they are requested.
pub(super) fn prompt_logprobs(context: &AnswerContext, choice: u32) -> Option<PromptLogprobs> {
    let count = context.answer_options.prompt_logprobs? as usize;
    let entry = |TokenLogprob { token, logprob }: TokenLogprob, rank| {
        (token, PromptLogprob { logprob, rank, decoded_token: context.tokenizer.token_text(token) })
    };
    let position = |scored: &ScoredToken| {
        let top = (1..).zip(scored.logprobs.top.iter().take(count));
        let mut entries: BTreeMap<_, _> = top.map(|(rank, top)| entry(*top, rank)).collect();
        entries.extend([entry(scored.logprobs.chosen, scored.rank)]);
        Some(entries)
    };
    Some(std::iter::once(None).chain(scores(context, choice)?.iter().map(position)).collect())
}

/// Returns the log probabilities of a chat choice, or of a part of it.
pub(super) fn chat(context: &AnswerContext, tokens: Vec<TokenText>) -> Option<ChatLogprobs> {
    context.answer_options.logprobs?;
    let content = entries(&context.tokenizer, tokens, context.answer_options.names_by_id);
    Some(ChatLogprobs { content, refusal: None })
}

/// Returns log probabilities in the format of the chat and responses endpoints.
pub(super) fn entries(
    tokenizer: &Tokenizer,
    tokens: Vec<TokenText>,
    names_by_id: bool,
) -> Vec<ChatTokenLogprob> {
    let named = |token| if names_by_id { id(token) } else { tokenizer.token_text(token) };
    let bytes = |token| tokenizer.token_bytes(token).to_vec();
    let top =
        |TokenLogprob { token, logprob }| TopLogprob { token: named(token), logprob, bytes: bytes(token) };
    let entries = tokens.into_iter().map(|text| ChatTokenLogprob {
        token: named(text.token),
        logprob: text.logprob,
        bytes: bytes(text.token),
        top_logprobs: text.top.into_iter().map(top).collect(),
    });
    entries.collect()
}

/// Returns the log probabilities of a completion, or of a part of it.
pub(super) fn completion(
    context: &AnswerContext,
    choice: u32,
    tokens: Vec<TokenText>,
) -> Option<CompletionLogprobs> {
    context.answer_options.logprobs?;
    let before = context.echo(choice).chars().count();
    let mut logprobs = CompletionLogprobs::default();
    for TokenText { token, start, logprob, top } in tokens {
        push(context, token, before + start, Some(Score { logprob, top: &top }), &mut logprobs);
    }
    Some(logprobs)
}

/// Returns the log probabilities of an echoed prompt.
pub(super) fn echoed(context: &AnswerContext, choice: u32) -> Option<CompletionLogprobs> {
    let count = context.answer_options.logprobs? as usize;
    let (echo, tokens) = (context.echo(choice), prompt(context, choice)?);
    if echo.is_empty() {
        return None;
    }
    let scores = scores(context, choice)?.iter().map(|scored| {
        let TokenLogprob { logprob, .. } = scored.logprobs.chosen;
        Some(Score { logprob, top: &scored.logprobs.top[..count.min(scored.logprobs.top.len())] })
    });
    let mut logprobs = CompletionLogprobs::default();
    let positions = tokens.iter().copied().zip(offsets(context, echo, tokens));
    for ((token, start), score) in positions.zip(std::iter::once(None).chain(scores)) {
        push(context, token, start, score, &mut logprobs);
    }
    Some(logprobs)
}

/// Concatenates the log probabilities of an echoed prompt and a completion.
pub(super) fn joined(
    before: Option<CompletionLogprobs>,
    after: Option<CompletionLogprobs>,
) -> Option<CompletionLogprobs> {
    match (before, after) {
        (Some(mut before), Some(after)) => {
            let CompletionLogprobs { tokens, token_logprobs, top_logprobs, text_offset } = after;
            before.tokens.extend(tokens);
            before.token_logprobs.extend(token_logprobs);
            before.top_logprobs.extend(top_logprobs);
            before.text_offset.extend(text_offset);
            Some(before)
        }
        (before, after) => before.or(after),
    }
}

/// The log probabilities of a token and of the most probable tokens at its position.
#[derive(Clone, Copy)]
struct Score<'a> {
    logprob: f32,
    top: &'a [TokenLogprob],
}

fn push(
    context: &AnswerContext,
    token: TokenId,
    start: usize,
    score: Option<Score<'_>>,
    logprobs: &mut CompletionLogprobs,
) {
    let name = name(context, token);
    // Include the token itself, whether or not it is one of the most probable.
    let tops = score.map(|Score { logprob, top }| {
        let mut tops = Map::new();
        for top in top {
            tops.insert(self::name(context, top.token), number(top.logprob));
        }
        tops.entry(name.clone()).or_insert_with(|| number(logprob));
        tops
    });
    logprobs.tokens.push(name);
    logprobs.token_logprobs.push(score.map(|score| score.logprob));
    logprobs.top_logprobs.push(tops);
    logprobs.text_offset.push(start);
}

/// Returns the position of each token's text within the echo, in characters. An echo that was decoded from token IDs
/// contains the text of special tokens. An echo that repeats the text of the request does not contain the special
/// tokens that the tokenizer added.
fn offsets(context: &AnswerContext, echo: &str, tokens: &[TokenId]) -> Vec<usize> {
    let length = echo.chars().count();
    let offsets = |skip_special| {
        let options = DetokenizeOptions { skip_special, continues_text: false };
        let mut detokenizer = Detokenizer::new(Arc::clone(&context.tokenizer), options);
        let mut end = 0;
        let mut starts = Vec::with_capacity(tokens.len());
        for &token in tokens {
            starts.push(end);
            end += detokenizer.push(token).chars().count();
        }
        (starts, end + detokenizer.finish().chars().count())
    };
    let (starts, end) = offsets(true);
    if end == length { starts } else { offsets(false).0.into_iter().map(|start| start.min(length)).collect() }
}

fn scores(context: &AnswerContext, choice: u32) -> Option<&[ScoredToken]> {
    context.scores.get(context.prompt_of(choice))?.as_deref()
}

fn prompt(context: &AnswerContext, choice: u32) -> Option<&Arc<[TokenId]>> {
    context.answer_options.prompts.get(context.prompt_of(choice))
}

/// Returns the name of the token, which is its ID if requested, and otherwise its text. If the bytes of the token are
/// not valid UTF-8, the name consists of their values instead, so that tokens remain distinct.
fn name(context: &AnswerContext, token: TokenId) -> String {
    if context.answer_options.names_by_id {
        return id(token);
    }
    let bytes = context.tokenizer.token_bytes(token);
    std::str::from_utf8(bytes).map_or_else(
        |_| bytes.iter().fold("bytes:".to_owned(), |name, byte| format!("{name}\\x{byte:02x}")),
        str::to_owned,
    )
}

fn id(token: TokenId) -> String {
    format!("token_id:{token}")
}

/// Returns the JSON number with the shortest decimal form of an `f32`. A `Value` contains an `f64`, so a widened `f32`
/// would be written with more digits.
fn number(logprob: f32) -> Value {
    let shortest = logprob.to_string().parse().ok();
    shortest.and_then(serde_json::Number::from_f64).map_or(Value::Null, Value::Number)
}
