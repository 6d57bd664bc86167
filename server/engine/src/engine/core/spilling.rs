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

    /// Waits for what the next step needs: blocks that are read back, or guides that are ready. `None` if there is news of
    /// either, or a block is late; a command if one comes before that.
    pub(super) fn await_news(&mut self, shared: &Shared) -> Option<Command> {
        let under_way = |core: &Self| core.spill.as_ref().map_or(0, |spill| spill.under_way());
        let before = under_way(self);
        loop {
            self.look_at_spill(shared);
            if self.guides.collect(&mut self.requests) || under_way(self) != before {
                break;
            }
            let late = self.spill.as_ref().and_then(|spill| spill.next_late());
            let command = match late {
                Some(late) => self.commands.recv_timeout(late.saturating_sub(shared.clock.now())).ok(),
                None if self.guides.are_away() => self.commands.recv().ok(),
                None => break,
            };
            match (command, late) {
                (Some(Command::Wake), _) => self.waker.woke(),
                (Some(command), _) => {
                    self.is_stalled = false;
                    return Some(command);
                }
                (None, Some(late)) => {
                    // By the time that was waited: a simulated clock stands still meanwhile.
                    let Self { spill: Some(spill), scheduler, .. } = self else { break };
                    spill.expire(scheduler, late);
                }
                (None, None) => break,
            }
        }
        self.is_stalled = false;
        None
    }

    /// Forgets what is cached, of which nobody holds anything; kept if evicted blocks are.
    pub(super) fn give_up_cached(&mut self) {
        let Self { spill, scheduler, runner, .. } = self;
        match spill {
            Some(spill) => spill.flush(scheduler, &**runner),
            None => scheduler.clear_cache(),
        }
    }

    /// The model was loaded anew.
    pub(super) fn check_spill(&mut self) {
        if self.spill.as_ref().is_some_and(|spill| spill.is_of_another_model()) {
            tracing::warn!("evicted blocks are not kept any more: the model's files have changed");
            self.scheduler.disable_spill();
            self.spill = None;
        }
    }
}
