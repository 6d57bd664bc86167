//! Responses that are generated in the background. A client can retrieve the current state of a response, or follow its
//! events from any position if they are stored.

use std::collections::HashMap;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError, Weak};

use server_openai::responses::{Event, Item, Response};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::assembly::{Assembly, Sink};
use super::events::{EVENTS_TIME_MAX, EventLog, ResponseEvents};
use super::retained::RetainedRequest;
use crate::encoding::{self, EncodingCost};
use crate::respond::ChoiceDelta;
use crate::store::ResponseRecord;
use crate::tenant::Tenant;

/// All responses that are generated in the background. Clones share the same responses.
#[derive(Clone, Debug, Default)]
pub(crate) struct BackgroundResponses(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    live: Mutex<HashMap<String, Arc<LiveResponse>>>,
    tasks: TaskTracker,
    /// The tasks that discard the events of responses that have ended.
    discards: TaskTracker,
    /// The total size of the events of all responses in bytes.
    events_bytes: Arc<AtomicUsize>,
    /// Canceled to end all responses, which are then stored as failed.
    stop: CancellationToken,
    /// Canceled to drop all responses without storing them.
    cut_off: CancellationToken,
}

impl BackgroundResponses {
    /// Creates a response. [`BackgroundResponses::begin`] registers it.
    pub(crate) fn live(&self, response: BackgroundResponse) -> Arc<LiveResponse> {
        let BackgroundResponse { assembly, retained, tenant, stores_events } = response;
        let log = stores_events.then(|| EventLog::new(&self.0.events_bytes));
        Arc::new(LiveResponse {
            assembly: Mutex::new(assembly),
            events: Arc::new(ResponseEvents::new(log)),
            cancel: CancellationToken::new(),
            stop: self.0.stop.clone(),
            retained,
            tenant,
        })
    }

    /// Runs `work`, which generates a response. [`BackgroundResponses::find`] returns the response until the work is
    /// done.
    pub(crate) fn begin(&self, live: Arc<LiveResponse>, work: impl Future<Output = ()> + Send + 'static) {
        let id = live.assembly().response().id.clone();
        let events = Arc::downgrade(&live.events);
        self.lock().insert(id.clone(), live);
        let registration = Registration { background: self.clone(), id };
        let (cut_off, discards) = (self.0.cut_off.clone(), self.0.discards.clone());
        self.0.tasks.spawn(async move {
            cut_off.run_until_cancelled(work).await;
            drop(registration);
            if events.strong_count() > 0 {
                discards.spawn(discard(events));
            }
        });
    }

    /// Returns the response with this ID if it is being generated for this tenant.
    pub(crate) fn find(&self, id: &str, tenant: Tenant) -> Option<Arc<LiveResponse>> {
        self.lock().get(id).filter(|live| live.tenant == tenant).cloned()
    }

    /// Waits until all responses have ended. No new response may begin after this call.
    pub(crate) async fn finished(&self) {
        self.0.tasks.close();
        self.0.tasks.wait().await;
    }

    /// Ends all responses, including those that begin later. They are stored as failed.
    pub(crate) fn stop(&self) {
        self.0.stop.cancel();
    }

