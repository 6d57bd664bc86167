//! From the engine's tokens to pieces of text: detokenised, up to the stop string, with their log
//! probabilities. Streaming sends the pieces; not streaming adds the same pieces up.

mod best;
mod choice;
mod parsed;

use std::future::poll_fn;
use std::mem::discriminant;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use server_engine::{DraftCounts, Event, ScoredToken, TokenId, TokenLogprob, TokenStream};
use server_openai::{CompletionTokensDetails, FinishReason, PromptTokensDetails, Usage};
use server_parsers::ReasoningFormat;
use server_text::Tokenizer;

use crate::error::Error;
use crate::metrics::Record;
use crate::prepare::TextRule;
pub(crate) use best::Deltas;
use choice::Choice;

/// What is new in a choice.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Delta {
    /// Text, and the tokens whose text it is (if log probabilities are wanted). Either may be empty.
    Text { choice: u32, text: String, tokens: Vec<TokenText> },
    /// Reasoning. Either may be empty, but not both.
    Reasoning { choice: u32, text: String, tokens: Vec<TokenText> },
    /// A call of a tool begins: the `call`th of the choice, from 0. Its arguments follow.
    CallBegin { choice: u32, call: u32, id: String, name: String },
    /// More of the arguments of the call that began last, and the tokens of calls. Either may be empty, but not both.
    CallArguments { choice: u32, call: u32, text: String, tokens: Vec<TokenText> },
    /// The arguments of the call are a whole JSON object. A call that was cut off has no such end.
    CallEnd { choice: u32, call: u32 },
    /// The choice ended.
    End { choice: u32, reason: FinishReason },
}

impl Delta {
    /// Which choice it is of.
    pub(crate) fn choice(&self) -> u32 {
        match self {
            Self::Text { choice, .. }
            | Self::Reasoning { choice, .. }
            | Self::CallBegin { choice, .. }
            | Self::CallArguments { choice, .. }
            | Self::CallEnd { choice, .. }
            | Self::End { choice, .. } => *choice,
        }
    }

    /// Takes in what follows it, or gives it back if it is of another kind, choice or call.
    fn absorb(&mut self, next: Self) -> Option<Self> {
        // Between the arguments of two calls is the beginning of the second.
        if discriminant(self) != discriminant(&next) || self.choice() != next.choice() {
            return Some(next);
        }
        match (self, next) {
            (
                Self::Text { text, tokens, .. }
                | Self::Reasoning { text, tokens, .. }
                | Self::CallArguments { text, tokens, .. },
                Self::Text { text: more, tokens: more_tokens, .. }
                | Self::Reasoning { text: more, tokens: more_tokens, .. }
                | Self::CallArguments { text: more, tokens: more_tokens, .. },
            ) => {
                text.push_str(&more);
                tokens.extend(more_tokens);
                None
            }
            (_, next) => Some(next),
        }
    }
}

/// A token within a choice's text.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TokenText {
    pub(crate) token: TokenId,
    /// Where its text begins, in characters from the beginning of what was generated.
    pub(crate) start: usize,
    pub(crate) logprob: f32,
    /// The most probable tokens, most probable first.
    pub(crate) top: Vec<TokenLogprob>,
}

/// An answer in the making. Dropping it cancels what is left of it.
#[derive(Debug)]
pub(crate) struct Answer {
    prompts: Vec<PromptAnswer>,
    usage: Usage,
    record: Record,
    /// What came before the scores of all prompts had.
    held: Vec<Delta>,
    end: End,
}

/// How far an answer is from its end.
#[derive(Debug)]
enum End {
    /// More may come.
    Open,
    /// Only this error.
    Failing(Error),
    /// Nothing.
    Reached,
}

/// The answer to one of the request's prompts.
#[derive(Debug)]
struct PromptAnswer {
    /// None once all choices have ended.
    stream: Option<TokenStream>,
    choices: Vec<Choice>,
    /// The number of the first choice in the whole answer.
    first: u32,
    /// Of the prompt, if they are asked for and have come.
    scores: Option<Arc<[ScoredToken]>>,
    /// Whether they are still to come.
    awaits_scores: bool,
    /// Whether nothing that is generated is wanted.
    discards: bool,
}

/// The tokens of one prompt's choices, on their way.
pub(crate) struct Submitted {
    pub(crate) stream: TokenStream,
    pub(crate) choices: u32,
    pub(crate) prompt_tokens: usize,
    /// Whether the log probabilities of the prompt are asked for.
    pub(crate) scored: bool,
}

impl Answer {
    pub(crate) fn new(
        submitted: Vec<Submitted>,
        tokenizer: &Arc<Tokenizer>,
        rule: &TextRule,
        record: Record,
    ) -> Self {
        let mut first = 0;
        let thinks =
            rule.reading.as_ref().is_some_and(|reading| reading.formats.reasoning != ReasoningFormat::None);
        let mut usage = Usage {
            completion_tokens_details: thinks.then(CompletionTokensDetails::default),
            ..Usage::default()
        };
        let prompts = submitted
            .into_iter()
            .map(|Submitted { stream, choices, prompt_tokens, scored }| {
                usage.prompt_tokens += prompt_tokens as u64;
                let prompt = PromptAnswer {
                    stream: Some(stream),
                    choices: (0..choices).map(|_| Choice::new(tokenizer, rule)).collect(),
                    first,
                    scores: None,
                    awaits_scores: scored,
                    discards: rule.discards,
                };
                first += choices;
                prompt
            })
            .collect();
        Self { prompts, usage, record, held: Vec::new(), end: End::Open }
    }

