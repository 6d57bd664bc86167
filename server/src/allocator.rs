//! Returns freed memory to the operating system.
//!
//! By default, the C library's allocator has up to eight arenas per processor and retains most of the memory that is
//! freed in them, so most of the memory of a burst of large requests would never be returned. See decision 0081.

use std::convert::Infallible;
use std::time::{Duration, Instant};

use tokio::time::MissedTickBehavior;

/// The interval at which the memory of the process is measured.
const INTERVAL: Duration = Duration::from_secs(5);
/// The memory is trimmed only if it exceeds the lowest measurement by at least this number of bytes, because trimming
/// holds the allocator's locks for several milliseconds.
const EXCESS_BYTES_MIN: u64 = 32 << 20;
/// The maximum of [`Trimmer::period`], which grows if trims return little memory because the memory is still in use.
/// Memory that becomes unused later is returned within half a minute.
const READINGS_MAX: u32 = 6;

/// Decides when to trim the allocator's memory.
#[derive(Debug)]
struct Trimmer {
    /// The lowest measurement so far, in bytes.
    least: u64,
    /// Minimum number of measurements from one trim to the next.
    period: u32,
    /// Number of measurements since the last trim.
    readings: u32,
}

impl Trimmer {
    fn new(anonymous: u64) -> Self {
        Self { least: anonymous, period: 1, readings: 0 }
    }

    /// Whether to trim after a measurement of `anonymous` bytes.
    fn is_due(&mut self, anonymous: u64) -> bool {
        self.least = self.least.min(anonymous);
        self.readings += 1;
        anonymous - self.least >= EXCESS_BYTES_MIN && self.readings >= self.period
    }

    /// Records a trim that changed the memory from `before` to `after` bytes. Memory that is in use now may be free
    /// later, so a trim that returns little memory is repeated, but at increasing intervals.
    fn record_trim(&mut self, before: u64, after: u64) {
        self.readings = 0;
        let is_useful = before.saturating_sub(after) >= EXCESS_BYTES_MIN / 4;
        self.period = if is_useful { 1 } else { (2 * self.period).min(READINGS_MAX) };
    }
}

/// Makes all threads allocate from one arena. This function must be called before another thread starts.
#[cfg(feature = "openvino")]
pub(crate) fn use_one_arena() {
    server_openvino::use_one_arena();
}

/// Does nothing: only the OpenVINO crate can configure the allocator.
#[cfg(not(feature = "openvino"))]
pub(crate) fn use_one_arena() {}

/// Returns free memory to the operating system.
#[cfg(feature = "openvino")]
fn return_free_memory() {
    server_openvino::trim();
}

/// Does nothing: only the OpenVINO crate can call the allocator.
#[cfg(not(feature = "openvino"))]
fn return_free_memory() {}

/// Trims the memory of this process when it exceeds its lowest measurement by at least [`EXCESS_BYTES_MIN`]. Never
/// returns.
pub(crate) async fn trim_excess() -> anyhow::Result<Infallible> {
    let mut trimmer = Trimmer::new(anonymous_bytes().unwrap_or(u64::MAX));
    let mut ticks = tokio::time::interval(INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        // Some systems do not report the memory of a process, so nothing is trimmed there.
        let Some(before) = anonymous_bytes() else { return std::future::pending().await };
        if trimmer.is_due(before) {
            let start = Instant::now();
            tokio::task::spawn_blocking(return_free_memory).await?;
            let elapsed = start.elapsed();
            let after = anonymous_bytes().unwrap_or(before);
            trimmer.record_trim(before, after);
            tracing::debug!(before, after, ?elapsed, "trimmed the memory of the process");
        }
    }
}

/// Returns the resident anonymous memory of this process in bytes, or `None` if the system does not report it.
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
    fn trims_while_there_is_excess_and_less_often_if_it_is_in_use() {
        let mut trimmer = Trimmer::new(100 << 20);
        assert!(!trimmer.is_due(131 << 20));
        assert!(trimmer.is_due(132 << 20));
        trimmer.record_trim(132 << 20, 131 << 20);
        let mut trims = 0;
        for _ in 0..1000 {
            if trimmer.is_due(500 << 20) {
                trims += 1;
                trimmer.record_trim(500 << 20, 500 << 20);
            }
        }
        assert!((160..200).contains(&trims), "{trims} trims");
        // From here on, the memory is unused, so the next trim returns it.
        let due = (0..READINGS_MAX).any(|_| trimmer.is_due(500 << 20));
        assert!(due);
        trimmer.record_trim(500 << 20, 200 << 20);
        assert!(trimmer.is_due(200 << 20), "another trim may return more");
        trimmer.record_trim(200 << 20, 100 << 20);
        assert!(!trimmer.is_due(100 << 20));
    }

    #[test]
    fn the_memory_of_this_process_can_be_measured() {
        assert!(anonymous_bytes().is_some_and(|bytes| bytes > 100 << 10));
    }
}
