//! Limits the memory for the bodies of all requests together. Bytes are reserved before they are stored, and released
//! when the last user of the body drops it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;

/// Size up to which a body may use the whole budget. Larger bodies leave up to an eighth of the budget to small bodies,
/// so that small requests, which are the majority, are served even while other clients send large bodies at full speed.
const SMALL_BODY_BYTES: u64 = 64 << 10;

/// The number of bytes that all bodies together may reserve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BudgetLimits {
    total: u64,
    /// The limit that applies when a body has more than [`SMALL_BODY_BYTES`].
    large: u64,
}

impl BudgetLimits {
    /// Creates limits. The part that is reserved for small bodies still leaves room for a body of `max_body_bytes`
    /// bytes.
    #[must_use]
    pub fn new(max_buffered_body_bytes: u64, max_body_bytes: u64) -> Self {
        let total = max_buffered_body_bytes;
        let reserve = (total / 8).min(total.saturating_sub(max_body_bytes));
        Self { total, large: total - reserve }
    }

    fn of_body(self, bytes: u64) -> u64 {
        if bytes <= SMALL_BODY_BYTES { self.total } else { self.large }
    }
}

/// Counts the bytes that are reserved for bodies.
#[derive(Debug, Default)]
pub struct BodyBudget {
    reserved: AtomicU64,
}

/// The limit does not permit more bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BudgetExceeded;

/// A body that is being received.
#[derive(Debug)]
pub struct ReceivedBody {
    reservation: Reservation,
    /// The first part, which is not copied while it is the only one.
    first: Option<Bytes>,
    /// All parts, joined in one buffer, if there are several.
    joined: Vec<u8>,
    /// The length that the client has announced.
    announced: usize,
}

#[derive(Debug)]
struct Reservation {
    budget: Arc<BodyBudget>,
    bytes: u64,
}

/// The bytes of a body with their reservation.
struct ReservedBytes<T> {
    bytes: T,
    _reservation: Reservation,
}

impl BodyBudget {
    /// The number of bytes that are reserved now.
    #[must_use]
    pub fn reserved(&self) -> u64 {
        self.reserved.load(Ordering::Relaxed)
    }

    /// Creates a body without any received bytes. `announced` is the length that the client has announced.
    pub fn body(self: &Arc<Self>, announced: usize) -> ReceivedBody {
        let reservation = Reservation { budget: Arc::clone(self), bytes: 0 };
        ReceivedBody { reservation, first: None, joined: Vec::new(), announced }
    }
}

impl ReceivedBody {
    /// The number of bytes received so far.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.reservation.bytes
    }

    /// Whether no bytes have been received yet.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Adds a part, if all bodies together stay within `limits`.
    ///
    /// # Errors
    /// The part would exceed the limits. It was not added.
    pub fn push(&mut self, part: Bytes, limits: BudgetLimits) -> Result<(), BudgetExceeded> {
        let bytes = part.len() as u64;
        self.reservation.grow(bytes, limits.of_body(self.len() + bytes))?;
        if self.joined.is_empty() && self.first.is_none() {
            self.first = Some(part);
            return Ok(());
        }
        if let Some(first) = self.first.take() {
            // The operating system allocates memory only when it is written to, so reserving the announced length costs
            // no memory.
            self.joined.reserve_exact(self.announced.max(first.len() + part.len()));
            self.joined.extend_from_slice(&first);
        }
        self.joined.extend_from_slice(&part);
        Ok(())
    }

    /// The whole body. Its bytes remain reserved as long as any part of it exists.
    #[must_use]
    pub fn into_bytes(self) -> Bytes {
        let Self { reservation, first, joined, .. } = self;
        match first {
            Some(first) => Bytes::from_owner(ReservedBytes { bytes: first, _reservation: reservation }),
            None if joined.is_empty() => Bytes::new(),
            None => Bytes::from_owner(ReservedBytes { bytes: joined, _reservation: reservation }),
        }
    }
}

impl<T: AsRef<[u8]>> AsRef<[u8]> for ReservedBytes<T> {
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

    const LIMITS: BudgetLimits = BudgetLimits { total: 100, large: 100 };

    #[test]
    fn bodies_together_stay_within_the_limit_and_release_their_bytes() {
        let budget = Arc::new(BodyBudget::default());
        let (mut first, mut second) = (budget.body(60), budget.body(0));
        first.push(Bytes::from(vec![1; 30]), LIMITS).unwrap();
        assert_eq!(budget.reserved(), 30, "bytes that are only announced cost nothing");
        first.push(Bytes::from(vec![2; 30]), LIMITS).unwrap();
        second.push(Bytes::from(vec![3; 40]), LIMITS).unwrap();
        assert_eq!(second.push(Bytes::from_static(b"x"), LIMITS), Err(BudgetExceeded));
        assert_eq!((first.len(), second.len(), budget.reserved()), (60, 40, 100));
        let first = first.into_bytes();
        assert_eq!(first, [vec![1; 30], vec![2; 30]].concat());
        let part = first.slice(10..20);
        drop(first);
        assert_eq!(budget.reserved(), 100, "a part of it still exists");
        drop((part, second));
        assert_eq!(budget.reserved(), 0);
    }

    #[test]
    fn small_bodies_have_room_when_large_bodies_have_reached_their_limit() {
        const MEBIBYTE: u64 = 1 << 20;
        let limits = BudgetLimits::new(16 * MEBIBYTE, 8 * MEBIBYTE);
        let budget = Arc::new(BodyBudget::default());
        let part = Bytes::from(vec![0; 1 << 20]);
        let mut large: Vec<ReceivedBody> = (0..14).map(|_| budget.body(0)).collect();
        for body in &mut large {
            body.push(part.clone(), limits).unwrap();
        }
        assert_eq!(budget.body(0).push(part.slice(..70_000), limits), Err(BudgetExceeded));
        assert_eq!(large[0].push(part.slice(..1), limits), Err(BudgetExceeded));
        let mut small = budget.body(0);
        for _ in 0..2 {
            small.push(part.slice(..30_000), limits).unwrap();
        }
        assert_eq!(small.push(part.slice(..30_000), limits), Err(BudgetExceeded), "it is no longer small");
        // A single body of the largest size always fits.
        assert_eq!(BudgetLimits::new(8, 8), BudgetLimits { total: 8, large: 8 });
        assert_eq!(BudgetLimits::new(80, 75), BudgetLimits { total: 80, large: 75 });
        assert_eq!(BudgetLimits::new(80, 8), BudgetLimits { total: 80, large: 70 });
    }

    #[test]
    fn a_body_of_one_part_is_not_copied_and_an_empty_body_reserves_nothing() {
        let budget = Arc::new(BodyBudget::default());
        let part = Bytes::from(vec![7; 9]);
        let mut body = budget.body(9);
        body.push(part.clone(), LIMITS).unwrap();
        let body = body.into_bytes();
        assert!(std::ptr::eq(body.as_ptr(), part.as_ptr()) && budget.reserved() == 9);
        assert!(budget.body(5).into_bytes().is_empty());
        drop(body);
        assert_eq!(budget.reserved(), 0);
    }
}
