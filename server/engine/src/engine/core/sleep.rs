//! Sleep and waking, on the engine's thread: between steps, and only while nothing is in work.

use super::Core;
use crate::handle::Shared;
use crate::report::StepReport;
use crate::request::Failure;
use crate::runner::RunError;
use crate::sleep::{SleepCommand, SleepError, SleepLevel};

impl Core {
    /// Does what is asked, and answers.
    ///
    /// # Errors
    /// The runner is of no further use.
    pub(super) fn change_sleep(&mut self, command: SleepCommand, shared: &Shared) -> Result<(), RunError> {
        let SleepCommand { level, answer, _turn } = command;
        // Nobody is in the way who has gone.
        self.requests.drop_abandoned(&mut self.scheduler);
        let outcome = match level {
            None => self.wake(shared)?.map_err(SleepError::Wake),
            Some(_) if !self.scheduler.is_idle() => Err(SleepError::Busy),
            // What it gave back it has given back.
            Some(level) if self.asleep >= Some(level) => Ok(()),
            Some(level) => {
                self.give_up_cached();
                self.runner.sleep(level);
                self.drafting.sleep(level);
                self.asleep = Some(level);
                tracing::info!(?level, "asleep: the next request wakes the model");
                Ok(())
            }
        };
        // Whoever has the answer finds it confirmed.
        self.publish(shared);
        // Whoever asked may have gone.
        let _ = answer.send(outcome);
        Ok(())
    }

    /// Wakes the runner for what there is to compute. False if that fails, and with it all requests: the next one tries
    /// again.
    ///
    /// # Errors
    /// As [`Self::change_sleep`].
    pub(super) fn is_awake(&mut self, shared: &Shared) -> Result<bool, RunError> {
        if self.asleep.is_none() {
            return Ok(true);
        }
        // They wait, and whoever looks sees that they do.
        self.publish(shared);
        match self.wake(shared)? {
            Ok(()) => Ok(true),
            Err(message) => {
                tracing::warn!("failed to wake the model: {message}");
                let all: Vec<u64> = self.requests.live.keys().copied().collect();
                for &number in &all {
                    self.requests.fail(number, Failure::Wake(message.clone()), &mut self.scheduler);
                }
                let requests_failed = all.len() as u32;
                (self.observer)(&StepReport { requests_failed, ..StepReport::default() });
                Ok(false)
            }
        }
    }

    fn wake(&mut self, shared: &Shared) -> Result<Result<(), String>, RunError> {
        if self.asleep.is_none() {
            return Ok(Ok(()));
        }
        let began = shared.clock.now();
        match self.runner.wake() {
            Ok(()) => {}
            Err(error) if error.fatal => return Err(error),
            Err(error) => return Ok(Err(error.message)),
        }
        self.drafting.wake();
        if self.asleep == Some(SleepLevel::Model) {
            self.check_spill();
        }
        self.asleep = None;
        let wake_time = shared.clock.now() - began;
        tracing::info!(ms = wake_time.as_millis() as u64, "awake");
        let wake_time = Some(wake_time);
        (self.observer)(&StepReport { wake_time, ..StepReport::default() });
        Ok(Ok(()))
    }
}
