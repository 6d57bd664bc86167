//! Streams the events of an answer to the client.

use axum::response::Response;
use futures_util::{FutureExt as _, stream};
use server_openai::Usage;

use crate::encoding::{self, EncodingCost};
use crate::error::Error;
use crate::respond::{Answer, AnswerEvent, ChoiceDelta};
use crate::sse::{self, Events};

/// Encodes the events of an answer as server-sent events.
pub(super) trait Encoder: Send + 'static {
    /// Returns the number of parts that precede the first delta.
    fn num_opening_parts(&self) -> u32;
    /// Returns the cost of encoding a part that precedes the first delta.
    fn opening_cost(&self, part: u32) -> EncodingCost;
    /// Encodes a part that precedes the first delta.
    fn opening(&mut self, part: u32, events: &mut Events);
    /// Returns the cost of encoding new deltas.
    fn deltas_cost(&self, deltas: &[ChoiceDelta]) -> EncodingCost;
    /// Encodes new deltas. `usage` is the usage up to this point.
    fn deltas(&mut self, deltas: Vec<ChoiceDelta>, usage: Usage, events: &mut Events);
    /// Appends the last events of the answer to `events`, and returns all of them.
    fn finish(self: Box<Self>, usage: Usage, events: Events) -> impl Future<Output = Events> + Send;
    /// Appends the events for `error` to `events`, and returns all of them. The error ends the answer.
    fn fail(self: Box<Self>, error: Error, events: Events) -> impl Future<Output = Events> + Send;
}

/// Returns a response that streams the events of `answer`. The response begins when the first token has been generated,
/// even if the text of the token is not known yet or is hidden from the client. At that time, `encoder` creates the
/// encoder.
///
/// # Errors
/// The answer failed before its first token. In this case, the error response can still have the right status, and the
/// router can retry the request on another replica.
pub(super) async fn stream<E: Encoder>(
    mut answer: Answer,
    encoder: impl FnOnce(&Answer) -> Box<E>,
) -> Result<Response, Error> {
    answer.start().await?;
    let encoder = encoder(&answer);
    let state = AnswerStream { answer, encoder, num_opened: 0 };
    let events = stream::unfold(Some(state), |state| async move {
        let (mut events, rest) = state?.next().await;
        Some((events.take(), rest))
    });
    Ok(sse::response(events))
}

struct AnswerStream<E> {
    answer: Answer,
    encoder: Box<E>,
    /// Number of opening parts that have been encoded.
    num_opened: u32,
}

impl<E: Encoder> AnswerStream<E> {
    /// Waits for the next event of the answer and encodes it. Returns the rest of the stream unless the event is the
    /// last one.
    async fn next(self) -> (Events, Option<Self>) {
        let Self { mut answer, mut encoder, mut num_opened } = self;
        let mut events = Events::default();
        while num_opened < encoder.num_opening_parts() {
            let (part, cost) = (num_opened, encoder.opening_cost(num_opened));
            let encode = move || {
                encoder.opening(part, &mut events);
                (encoder, events)
            };
            (encoder, events) = encoding::run(cost, encode).await;
            num_opened += 1;
            if cost == EncodingCost::High {
                // Send the part before encoding the next one, so that only one part is in memory at a time.
                return (events, Some(Self { answer, encoder, num_opened }));
            }
        }
        let next = if events.is_empty() {
            answer.next().await
        } else {
            // Send the opening parts together with the first deltas, unless those are still being generated.
            match answer.next().now_or_never() {
                Some(next) => next,
                None => return (events, Some(Self { answer, encoder, num_opened })),
            }
        };
        match next {
            AnswerEvent::Deltas(deltas) => {
                let (cost, usage) = (encoder.deltas_cost(&deltas), answer.usage());
                let encode = move || {
                    encoder.deltas(deltas, usage, &mut events);
                    (encoder, events)
                };
                let (encoder, events) = encoding::run(cost, encode).await;
                (events, Some(Self { answer, encoder, num_opened }))
            }
            AnswerEvent::Finished(usage) => (encoder.finish(usage, events).await, None),
            AnswerEvent::Failed(error) => (encoder.fail(error, events).await, None),
        }
    }
}
