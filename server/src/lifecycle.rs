//! Where the process is between start and end. One value; readiness, the load report and the health service
//! all follow it.

use tokio::sync::watch;

/// Where the process is. It only ever moves down this list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// The model is being loaded.
    Starting,
    /// Requests are taken.
    Serving,
    /// Requests are taken, but none should be sent: the process is about to be asked to end.
    Draining,
    /// The process was asked to end and finishes what it has.
    Stopping,
    /// The engine has ended.
    Stopped,
}

/// The process's phase. Clones are of the same.
#[derive(Clone, Debug)]
pub struct Lifecycle(watch::Sender<Phase>);

impl Default for Lifecycle {
    fn default() -> Self {
        Self(watch::Sender::new(Phase::Starting))
    }
}

impl Lifecycle {
    /// The present phase.
    pub fn phase(&self) -> Phase {
        *self.0.borrow()
    }

    /// Moves on to `phase`; never back.
    pub fn advance(&self, phase: Phase) {
        self.0.send_if_modified(|present| {
            let later = phase > *present;
            if later {
                *present = phase;
            }
            later
        });
    }

    /// Tells of changes.
    pub fn watch(&self) -> watch::Receiver<Phase> {
        self.0.subscribe()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_phase_never_comes_back() {
        let lifecycle = Lifecycle::default();
        lifecycle.advance(Phase::Draining);
        lifecycle.advance(Phase::Serving);
        assert_eq!(lifecycle.phase(), Phase::Draining);
    }
}
