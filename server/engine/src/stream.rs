//! The client's end of a request.

use std::task::{Context, Poll, ready};

use tokio::sync::mpsc;

use crate::request::{Event, Failure};

/// The events of one request, in order. They wait here for as long as the client likes: there is room for
/// all that the request can ever produce, so the engine never waits for a client.
///
/// # Guarantees
/// - The last event is the `Finished` of the last sequence, or `Failed`; then nothing comes. If the engine
///   ends before, that is `Failed(Failure::Stopped)`.
/// - Dropping the stream aborts what is left of the request: its sequences are in no step that begins later,
///   and their blocks are free. There is no other way to cancel.
#[derive(Debug)]
pub struct TokenStream {
    events: mpsc::Receiver<Event>,
    /// Sequences that have not ended.
    open: u32,
}

impl TokenStream {
    /// `events` has room for all that a request of so many `sequences` can produce.
    pub(crate) fn new(events: mpsc::Receiver<Event>, sequences: u32) -> Self {
        Self { events, open: sequences }
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
        if self.open == 0 {
            return Poll::Ready(None);
        }
        let event = ready!(self.events.poll_recv(context));
        Poll::Ready(Some(self.take(event)))
    }

    /// The next event if there is one already: what has gathered can go out together.
    pub fn try_next(&mut self) -> Option<Event> {
        if self.open == 0 {
            return None;
        }
        match self.events.try_recv() {
            Ok(event) => Some(self.take(Some(event))),
            Err(mpsc::error::TryRecvError::Empty) => None,
            Err(mpsc::error::TryRecvError::Disconnected) => Some(self.take(None)),
        }
    }

    /// Waits for the next event on the calling thread.
    ///
    /// # Panics
    /// If called from asynchronous code.
    pub fn blocking_next(&mut self) -> Option<Event> {
        if self.open == 0 {
            return None;
        }
        let event = self.events.blocking_recv();
        Some(self.take(event))
    }

    fn take(&mut self, event: Option<Event>) -> Event {
        let event = event.unwrap_or(Event::Failed(Failure::Stopped));
        match event {
            Event::Finished { .. } => self.open -= 1,
            Event::Failed(_) => self.open = 0,
            Event::Started { .. } | Event::Token { .. } => {}
        }
        event
    }
}
