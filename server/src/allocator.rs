//! The C library's allocator: how much of the memory that requests have freed stays with this process.
//!
//! By default it has as many arenas as there are threads and retains what is freed in each, so a burst of large requests would
//! keep its memory for good. See decision 0081.

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

/// Makes all threads allocate from one arena. To be called before there is another thread.
#[cfg(feature = "openvino")]
pub(crate) fn use_one_arena() {
    server_openvino::use_one_arena();
}

/// Without the runtime's crate nothing can configure the allocator.
#[cfg(not(feature = "openvino"))]
pub(crate) fn use_one_arena() {}

/// Returns free memory to the operating system.
#[cfg(feature = "openvino")]
fn return_free_memory() {
    server_openvino::trim();
}

/// Without the runtime's crate nothing can ask the allocator.
#[cfg(not(feature = "openvino"))]
fn return_free_memory() {}

/// Trims whenever the memory of this process has grown, for as long as it is polled.
pub(crate) async fn trim_after_growth() -> anyhow::Result<Infallible> {
    let mut trimmer = Trimmer { floor: anonymous_bytes().unwrap_or(u64::MAX) };
    let mut ticks = tokio::time::interval(INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        // Systems that do not report it are left alone.
        let Some(before) = anonymous_bytes() else { return std::future::pending().await };
        if trimmer.is_due(before) {
            tokio::task::spawn_blocking(return_free_memory).await?;
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
