//! Responses that are made in the background: a client gets one as it is at the moment, or its events from any of them
//! on.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use server_openai::responses::{Item, Response};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::assembly::{Assembly, Sink, sent};
use super::retained::RetainedInput;
use crate::store::ResponseRecord;
use crate::tenant::Tenant;

/// Total size of the events of one background response.
///
/// Beyond it: the events of the response cannot be read again.
const EVENTS_BYTES_MAX: usize = 8 << 20;
/// Total size of the events of all background responses in progress.
///
/// Beyond it: the events of the response that exceeds it cannot be read again.
const ALL_EVENTS_BYTES_MAX: usize = 128 << 20;
/// Bytes of the events that a follower gets at a time, unless a single one is larger.
const FOLLOWED_BYTES_MAX: usize = 64 << 10;

/// All responses that are being made. Clones share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Background(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    live: Mutex<HashMap<String, Arc<Live>>>,
    tasks: TaskTracker,
    events_bytes: Arc<AtomicUsize>,
    /// Responses are to end now, and to be stored as they are.
    stop: CancellationToken,
    /// There is no more time for that.
    cut_off: CancellationToken,
}

impl Background {
    /// A response that is about to be made.
    pub(crate) fn live(&self, begun: LiveResponse) -> Arc<Live> {
        let LiveResponse { assembly, input, tenant, keeps_events } = begun;
        let events = keeps_events.then(|| KeptEvents {
            list: Vec::new(),
            bytes: 0,
            all_bytes: Arc::clone(&self.0.events_bytes),
        });
        Arc::new(Live {
            state: Mutex::new(State { assembly, events, is_done: false }),
            changes: watch::Sender::new(0),
            cancel: CancellationToken::new(),
            stop: self.0.stop.clone(),
            input,
            tenant,
        })
    }

    /// Lets `work` make a response, which can be found until the work is done.
    pub(crate) fn begin(&self, live: Arc<Live>, work: impl Future<Output = ()> + Send + 'static) {
        let name = live.state().assembly.response().id.clone();
        self.lock().insert(name.clone(), live);
        let listed = Listed { background: self.clone(), name };
        let cut_off = self.0.cut_off.clone();
        self.0.tasks.spawn(async move {
            let _listed = listed;
            cut_off.run_until_cancelled(work).await;
        });
    }

    /// The response of this name, if it is being made for this tenant.
    pub(crate) fn find(&self, name: &str, tenant: Tenant) -> Option<Arc<Live>> {
        self.lock().get(name).filter(|live| live.tenant == tenant).cloned()
    }

    /// Waits until all responses have ended. None may be begun any more.
    pub(crate) async fn finished(&self) {
        self.0.tasks.close();
        self.0.tasks.wait().await;
    }

    /// Ends all responses, those that begin later at once, and lets them be stored as failed.
    pub(crate) fn stop(&self) {
        self.0.stop.cancel();
    }

