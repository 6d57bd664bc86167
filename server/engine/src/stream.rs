//! The stream of a request's events.

use std::sync::Arc;
use std::task::{Context, Poll, ready};

use tokio::sync::mpsc;

use crate::aborts::Aborts;
use crate::request::{Event, Failure};
use crate::waker::Waker;

/// The events of one request, in order. The stream has room for all events that the request can produce, so the engine
/// never waits for a client.
///
/// # Guarantees
/// - The last event is `Failed`, or the `Finished` event of the sequence that ends last. If the engine ends before
///   that, the last event is `Failed(Failure::Stopped)`. No event follows when the last open sequence is aborted.
/// - Dropping the stream aborts the request: no step that begins later computes its sequences, and their blocks are
///   released. [`Self::abort`] aborts a single sequence. There is no other way to cancel a request.
#[derive(Debug)]
pub struct TokenStream {
    events: mpsc::Receiver<Event>,
    aborts: Arc<Aborts>,
    /// Whether each sequence has ended or was aborted.
    ended: Vec<bool>,
    /// Number of sequences that have neither ended nor been aborted.
    open: usize,
    waker: Waker,
}

impl TokenStream {
    /// Creates a stream. `events` must have room for all events of a request with as many sequences as `aborts`.
    pub(crate) fn new(events: mpsc::Receiver<Event>, aborts: Arc<Aborts>, waker: Waker) -> Self {
        let open = aborts.num_sequences();
        Self { events, aborts, ended: vec![false; open], open, waker }
    }

    /// Waits for the next event. `None` after the last event.
    ///
    /// # Cancel safety
    /// If the future is dropped before it is ready, no event is lost.
    pub async fn next(&mut self) -> Option<Event> {
        std::future::poll_fn(|context| self.poll_next(context)).await
    }

    /// Polls for the next event. This method is meant for implementations of other streams.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Event>> {
        while self.open > 0 {
            let event = ready!(self.events.poll_recv(context));
            if let Some(event) = self.process(event) {
                return Poll::Ready(Some(event));
            }
        }
        Poll::Ready(None)
    }

    /// Returns the next event if it is already available, so that several events can be sent together.
    pub fn try_next(&mut self) -> Option<Event> {
        while self.open > 0 {
            let event = match self.events.try_recv() {
                Ok(event) => Some(event),
                Err(mpsc::error::TryRecvError::Empty) => return None,
                Err(mpsc::error::TryRecvError::Disconnected) => None,
            };
            if let Some(event) = self.process(event) {
                return Some(event);
            }
        }
        None
    }

    /// Aborts one sequence of the request: no step that begins later computes it, and its blocks are released. The
    /// stream yields no further events of the sequence, not even `Finished`. Does nothing if the sequence has ended.
    ///
    /// # Panics
    /// Panics if the request has no such sequence and the stream has not ended.
    pub fn abort(&mut self, index: u32) {
        let index = index as usize;
        if self.open > 0 && !std::mem::replace(&mut self.ended[index], true) {
            self.open -= 1;
            self.aborts.add(index);
        }
    }

    /// Updates the state with an event, and returns the event. `None` if the event's sequence was aborted.
    fn process(&mut self, event: Option<Event>) -> Option<Event> {
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

impl Drop for TokenStream {
    fn drop(&mut self) {
        if self.open > 0 {
            // Wake an engine that waits for images, blocks or guides, so that it releases the request immediately.
            self.events.close();
            self.waker.wake();
        }
    }
}
