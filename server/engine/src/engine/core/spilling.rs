//! When the loop looks at what becomes of evicted blocks, and how long it waits for them.

use std::time::Duration;

use super::Core;
use crate::handle::{Command, Shared};

impl Core {
    /// Takes in what came from the disk, and gives up what is late.
    pub(super) fn look_at_spill(&mut self, shared: &Shared) {
        let Self { spill: Some(spill), scheduler, runner, .. } = self else { return };
        let now = shared.clock.now();
        spill.poll(scheduler, &mut **runner, now);
        spill.expire(scheduler, now);
    }

    /// Copies what the step is about to write over, and asks for what requests wait for.
    pub(super) fn spill_scheduled(&mut self, now: Duration) {
        let Self { spill: Some(spill), scheduler, runner, prefill_rate, .. } = self else { return };
        spill.save(scheduler, &**runner);
        spill.ask(scheduler, now, prefill_rate.per_second());
    }

    /// Waits until the blocks have come that requests wait for, or are late, or for a command before that.
    pub(super) fn await_blocks(&mut self, shared: &Shared) -> Option<Command> {
        let under_way = |core: &Self| core.spill.as_ref().map_or(0, |spill| spill.under_way());
        let before = under_way(self);
        loop {
            self.look_at_spill(shared);
            let late = self.spill.as_ref().and_then(|spill| spill.next_late());
            let Some(late) = late.filter(|_| under_way(self) == before) else { break };
            match self.commands.recv_timeout(late.saturating_sub(shared.clock.now())) {
                Ok(Command::LookAtSpill) => self.woke(),
                Ok(command) => {
                    self.is_stalled = false;
                    return Some(command);
                }
                Err(_) => {
                    // By the time that was waited: a simulated clock stands still meanwhile.
                    let Self { spill: Some(spill), scheduler, .. } = self else { break };
                    spill.expire(scheduler, late);
                }
            }
        }
        self.is_stalled = false;
        None
    }

    pub(super) fn woke(&mut self) {
        if let Some(spill) = &self.spill {
            spill.woke();
        }
    }

    /// Forgets what is cached, of which nobody holds anything; kept if evicted blocks are.
    pub(super) fn give_up_cached(&mut self) {
        let Self { spill, scheduler, runner, .. } = self;
        match spill {
            Some(spill) => spill.flush(scheduler, &**runner),
            None => scheduler.forget_cached(),
        }
    }

    /// The model was loaded anew.
    pub(super) fn check_spill(&mut self) {
        if self.spill.as_ref().is_some_and(|spill| spill.is_of_another_model()) {
            tracing::warn!("evicted blocks are not kept any more: the model's files have changed");
            self.scheduler.forget_stored();
            self.spill = None;
        }
    }
}
