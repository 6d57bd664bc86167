//! Puts an idle engine to sleep. The sleep level determines which memory the engine releases.

use std::time::Duration;

use server_engine::{EngineHandle, EngineLoad, EngineState, SleepError, SleepLevel};

/// Returns the sleep level with this number in vLLM, or `None` if the engine has no such level.
pub(crate) fn level(number: u8) -> Option<SleepLevel> {
    match number {
        1 => Some(SleepLevel::Cache),
        2 => Some(SleepLevel::Model),
        _ => None,
    }
}

/// Puts the engine to sleep whenever it has been idle for `after`. Never returns.
///
/// # Cancel safety
/// Dropping the future has no effect on the engine.
pub async fn sleep_when_idle(engine: EngineHandle, after: Duration, level: SleepLevel) {
    let mut load = engine.load();
    let may_sleep = |load: &EngineLoad| {
        load.state == EngineState::Serving
            && load.sleep_level < Some(level)
            && (load.load.running, load.load.waiting) == (0, 0)
    };
    while load.wait_for(may_sleep).await.is_ok() {
        tokio::select! {
            // Any change of the load restarts the idle time.
            changed = load.changed() => if changed.is_err() { break },
            () = tokio::time::sleep(after) => match engine.sleep(level).await {
                // The engine is busy if a request has just arrived.
                Ok(()) | Err(SleepError::Busy) => {}
                Err(SleepError::Wake(_) | SleepError::Stopped) => break,
            },
        }
    }
    std::future::pending().await
}
