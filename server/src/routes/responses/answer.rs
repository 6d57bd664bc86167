//! Generates a response as a whole, as a stream of events, or in the background. In each case, an [`Assembly`]
//! assembles the response from the deltas of the answer.

use std::sync::Arc;

use axum::Json;
use axum::response::{IntoResponse, Response};
use server_openai::Usage;
use server_openai::responses::{
    Event, EventData, InputTokensDetails, Item, OutputTokensDetails, Response as WireResponse, ResponseError,
    ResponseUsage, Status, kind,
};

use crate::app::App;
use crate::encoding::{self, EncodingCost};
use crate::error::Error;
use crate::model::unix_time;
use crate::respond::{Answer, AnswerEvent, ChoiceDelta};
use crate::responses::{
    Assembly, BackgroundResponse, FollowedEvents, Interruption, LiveResponse, ResponseEvents,
    RetainedRequest, encode,
};
use crate::routes::stream::{Encoder, stream};
use crate::routes::submission::with_request_id;
use crate::routes::unread::hold_until_sent;
use crate::sse::{self, Events};
use crate::store::{self, Id, NewItems, ResponseRecord, Store};
use crate::tenant::Tenant;

/// A response whose request has been submitted to the engine.
pub(super) struct PendingResponse {
    pub(super) assembly: Assembly,
    pub(super) retained: RetainedRequest,
    pub(super) answer: Answer,
    pub(super) delivery: Delivery,
    pub(super) tenant: Tenant,
}

/// The way in which the client receives the response.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Delivery {
    Whole,
    Streamed,
    /// The client retrieves the response later, or follows its events.
    Background {
        follows: bool,
    },
}

pub(super) async fn answer(app: App, pending: PendingResponse) -> Response {
    let PendingResponse { assembly, retained, answer, delivery, tenant } = pending;
    let id = assembly.response().id.clone();
    let encoder = Box::new(ResponseEncoder { app, assembly, retained, tenant });
    let response = match delivery {
        Delivery::Whole => whole(answer, encoder).await,
        Delivery::Streamed => stream(answer, move |_| encoder).await,
        Delivery::Background { follows } => Ok(background(answer, *encoder, follows)),
    };
    with_request_id(response.unwrap_or_else(Error::into_response), &id)
}

