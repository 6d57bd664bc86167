//! Wakes the engine's thread when another thread has a result for it or a client has disconnected.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::SyncSender;

use crate::command::Command;

/// Sends the engine's thread a command to wake up. All clones together have at most one such command in the channel.
#[derive(Clone, Debug)]
pub(crate) struct Waker {
    commands: SyncSender<Command>,
    is_pending: Arc<AtomicBool>,
}

impl Waker {
    pub(crate) fn new(commands: SyncSender<Command>) -> Self {
        Self { commands, is_pending: Arc::default() }
    }

    pub(crate) fn wake(&self) {
        if !self.is_pending.swap(true, Ordering::AcqRel) {
            // The channel has room for this command, so sending fails only if the engine has ended.
            let _ = self.commands.try_send(Command::Wake);
        }
    }

    /// Records that the engine's thread has received the command. The thread must check the results of other threads
    /// after this call, so that it misses no result.
    pub(crate) fn acknowledge(&self) {
        // This is a swap, because a store could take effect after the engine's thread has checked the results. Another
        // thread that adds a result in between would then not wake the engine.
        self.is_pending.swap(false, Ordering::AcqRel);
    }
}
