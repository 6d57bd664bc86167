//! How a response is answered: whole, as a stream of events, or in the background. All are the same deltas, put
//! together by the same [`Assembly`].

use std::sync::Arc;

use axum::Json;
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use server_openai::responses::{
    Event, EventData, InputTokensDetails, OutputTokensDetails, Response as Made, Status,
    Usage as ResponseUsage, kind,
};

use super::{Making, Way};
use crate::app::App;
use crate::error::Error;
use crate::model::unix_time;
use crate::respond::{Delta, Deltas};
use crate::responses::{Assembly, Followed, Interruption, Live, LiveResponse, RetainedInput, sent};
use crate::routes::generate::named;
use crate::sse::{self, Events};
use crate::store::{self, Id, NewItems, ResponseRecord};
use crate::tenant::Tenant;

/// Answers with a response that is about to be made.
pub(super) async fn answer(app: App, making: Making) -> Response {
    let name = making.assembly.response().id.clone();
    let response = match making.way {
        Way::Whole => whole(app, making).await,
        Way::Streamed => streamed(app, making).await,
        Way::Background { follows } => background(&app, making, follows),
    };
    named(response, &name)
}

async fn whole(app: App, making: Making) -> Response {
    let Making { mut assembly, input, mut answer, tenant, .. } = making;
    let sink = &mut |_: &Event<'_>| {};
    assembly.create(sink);
    assembly.begin(sink);
    while let Some(deltas) = answer.next().await {
        match deltas {
            Ok(deltas) => deltas.into_iter().for_each(|delta| assembly.push(delta, sink)),
            Err(error) => return error.into_response(),
        }
    }
    assembly.settle(usage(&answer), unix_time());
    keep(&app, &mut assembly, &input, tenant).await;
    Json(assembly.response()).into_response()
}

async fn streamed(app: App, mut making: Making) -> Response {
    // Until the first token an error has a status of its own, and who passes requests on may try elsewhere.
    let first = match making.answer.next().await {
        Some(Err(error)) => return error.into_response(),
        first => first,
    };
    let state = Streamed { app, making, first: Some(first) };
    sse::response(stream::unfold(Some(state), |state| async move {
        let mut state = state?;
        let mut events = Events::default();
        let more = state.next(&mut events).await;
        Some((events.take(), more.then_some(state)))
    }))
}

/// A response that is being sent.
struct Streamed {
    app: App,
    making: Making,
    /// What came before the answer was begun.
    first: Option<Option<Result<Vec<Delta>, Error>>>,
}

