//! Responses that are made in the background: who asks for one gets it as it is at the moment, or its events from
//! wherever they want to go on.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use server_openai::responses::{Item, Response};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::assembly::{Assembly, Sink, sent};
use crate::store::ResponseRecord;

/// Bytes of the events of one response; of more, none are kept.
const EVENTS_BYTES_MAX: usize = 16 << 20;

/// All that are being made. Clones are of the same.
#[derive(Clone, Debug, Default)]
pub(crate) struct Background(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    live: Mutex<HashMap<String, Arc<Live>>>,
    tasks: TaskTracker,
}

impl Background {
    /// Lets `work` make a response, which is found until the work is done.
    pub(crate) fn begin(&self, live: Arc<Live>, work: impl Future<Output = ()> + Send + 'static) {
        let name = live.state().assembly.response().id.clone();
        self.lock().insert(name.clone(), live);
        let listed = Listed { background: self.clone(), name };
        self.0.tasks.spawn(async move {
            let _listed = listed;
            work.await;
        });
    }

    /// The response of this name, if it is being made.
    pub(crate) fn find(&self, name: &str) -> Option<Arc<Live>> {
        self.lock().get(name).cloned()
    }

    /// Waits until none is left. None may be begun any more.
    pub(crate) async fn finished(&self) {
        self.0.tasks.close();
        self.0.tasks.wait().await;
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Arc<Live>>> {
        self.0.live.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A response that is found. Dropping it ends that, however its work ended.
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

/// A response that is being made.
pub(crate) struct Live {
    state: Mutex<State>,
    changes: watch::Sender<u64>,
    cancel: CancellationToken,
    input: Vec<Item>,
}

struct State {
    assembly: Assembly,
    /// As they are sent, if they are kept. The place in the list is the sequence number.
    events: Option<Vec<String>>,
    bytes: usize,
    is_done: bool,
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
    Events(Vec<String>),
    /// These are there, and are the last.
    Last(Vec<String>),
    /// They are not kept.
    NotKept,
}

impl Live {
    /// `keeps_events`: they may be read again.
    pub(crate) fn new(assembly: Assembly, input: Vec<Item>, keeps_events: bool) -> Arc<Self> {
        let events = keeps_events.then(Vec::new);
        Arc::new(Self {
            state: Mutex::new(State { assembly, events, bytes: 0, is_done: false }),
            changes: watch::Sender::new(0),
            cancel: CancellationToken::new(),
            input,
        })
    }

    /// Changes the response, and tells who follows.
    pub(crate) fn change(&self, change: impl FnOnce(&mut Assembly, Sink<'_>)) {
        {
            let mut state = self.state();
            let State { assembly, events, bytes, .. } = &mut *state;
            change(assembly, &mut |event| {
                let Some(kept) = events else { return };
                let event = sent(event);
                *bytes += event.len();
                if *bytes > EVENTS_BYTES_MAX {
                    *events = None;
                } else {
                    kept.push(event);
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

    /// As it is kept.
    pub(crate) fn record(&self) -> ResponseRecord {
        let state = self.state();
        ResponseRecord {
            response: state.assembly.response().clone(),
            input: self.input.clone(),
            events: state.events.clone(),
        }
    }

    /// Asks for its end.
    pub(crate) fn cancel(&self) {
        self.cancel.cancel();
    }

    /// Waits until somebody asks for its end.
    pub(crate) async fn cancelled(&self) {
        self.cancel.cancelled().await;
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
                let new = events.get(from..).unwrap_or_default().to_vec();
                if state.is_done {
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