    /// What is new, at least one delta; nothing once all choices have ended. What has gathered since the last
    /// call comes together. After an error nothing comes.
    ///
    /// # Cancel safety
    /// A future that is dropped before it is ready has lost nothing.
    pub(crate) async fn next(&mut self) -> Option<Result<Vec<Delta>, Error>> {
        poll_fn(|context| self.poll_next(context)).await
    }

    fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Vec<Delta>, Error>>> {
        match std::mem::replace(&mut self.end, End::Reached) {
            End::Open => {}
            End::Failing(error) => return Poll::Ready(Some(Err(error))),
            End::Reached => return Poll::Ready(None),
        }
        let mut deltas = std::mem::take(&mut self.held);
        for prompt in &mut self.prompts {
            if let Err(error) = prompt.poll(context, &mut self.usage, &mut self.record, &mut deltas) {
                self.record.failed(&error);
                self.prompts.clear();
                if deltas.is_empty() {
                    return Poll::Ready(Some(Err(error)));
                }
                // What came before the failure goes out first.
                self.end = End::Failing(error);
                return Poll::Ready(Some(Ok(deltas)));
            }
        }
        self.end = End::Open;
        if self.prompts.iter().any(|prompt| prompt.awaits_scores) {
            self.held = deltas;
            return Poll::Pending;
        }
        if !deltas.is_empty() {
            return Poll::Ready(Some(Ok(deltas)));
        }
        if self.prompts.iter().all(|prompt| prompt.stream.is_none()) {
            self.record.ended(self.usage());
            self.end = End::Reached;
            return Poll::Ready(None);
        }
        Poll::Pending
    }

    /// The log probabilities of the prompts' tokens from the second on, by prompt; all there once anything is, where
    /// they are asked for.
    pub(crate) fn scores(&self) -> Vec<Option<Arc<[ScoredToken]>>> {
        self.prompts.iter().map(|prompt| prompt.scores.clone()).collect()
    }

    /// The tokens used so far.
    pub(crate) fn usage(&self) -> Usage {
        Usage { total_tokens: self.usage.prompt_tokens + self.usage.completion_tokens, ..self.usage }
    }
}

/// Adds the guesses of a choice.
fn count(DraftCounts { accepted, rejected }: DraftCounts, usage: &mut Usage) {
    if accepted + rejected > 0 {
        let details = usage.completion_tokens_details.get_or_insert_default();
        *details.accepted_prediction_tokens.get_or_insert_default() += u64::from(accepted);
        *details.rejected_prediction_tokens.get_or_insert_default() += u64::from(rejected);
    }
}

impl PromptAnswer {
    /// Takes all events there are.
    fn poll(
        &mut self,
        context: &mut Context<'_>,
        usage: &mut Usage,
        record: &mut Record,
        deltas: &mut Vec<Delta>,
    ) -> Result<(), Error> {
        while let Some(stream) = &mut self.stream {
            let Poll::Ready(event) = stream.poll_next(context) else { return Ok(()) };
            match event {
                Some(Event::Started { cached_tokens }) => {
                    let PromptTokensDetails { cached_tokens: cached } = &mut usage.prompt_tokens_details;
                    *cached += u64::from(cached_tokens);
                }
                Some(Event::Scored { mut tokens }) => {
                    tokens.iter_mut().for_each(|scored| choice::floor(&mut scored.logprobs));
                    self.scores = Some(tokens.into());
                    self.awaits_scores = false;
                }
                Some(Event::Token { .. }) if self.discards => {}
                Some(Event::Token { index, token, logprobs }) => {
                    let choice = &mut self.choices[index as usize];
                    usage.completion_tokens += 1;
                    let now = Instant::now();
                    record.token(now, choice.last_token.replace(now));
                    let thought = choice.push(self.first + index, (token, logprobs), deltas);
                    if let Some(details) = &mut usage.completion_tokens_details {
                        details.reasoning_tokens += thought;
                    }
                    if choice.has_ended() {
                        // By a stop string, of which the engine knows nothing.
                        stream.abort(index);
                    }
                }
                Some(Event::Finished { index, reason, drafts }) => {
                    count(drafts, usage);
                    // Whatever the token was that is not wanted, none was allowed.
                    let reason = if self.discards { server_engine::FinishReason::Length } else { reason };
                    self.choices[index as usize].finish(self.first + index, reason, deltas);
                }
                Some(Event::Failed(failure)) => return Err(Error::Failed(failure)),
                None => self.stream = None,
            }
            if self.choices.iter().all(Choice::has_ended) {
                self.stream = None;
            }
        }
        Ok(())
    }
}