impl Streamed {
    /// Puts what is new into `events`. Returns whether there is more to come.
    async fn next(&mut self, events: &mut Events) -> bool {
        let Making { assembly, input, answer, tenant, .. } = &mut self.making;
        let deltas = match self.first.take() {
            Some(first) => {
                let sink = &mut |event: &Event<'_>| events.push_raw(&sent(event));
                assembly.create(sink);
                assembly.begin(sink);
                first
            }
            None => answer.next().await,
        };
        let end = match deltas {
            Some(Ok(deltas)) => {
                let sink = &mut |event: &Event<'_>| events.push_raw(&sent(event));
                deltas.into_iter().for_each(|delta| assembly.push(delta, sink));
                return true;
            }
            Some(Err(error)) => Some(error),
            None => None,
        };
        match end {
            None => {
                assembly.settle(usage(answer), unix_time());
                // Before its end is told: who goes on from it must find it.
                keep(&self.app, assembly, input, *tenant).await;
            }
            Some(error) => assembly.fail(&error, &mut |event: &Event<'_>| events.push_raw(&sent(event))),
        }
        assembly.conclude(&mut |event: &Event<'_>| events.push_raw(&sent(event)));
        events.done();
        false
    }
}

fn background(app: &App, making: Making, follows: bool) -> Response {
    let Making { mut assembly, input, answer, tenant, .. } = making;
    if !follows {
        // Nobody follows: there are no events, only states.
        assembly.create(&mut |_: &Event<'_>| {});
    }
    let live = app.background().live(LiveResponse { assembly, input, tenant, keeps_events: follows });
    if follows {
        live.change(|assembly, sink| assembly.create(sink));
    }
    let response = live.response();
    app.background().begin(Arc::clone(&live), work(app.clone(), Arc::clone(&live), answer));
    if follows { follow(live, 0) } else { Json(response).into_response() }
}

/// Makes a response, whether or not anybody looks.
async fn work(app: App, live: Arc<Live>, mut answer: Deltas) {
    // If the process dies before the end, this is found.
    write(&app, live.record(), live.tenant()).await;
    let mut is_begun = false;
    loop {
        let next = tokio::select! {
            biased;
            interruption = live.interrupted() => {
                drop(answer);
                live.change(|assembly, sink| {
                    match interruption {
                        Interruption::Cancelled => assembly.cancel(),
                        Interruption::Stopping => assembly.fail(&Error::Stopping, sink),
                    }
                    assembly.conclude(sink);
                });
                break;
            }
            next = answer.next() => next,
        };
        let first = !std::mem::replace(&mut is_begun, true);
        live.change(|assembly, sink| {
            if first {
                assembly.begin(sink);
            }
            match next {
                Some(Ok(deltas)) => deltas.into_iter().for_each(|delta| assembly.push(delta, sink)),
                Some(Err(error)) => assembly.fail(&error, sink),
                None => assembly.settle(usage(&answer), unix_time()),
            }
            if assembly.response().status.is_final() {
                assembly.conclude(sink);
            }
        });
        if live.is_final() {
            break;
        }
    }
    let record = live.record();
    join(&app, &record, live.tenant()).await;
    write(&app, record, live.tenant()).await;
}

/// The events of a response in the background, from the one of this number on.
pub(super) fn follow(live: Arc<Live>, from: usize) -> Response {
    sse::response(stream::unfold(Some((live, from)), |state| async move {
        let (live, from) = state?;
        let mut events = Events::default();
        let followed = live.follow(from).await;
        let more = match followed {
            Followed::Events(new) => {
                new.iter().for_each(|event| events.push_raw(event));
                Some((live, from + new.len()))
            }
            Followed::Last(new) => {
                new.iter().for_each(|event| events.push_raw(event));
                events.done();
                None
            }
            Followed::NotKept => {
                let message = "the response has more events than are kept; ask for the response itself";
                let data = EventData::Error { code: Some("events_not_kept"), message, param: None };
                let event = Event { r#type: kind::ERROR, data, sequence_number: from as u64 };
                events.push_raw(&sent(&event));
                events.done();
                None
            }
        };
        Some((events.take(), more))
    }))
}

/// Stores what was made, if it is to be stored, and adds it to its conversation.
async fn keep(app: &App, assembly: &mut Assembly, input: &RetainedInput, tenant: Tenant) {
    let response = assembly.response();
    if !response.store && response.conversation.is_none() {
        return;
    }
    let record = ResponseRecord { response: response.clone(), input: input.items().to_vec(), events: None };
    join(app, &record, tenant).await;
    if record.response.store && !write(app, record, tenant).await {
        assembly.set_stored(false);
    }
}

/// Stores a response. Returns whether that succeeded.
async fn write(app: &App, record: ResponseRecord, tenant: Tenant) -> bool {
    let written = app.store().run(move |store| store.put_response(record, tenant)).await;
    if let Err(error) = &written {
        tracing::warn!(error = error as &dyn std::error::Error, "failed to store a response");
    }
    written.is_ok()
}

/// Adds the input and the output of a response to its conversation.
async fn join(app: &App, record: &ResponseRecord, tenant: Tenant) {
    let Made { conversation, output, status, .. } = &record.response;
    let Some(id) = conversation.as_ref().and_then(|conversation| Id::parse(&conversation.id)) else { return };
    if !matches!(status, Status::Completed | Status::Incomplete) {
        return;
    }
    let items = record.input.iter().cloned().chain(output.iter().cloned().map(Arc::new)).collect();
    let joined = app.store().run(move |store| {
        store.append(id, tenant, |tally| Ok::<_, store::Error>(NewItems { items, named: tally.named }))
    });
    match joined.await {
        Ok(Some(_)) => {}
        Ok(None) => tracing::debug!("a conversation was deleted while a response was made in it"),
        Err(error) => {
            tracing::warn!(error = &error as &dyn std::error::Error, "failed to add to a conversation");
        }
    }
}

fn usage(answer: &Deltas) -> ResponseUsage {
    let usage = answer.usage();
    ResponseUsage {
        input_tokens: usage.prompt_tokens,
        input_tokens_details: InputTokensDetails {
            cached_tokens: usage.prompt_tokens_details.cached_tokens,
            cache_write_tokens: 0,
        },
        output_tokens: usage.completion_tokens,
        output_tokens_details: OutputTokensDetails {
            reasoning_tokens: usage.completion_tokens_details.map_or(0, |details| details.reasoning_tokens),
        },
        total_tokens: usage.total_tokens,
    }
}