    /// Drops whatever is still being done.
    pub(crate) fn cut_off(&self) {
        self.0.cut_off.cancel();
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Arc<Live>>> {
        self.0.live.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A response that can be found. Dropping it ends that, however its work ended.
struct Listed {
    background: Background,
    name: String,
}

impl Drop for Listed {
    fn drop(&mut self) {
        let live = self.background.lock().remove(&self.name);
        if let Some(live) = live {
            live.end();
        }
    }
}

/// What a response in the background begins with.
pub(crate) struct LiveResponse {
    pub(crate) assembly: Assembly,
    pub(crate) input: RetainedInput,
    pub(crate) tenant: Tenant,
    /// Its events may be read again.
    pub(crate) keeps_events: bool,
}

/// A response that is being made.
pub(crate) struct Live {
    state: Mutex<State>,
    changes: watch::Sender<u64>,
    cancel: CancellationToken,
    stop: CancellationToken,
    input: RetainedInput,
    tenant: Tenant,
}

struct State {
    assembly: Assembly,
    /// `None` if they are not kept.
    events: Option<KeptEvents>,
    is_done: bool,
}

/// Events as they are sent. The place in the list is the sequence number.
struct KeptEvents {
    list: Vec<Arc<str>>,
    bytes: usize,
    /// Of all responses.
    all_bytes: Arc<AtomicUsize>,
}

impl KeptEvents {
    /// Adds an event. Returns whether there was room.
    fn push(&mut self, event: String) -> bool {
        let bytes = event.len();
        self.bytes += bytes;
        let all = self.all_bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.list.push(event.into());
        self.bytes <= EVENTS_BYTES_MAX && all <= ALL_EVENTS_BYTES_MAX
    }
}

impl Drop for KeptEvents {
    fn drop(&mut self) {
        self.all_bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// Why a response is to end before it is complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Interruption {
    /// A client cancelled it.
    Cancelled,
    /// The process ends.
    Stopping,
}

impl std::fmt::Debug for Live {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Live")
            .field("response", &self.state().assembly.response().id)
            .finish_non_exhaustive()
    }
}

/// Events from somewhere on.
pub(crate) enum Followed {
    /// These are there.
    Events(Vec<Arc<str>>),
    /// These are there, and are the last.
    Last(Vec<Arc<str>>),
    /// They are not kept.
    NotKept,
}

impl Live {
    /// Changes the response, and tells who follows.
    pub(crate) fn change(&self, change: impl FnOnce(&mut Assembly, Sink<'_>)) {
        {
            let mut state = self.state();
            let State { assembly, events, .. } = &mut *state;
            change(assembly, &mut |event| {
                if events.as_mut().is_some_and(|events| !events.push(sent(event))) {
                    *events = None;
                }
            });
        }
        self.changes.send_modify(|count| *count += 1);
    }

    /// As it is now.
    pub(crate) fn response(&self) -> Response {
        self.state().assembly.response().clone()
    }

    /// Whether it stays as it is.
    pub(crate) fn is_final(&self) -> bool {
        self.state().assembly.response().status.is_final()
    }

    /// Whether its events can be followed.
    pub(crate) fn keeps_events(&self) -> bool {
        self.state().events.is_some()
    }

    /// The items that its request added to the conversation.
    pub(crate) fn input(&self) -> &[Arc<Item>] {
        self.input.items()
    }

    /// Whose it is.
    pub(crate) fn tenant(&self) -> Tenant {
        self.tenant
    }

    /// As it is stored.
    pub(crate) fn record(&self) -> ResponseRecord {
        let state = self.state();
        ResponseRecord {
            response: state.assembly.response().clone(),
            input: self.input.items().to_vec(),
            events: state.events.as_ref().map(|events| events.list.clone()),
        }
    }

    /// Asks for its end.
    pub(crate) fn cancel(&self) {
        self.cancel.cancel();
    }

    /// Waits until it is to end.
    pub(crate) async fn interrupted(&self) -> Interruption {
        tokio::select! {
            () = self.cancel.cancelled() => Interruption::Cancelled,
            () = self.stop.cancelled() => Interruption::Stopping,
        }
    }

    /// Waits for its end.
    pub(crate) async fn done(&self) {
        let mut changes = self.changes.subscribe();
        while !self.state().is_done {
            if changes.changed().await.is_err() {
                return;
            }
        }
    }

    /// Waits until there are events from the `from`th on, or there will be none.
    ///
    /// # Cancel safety
    /// Dropped, it has taken nothing.
    pub(crate) async fn follow(&self, from: usize) -> Followed {
        let mut changes = self.changes.subscribe();
        loop {
            {
                let state = self.state();
                let Some(events) = &state.events else { return Followed::NotKept };
                let rest = events.list.get(from..).unwrap_or_default();
                let new = beginning(rest);
                if state.is_done && new.len() == rest.len() {
                    return Followed::Last(new);
                }
                if !new.is_empty() {
                    return Followed::Events(new);
                }
            }
            if changes.changed().await.is_err() {
                return Followed::Last(Vec::new());
            }
        }
    }

    fn end(&self) {
        self.state().is_done = true;
        self.changes.send_modify(|count| *count += 1);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// As many of these events as are sent at a time.
fn beginning(events: &[Arc<str>]) -> Vec<Arc<str>> {
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
    use super::*;

    #[test]
    fn followers_get_a_bounded_part_of_the_events_at_a_time() {
        let event = |bytes: usize| Arc::from("x".repeat(bytes));
        let count =
            |sizes: &[usize]| beginning(&sizes.iter().map(|&bytes| event(bytes)).collect::<Vec<_>>()).len();
        assert_eq!(count(&[]), 0);
        assert_eq!(count(&[FOLLOWED_BYTES_MAX + 1, 1]), 1);
        assert_eq!(count(&[1, FOLLOWED_BYTES_MAX, 1]), 1);
        assert_eq!(count(&[FOLLOWED_BYTES_MAX / 2, FOLLOWED_BYTES_MAX / 2, 1]), 2);
    }

    #[test]
    fn events_are_bounded_over_all_responses_and_give_their_room_back() {
        let all_bytes = Arc::new(AtomicUsize::new(ALL_EVENTS_BYTES_MAX - 2));
        let events = || KeptEvents { list: Vec::new(), bytes: 0, all_bytes: Arc::clone(&all_bytes) };
        let (mut one, mut two) = (events(), events());
        assert!(one.push("ab".to_owned()) && !two.push("c".to_owned()));
        drop((one, two));
        assert_eq!(all_bytes.load(Ordering::Relaxed), ALL_EVENTS_BYTES_MAX - 2);
        all_bytes.store(0, Ordering::Relaxed);
        let mut one = events();
        assert!(one.push("x".repeat(EVENTS_BYTES_MAX)) && !one.push("x".to_owned()));
    }
}
