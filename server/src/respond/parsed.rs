//! Parses the text of a choice into content up to a stop string, reasoning and tool calls. Stop strings take effect
//! only in content, so that they do not cut off calls or reasoning. Tokens are returned with the first delta that the
//! parser emits after them.

use std::sync::Arc;

use server_engine::{FinishReason, TokenId};
use server_openai::ChoiceFinishReason;
use server_parsers::{Delta, Parser};
use server_text::{StopFilter, StopFilterOutput};

use super::delta::{ChoiceDelta, TokenText, push};
use crate::prepare::ParserSettings;

#[derive(Debug)]
pub(super) struct ParsedText {
    /// The parser; `None` after the text has ended.
    parser: Option<Parser>,
    stops: StopFilter,
    settings: Arc<ParserSettings>,
    /// Tokens that have not been returned yet, each with the number of bytes of its text.
    pending: Vec<(usize, TokenText)>,
    /// Number of calls that have been returned.
    calls: u32,
    /// Number of tokens of reasoning, including the tags around it.
    pub(super) reasoning_tokens: u64,
}

impl ParsedText {
    pub(super) fn new(settings: &Arc<ParserSettings>, stops: StopFilter) -> Self {
        Self {
            parser: Some(Parser::new(settings.formats, &settings.tools, &settings.prompt_end)),
            stops,
            settings: Arc::clone(settings),
            pending: Vec::new(),
            calls: 0,
            reasoning_tokens: 0,
        }
    }

    /// Activates the stop strings. Only those that are completed from now on take effect.
    pub(super) fn activate_stops(&mut self) {
        self.stops.activate();
    }

    /// Whether the parser needs the text of a stop token.
    pub(super) fn reads(&self, token: TokenId) -> bool {
        self.settings.visible_tokens.binary_search(&token).is_ok()
    }

    /// Adds the text of the next token, and the token if it is reported. Returns the reason why the choice ended, if it
    /// did.
    pub(super) fn push(
        &mut self,
        choice: u32,
        text: &str,
        token: Option<TokenText>,
        deltas: &mut Vec<ChoiceDelta>,
    ) -> Option<ChoiceFinishReason> {
        self.pending.extend(token.map(|token| (text.len(), token)));
        let parser = self.parser.as_mut()?;
        let was_reasoning = parser.is_reasoning();
        let parsed = parser.push(text);
        self.reasoning_tokens += u64::from(was_reasoning || parser.is_reasoning());
        self.convert(choice, parsed, deltas)
    }

    /// Ends the text with `rest`, because the engine has ended the sequence. Returns the reason why the choice ended.
    pub(super) fn finish(
        &mut self,
        choice: u32,
        rest: &str,
        reason: FinishReason,
        deltas: &mut Vec<ChoiceDelta>,
    ) -> ChoiceFinishReason {
        let Some(mut parser) = self.parser.take() else { return ChoiceFinishReason::Stop };
        let mut parsed = parser.push(rest);
        parsed.extend(match reason {
            FinishReason::Stop => parser.finish(),
            FinishReason::Length => parser.finish_cut(),
        });
        if let Some(reason) = self.convert(choice, parsed, deltas) {
            return reason;
        }
        self.interrupt(choice, deltas);
        let tokens = self.tokens();
        push(ChoiceDelta::Text { choice, text: String::new(), tokens }, deltas);
        match reason {
            FinishReason::Stop => self.stopped(),
            FinishReason::Length => ChoiceFinishReason::Length,
        }
    }

    /// Converts the parser's deltas. Returns the reason why the choice ended, if it did.
    fn convert(
        &mut self,
        choice: u32,
        parsed: Vec<Delta>,
        deltas: &mut Vec<ChoiceDelta>,
    ) -> Option<ChoiceFinishReason> {
        for delta in parsed {
            match delta {
                Delta::Content(text) => match self.stops.push(&text) {
                    StopFilterOutput::Text(text) => {
                        let tokens = self.tokens();
                        push(ChoiceDelta::Text { choice, text, tokens }, deltas);
                    }
                    StopFilterOutput::Held => {}
                    StopFilterOutput::Stopped { text, .. } => {
                        let tokens = self.tokens_within(text.len());
                        push(ChoiceDelta::Text { choice, text, tokens }, deltas);
                        return Some(self.stopped());
                    }
                },
                Delta::Reasoning(text) => {
                    self.interrupt(choice, deltas);
                    let tokens = self.tokens();
                    if self.settings.shows_reasoning {
                        push(ChoiceDelta::Reasoning { choice, text, tokens }, deltas);
                    }
                }
                Delta::ToolCallBegin { index: call, name } => {
                    self.interrupt(choice, deltas);
                    if call >= self.settings.calls_max {
                        return Some(ChoiceFinishReason::ToolCalls);
                    }
                    self.calls += 1;
                    let id = self.settings.call_id(choice, call);
                    deltas.push(ChoiceDelta::CallBegin { choice, call, id, name });
                }
                Delta::ToolCallArguments { index: call, text } => {
                    let tokens = self.tokens();
                    push(ChoiceDelta::CallArguments { choice, call, text, tokens }, deltas);
                }
                Delta::ToolCallEnd { index: call } => deltas.push(ChoiceDelta::CallEnd { choice, call }),
            }
        }
        None
    }

    /// Releases the held text, because a stop string cannot extend into the part that follows.
    fn interrupt(&mut self, choice: u32, deltas: &mut Vec<ChoiceDelta>) {
        let text = self.stops.interrupt();
        if !text.is_empty() {
            let tokens = self.tokens();
            push(ChoiceDelta::Text { choice, text, tokens }, deltas);
        }
    }

    /// Returns the reason why a choice that was not cut off has ended.
    fn stopped(&self) -> ChoiceFinishReason {
        if self.calls > 0 { ChoiceFinishReason::ToolCalls } else { ChoiceFinishReason::Stop }
    }

    fn tokens(&mut self) -> Vec<TokenText> {
        self.pending.drain(..).map(|(_, token)| token).collect()
    }

    /// Releases the pending tokens whose text begins before the byte position `end` of the pending text.
    fn tokens_within(&mut self, end: usize) -> Vec<TokenText> {
        let mut at = 0;
        let mut begins_before = |(bytes, _): &(usize, TokenText)| {
            let begins = at < end;
            at += bytes;
            begins
        };
        let count = self.pending.iter().take_while(|token| begins_before(token)).count();
        self.pending.drain(..count).map(|(_, token)| token).collect()
    }

    /// Removes the tokens that remain after the choice has ended. Returns them, followed by `stop_token`.
    pub(super) fn take_end_tokens(&mut self, stop_token: Option<TokenId>) -> Vec<TokenId> {
        self.pending.drain(..).map(|(_, token)| token.token).chain(stop_token).collect()
    }
}
