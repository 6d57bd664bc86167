//! When an idle engine is put to sleep. What it gives back then is the engine's business.

use std::time::Duration;

use server_engine::{EngineHandle, EngineLoad, EngineState, SleepError, SleepLevel};

/// The level of this number, as vLLM counts them; `None` if there is none.
pub(crate) fn level(number: u8) -> Option<SleepLevel> {
    match number {
        1 => Some(SleepLevel::Cache),
        2 => Some(SleepLevel::Model),
        _ => None,
    }
}

/// Puts the engine to sleep whenever it has had nothing to do for `after`. Never ends.
///
/// # Cancel safety
/// Dropped, it lets the engine be.
pub async fn sleep_when_idle(engine: EngineHandle, after: Duration, level: SleepLevel) {
    let mut load = engine.load();
    let may_sleep = |load: &EngineLoad| {
        load.state == EngineState::Serving
            && load.sleep_level < Some(level)
            && (load.load.running, load.load.waiting) == (0, 0)
    };
    while load.wait_for(may_sleep).await.is_ok() {
        tokio::select! {
            // Whatever it is, the time begins anew.
            changed = load.changed() => if changed.is_err() { break },
            () = tokio::time::sleep(after) => match engine.sleep(level).await {
                // A request came at this moment.
                Ok(()) | Err(SleepError::Busy) => {}
                Err(SleepError::Wake(_) | SleepError::Stopped) => break,
            },
        }
    }
    std::future::pending().await
}
