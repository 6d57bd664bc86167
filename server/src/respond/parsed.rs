//! The text of a choice, read: content, up to the stop string, reasoning and calls. Stop strings are looked for
//! in content alone, so that none cuts a call or a thought. Tokens go out with the first text that is given out
//! after they were read.

use std::sync::Arc;

use server_engine::{FinishReason as EngineReason, TokenId};
use server_openai::FinishReason;
use server_parsers::{Delta as Read, Parser};
use server_text::{StopFilter, StopFilterOutput};

use super::{Delta, TokenText};
use crate::prepare::Reading;

#[derive(Debug)]
pub(super) struct Parsed {
    /// None once the text has ended.
    parser: Option<Parser>,
    stops: StopFilter,
    reading: Arc<Reading>,
    /// Tokens that have not gone out, with the bytes of their texts.
    pending: Vec<(usize, TokenText)>,
    /// Calls that went out.
    calls: u32,
    /// Tokens of reasoning, its tags included.
    pub(super) reasoning_tokens: u64,
}

impl Parsed {
    pub(super) fn new(reading: &Arc<Reading>, stops: StopFilter) -> Self {
        Self {
            parser: Some(Parser::new(reading.formats, &reading.tools, &reading.prompt_end)),
            stops,
            reading: Arc::clone(reading),
            pending: Vec::new(),
            calls: 0,
            reasoning_tokens: 0,
        }
    }

    /// Stop strings that are complete from now on count.
    pub(super) fn heed(&mut self) {
        self.stops.activate();
    }

    /// Whether a stop token has a meaning to the parser, so that it has to see it.
    pub(super) fn reads(&self, token: TokenId) -> bool {
        self.reading.kept.binary_search(&token).is_ok()
    }

    /// Takes the text of the next token, and the token if it is wanted. Returns why the choice ended, if it did.
    pub(super) fn push(
        &mut self,
        choice: u32,
        (text, token): (&str, Option<TokenText>),
        deltas: &mut Vec<Delta>,
    ) -> Option<FinishReason> {
        self.pending.extend(token.map(|token| (text.len(), token)));
        let parser = self.parser.as_mut()?;
        let was_reasoning = parser.is_reasoning();
        let read = parser.push(text);
        self.reasoning_tokens += u64::from(was_reasoning || parser.is_reasoning());
        self.give(choice, read, deltas)
    }

    /// The sequence ended by itself, with `rest` as its last text. Returns why the choice did.
    pub(super) fn finish(
        &mut self,
        choice: u32,
        (rest, reason): (&str, EngineReason),
        deltas: &mut Vec<Delta>,
    ) -> FinishReason {
        let Some(mut parser) = self.parser.take() else { return FinishReason::Stop };
        let mut read = parser.push(rest);
        read.extend(match reason {
            EngineReason::Stop => parser.finish(),
            EngineReason::Length => parser.finish_cut(),
        });
        if let Some(reason) = self.give(choice, read, deltas) {
            return reason;
        }
        self.interrupt(choice, deltas);
        let tokens = self.tokens();
        put(Delta::Text { choice, text: String::new(), tokens }, deltas);
        match reason {
            EngineReason::Stop => self.stopped(),
            EngineReason::Length => FinishReason::Length,
        }
    }

    fn give(&mut self, choice: u32, read: Vec<Read>, deltas: &mut Vec<Delta>) -> Option<FinishReason> {
        for read in read {
            match read {
                Read::Content(text) => match self.stops.push(&text) {
                    StopFilterOutput::Text(text) => {
                        let tokens = self.tokens();
                        put(Delta::Text { choice, text, tokens }, deltas);
                    }
                    StopFilterOutput::Held => {}
                    StopFilterOutput::Stopped { text, .. } => {
                        let tokens = self.tokens_within(text.len());
                        put(Delta::Text { choice, text, tokens }, deltas);
                        return Some(self.stopped());
                    }
                },
                Read::Reasoning(text) => {
                    self.interrupt(choice, deltas);
                    let tokens = self.tokens();
                    if self.reading.shows_reasoning {
                        put(Delta::Reasoning { choice, text, tokens }, deltas);
                    }
                }
                Read::ToolCallBegin { index: call, name } => {
                    self.interrupt(choice, deltas);
                    if call >= self.reading.calls_max {
                        return Some(FinishReason::ToolCalls);
                    }
                    self.calls += 1;
                    let id = self.reading.call_id(choice, call);
                    deltas.push(Delta::CallBegin { choice, call, id, name });
                }
                Read::ToolCallArguments { index: call, text } => {
                    let tokens = self.tokens();
                    put(Delta::CallArguments { choice, call, text, tokens }, deltas);
                }
                Read::ToolCallEnd { index: call } => deltas.push(Delta::CallEnd { choice, call }),
            }
        }
        None
    }

    /// No stop string goes on in what comes now.
    fn interrupt(&mut self, choice: u32, deltas: &mut Vec<Delta>) {
        let text = self.stops.interrupt();
        if !text.is_empty() {
            let tokens = self.tokens();
            put(Delta::Text { choice, text, tokens }, deltas);
        }
    }

    /// Why a choice ended that was not cut off.
    fn stopped(&self) -> FinishReason {
        if self.calls > 0 { FinishReason::ToolCalls } else { FinishReason::Stop }
    }

    fn tokens(&mut self) -> Vec<TokenText> {
        self.pending.drain(..).map(|(_, token)| token).collect()
    }

    /// The tokens whose text begins before `end`, in bytes, the first of them at 0.
    fn tokens_within(&mut self, end: usize) -> Vec<TokenText> {
        let mut at = 0;
        let mut begins_before = |(bytes, _): &(usize, TokenText)| {
            let begins = at < end;
            at += bytes;
            begins
        };
        let count = self.pending.iter().take_while(|token| begins_before(token)).count();
        self.pending.drain(..).take(count).map(|(_, token)| token).collect()
    }
}

/// Adds to the last delta if it is of the same kind and choice, so that what has gathered is one.
pub(super) fn put(delta: Delta, deltas: &mut Vec<Delta>) {
    if let Delta::Text { text, tokens, .. }
    | Delta::Reasoning { text, tokens, .. }
    | Delta::CallArguments { text, tokens, .. } = &delta
        && text.is_empty()
        && tokens.is_empty()
    {
        return;
    }
    let unmerged = match deltas.last_mut() {
        Some(last) => last.absorb(delta),
        None => Some(delta),
    };
    deltas.extend(unmerged);
}