    /// Drops all responses that have not ended.
    pub(crate) fn cut_off(&self) {
        self.0.cut_off.cancel();
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Arc<LiveResponse>>> {
        self.0.live.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Waits for [`EVENTS_TIME_MAX`], and then discards the events of a response that has ended.
async fn discard(events: Weak<ResponseEvents>) {
    tokio::time::sleep(EVENTS_TIME_MAX).await;
    if let Some(events) = events.upgrade() {
        events.discard();
    }
}

/// The registration of a response. Dropping it removes the response, regardless of how the work on it has ended.
struct Registration {
    background: BackgroundResponses,
    id: String,
}

impl Drop for Registration {
    fn drop(&mut self) {
        let live = self.background.lock().remove(&self.id);
        if let Some(live) = live {
            live.events.end();
        }
    }
}

/// A new background response.
pub(crate) struct BackgroundResponse {
    pub(crate) assembly: Assembly,
    pub(crate) retained: RetainedRequest,
    pub(crate) tenant: Tenant,
    /// Whether the events of the response can be replayed.
    pub(crate) stores_events: bool,
}

/// A response that is being generated. The followers of its events hold no reference to this value, so that its memory
/// is freed when the response has ended.
pub(crate) struct LiveResponse {
    /// The response. It is locked while its events are encoded and while it is cloned. Both can take a long time if the
    /// response is large.
    assembly: Mutex<Assembly>,
    events: Arc<ResponseEvents>,
    cancel: CancellationToken,
    stop: CancellationToken,
    retained: RetainedRequest,
    tenant: Tenant,
}

/// The reason why a response ends before it is complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Interruption {
    /// A client canceled the response.
    Cancelled,
    /// The process is shutting down.
    Stopping,
}

impl std::fmt::Debug for LiveResponse {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("LiveResponse")
            .field("response", &self.assembly().response().id)
            .finish_non_exhaustive()
    }
}

impl LiveResponse {
    /// Changes the response and wakes its followers.
    pub(crate) fn change(&self, change: impl FnOnce(&mut Assembly, Sink<'_>)) {
        {
            let mut assembly = self.assembly();
            change(&mut assembly, &mut |event| self.events.store(event));
        }
        self.events.wake_followers();
    }

    /// Adds deltas. If adding them would take a long time, or if another thread is using the response, they are added
    /// on a separate thread.
    pub(crate) async fn add(self: &Arc<Self>, deltas: Vec<ChoiceDelta>) {
        let Err(deltas) = self.try_add(deltas) else { return };
        let live = Arc::clone(self);
        let add = move || {
            live.change(|assembly, sink| deltas.into_iter().for_each(|delta| assembly.push(delta, sink)));
        };
        encoding::run(EncodingCost::High, add).await;
    }

    /// Adds deltas without waiting for other threads.
    ///
    /// # Errors
    /// Returns the deltas if adding them would take a long time, or if another thread is using the response.
    fn try_add(&self, deltas: Vec<ChoiceDelta>) -> Result<(), Vec<ChoiceDelta>> {
        {
            let mut assembly = match self.assembly.try_lock() {
                Ok(assembly) => assembly,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => return Err(deltas),
            };
            if assembly.deltas_cost(&deltas) == EncodingCost::High {
                return Err(deltas);
            }
            let sink = &mut |event: &Event<'_>| self.events.store(event);
            deltas.into_iter().for_each(|delta| assembly.push(delta, sink));
        }
        self.events.wake_followers();
        Ok(())
    }

    /// Returns the current state of the response. If the response has output, call this on a thread that may block.
    pub(crate) fn response(&self) -> Response {
        self.assembly().response().clone()
    }

    /// Returns the ID of the response that this one follows.
    pub(crate) fn previous_response_id(&self) -> Option<String> {
        self.assembly().response().previous_response_id.clone()
    }

    /// Whether the response has its final status.
    pub(crate) fn is_final(&self) -> bool {
        self.assembly().response().status.is_final()
    }

    /// Whether clients can follow the events of the response.
    pub(crate) fn stores_events(&self) -> bool {
        self.events.are_stored()
    }

    /// Returns the events, which clients can follow.
    pub(crate) fn events(&self) -> Arc<ResponseEvents> {
        Arc::clone(&self.events)
    }

    /// Returns the items that the request added to the conversation.
    pub(crate) fn input(&self) -> &[Arc<Item>] {
        self.retained.items()
    }

    /// Returns the owner of the response.
    pub(crate) fn tenant(&self) -> Tenant {
        self.tenant
    }

    /// Returns the current state of the response as a record for the store.
    pub(crate) fn record(&self) -> ResponseRecord {
        let response = self.response();
        ResponseRecord { response, input: self.retained.items().to_vec(), events: self.events.list() }
    }

    /// Cancels the response. The response ends asynchronously.
    pub(crate) fn cancel(&self) {
        self.cancel.cancel();
    }

    /// Waits until the response is canceled or the process shuts down, and returns the reason.
    pub(crate) async fn interrupted(&self) -> Interruption {
        tokio::select! {
            () = self.cancel.cancelled() => Interruption::Cancelled,
            () = self.stop.cancelled() => Interruption::Stopping,
        }
    }

    /// Waits until the work on the response is done.
    pub(crate) async fn done(&self) {
        self.events.done().await;
    }

    fn assembly(&self) -> MutexGuard<'_, Assembly> {
        self.assembly.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use futures_util::FutureExt as _;
    use serde_json::json;
    use server_openai::responses::Status;

    use super::super::assembly::tests::new_response;
    use super::super::events::FollowedEvents;
    use super::*;
    use crate::limits::ByteBudget;

    #[tokio::test]
    async fn deltas_are_added_on_another_thread_while_the_response_is_used() {
        let budget = ByteBudget::new(1 << 20, 1 << 20);
        let live = BackgroundResponses::default().live(BackgroundResponse {
            assembly: Assembly::new(new_response(Status::InProgress, 1)),
            retained: RetainedRequest::new(&budget, Vec::new(), &json!({})).unwrap(),
            tenant: Tenant::default(),
            stores_events: false,
        });
        let delta = ChoiceDelta::Text { choice: 0, text: "a".to_owned(), tokens: Vec::new() };
        live.add(vec![delta.clone()]).now_or_never().expect("a small delta is added immediately");
        let mut adding = Box::pin(live.add(vec![delta]));
        // This thread has locked the response, so adding the delta on this thread would deadlock.
        live.change(|_, _| assert!(adding.as_mut().now_or_never().is_none()));
        adding.await;
        let response = live.response();
        let Item::Message(message) = &response.output[0] else { panic!("{response:?}") };
        assert_eq!(message.content[0].text(), "aa");
    }

    /// Generates a response with one event and ends it. Returns its events, as a follower receives them.
    async fn ended(background: &BackgroundResponses, budget: &Arc<ByteBudget>) -> Arc<ResponseEvents> {
        let live = background.live(BackgroundResponse {
            assembly: Assembly::new(new_response(Status::InProgress, 1)),
            retained: RetainedRequest::new(budget, Vec::new(), &json!({"tools": ["x"]})).unwrap(),
            tenant: Tenant::default(),
            stores_events: true,
        });
        live.change(|assembly, sink| assembly.create(sink));
        let events = live.events();
        background.begin(live, async {});
        background.finished().await;
        events
    }

    #[tokio::test]
    async fn a_follower_of_a_response_that_has_ended_holds_only_its_events() {
        const BYTES: usize = 1 << 20;
        let (background, budget) = (BackgroundResponses::default(), ByteBudget::new(BYTES, BYTES));
        let events = ended(&background, &budget).await;
        budget.empty_reservation().grow_to(BYTES).expect("the request is still in memory");
        let followed = events.follow(0).await;
        assert!(matches!(&followed, FollowedEvents::Last(events) if events.len() == 1));
    }

    #[tokio::test(start_paused = true)]
    async fn the_events_of_a_response_that_has_ended_are_discarded_even_if_a_client_is_reading_them() {
        let (background, budget) = (BackgroundResponses::default(), ByteBudget::new(1 << 20, 1 << 20));
        let events = ended(&background, &budget).await;
        let bytes = || background.0.events_bytes.load(Ordering::Relaxed);
        tokio::time::sleep(EVENTS_TIME_MAX / 2).await;
        assert!(bytes() > 0);
        tokio::time::sleep(EVENTS_TIME_MAX).await;
        assert_eq!(bytes(), 0);
        assert!(matches!(events.follow(0).await, FollowedEvents::Discarded));
    }
}
