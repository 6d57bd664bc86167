//! Wakes the engine's thread when another thread has something for it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::SyncSender;

use crate::handle::Command;

/// Sends the engine's thread a command to wake up. At most one such command is on its way, whoever sends it.
#[derive(Clone, Debug)]
pub(crate) struct Waker {
    commands: SyncSender<Command>,
    is_under_way: Arc<AtomicBool>,
}

impl Waker {
    pub(crate) fn new(commands: SyncSender<Command>) -> Self {
        Self { commands, is_under_way: Arc::default() }
    }

    pub(crate) fn wake(&self) {
        if !self.is_under_way.swap(true, Ordering::AcqRel) {
            // There is room for it; without a receiver there is nobody to wake.
            let _ = self.commands.try_send(Command::Wake);
        }
    }

    /// The engine's thread is awake. It looks at what the other threads have done after this call, so that nothing is missed.
    pub(crate) fn woke(&self) {
        self.is_under_way.store(false, Ordering::Release);
    }
}
