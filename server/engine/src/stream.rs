//! The client's end of a request.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};

use tokio::sync::mpsc;

use crate::request::{Event, Failure};

/// The events of one request, in order. They wait here for as long as the client likes: there is room for
/// all that the request can ever produce, so the engine never waits for a client.
///
/// # Guarantees
/// - The last event is the `Finished` of the last sequence that was not aborted, or `Failed`; then nothing comes.
///   If the engine ends before, that is `Failed(Failure::Stopped)`.
/// - Dropping the stream aborts what is left of the request: its sequences are in no step that begins later,
///   and their blocks are free. [`Self::abort`] does so to one of them. There is no third way to cancel.
#[derive(Debug)]
pub struct TokenStream {
    events: mpsc::Receiver<Event>,
    aborts: Arc<Aborts>,
    /// Whether each sequence has ended.
    ended: Vec<bool>,
    /// Sequences that have not ended.
    open: usize,
}

/// Which sequences of a request the client has aborted; looked at before each step.
#[derive(Debug)]
pub(crate) struct Aborts {
    sequences: Box<[AtomicBool]>,
    /// Whether there are any that the engine has not seen.
    unseen: AtomicBool,
}

impl Aborts {
    pub(crate) fn new(sequences: u32) -> Arc<Self> {
        let sequences = (0..sequences).map(|_| AtomicBool::new(false)).collect();
        Arc::new(Self { sequences, unseen: AtomicBool::new(false) })
    }

    fn add(&self, index: usize) {
        self.sequences[index].store(true, Ordering::Relaxed);
        // With what was stored before: who sees this, sees that.
        self.unseen.store(true, Ordering::Release);
    }

    /// All that were aborted, if there are new ones among them.
    pub(crate) fn take(&self) -> Option<impl Iterator<Item = u32>> {
        let unseen = self.unseen.load(Ordering::Relaxed) && self.unseen.swap(false, Ordering::Acquire);
        let aborted = || (0..).zip(&self.sequences).filter(|(_, aborted)| aborted.load(Ordering::Relaxed));
        unseen.then(|| aborted().map(|(index, _)| index))
    }
}

impl TokenStream {
    /// `events` has room for all that a request of as many sequences as `aborts` has can produce.
    pub(crate) fn new(events: mpsc::Receiver<Event>, aborts: Arc<Aborts>) -> Self {
        let open = aborts.sequences.len();
        Self { events, aborts, ended: vec![false; open], open }
    }

    /// The next event; nothing after the last.
    ///
    /// # Cancel safety
    /// A future that is dropped before it is ready has taken no event.
    pub async fn next(&mut self) -> Option<Event> {
        std::future::poll_fn(|context| self.poll_next(context)).await
    }

    /// The next event, for those who implement a stream of their own.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Event>> {
        while self.open > 0 {
            let event = ready!(self.events.poll_recv(context));
            if let Some(event) = self.take(event) {
                return Poll::Ready(Some(event));
            }
        }
        Poll::Ready(None)
    }

    /// The next event if there is one already: what has gathered can go out together.
    pub fn try_next(&mut self) -> Option<Event> {
        while self.open > 0 {
            let event = match self.events.try_recv() {
                Ok(event) => Some(event),
                Err(mpsc::error::TryRecvError::Empty) => return None,
                Err(mpsc::error::TryRecvError::Disconnected) => None,
            };
            if let Some(event) = self.take(event) {
                return Some(event);
            }
        }
        None
    }

    /// Waits for the next event on the calling thread.
    ///
    /// # Panics
    /// If called from asynchronous code.
    pub fn blocking_next(&mut self) -> Option<Event> {
        while self.open > 0 {
            let event = self.events.blocking_recv();
            if let Some(event) = self.take(event) {
                return Some(event);
            }
        }
        None
    }

    /// Ends one sequence of the request, whose text has become enough: it is in no step that begins later, and
    /// what only it holds is free. No event of it comes any more, not even `Finished`. Nothing happens if it has
    /// ended.
    ///
    /// # Panics
    /// If the request has no such sequence.
    pub fn abort(&mut self, index: u32) {
        let index = index as usize;
        if self.open > 0 && !std::mem::replace(&mut self.ended[index], true) {
            self.open -= 1;
            self.aborts.add(index);
        }
    }

    /// Nothing if the event is of a sequence that was aborted.
    fn take(&mut self, event: Option<Event>) -> Option<Event> {
        let event = event.unwrap_or(Event::Failed(Failure::Stopped));
        match event {
            Event::Token { index, .. } | Event::Finished { index, .. } if self.ended[index as usize] => {
                return None;
            }
            Event::Finished { index, .. } => {
                self.ended[index as usize] = true;
                self.open -= 1;
            }
            Event::Failed(_) => self.open = 0,
            Event::Started { .. } | Event::Scored { .. } | Event::Token { .. } => {}
        }
        Some(event)
    }
}
