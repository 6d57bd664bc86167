//! Responses that are generated in the background. A client can retrieve the current state of a response, or follow its
//! events starting at any position.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use server_openai::responses::{Event, Item, Response};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::assembly::{Assembly, Sink, encode};
use super::retained::RetainedRequest;
use crate::encoding::{self, EncodingCost};
use crate::respond::ChoiceDelta;
use crate::store::ResponseRecord;
use crate::tenant::Tenant;

/// Total size of the events of one background response.
///
/// If exceeded: the events of the response cannot be read again.
const EVENTS_BYTES_MAX: usize = 8 << 20;
/// Total size of the events of all background responses in progress.
///
/// If exceeded: the events of the response that exceeds it cannot be read again.
const ALL_EVENTS_BYTES_MAX: usize = 128 << 20;
/// Maximum size in bytes of the events that a follower gets at a time, unless a single event is larger.
const FOLLOWED_BYTES_MAX: usize = 64 << 10;

/// All responses that are generated in the background. Clones share the same responses.
#[derive(Clone, Debug, Default)]
pub(crate) struct BackgroundResponses(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    live: Mutex<HashMap<String, Arc<LiveResponse>>>,
    tasks: TaskTracker,
    events_bytes: Arc<AtomicUsize>,
    /// Canceled to end all responses, which are then stored as failed.
    stop: CancellationToken,
    /// Canceled to drop all responses without storing them.
    cut_off: CancellationToken,
}

impl BackgroundResponses {
    /// Creates a response whose generation has not begun.
    pub(crate) fn live(&self, response: BackgroundResponse) -> Arc<LiveResponse> {
        let BackgroundResponse { assembly, retained, tenant, stores_events } = response;
        let events = stores_events.then(|| EventLog {
            list: Vec::new(),
            bytes: 0,
            all_bytes: Arc::clone(&self.0.events_bytes),
        });
        Arc::new(LiveResponse {
            assembly: Mutex::new(assembly),
            events: Mutex::new(LiveEvents { log: events, is_done: false }),
            changes: watch::Sender::new(0),
            cancel: CancellationToken::new(),
            stop: self.0.stop.clone(),
            retained,
            tenant,
        })
    }

