//! One choice: its tokens become text, up to the stop string. Text that has to be read is `parsed`'s.

use std::sync::Arc;
use std::time::Instant;

use server_engine::{FinishReason as EngineReason, TokenId, TokenLogprobs};
use server_openai::FinishReason;
use server_text::{DetokenizeOptions, Detokenizer, StopFilter, StopFilterOutput, Tokenizer};

use super::parsed::{Parsed, put};
use super::{Delta, TokenText};
use crate::prepare::TextRule;

/// What the probability 0 is told as, since JSON has no infinity; as OpenAI does.
const LOGPROB_MIN: f32 = -9999.0;

#[derive(Debug)]
pub(super) struct Choice {
    /// None once the choice has ended.
    text: Option<(Detokenizer, Reader)>,
    include_stop: bool,
    /// Tokens to come until stop strings count.
    unheeded: u32,
    detokenize: bool,
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

/// What becomes of the text.
#[derive(Debug)]
enum Reader {
    /// It is the answer, up to the stop string.
    Plain(StopFilter),
    /// It is read.
    Parsed(Box<Parsed>),
}

impl Reader {
    /// Stop strings that are complete from now on count.
    fn heed(&mut self) {
        match self {
            Self::Plain(stops) => stops.activate(),
            Self::Parsed(parsed) => parsed.heed(),
        }
    }
}

impl Choice {
    pub(super) fn new(tokenizer: &Arc<Tokenizer>, rule: &TextRule) -> Self {
        let options =
            DetokenizeOptions { skip_special: rule.skip_special, continues_text: rule.continues_text };
        let detokenizer = Detokenizer::new(Arc::clone(tokenizer), options);
        let stops = StopFilter::new(&rule.stops, rule.include_stop);
        let stops = if rule.tokens_min > 0 { stops.inactive() } else { stops };
        let text = match &rule.reading {
            None => (detokenizer, Reader::Plain(stops)),
            Some(reading) => {
                let parsed = Box::new(Parsed::new(reading, stops));
                (detokenizer.with_visible_special(Arc::clone(&reading.kept)), Reader::Parsed(parsed))
            }
        };
        Self {
            text: Some(text),
            include_stop: rule.include_stop,
            unheeded: rule.tokens_min,
            detokenize: rule.detokenize,
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

    /// Takes the next token. Returns how many tokens of reasoning it is, none or one.
    pub(super) fn push(
        &mut self,
        choice: u32,
        (token, logprobs): (TokenId, Option<Box<TokenLogprobs>>),
        deltas: &mut Vec<Delta>,
    ) -> u64 {
        let Some((detokenizer, reader)) = &mut self.text else { return 0 };
        match self.unheeded.checked_sub(1) {
            Some(rest) => self.unheeded = rest,
            None => reader.heed(),
        }
        // A stop token always ends the sequence (before `tokens_min` none is sampled), and is no text.
        let ends = !self.include_stop && self.stop_tokens.binary_search(&token).is_ok();
        match reader {
            Reader::Parsed(parsed) if ends && !parsed.reads(token) => return 0,
            Reader::Parsed(parsed) => {
                let before = parsed.reasoning_tokens;
                let token_text =
                    logprobs.filter(|_| !ends).map(|logprobs| told(token, *logprobs, self.characters));
                let text = detokenizer.push(token);
                self.characters += text.chars().count();
                let ended = parsed.push(choice, (&text, token_text), deltas);
                let thought = parsed.reasoning_tokens - before;
                if let Some(reason) = ended {
                    self.text = None;
                    deltas.push(Delta::End { choice, reason });
                }
                return thought;
            }
            Reader::Plain(_) if ends => return 0,
            Reader::Plain(_) => {}
        }
        if let Some(logprobs) = logprobs {
            self.held.push((self.bytes, told(token, *logprobs, self.characters)));
        }
        let text = if self.detokenize { detokenizer.push(token) } else { String::new() };
        self.push_plain(choice, &text, deltas);
        0
    }

    fn push_plain(&mut self, choice: u32, text: &str, deltas: &mut Vec<Delta>) {
        let Some((_, Reader::Plain(filter))) = &mut self.text else { return };
        self.bytes += text.len();
        self.characters += text.chars().count();
        match filter.push(text) {
            StopFilterOutput::Text(text) => {
                self.bytes_out += text.len();
                // A token goes out with the last of its text.
                let certain = if self.bytes_out == self.bytes { usize::MAX } else { self.bytes_out };
                let tokens = self.release(certain);
                put(Delta::Text { choice, text, tokens }, deltas);
            }
            // A token without text of its own does not wait for any, unless text before it does.
            StopFilterOutput::Held if self.bytes_out == self.bytes && !self.held.is_empty() => {
                let tokens = self.release(usize::MAX);
                put(Delta::Text { choice, text: String::new(), tokens }, deltas);
            }
            StopFilterOutput::Held => {}
            StopFilterOutput::Stopped { text, .. } => {
                self.text = None;
                self.bytes_out += text.len();
                let tokens = self.release(self.bytes_out);
                self.held.clear();
                put(Delta::Text { choice, text, tokens }, deltas);
                deltas.push(Delta::End { choice, reason: FinishReason::Stop });
            }
        }
    }

    /// The sequence ended by itself.
    pub(super) fn finish(&mut self, choice: u32, reason: EngineReason, deltas: &mut Vec<Delta>) {
        let Some((detokenizer, reader)) = self.text.take() else { return };
        let rest = detokenizer.finish();
        let mut filter = match reader {
            Reader::Plain(filter) => filter,
            Reader::Parsed(mut parsed) => {
                let reason = parsed.finish(choice, (&rest, reason), deltas);
                deltas.push(Delta::End { choice, reason });
                return;
            }
        };
        let (text, reason) = match filter.push(&rest) {
            StopFilterOutput::Stopped { text, .. } => (text, FinishReason::Stop),
            StopFilterOutput::Text(text) => (text + &filter.finish(), wire(reason)),
            StopFilterOutput::Held => (filter.finish(), wire(reason)),
        };
        let tokens = self.release(usize::MAX);
        put(Delta::Text { choice, text, tokens }, deltas);
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

/// A token with its probabilities, whose text begins at the character `start`.
fn told(token: TokenId, mut logprobs: TokenLogprobs, start: usize) -> TokenText {
    floor(&mut logprobs);
    let TokenLogprobs { chosen, top } = logprobs;
    TokenText { token, start, logprob: chosen.logprob, top }
}

/// No log probability is less than can be told.
pub(super) fn floor(logprobs: &mut TokenLogprobs) {
    for told in logprobs.top.iter_mut().chain([&mut logprobs.chosen]) {
        told.logprob = told.logprob.max(LOGPROB_MIN);
    }
}