async fn whole(mut answer: Answer, mut encoder: Box<ResponseEncoder>) -> Result<Response, Error> {
    let (assembly, sink) = (&mut encoder.assembly, &mut |_: &Event<'_>| {});
    assembly.create(sink);
    assembly.begin(sink);
    let usage = answer.fold(|delta| assembly.push(delta, sink)).await?;
    let encoder = encoder.completed(usage).await;
    let cost = encoder.assembly.encoding_cost();
    let response = encoding::run(cost, move || Json(encoder.assembly.response()).into_response()).await;
    Ok(hold_until_sent(response, answer.into_record()))
}

/// Encodes a response as a stream of the events of its assembly.
struct ResponseEncoder {
    app: App,
    assembly: Assembly,
    retained: RetainedRequest,
    tenant: Tenant,
}

impl ResponseEncoder {
    /// Completes the response, adds it to its conversation, and stores it if requested.
    ///
    /// # Cancel safety
    /// A client can disconnect at any time. The last two steps are one unit of work, so that a disconnection cannot
    /// leave a turn in the conversation whose response is not stored.
    async fn completed(mut self: Box<Self>, usage: Usage) -> Box<Self> {
        self.assembly.complete(response_usage(usage), unix_time());
        let response = self.assembly.response();
        if !response.store && response.conversation.is_none() {
            return self;
        }
        let app = self.app.clone();
        let store = move |store: &Store| {
            self.store(store);
            self
        };
        app.store().run(store).await
    }

    /// Adds the response to its conversation, and stores it if requested. If the response cannot be added, it is marked
    /// as failed, but keeps its output.
    fn store(&mut self, store: &Store) {
        let (response, input) = (self.assembly.response().clone(), self.retained.items().to_vec());
        let mut record = ResponseRecord { response, input, events: None };
        if let Err(error) = join(store, &record.response, &record.input, self.tenant) {
            self.assembly.fail_complete(error);
            record.response = self.assembly.response().clone();
        }
        let is_stored = record.response.store && write(store, record, self.tenant);
        self.assembly.set_stored(is_stored);
    }
}

impl Encoder for ResponseEncoder {
    fn num_opening_parts(&self) -> u32 {
        1
    }

    fn opening_cost(&self, _: u32) -> EncodingCost {
        EncodingCost::Low
    }

    fn opening(&mut self, _: u32, events: &mut Events) {
        let sink = &mut |event: &Event<'_>| events.push_raw(&encode(event));
        self.assembly.create(sink);
        self.assembly.begin(sink);
    }

    fn deltas_cost(&self, deltas: &[ChoiceDelta]) -> EncodingCost {
        self.assembly.deltas_cost(deltas)
    }

    fn deltas(&mut self, deltas: Vec<ChoiceDelta>, _: Usage, events: &mut Events) {
        let sink = &mut |event: &Event<'_>| events.push_raw(&encode(event));
        deltas.into_iter().for_each(|delta| self.assembly.push(delta, sink));
    }

    async fn finish(self: Box<Self>, usage: Usage, mut events: Events) -> Events {
        // Store the response before sending its last event, after which the client may refer to it.
        let mut encoder = self.completed(usage).await;
        let cost = encoder.assembly.encoding_cost();
        let conclude = move || {
            encoder.assembly.conclude(&mut |event: &Event<'_>| events.push_raw(&encode(event)));
            events.done();
            events
        };
        encoding::run(cost, conclude).await
    }

    async fn fail(mut self: Box<Self>, error: Error, mut events: Events) -> Events {
        let cost = self.assembly.encoding_cost();
        let conclude = move || {
            let sink = &mut |event: &Event<'_>| events.push_raw(&encode(event));
            self.assembly.fail(&error, sink);
            // A streamed response that fails is not stored.
            self.assembly.set_stored(false);
            self.assembly.conclude(sink);
            events.done();
            events
        };
        encoding::run(cost, conclude).await
    }
}

fn background(answer: Answer, encoder: ResponseEncoder, follows: bool) -> Response {
    let ResponseEncoder { app, mut assembly, retained, tenant } = encoder;
    if !follows {
        // No client follows the events, so the first one need not be stored.
        assembly.create(&mut |_: &Event<'_>| {});
    }
    let live =
        app.background().live(BackgroundResponse { assembly, retained, tenant, stores_events: follows });
    if follows {
        live.change(|assembly, sink| assembly.create(sink));
    }
    let response = live.response();
    app.background().begin(Arc::clone(&live), work(app.clone(), Arc::clone(&live), answer));
    if follows { follow(live.events(), 0) } else { Json(response).into_response() }
}

/// Generates a response, whether or not a client follows it.
async fn work(app: App, live: Arc<LiveResponse>, mut answer: Answer) {
    // If the process dies during generation, this record remains.
    let (record, tenant) = (live.record(), live.tenant());
    app.store().run(move |store| write(store, record, tenant)).await;
    let mut is_started = false;
    let end = loop {
        let next = tokio::select! {
            biased;
            interruption = live.interrupted() => {
                drop(answer);
                break ResponseEnd::Interrupted(interruption);
            }
            next = answer.next() => next,
        };
        if !std::mem::replace(&mut is_started, true) {
            live.change(|assembly, sink| assembly.begin(sink));
        }
        match next {
            AnswerEvent::Deltas(deltas) => live.add(deltas).await,
            AnswerEvent::Finished(usage) => break ResponseEnd::Finished(usage),
            AnswerEvent::Failed(error) => break ResponseEnd::Failed(error),
        }
    };
    // The conversation and the record of the response must agree even if this task is aborted, so one unit of work
    // changes both.
    app.store().run(move |store| conclude(store, &live, end)).await;
}

/// The outcome of the work on a background response.
enum ResponseEnd {
    Finished(Usage),
    Failed(Error),
    Interrupted(Interruption),
}

/// Ends a background response and stores it.
fn conclude(store: &Store, live: &LiveResponse, end: ResponseEnd) {
    // Add the response to its conversation before publishing the final state, after which the client may continue the
    // conversation.
    let joined = match end {
        ResponseEnd::Finished(_) => join(store, &live.response(), live.input(), live.tenant()),
        ResponseEnd::Failed(_) | ResponseEnd::Interrupted(_) => Ok(()),
    };
    live.change(|assembly, sink| {
        match end {
            ResponseEnd::Finished(usage) => {
                assembly.complete(response_usage(usage), unix_time());
                if let Err(error) = joined {
                    assembly.fail_complete(error);
                }
            }
            ResponseEnd::Failed(error) => assembly.fail(&error, sink),
            ResponseEnd::Interrupted(Interruption::Cancelled) => assembly.cancel(),
            ResponseEnd::Interrupted(Interruption::Stopping) => assembly.fail(&Error::Stopping, sink),
        }
        assembly.conclude(sink);
    });
    if !write(store, live.record(), live.tenant()) {
        write(store, not_stored(live.record()), live.tenant());
    }
}

/// Returns the record that is stored in place of a background response that cannot be stored. Without it, the first
/// record of the response would remain, which says that the response is not complete. The new record contains little
/// more than the first one, so it can be stored even if the response is too large.
fn not_stored(record: ResponseRecord) -> ResponseRecord {
    let ResponseRecord { response, input, events: _ } = record;
    let error = ResponseError {
        code: "server_error".to_owned(),
        message: "the response could not be stored".to_owned(),
    };
    let response = WireResponse {
        status: Status::Failed,
        error: Some(error),
        incomplete_details: None,
        completed_at: None,
        output: Vec::new(),
        ..response
    };
    ResponseRecord { response, input, events: None }
}

/// Streams the events of a background response, starting at the sequence number `from`.
pub(super) fn follow(followed: Arc<ResponseEvents>, from: usize) -> Response {
    sse::response(futures_util::stream::unfold(Some((followed, from)), |state| async move {
        let (followed, from) = state?;
        let mut events = Events::default();
        let next = followed.follow(from).await;
        let more = match next {
            FollowedEvents::New(new) => {
                new.iter().for_each(|event| events.push_raw(event));
                Some((followed, from + new.len()))
            }
            FollowedEvents::Last(new) => {
                new.iter().for_each(|event| events.push_raw(event));
                events.done();
                None
            }
            FollowedEvents::Discarded => {
                let message = "the events were discarded, because there were too many or the response ended more \
                    than a minute ago; retrieve the response instead";
                let data = EventData::Error { code: Some("events_discarded"), message, param: None };
                let event = Event { r#type: kind::ERROR, data, sequence_number: from as u64 };
                events.push_raw(&encode(&event));
                events.done();
                None
            }
        };
        Some((events.take(), more))
    }))
}

/// Stores a response. Returns whether that succeeded.
fn write(store: &Store, record: ResponseRecord, tenant: Tenant) -> bool {
    let written = store.put_response(record, tenant);
    if let Err(error) = &written {
        tracing::warn!(error = error as &dyn std::error::Error, "failed to store a response");
    }
    written.is_ok()
}

/// Adds the input and the output of a response to its conversation, after all choices have ended. A response that fails
/// or is canceled does not become a part of the conversation.
///
/// # Errors
/// The items cannot be added. If the client has deleted the conversation, this is not an error.
fn join(
    store: &Store,
    response: &WireResponse,
    input: &[Arc<Item>],
    tenant: Tenant,
) -> Result<(), ResponseError> {
    let WireResponse { conversation, output, .. } = response;
    let Some(id) = conversation.as_ref().and_then(|conversation| Id::parse(&conversation.id)) else {
        return Ok(());
    };
    let items: Vec<Arc<Item>> = input.iter().cloned().chain(output.iter().cloned().map(Arc::new)).collect();
    let joined = store.append(id, tenant, |stored| {
        // Another turn may have added an item with the same ID in the meantime.
        stored.check_new_ids(&items)?;
        Ok::<_, store::Error>(NewItems { items, generated_ids: stored.counts().generated_ids })
    });
    let error = match joined {
        Ok(Some(_)) => return Ok(()),
        Ok(None) => {
            tracing::debug!("a conversation was deleted while a response to it was generated");
            return Ok(());
        }
        Err(error) => error,
    };
    tracing::warn!(error = &error as &dyn std::error::Error, "failed to add a response to its conversation");
    let reason = match error {
        // The client cannot influence these errors, and must not learn the paths that they contain.
        store::Error::Io { .. } | store::Error::InUse(_) => {
            "the conversation could not be written".to_owned()
        }
        error => error.to_string(),
    };
    let message = format!("the response could not be added to its conversation: {reason}");
    Err(ResponseError { code: "server_error".to_owned(), message })
}

fn response_usage(usage: Usage) -> ResponseUsage {
    ResponseUsage {
        input_tokens: usage.prompt_tokens,
        input_tokens_details: InputTokensDetails {
            cached_tokens: usage.prompt_tokens_details.cached_tokens,
            cache_write_tokens: 0,
            image_tokens: usage.prompt_tokens_details.image_tokens,
        },
        output_tokens: usage.completion_tokens,
        output_tokens_details: OutputTokensDetails {
            reasoning_tokens: usage.completion_tokens_details.map_or(0, |details| details.reasoning_tokens),
        },
        total_tokens: usage.total_tokens,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::limits::HttpLimits;
    use crate::metrics::Metrics;
    use crate::prepare::responses::CallNames;
    use crate::responses::NewResponse;
    use crate::store::Kind;

    #[tokio::test]
    async fn a_streamed_response_that_fails_reports_that_it_is_not_stored() {
        let app = App::new(HttpLimits::default(), Metrics::new("m", "test"));
        let id = app.store().new_id(Kind::Response);
        let response = json!({
            "id": id.to_string(), "object": "response", "created_at": 1, "status": "in_progress", "background": false,
            "model": "m", "output": [], "parallel_tool_calls": true, "reasoning": {}, "service_tier": "default",
            "store": true, "temperature": 1.0, "text": {}, "tool_choice": "auto", "tools": [], "top_logprobs": 0,
            "top_p": 1.0, "truncation": "disabled", "metadata": {},
        });
        let response: WireResponse = serde_json::from_value(response).unwrap();
        let retained = RetainedRequest::new(app.body_bytes(), Vec::new(), &response).unwrap();
        let call_names = CallNames::default();
        let new = NewResponse { response, ids: id.items(), logprobs: None, choices: 1, call_names };
        let assembly = Assembly::new(new);
        let encoder = Box::new(ResponseEncoder { app, assembly, retained, tenant: Tenant::default() });
        let mut events = encoder.fail(Error::Internal("broken".to_owned()), Events::default()).await;
        let text = String::from_utf8(events.take().to_vec()).unwrap();
        assert!(text.contains("\"store\":false") && !text.contains("\"store\":true"), "{text}");
    }
}