    /// Runs `work`, which generates a response. [`BackgroundResponses::find`] returns the response until the work is done.
    pub(crate) fn begin(&self, live: Arc<LiveResponse>, work: impl Future<Output = ()> + Send + 'static) {
        let id = live.assembly().response().id.clone();
        self.lock().insert(id.clone(), live);
        let registration = Registration { background: self.clone(), id };
        let cut_off = self.0.cut_off.clone();
        self.0.tasks.spawn(async move {
            let _registration = registration;
            cut_off.run_until_cancelled(work).await;
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

/// The registration of a response. Dropping it removes the response, however the work on it has ended.
struct Registration {
    background: BackgroundResponses,
    id: String,
}

impl Drop for Registration {
    fn drop(&mut self) {
        let live = self.background.lock().remove(&self.id);
        if let Some(live) = live {
            live.end();
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

/// A response that is being generated.
pub(crate) struct LiveResponse {
    /// The response. It is locked while its events are encoded, and while it is cloned, which takes long if it is large.
    assembly: Mutex<Assembly>,
    /// The events. They are never locked for long, because followers wait for them on threads that serve connections.
    events: Mutex<LiveEvents>,
    changes: watch::Sender<u64>,
    cancel: CancellationToken,
    stop: CancellationToken,
    retained: RetainedRequest,
    tenant: Tenant,
}

/// The events of a response for its followers.
struct LiveEvents {
    /// The events; `None` if they are not stored or were discarded.
    log: Option<EventLog>,
    /// Whether the work on the response is done.
    is_done: bool,
}

/// Encoded events. The index in the list is the sequence number.
struct EventLog {
    list: Vec<Arc<str>>,
    bytes: usize,
    /// The total size of the events of all responses in bytes.
    all_bytes: Arc<AtomicUsize>,
}

impl EventLog {
    /// Adds an event. Returns whether the limits allow it.
    fn push(&mut self, event: Arc<str>) -> bool {
        let bytes = event.len();
        self.bytes += bytes;
        let all = self.all_bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.list.push(event);
        self.bytes <= EVENTS_BYTES_MAX && all <= ALL_EVENTS_BYTES_MAX
    }
}

impl Drop for EventLog {
    fn drop(&mut self) {
        self.all_bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
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

/// The next events for a follower.
pub(crate) enum FollowedEvents {
    /// There are new events, and more will follow.
    New(Vec<Arc<str>>),
    /// These are the last events.
    Last(Vec<Arc<str>>),
    /// The events were discarded.
    Discarded,
}

impl LiveResponse {
    /// Changes the response and wakes its followers.
    pub(crate) fn change(&self, change: impl FnOnce(&mut Assembly, Sink<'_>)) {
        {
            let mut assembly = self.assembly();
            change(&mut assembly, &mut |event| self.store_event(event));
        }
        self.wake_followers();
    }

    /// Adds deltas. If that takes long, or if another thread uses the response, they are added on a separate thread.
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
    /// Adding the deltas takes long, or another thread uses the response. The deltas are returned.
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
            let sink = &mut |event: &Event<'_>| self.store_event(event);
            deltas.into_iter().for_each(|delta| assembly.push(delta, sink));
        }
        self.wake_followers();
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

    /// Whether clients can follow its events.
    pub(crate) fn stores_events(&self) -> bool {
        self.events().log.is_some()
    }

    /// Returns the items that the request added to the conversation.
    pub(crate) fn input(&self) -> &[Arc<Item>] {
        self.retained.items()
    }

    /// Returns the owner of the response.
    pub(crate) fn tenant(&self) -> Tenant {
        self.tenant
    }

    /// Returns the current state of the response for the store.
    pub(crate) fn record(&self) -> ResponseRecord {
        let response = self.response();
        let events = self.events().log.as_ref().map(|log| log.list.clone());
        ResponseRecord { response, input: self.retained.items().to_vec(), events }
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
        let mut changes = self.changes.subscribe();
        while !self.events().is_done {
            if changes.changed().await.is_err() {
                return;
            }
        }
    }

    /// Waits for events starting at number `from`, or for the end.
    ///
    /// # Cancel safety
    /// Dropping the future loses no events.
    pub(crate) async fn follow(&self, from: usize) -> FollowedEvents {
        let mut changes = self.changes.subscribe();
        loop {
            {
                let events = self.events();
                let Some(log) = &events.log else { return FollowedEvents::Discarded };
                let rest = log.list.get(from..).unwrap_or_default();
                let new = limited(rest);
                if events.is_done && new.len() == rest.len() {
                    return FollowedEvents::Last(new);
                }
                if !new.is_empty() {
                    return FollowedEvents::New(new);
                }
            }
            if changes.changed().await.is_err() {
                return FollowedEvents::Last(Vec::new());
            }
        }
    }

    fn end(&self) {
        self.events().is_done = true;
        self.wake_followers();
    }

    fn wake_followers(&self) {
        self.changes.send_modify(|count| *count += 1);
    }

    /// Stores an event, unless events are not stored. Beyond the limits, all events are discarded.
    fn store_event(&self, event: &Event<'_>) {
        if !self.stores_events() {
            return;
        }
        // Encode the event, and copy it into its own allocation, before locking the others.
        let encoded: Arc<str> = encode(event).into();
        let mut events = self.events();
        if events.log.as_mut().is_some_and(|log| !log.push(encoded)) {
            let discarded = events.log.take();
            // Free the events without the lock.
            drop(events);
            drop(discarded);
        }
    }

    fn assembly(&self) -> MutexGuard<'_, Assembly> {
        self.assembly.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn events(&self) -> MutexGuard<'_, LiveEvents> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the first events, up to the size that is sent at a time.
fn limited(events: &[Arc<str>]) -> Vec<Arc<str>> {
    let mut bytes = 0;
    let fits = |event: &&Arc<str>| {
        let is_first = bytes == 0;
        bytes += event.len();
        is_first || bytes <= FOLLOWED_BYTES_MAX
    };
    events.iter().take_while(fits).cloned().collect()
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;
    use serde_json::json;
    use server_openai::responses::Status;

    use super::super::assembly::tests::new_response;
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
        // This thread uses the response, so it would wait for itself.
        live.change(|_, _| assert!(adding.as_mut().now_or_never().is_none()));
        adding.await;
        let response = live.response();
        let Item::Message(message) = &response.output[0] else { panic!("{response:?}") };
        assert_eq!(message.content[0].text(), "aa");
    }

    #[test]
    fn followers_get_a_limited_number_of_bytes_at_a_time() {
        let event = |bytes: usize| Arc::from("x".repeat(bytes));
        let count =
            |sizes: &[usize]| limited(&sizes.iter().map(|&bytes| event(bytes)).collect::<Vec<_>>()).len();
        assert_eq!(count(&[]), 0);
        assert_eq!(count(&[FOLLOWED_BYTES_MAX + 1, 1]), 1);
        assert_eq!(count(&[1, FOLLOWED_BYTES_MAX, 1]), 1);
        assert_eq!(count(&[FOLLOWED_BYTES_MAX / 2, FOLLOWED_BYTES_MAX / 2, 1]), 2);
    }

    #[test]
    fn the_events_of_all_responses_together_are_limited_and_return_their_room() {
        let all_bytes = Arc::new(AtomicUsize::new(ALL_EVENTS_BYTES_MAX - 2));
        let events = || EventLog { list: Vec::new(), bytes: 0, all_bytes: Arc::clone(&all_bytes) };
        let (mut one, mut two) = (events(), events());
        assert!(one.push("ab".into()) && !two.push("c".into()));
        drop((one, two));
        assert_eq!(all_bytes.load(Ordering::Relaxed), ALL_EVENTS_BYTES_MAX - 2);
        all_bytes.store(0, Ordering::Relaxed);
        let mut one = events();
        assert!(one.push("x".repeat(EVENTS_BYTES_MAX).into()) && !one.push("x".into()));
    }
}
