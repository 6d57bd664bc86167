//! Streams the events of an answer to the client.

use axum::response::Response;
use futures_util::stream;
use server_openai::Usage;

use crate::error::Error;
use crate::respond::{Answer, AnswerEvent, ChoiceDelta};
use crate::sse::{self, Events};

/// Encodes the events of an answer as server-sent events.
pub(super) trait Encoder: Send + 'static {
    /// Encodes the beginning of the answer, before its first delta.
    fn start(&mut self, answer: &Answer, events: &mut Events);
    /// Encodes new deltas. `usage` is the usage up to this point.
    fn deltas(&mut self, deltas: Vec<ChoiceDelta>, usage: Usage, events: &mut Events);
    /// Encodes the end of the answer.
    fn finish(&mut self, usage: Usage, events: &mut Events) -> impl Future<Output = ()> + Send;
    /// Encodes an error that ends the answer.
    fn fail(&mut self, error: &Error, events: &mut Events);
}

/// Returns a response that streams the events of `answer`.
///
/// # Errors
/// The answer failed before its first delta, so that the error response has the right status, and the router can retry
/// the request on another replica.
pub(super) async fn stream(mut answer: Answer, encoder: impl Encoder) -> Result<Response, Error> {
    answer.start().await?;
    let state = AnswerStream { answer, encoder, is_started: false };
    let events = stream::unfold(Some(state), |state| async move {
        let mut state = state?;
        let mut events = Events::default();
        let has_ended = state.encode_next(&mut events).await;
        Some((events.take(), (!has_ended).then_some(state)))
    });
    Ok(sse::response(events))
}

struct AnswerStream<E> {
    answer: Answer,
    encoder: E,
    is_started: bool,
}

impl<E: Encoder> AnswerStream<E> {
    /// Waits for the next event of the answer and encodes it. Returns whether it is the last one.
    async fn encode_next(&mut self, events: &mut Events) -> bool {
        let Self { answer, encoder, is_started } = self;
        if !std::mem::replace(is_started, true) {
            encoder.start(answer, events);
        }
        match answer.next().await {
            AnswerEvent::Deltas(deltas) => {
                encoder.deltas(deltas, answer.usage(), events);
                false
            }
            AnswerEvent::Finished(usage) => {
                encoder.finish(usage, events).await;
                true
            }
            AnswerEvent::Failed(error) => {
                encoder.fail(&error, events);
                true
            }
        }
    }
}
