//! One choice: its tokens become text, up to the stop string.

use std::sync::Arc;
use std::time::Instant;

use server_engine::{FinishReason as EngineReason, TokenId, TokenLogprobs};
use server_openai::FinishReason;
use server_text::{DetokenizeOptions, Detokenizer, Filtered, StopFilter, Tokenizer};

use super::{Delta, TokenText};
use crate::prepare::TextRule;

/// What the probability 0 is told as, since JSON has no infinity; as OpenAI does.
const LOGPROB_MIN: f32 = -9999.0;

#[derive(Debug)]
pub(super) struct Choice {
    /// None once the choice has ended.
    text: Option<(Detokenizer, StopFilter)>,
    include_stop: bool,
    /// Sorted.
    stop_tokens: Vec<TokenId>,
    /// Tokens whose text is not certain yet, with where it begins in bytes.
    held: Vec<(usize, TokenText)>,
    /// What came out of the detokeniser.
    bytes: usize,
    characters: usize,
    /// What went out.
    bytes_out: usize,
    /// When the last token came, for the metrics.
    pub(super) last_token: Option<Instant>,
}

impl Choice {
    pub(super) fn new(tokenizer: &Arc<Tokenizer>, rule: &TextRule) -> Self {
        let options =
            DetokenizeOptions { skip_special: rule.skip_special, continues_text: rule.continues_text };
        let detokenizer = Detokenizer::new(Arc::clone(tokenizer), options);
        Self {
            text: Some((detokenizer, StopFilter::new(&rule.stops, rule.include_stop))),
            include_stop: rule.include_stop,
            stop_tokens: rule.stop_tokens.clone(),
            held: Vec::new(),
            bytes: 0,
            characters: 0,
            bytes_out: 0,
            last_token: None,
        }
    }

    pub(super) fn has_ended(&self) -> bool {
        self.text.is_none()
    }

    /// Takes the next token.
    pub(super) fn push(
        &mut self,
        choice: u32,
        (token, logprobs): (TokenId, Option<Box<TokenLogprobs>>),
        deltas: &mut Vec<Delta>,
    ) {
        // A stop token always ends the sequence (before `tokens_min` none is sampled), and is no text.
        if !self.include_stop && self.stop_tokens.binary_search(&token).is_ok() {
            return;
        }
        let Some((detokenizer, filter)) = &mut self.text else { return };
        if let Some(logprobs) = logprobs {
            let TokenLogprobs { chosen, mut top } = *logprobs;
            for top in &mut top {
                top.logprob = top.logprob.max(LOGPROB_MIN);
            }
            let logprob = chosen.logprob.max(LOGPROB_MIN);
            let text = TokenText { token, start: self.characters, logprob, top };
            self.held.push((self.bytes, text));
        }
        let text = detokenizer.push(token);
        self.bytes += text.len();
        self.characters += text.chars().count();
        match filter.push(&text) {
            Filtered::Text(text) => {
                self.bytes_out += text.len();
                // A token goes out with the last of its text.
                let certain = if self.bytes_out == self.bytes { usize::MAX } else { self.bytes_out };
                let tokens = self.release(certain);
                put(choice, text, tokens, deltas);
            }
            // A token without text of its own does not wait for any, unless text before it does.
            Filtered::Held if self.bytes_out == self.bytes && !self.held.is_empty() => {
                let tokens = self.release(usize::MAX);
                put(choice, String::new(), tokens, deltas);
            }
            Filtered::Held => {}
            Filtered::Stopped { text, .. } => {
                self.text = None;
                self.bytes_out += text.len();
                let tokens = self.release(self.bytes_out);
                self.held.clear();
                put(choice, text, tokens, deltas);
                deltas.push(Delta::End { choice, reason: FinishReason::Stop });
            }
        }
    }

    /// The sequence ended by itself.
    pub(super) fn finish(&mut self, choice: u32, reason: EngineReason, deltas: &mut Vec<Delta>) {
        let Some((detokenizer, mut filter)) = self.text.take() else { return };
        let rest = detokenizer.finish();
        let (text, reason) = match filter.push(&rest) {
            Filtered::Stopped { text, .. } => (text, FinishReason::Stop),
            Filtered::Text(text) => (text + &filter.finish(), wire(reason)),
            Filtered::Held => (filter.finish(), wire(reason)),
        };
        let tokens = self.release(usize::MAX);
        put(choice, text, tokens, deltas);
        deltas.push(Delta::End { choice, reason });
    }

    /// The held tokens whose text begins before `end`, in bytes.
    fn release(&mut self, end: usize) -> Vec<TokenText> {
        let count = self.held.iter().take_while(|(start, _)| *start < end).count();
        self.held.drain(..count).map(|(_, token)| token).collect()
    }
}

fn wire(reason: EngineReason) -> FinishReason {
    match reason {
        EngineReason::Stop => FinishReason::Stop,
        EngineReason::Length => FinishReason::Length,
    }
}

/// Adds to the last delta if it is of the same choice, so that what has gathered is one.
fn put(choice: u32, text: String, tokens: Vec<TokenText>, deltas: &mut Vec<Delta>) {
    if text.is_empty() && tokens.is_empty() {
        return;
    }
    match deltas.last_mut() {
        Some(Delta::Text { choice: last, text: before, tokens: tokens_before }) if *last == choice => {
            before.push_str(&text);
            tokens_before.extend(tokens);
        }
        _ => deltas.push(Delta::Text { choice, text, tokens }),
    }
}
