//! The events of an answer.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use server_engine::{DraftCounts, Event, ScoredToken, TokenStream};
use server_openai::{CompletionTokensDetails, Usage};
use server_parsers::ReasoningFormat;
use server_text::Tokenizer;

use super::best::best;
use super::choice::{self, Choice};
use super::delta::ChoiceDelta;
use crate::error::Error;
use crate::prepare::TextOptions;
use crate::request_record::RequestRecord;

/// An event of an answer. No events follow `Finished` or `Failed`.
#[derive(Clone, Debug)]
pub(crate) enum AnswerEvent {
    /// The new deltas, at least one.
    Deltas(Vec<ChoiceDelta>),
    /// All choices have ended.
    Finished(Usage),
    /// The answer failed.
    Failed(Error),
}

/// An answer that is being generated. Dropping it aborts the rest of the generation.
#[derive(Debug)]
pub(crate) struct Answer {
    prompts: Vec<PromptAnswer>,
    usage: Usage,
    record: RequestRecord,
    /// The numbers of choices for each prompt, if more choices are generated than returned.
    best_of: Option<BestOf>,
    /// Deltas that wait for the log probabilities of all prompts.
    held: Vec<ChoiceDelta>,
    /// The first event, if [`Answer::start`] has received it and [`Answer::next`] has not returned it yet.
    first: Option<AnswerEvent>,
    /// The last event; `None` until it is known.
    end: Option<AnswerEvent>,
}

/// The numbers of choices for each prompt.
#[derive(Clone, Copy, Debug)]
struct BestOf {
    generated: u32,
    returned: u32,
}

/// The answer to one of the request's prompts.
#[derive(Debug)]
struct PromptAnswer {
    /// The stream of tokens, until all choices have ended.
    stream: Option<TokenStream>,
    choices: Vec<Choice>,
    /// The index of this prompt's first choice among all choices of the answer.
    first: u32,
    /// The log probabilities of the prompt, once they are known.
    scores: Option<Arc<[ScoredToken]>>,
    /// Whether the log probabilities are requested but not known yet.
    awaits_scores: bool,
    /// Whether to discard the generated tokens.
    discards: bool,
}

/// A prompt that was submitted to the engine.
pub(crate) struct SubmittedPrompt {
    pub(crate) stream: TokenStream,
    pub(crate) choices: u32,
    pub(crate) prompt_tokens: usize,
    /// Number of tokens of the prompt that represent images.
    pub(crate) image_tokens: u64,
    /// Whether the log probabilities of the prompt are requested.
    pub(crate) is_scored: bool,
}

impl Answer {
    /// Creates the answer to `submitted`. `choices` is the number of returned choices for each prompt.
    pub(crate) fn new(
        submitted: Vec<SubmittedPrompt>,
        choices: u32,
        tokenizer: &Arc<Tokenizer>,
        options: &TextOptions,
        record: RequestRecord,
    ) -> Self {
        let generated = submitted.first().map_or(choices, |prompt| prompt.choices);
        let best_of = (generated > choices).then_some(BestOf { generated, returned: choices });
        let reasons =
            options.parser.as_ref().is_some_and(|parser| parser.formats.reasoning != ReasoningFormat::None);
        let mut usage = Usage {
            completion_tokens_details: reasons.then(CompletionTokensDetails::default),
            ..Usage::default()
        };
        let mut first = 0;
        let prompts = submitted
            .into_iter()
            .map(|SubmittedPrompt { stream, choices, prompt_tokens, image_tokens, is_scored }| {
                usage.prompt_tokens += prompt_tokens as u64;
                if image_tokens > 0 {
                    *usage.prompt_tokens_details.image_tokens.get_or_insert_default() += image_tokens;
                }
                let prompt = PromptAnswer {
                    stream: Some(stream),
                    choices: (0..choices).map(|_| Choice::new(tokenizer, options)).collect(),
                    first,
                    scores: None,
                    awaits_scores: is_scored,
                    discards: options.discards,
                };
                first += choices;
                prompt
            })
            .collect();
        Self { prompts, usage, record, best_of, held: Vec::new(), first: None, end: None }
    }

    /// Waits for the first token and the requested log probabilities of the prompts, or for the end of the answer. The
    /// token may have no delta, for example if the reasoning is hidden from the client. Must not be called if more
    /// choices are generated than returned.
    ///
    /// # Errors
    /// The answer failed before its first token.
    pub(crate) async fn start(&mut self) -> Result<(), Error> {
        debug_assert!(self.best_of.is_none(), "the best choices are known only at the end");
        let first = poll_fn(|context| match self.poll_next(context) {
            Poll::Ready(event) => Poll::Ready(Some(event)),
            Poll::Pending if self.has_started() => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        })
        .await;
        match first {
            Some(AnswerEvent::Failed(error)) => Err(error),
            event => {
                self.first = event;
                Ok(())
            }
        }
    }

    /// Whether a token has been generated and all requested log probabilities of prompts are known.
    fn has_started(&self) -> bool {
        self.usage.completion_tokens > 0 && !self.awaits_scores()
    }

