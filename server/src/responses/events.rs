//! The events of a background response, for the clients that follow it. A slow client may still read the events after
//! the response has ended, so the events do not keep the response in memory.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use server_openai::responses::Event;
use tokio::sync::watch;

use super::assembly::encode;

/// Total size of the events of one background response.
///
/// If exceeded: the events of the response are discarded, and the streams of clients that follow it end with the error
/// `events_discarded`.
const EVENTS_BYTES_MAX: usize = 8 << 20;
/// Total size of the events of all background responses that are in progress or that clients are reading.
///
/// If exceeded: the events of the response that exceeds the limit are discarded, and the streams of clients that follow
/// it end with the error `events_discarded`.
const ALL_EVENTS_BYTES_MAX: usize = 128 << 20;
/// Time for which the events of a background response remain in memory after the response has ended, for clients that
/// are still reading them.
///
/// If exceeded: the streams of these clients end with the error `events_discarded`.
pub(super) const EVENTS_TIME_MAX: Duration = Duration::from_secs(60);
/// Maximum size in bytes of the events that a follower gets at a time, unless a single event is larger.
const FOLLOWED_BYTES_MAX: usize = 64 << 10;

/// The events of a response.
pub(crate) struct ResponseEvents {
    /// The lock on this state must not be held for long, because followers wait for it on threads that serve
    /// connections.
    state: Mutex<EventsState>,
    changes: watch::Sender<u64>,
}

struct EventsState {
    /// The events; `None` if they are not stored or were discarded.
    log: Option<EventLog>,
    /// Whether the work on the response is done.
    is_done: bool,
}

/// Encoded events. The index of an event in the list is its sequence number.
pub(super) struct EventLog {
    list: Vec<Arc<str>>,
    bytes: usize,
    /// The total size of the events of all responses in bytes.
    all_bytes: Arc<AtomicUsize>,
}

impl EventLog {
    /// Creates an empty log. `all_bytes` is the total size of the events of all responses in bytes.
    pub(super) fn new(all_bytes: &Arc<AtomicUsize>) -> Self {
        Self { list: Vec::new(), bytes: 0, all_bytes: Arc::clone(all_bytes) }
    }

    /// Adds an event, even if it exceeds a limit. Returns whether the events are still within the limits.
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

/// The next events for a follower.
pub(crate) enum FollowedEvents {
    /// There are new events, and more may follow.
    New(Vec<Arc<str>>),
    /// These are the last events.
    Last(Vec<Arc<str>>),
    /// The events were discarded.
    Discarded,
}

impl ResponseEvents {
    /// Creates the events of a new response, which are stored in `log` if there is one.
    pub(super) fn new(log: Option<EventLog>) -> Self {
        Self { state: Mutex::new(EventsState { log, is_done: false }), changes: watch::Sender::new(0) }
    }

    /// Waits for events from the sequence number `from` on, or for the end of the response.
    ///
    /// # Cancel safety
    /// Dropping the future loses no events.
    pub(crate) async fn follow(&self, from: usize) -> FollowedEvents {
        let mut changes = self.changes.subscribe();
        loop {
            {
                let state = self.state();
                let Some(log) = &state.log else { return FollowedEvents::Discarded };
                let rest = log.list.get(from..).unwrap_or_default();
                let new = limited(rest);
                if state.is_done && new.len() == rest.len() {
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

    /// Whether the events are stored.
    pub(super) fn are_stored(&self) -> bool {
        self.state().log.is_some()
    }

    /// Returns the events if they are stored.
    pub(super) fn list(&self) -> Option<Vec<Arc<str>>> {
        self.state().log.as_ref().map(|log| log.list.clone())
    }

    /// Stores an event, unless the events of this response are not stored. If the events then exceed a limit, all
    /// events of the response are discarded.
    pub(super) fn store(&self, event: &Event<'_>) {
        if !self.are_stored() {
            return;
        }
        // Encode the event, and copy it into its own allocation, before locking the state.
        let encoded: Arc<str> = encode(event).into();
        let mut state = self.state();
        if state.log.as_mut().is_some_and(|log| !log.push(encoded)) {
            let discarded = state.log.take();
            // Release the lock before freeing the events.
            drop(state);
            drop(discarded);
        }
    }

    pub(super) fn wake_followers(&self) {
        self.changes.send_modify(|count| *count += 1);
    }

    /// Records that the work on the response is done.
    pub(super) fn end(&self) {
        self.state().is_done = true;
        self.wake_followers();
    }

    /// Waits until the work on the response is done.
    pub(super) async fn done(&self) {
        let mut changes = self.changes.subscribe();
        while !self.state().is_done {
            if changes.changed().await.is_err() {
                return;
            }
        }
    }

    /// Frees the events, so that followers receive no further events.
    pub(super) fn discard(&self) {
        let discarded = self.state().log.take();
        drop(discarded);
    }

    fn state(&self) -> MutexGuard<'_, EventsState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
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
    use super::*;

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
        let (mut one, mut two) = (EventLog::new(&all_bytes), EventLog::new(&all_bytes));
        assert!(one.push("ab".into()) && !two.push("c".into()));
        drop((one, two));
        assert_eq!(all_bytes.load(Ordering::Relaxed), ALL_EVENTS_BYTES_MAX - 2);
        all_bytes.store(0, Ordering::Relaxed);
        let mut one = EventLog::new(&all_bytes);
        assert!(one.push("x".repeat(EVENTS_BYTES_MAX).into()) && !one.push("x".into()));
    }
}
