//! Converts the tokens of a choice to text up to a stop string. [`super::parsed`] parses the text if needed.

use std::sync::Arc;
use std::time::Instant;

use server_engine::{FinishReason, TokenId, TokenLogprobs};
use server_openai::ChoiceFinishReason;
use server_text::{DetokenizeOptions, Detokenizer, StopFilter, StopFilterOutput, Tokenizer};

use super::delta::{ChoiceDelta, TokenText, push};
use super::parsed::ParsedText;
use crate::prepare::TextOptions;

/// The log probability that is reported for probability 0, as in OpenAI's API, because JSON has no infinity.
const LOGPROB_MIN: f32 = -9999.0;

#[derive(Debug)]
pub(super) struct Choice {
    /// The state of the text; `None` after the choice has ended.
    text: Option<(Detokenizer, TextFilter)>,
    include_stop: bool,
    /// The number of further tokens before stop strings take effect.
    tokens_until_stops: u32,
    detokenize: bool,
    /// The stop tokens, ascending.
    stop_tokens: Vec<TokenId>,
    /// The stop token that ended the choice, if tokens are requested.
    stop_token: Option<TokenId>,
    /// Tokens that are held back because a stop string may still cut off their text. Each has the position in bytes at
    /// which its text begins.
    held: Vec<(usize, TokenText)>,
    /// Number of bytes and characters of the detokenized text.
    bytes: usize,
    characters: usize,
    /// Number of bytes of the text that have been returned.
    bytes_out: usize,
    /// The time of the last token, for the metrics.
    pub(super) last_token: Option<Instant>,
}

/// The processing of the detokenized text.
#[derive(Debug)]
enum TextFilter {
    /// The text is the answer, up to a stop string.
    Plain(StopFilter),
    /// The text is parsed.
    Parsed(Box<ParsedText>),
}

impl TextFilter {
    /// Activates the stop strings. Only those that are completed from now on take effect.
    fn activate_stops(&mut self) {
        match self {
            Self::Plain(stops) => stops.activate(),
            Self::Parsed(parsed) => parsed.activate_stops(),
        }
    }
}