    /// Waits for the next event. An [`AnswerEvent::Deltas`] contains all deltas since the previous event.
    ///
    /// # Cancel safety
    /// Dropping the future loses no events, unless more choices are generated than returned.
    pub(crate) async fn next(&mut self) -> AnswerEvent {
        if let Some(first) = self.first.take() {
            return first;
        }
        let Some(BestOf { generated, returned }) = self.best_of else { return self.next_of_all().await };
        // The best choices are known only at the end.
        let mut all = Vec::new();
        while let AnswerEvent::Deltas(deltas) = self.next_of_all().await {
            all.extend(deltas);
        }
        self.best_of = None;
        match &self.end {
            Some(AnswerEvent::Finished(_)) if !all.is_empty() => {
                AnswerEvent::Deltas(best(all, generated, returned))
            }
            _ => self.next_of_all().await,
        }
    }

    /// Passes all deltas to `add`. Returns the usage at the end.
    ///
    /// # Errors
    /// The answer failed.
    pub(crate) async fn fold(&mut self, mut add: impl FnMut(ChoiceDelta)) -> Result<Usage, Error> {
        loop {
            match self.next().await {
                AnswerEvent::Deltas(deltas) => deltas.into_iter().for_each(&mut add),
                AnswerEvent::Finished(usage) => return Ok(usage),
                AnswerEvent::Failed(error) => return Err(error),
            }
        }
    }

    /// Returns the record of the request. The request counts as in progress until the record is dropped.
    pub(crate) fn into_record(self) -> RequestRecord {
        self.record
    }

    async fn next_of_all(&mut self) -> AnswerEvent {
        poll_fn(|context| self.poll_next(context)).await
    }

    fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<AnswerEvent> {
        if let Some(end) = &self.end {
            return Poll::Ready(end.clone());
        }
        let mut deltas = std::mem::take(&mut self.held);
        for prompt in &mut self.prompts {
            if let Err(error) = prompt.poll(context, &mut self.usage, &mut self.record, &mut deltas) {
                self.record.failed(&error);
                self.prompts.clear();
                let failed = self.end.insert(AnswerEvent::Failed(error));
                // First return the deltas that precede the failure.
                let event = if deltas.is_empty() { failed.clone() } else { AnswerEvent::Deltas(deltas) };
                return Poll::Ready(event);
            }
        }
        if self.awaits_scores() {
            self.held = deltas;
            return Poll::Pending;
        }
        if !deltas.is_empty() {
            return Poll::Ready(AnswerEvent::Deltas(deltas));
        }
        if self.prompts.iter().all(|prompt| prompt.stream.is_none()) {
            let usage = self.usage();
            self.record.ended(usage);
            return Poll::Ready(self.end.insert(AnswerEvent::Finished(usage)).clone());
        }
        Poll::Pending
    }

    fn awaits_scores(&self) -> bool {
        self.prompts.iter().any(|prompt| prompt.awaits_scores)
    }

    /// Returns the log probabilities of the tokens of each prompt, except the first token, if they are requested.
    /// Unless the answer fails, they are known after [`Answer::start`] or the first event.
    pub(crate) fn scores(&self) -> Vec<Option<Arc<[ScoredToken]>>> {
        self.prompts.iter().map(|prompt| prompt.scores.clone()).collect()
    }

    /// Returns the tokens used so far.
    pub(crate) fn usage(&self) -> Usage {
        Usage { total_tokens: self.usage.prompt_tokens + self.usage.completion_tokens, ..self.usage }
    }
}

/// Adds the draft tokens of a choice to the usage.
fn count_drafts(DraftCounts { accepted, rejected }: DraftCounts, usage: &mut Usage) {
    if accepted + rejected > 0 {
        let details = usage.completion_tokens_details.get_or_insert_default();
        *details.accepted_prediction_tokens.get_or_insert_default() += u64::from(accepted);
        *details.rejected_prediction_tokens.get_or_insert_default() += u64::from(rejected);
    }
}

impl PromptAnswer {
    /// Processes all available events of the engine.
    fn poll(
        &mut self,
        context: &mut Context<'_>,
        usage: &mut Usage,
        record: &mut RequestRecord,
        deltas: &mut Vec<ChoiceDelta>,
    ) -> Result<(), Error> {
        while let Some(stream) = &mut self.stream {
            let Poll::Ready(event) = stream.poll_next(context) else { return Ok(()) };
            match event {
                Some(Event::Started { cached_tokens }) => {
                    usage.prompt_tokens_details.cached_tokens += u64::from(cached_tokens);
                }
                Some(Event::Scored { mut tokens }) => {
                    tokens.iter_mut().for_each(|scored| choice::floor(&mut scored.logprobs));
                    self.scores = Some(tokens.into());
                    self.awaits_scores = false;
                }
                Some(Event::Token { .. }) if self.discards => {}
                Some(Event::Token { index, token, logprobs, drafts }) => {
                    let choice = &mut self.choices[index as usize];
                    usage.completion_tokens += 1;
                    let now = Instant::now();
                    record.token(now, choice.last_token.replace(now));
                    let reasoning_tokens = choice.push(self.first + index, token, logprobs, deltas);
                    if let Some(details) = &mut usage.completion_tokens_details {
                        details.reasoning_tokens += reasoning_tokens;
                    }
                    if choice.has_ended() {
                        // Except in beam search, the engine does not know stop strings, so it must be notified that the
                        // choice has ended. An aborted sequence has no `Finished` event, so its draft tokens are
                        // counted here.
                        stream.abort(index);
                        count_drafts(drafts, usage);
                    }
                }
                Some(Event::Finished { index, reason, drafts }) => {
                    count_drafts(drafts, usage);
                    // Tokens are discarded if the request limits the answer to 0 tokens, so the limit is the reason,
                    // regardless of the generated token.
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
