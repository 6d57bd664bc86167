//! A budget that all requests share. A request reserves a part of it before it uses a resource, and waits while other
//! requests have reserved too much.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// An amount, such as a number of bytes, that all reservations together never exceed.
#[derive(Debug)]
pub(crate) struct WaitingBudget {
    max: usize,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    reserved: usize,
    /// The number of reservations that have been requested, including those that wait.
    arrived: u64,
    /// The number of reservations that have been granted. Reservations are granted in the order of their arrival.
    granted: u64,
}

/// The error for a reservation of more than the whole budget.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AboveBudget {
    /// The whole budget.
    pub(crate) max: usize,
}

/// A part of the budget. Dropping this value returns the part to the budget.
#[derive(Debug)]
pub(crate) struct WaitingReservation<'a> {
    budget: &'a WaitingBudget,
    amount: usize,
}

impl WaitingBudget {
    pub(crate) fn new(max: usize) -> Self {
        Self { max, state: Mutex::default(), changed: Condvar::new() }
    }

    /// Reserves an amount. If other reservations leave too little, this function blocks the thread until enough has
    /// been returned. Reservations are granted in the order of their arrival, so that a large one is not delayed by
    /// smaller ones that arrive later.
    ///
    /// # Errors
    /// The amount exceeds the whole budget.
    pub(crate) fn reserve(&self, amount: usize) -> Result<WaitingReservation<'_>, AboveBudget> {
        if amount > self.max {
            return Err(AboveBudget { max: self.max });
        }
        if amount > 0 {
            let mut state = self.state();
            let number = state.arrived;
            state.arrived += 1;
            let must_wait = |state: &mut State| state.granted != number || state.reserved + amount > self.max;
            let mut state = self.changed.wait_while(state, must_wait).unwrap_or_else(PoisonError::into_inner);
            state.reserved += amount;
            state.granted += 1;
            drop(state);
            // The next reservation may fit, too.
            self.changed.notify_all();
        }
        Ok(WaitingReservation { budget: self, amount })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for WaitingReservation<'_> {
    fn drop(&mut self) {
        if self.amount > 0 {
            self.budget.state().reserved -= self.amount;
            self.budget.changed.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn concurrent_reservations_never_exceed_the_budget() {
        const MAX: usize = 400;
        let budget = WaitingBudget::new(MAX);
        let (present, peak) = (AtomicUsize::new(0), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for thread in 1..=8 {
                let (budget, present, peak) = (&budget, &present, &peak);
                scope.spawn(move || {
                    let amount = 100 + thread * 30;
                    for _ in 0..200 {
                        let _reservation = budget.reserve(amount).unwrap();
                        peak.fetch_max(
                            present.fetch_add(amount, Ordering::SeqCst) + amount,
                            Ordering::SeqCst,
                        );
                        std::thread::yield_now();
                        present.fetch_sub(amount, Ordering::SeqCst);
                    }
                });
            }
        });
        assert!(peak.load(Ordering::SeqCst) <= MAX);
        assert_eq!(budget.state().reserved, 0);
    }

    #[test]
    fn a_reservation_that_can_never_fit_is_rejected_at_once() {
        let budget = WaitingBudget::new(10);
        let _all = budget.reserve(10).unwrap();
        assert_eq!(budget.reserve(11).unwrap_err(), AboveBudget { max: 10 });
        budget.reserve(0).unwrap();
    }
}
