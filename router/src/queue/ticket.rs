//! The identity of a request in the queue.

/// Identifies a request in the queue. Tickets are numbered in the order of arrival.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub(super) u64);
