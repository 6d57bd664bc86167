//! The memory that the bodies of all requests may take together. Bytes are reserved before they are kept and given
//! back when the last part of the router that needs the body drops it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;

/// The bytes that are reserved now.
#[derive(Debug, Default)]
pub struct BodyBudget {
    reserved: AtomicU64,
}

/// There is no room for more bytes within the limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BudgetExceeded;

/// A body that is being received.
#[derive(Debug)]
pub struct ReceivedBody {
    reservation: Reservation,
    /// The only part so far, not copied.
    first: Option<Bytes>,
    /// All parts, if there are several.
    joined: Vec<u8>,
    /// Bytes that the client has announced.
    announced: usize,
}

#[derive(Debug)]
struct Reservation {
    budget: Arc<BodyBudget>,
    bytes: u64,
}

/// The bytes of a body with their reservation.
struct Reserved<T> {
    bytes: T,
    _reservation: Reservation,
}

impl BodyBudget {
    /// The bytes that are reserved now.
    #[must_use]
    pub fn reserved(&self) -> u64 {
        self.reserved.load(Ordering::Relaxed)
    }

    /// A body of which nothing has been received. `announced` are the bytes that it has by its client's word.
    pub fn body(self: &Arc<Self>, announced: usize) -> ReceivedBody {
        let reservation = Reservation { budget: Arc::clone(self), bytes: 0 };
        ReceivedBody { reservation, first: None, joined: Vec::new(), announced }
    }
}

impl ReceivedBody {
    /// The bytes so far.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.reservation.bytes
    }

    /// Whether nothing was received.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Adds a part, if all bodies together stay within `limit`.
    ///
    /// # Errors
    /// They would not; nothing was added.
    pub fn push(&mut self, part: Bytes, limit: u64) -> Result<(), BudgetExceeded> {
        self.reservation.grow(part.len() as u64, limit)?;
        if self.joined.is_empty() && self.first.is_none() {
            self.first = Some(part);
            return Ok(());
        }
        if let Some(first) = self.first.take() {
            // Memory that is not written to is not taken, so that an announcement alone costs nothing.
            self.joined.reserve_exact(self.announced.max(first.len() + part.len()));
            self.joined.extend_from_slice(&first);
        }
        self.joined.extend_from_slice(&part);
        Ok(())
    }

    /// The whole body. Its bytes stay reserved for as long as any part of it is held.
    #[must_use]
    pub fn into_bytes(self) -> Bytes {
        let Self { reservation, first, joined, .. } = self;
        match first {
            Some(first) => Bytes::from_owner(Reserved { bytes: first, _reservation: reservation }),
            None if joined.is_empty() => Bytes::new(),
            None => Bytes::from_owner(Reserved { bytes: joined, _reservation: reservation }),
        }
    }
}

impl<T: AsRef<[u8]>> AsRef<[u8]> for Reserved<T> {
    fn as_ref(&self) -> &[u8] {
        self.bytes.as_ref()
    }
}

impl Reservation {
    fn grow(&mut self, bytes: u64, limit: u64) -> Result<(), BudgetExceeded> {
        let grow = |reserved: u64| reserved.checked_add(bytes).filter(|&total| total <= limit);
        let grown = self.budget.reserved.fetch_update(Ordering::Relaxed, Ordering::Relaxed, grow);
        grown.map_err(|_| BudgetExceeded)?;
        self.bytes += bytes;
        Ok(())
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.budget.reserved.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: u64 = 100;

    #[test]
    fn bodies_together_stay_within_the_limit_and_give_back_what_they_took() {
        let budget = Arc::new(BodyBudget::default());
        let (mut first, mut second) = (budget.body(60), budget.body(0));
        first.push(Bytes::from(vec![1; 30]), LIMIT).unwrap();
        assert_eq!(budget.reserved(), 30, "what was announced and has not come costs nothing");
        first.push(Bytes::from(vec![2; 30]), LIMIT).unwrap();
        second.push(Bytes::from(vec![3; 40]), LIMIT).unwrap();
        assert_eq!(second.push(Bytes::from_static(b"x"), LIMIT), Err(BudgetExceeded));
        assert_eq!((first.len(), second.len(), budget.reserved()), (60, 40, 100));
        let first = first.into_bytes();
        assert_eq!(first, [vec![1; 30], vec![2; 30]].concat());
        let part = first.slice(10..20);
        drop(first);
        assert_eq!(budget.reserved(), 100, "a part of it is held");
        drop((part, second));
        assert_eq!(budget.reserved(), 0);
    }

    #[test]
    fn a_body_of_one_part_is_not_copied_and_an_empty_one_holds_nothing() {
        let budget = Arc::new(BodyBudget::default());
        let part = Bytes::from(vec![7; 9]);
        let mut body = budget.body(9);
        body.push(part.clone(), LIMIT).unwrap();
        let body = body.into_bytes();
        assert!(std::ptr::eq(body.as_ptr(), part.as_ptr()) && budget.reserved() == 9);
        assert!(budget.body(5).into_bytes().is_empty());
        drop(body);
        assert_eq!(budget.reserved(), 0);
    }
}