impl Choice {
    pub(super) fn new(tokenizer: &Arc<Tokenizer>, options: &TextOptions) -> Self {
        let detokenize_options =
            DetokenizeOptions { skip_special: options.skip_special, continues_text: options.continues_text };
        let detokenizer = Detokenizer::new(Arc::clone(tokenizer), detokenize_options);
        let stops = StopFilter::new(&options.stops, options.include_stop);
        let stops = if options.tokens_min > 0 { stops.inactive() } else { stops };
        let text = match &options.parser {
            None => (detokenizer, TextFilter::Plain(stops)),
            Some(settings) => {
                let parsed = Box::new(ParsedText::new(settings, stops));
                let visible = Arc::clone(&settings.visible_tokens);
                (detokenizer.with_visible_special(visible), TextFilter::Parsed(parsed))
            }
        };
        Self {
            text: Some(text),
            include_stop: options.include_stop,
            tokens_until_stops: options.tokens_min,
            detokenize: options.detokenize,
            stop_tokens: options.stop_tokens.clone(),
            stop_token: None,
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

    /// Adds the next token. Returns the number of reasoning tokens, 0 or 1.
    pub(super) fn push(
        &mut self,
        choice: u32,
        token: TokenId,
        logprobs: Option<Box<TokenLogprobs>>,
        deltas: &mut Vec<ChoiceDelta>,
    ) -> u64 {
        let Some((detokenizer, filter)) = &mut self.text else { return 0 };
        match self.tokens_until_stops.checked_sub(1) {
            Some(rest) => self.tokens_until_stops = rest,
            None => filter.activate_stops(),
        }
        // A stop token always ends the sequence, because the engine samples none before `min_tokens` is reached. A stop
        // token has no text unless the request sets `include_stop_str_in_output`.
        let ends = !self.include_stop && self.stop_tokens.binary_search(&token).is_ok();
        self.stop_token = logprobs.as_ref().filter(|_| ends).map(|_| token);
        match filter {
            TextFilter::Parsed(parsed) if ends && !parsed.reads(token) => return 0,
            TextFilter::Parsed(parsed) => {
                let before = parsed.reasoning_tokens;
                let token_text =
                    logprobs.filter(|_| !ends).map(|logprobs| token_text(token, *logprobs, self.characters));
                let text = detokenizer.push(token);
                self.characters += text.chars().count();
                let ended = parsed.push(choice, &text, token_text, deltas);
                let reasoning_tokens = parsed.reasoning_tokens - before;
                if let Some(reason) = ended {
                    let tokens = parsed.take_end_tokens(self.stop_token);
                    self.text = None;
                    deltas.push(ChoiceDelta::End { choice, reason, tokens });
                }
                return reasoning_tokens;
            }
            TextFilter::Plain(_) if ends => return 0,
            TextFilter::Plain(_) => {}
        }
        if let Some(logprobs) = logprobs {
            self.held.push((self.bytes, token_text(token, *logprobs, self.characters)));
        }
        let text = if self.detokenize { detokenizer.push(token) } else { String::new() };
        self.push_plain(choice, &text, deltas);
        0
    }

    fn push_plain(&mut self, choice: u32, text: &str, deltas: &mut Vec<ChoiceDelta>) {
        let Some((_, TextFilter::Plain(filter))) = &mut self.text else { return };
        self.bytes += text.len();
        self.characters += text.chars().count();
        match filter.push(text) {
            StopFilterOutput::Text(text) => {
                self.bytes_out += text.len();
                // A token is returned with the first part of its text. If no text is held back, tokens without text are
                // returned, too.
                let certain = if self.bytes_out == self.bytes { usize::MAX } else { self.bytes_out };
                let tokens = self.release(certain);
                push(ChoiceDelta::Text { choice, text, tokens }, deltas);
            }
            // Return a token without text immediately, unless earlier text is held back.
            StopFilterOutput::Held if self.bytes_out == self.bytes && !self.held.is_empty() => {
                let tokens = self.release(usize::MAX);
                push(ChoiceDelta::Text { choice, text: String::new(), tokens }, deltas);
            }
            StopFilterOutput::Held => {}
            StopFilterOutput::Stopped { text, .. } => {
                self.text = None;
                self.bytes_out += text.len();
                let tokens = self.release(self.bytes_out);
                push(ChoiceDelta::Text { choice, text, tokens }, deltas);
                let tokens = self.held.drain(..).map(|(_, token)| token.token).collect();
                deltas.push(ChoiceDelta::End { choice, reason: ChoiceFinishReason::Stop, tokens });
            }
        }
    }

    /// Ends the choice, because the engine has ended the sequence.
    pub(super) fn finish(&mut self, choice: u32, reason: FinishReason, deltas: &mut Vec<ChoiceDelta>) {
        let Some((detokenizer, filter)) = self.text.take() else { return };
        let rest = detokenizer.finish();
        let mut filter = match filter {
            TextFilter::Plain(filter) => filter,
            TextFilter::Parsed(mut parsed) => {
                let reason = parsed.finish(choice, &rest, reason, deltas);
                let tokens = parsed.take_end_tokens(self.stop_token);
                deltas.push(ChoiceDelta::End { choice, reason, tokens });
                return;
            }
        };
        let (text, reason) = match filter.push(&rest) {
            StopFilterOutput::Stopped { text, .. } => (text, ChoiceFinishReason::Stop),
            StopFilterOutput::Text(text) => (text + &filter.finish(), finish_reason(reason)),
            StopFilterOutput::Held => (filter.finish(), finish_reason(reason)),
        };
        let tokens = self.release(usize::MAX);
        push(ChoiceDelta::Text { choice, text, tokens }, deltas);
        deltas.push(ChoiceDelta::End { choice, reason, tokens: self.stop_token.into_iter().collect() });
    }

    /// Releases the held tokens whose text begins before the byte position `end`.
    fn release(&mut self, end: usize) -> Vec<TokenText> {
        let count = self.held.iter().take_while(|(start, _)| *start < end).count();
        self.held.drain(..count).map(|(_, token)| token).collect()
    }
}

fn finish_reason(reason: FinishReason) -> ChoiceFinishReason {
    match reason {
        FinishReason::Stop => ChoiceFinishReason::Stop,
        FinishReason::Length => ChoiceFinishReason::Length,
    }
}

/// Returns a token, whose text begins at the character position `start`, with its log probabilities.
fn token_text(token: TokenId, mut logprobs: TokenLogprobs, start: usize) -> TokenText {
    floor(&mut logprobs);
    let TokenLogprobs { chosen, top } = logprobs;
    TokenText { token, start, logprob: chosen.logprob, top }
}

/// Raises log probabilities to at least [`LOGPROB_MIN`], because JSON cannot represent negative infinity.
pub(super) fn floor(logprobs: &mut TokenLogprobs) {
    for entry in logprobs.top.iter_mut().chain([&mut logprobs.chosen]) {
        entry.logprob = entry.logprob.max(LOGPROB_MIN);
    }
}
