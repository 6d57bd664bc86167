//! A budget of bytes that all requests share. A request reserves bytes before it uses them and never waits for them.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::body::Bytes;

/// Maximum size of a reservation that may use the whole budget. Larger reservations must leave a part of it free. Most
/// requests are small, and this part remains available to them even while other clients send as much data as they can.
const SMALL_RESERVATION_BYTES: usize = 64 << 10;

/// The bytes that all requests together may use for one purpose.
#[derive(Debug)]
pub(crate) struct ByteBudget {
    bytes_max: usize,
    /// The maximum total number of reserved bytes when a reservation grows beyond [`SMALL_RESERVATION_BYTES`].
    large_bytes_max: usize,
    reserved: AtomicUsize,
}

/// The error for a reservation of more bytes than the budget has left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BudgetExhausted;

/// Bytes that one request has reserved. Dropping this value returns them to the budget.
#[derive(Debug)]
pub(crate) struct ByteReservation {
    budget: Arc<ByteBudget>,
    bytes: usize,
}

impl ByteBudget {
    /// Creates a budget of `bytes_max` bytes, up to an eighth of which is set aside for small reservations. A single
    /// reservation of `reservation_bytes_max` bytes always fits into the unused budget.
    pub(crate) fn new(bytes_max: usize, reservation_bytes_max: usize) -> Arc<Self> {
        let small_bytes = (bytes_max / 8).min(bytes_max.saturating_sub(reservation_bytes_max));
        Arc::new(Self { bytes_max, large_bytes_max: bytes_max - small_bytes, reserved: AtomicUsize::new(0) })
    }

    pub(crate) fn bytes_max(&self) -> usize {
        self.bytes_max
    }

    /// Returns the maximum total number of reserved bytes when a reservation grows beyond [`SMALL_RESERVATION_BYTES`].
    pub(crate) fn large_bytes_max(&self) -> usize {
        self.large_bytes_max
    }

    /// Returns a reservation of no bytes, which can grow.
    pub(crate) fn empty_reservation(self: &Arc<Self>) -> ByteReservation {
        ByteReservation { budget: Arc::clone(self), bytes: 0 }
    }
}

impl ByteReservation {
    /// Returns the size of the whole budget in bytes.
    pub(crate) fn bytes_max(&self) -> usize {
        self.budget.bytes_max
    }

    /// Grows the reservation to `bytes` in total.
    ///
    /// # Errors
    /// The budget is exhausted. In this case, the reservation does not change.
    pub(crate) fn grow_to(&mut self, bytes: usize) -> Result<(), BudgetExhausted> {
        let more = bytes.saturating_sub(self.bytes);
        let ByteBudget { bytes_max, large_bytes_max, .. } = *self.budget;
        let limit = if bytes <= SMALL_RESERVATION_BYTES { bytes_max } else { large_bytes_max };
        let fits = |reserved: usize| reserved.checked_add(more).filter(|sum| *sum <= limit);
        let grown = self.budget.reserved.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits);
        grown.map_err(|_| BudgetExhausted)?;
        self.bytes += more;
        Ok(())
    }

    /// Returns `bytes`, which hold the reservation until their last clone is dropped.
    pub(crate) fn hold(self, bytes: impl AsRef<[u8]> + Send + 'static) -> Bytes {
        Bytes::from_owner(ReservedBytes { bytes, _reservation: self })
    }
}

impl Drop for ByteReservation {
    fn drop(&mut self) {
        self.budget.reserved.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// Bytes that count toward the budget as long as they exist.
struct ReservedBytes<T> {
    bytes: T,
    _reservation: ByteReservation,
}

impl<T: AsRef<[u8]>> AsRef<[u8]> for ReservedBytes<T> {
    fn as_ref(&self) -> &[u8] {
        self.bytes.as_ref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reservations_share_the_budget_and_return_their_bytes() {
        let budget = ByteBudget::new(100, 100);
        let (mut first, mut second) = (budget.empty_reservation(), budget.empty_reservation());
        assert_eq!((first.grow_to(60), second.grow_to(30)), (Ok(()), Ok(())));
        assert_eq!(second.grow_to(41), Err(BudgetExhausted));
        assert_eq!(second.grow_to(20), Ok(()), "a reservation does not shrink");
        assert_eq!(second.grow_to(40), Ok(()));
        assert_eq!(first.grow_to(usize::MAX), Err(BudgetExhausted));
        drop(first);
        assert_eq!(second.grow_to(100), Ok(()));
        drop(second);
        assert_eq!(budget.reserved.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn bytes_hold_their_reservation_until_their_last_clone_is_dropped() {
        let budget = ByteBudget::new(100, 100);
        let mut reservation = budget.empty_reservation();
        reservation.grow_to(100).unwrap();
        let bytes = reservation.hold(vec![7_u8; 90]);
        let clone = bytes.slice(10..);
        drop(bytes);
        assert_eq!(budget.empty_reservation().grow_to(1), Err(BudgetExhausted));
        drop(clone);
        assert_eq!(budget.empty_reservation().grow_to(100), Ok(()));
    }

    #[test]
    fn small_reservations_have_room_when_large_ones_have_used_theirs() {
        const MEBIBYTE: usize = 1 << 20;
        let budget = ByteBudget::new(16 * MEBIBYTE, 8 * MEBIBYTE);
        let (mut first, mut second, mut small) =
            (budget.empty_reservation(), budget.empty_reservation(), budget.empty_reservation());
        assert_eq!((first.grow_to(8 * MEBIBYTE), second.grow_to(6 * MEBIBYTE)), (Ok(()), Ok(())));
        assert_eq!(second.grow_to(6 * MEBIBYTE + 1), Err(BudgetExhausted));
        assert_eq!(small.grow_to(70_000), Err(BudgetExhausted));
        assert_eq!(small.grow_to(60_000), Ok(()));
        let whole = ByteBudget::new(MEBIBYTE, MEBIBYTE);
        assert_eq!(whole.empty_reservation().grow_to(MEBIBYTE), Ok(()), "a single reservation always fits");
    }
}
