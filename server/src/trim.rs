//! Returns memory that large requests have used to the operating system. The C library's allocator retains what is freed,
//! in as many arenas as there are threads, so that a burst of large requests would take its memory for good.

use std::convert::Infallible;
use std::time::Duration;

use tokio::time::MissedTickBehavior;

/// How often the memory of the process is compared with that after the last trim.
const INTERVAL: Duration = Duration::from_secs(5);
/// Growth after which it is worth trimming, which takes the allocator's locks for some milliseconds.
const GROWTH_BYTES_MIN: u64 = 32 << 20;

/// Decides when to trim.
#[derive(Debug, Default)]
struct Trimmer {
    /// Anonymous memory when it was last trimmed, or since then if it was less.
    floor: u64,
}

impl Trimmer {
    /// Whether `anonymous` bytes are so many that some of them may be free.
    fn is_due(&mut self, anonymous: u64) -> bool {
        self.floor = self.floor.min(anonymous);
        anonymous - self.floor >= GROWTH_BYTES_MIN
    }
}

/// Trims whenever the memory of this process has grown, for as long as it is polled.
pub(crate) async fn trim_after_growth() -> anyhow::Result<Infallible> {
    let mut trimmer = Trimmer { floor: anonymous_bytes().unwrap_or(u64::MAX) };
    let mut ticks = tokio::time::interval(INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        // Systems that do not tell are left alone.
        let Some(before) = anonymous_bytes() else { return std::future::pending().await };
        if trimmer.is_due(before) {
            tokio::task::spawn_blocking(server_openvino::trim).await?;
            trimmer.floor = anonymous_bytes().unwrap_or(before);
            tracing::debug!(before, after = trimmer.floor, "trimmed the memory of the process");
        }
    }
}

/// Anonymous memory of this process that is resident.
fn anonymous_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kibibytes << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trims_after_growth_and_not_again_while_the_memory_is_in_use() {
        let mut trimmer = Trimmer { floor: 100 << 20 };
        assert!(!trimmer.is_due(131 << 20));
        assert!(trimmer.is_due(132 << 20));
        trimmer.floor = 132 << 20;
        assert!(!trimmer.is_due(132 << 20));
        // What was given up since counts.
        assert!(!trimmer.is_due(50 << 20));
        assert!(trimmer.is_due(90 << 20));
    }

    #[test]
    fn the_memory_of_this_process_is_known() {
        assert!(anonymous_bytes().is_some_and(|bytes| bytes > 100 << 10));
    }
}
