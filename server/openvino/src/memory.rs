//! Determines the available memory, and returns unused memory to the system.

use std::fs;

use crate::numa;

/// Bytes that this process can still allocate: the minimum of the bytes available on the machine, within the limit of
/// its control group, and on the NUMA nodes to which its memory is bound. `None` if the system reports none of these
/// numbers.
pub fn available_bytes() -> Option<u64> {
    let machine = fs::read_to_string("/proc/meminfo").ok().and_then(|text| meminfo_available(&text));
    [machine, group_available(), numa::available_bytes()].into_iter().flatten().min()
}

/// Returns the whole free pages of the C library's allocator to the system.
pub fn trim() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: the call touches only free memory, under the allocator's locks.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Makes all threads allocate from one arena of the C library's allocator, instead of up to eight per processor. The
/// call affects only threads that are started later.
pub fn use_one_arena() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: the call sets a parameter of the allocator, under the allocator's locks.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}

fn meminfo_available(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

/// Bytes that remain within the limit of the control group (version 2), as a container sees it: the limit minus the used
/// memory that cannot be reclaimed.
fn group_available() -> Option<u64> {
    let read = |name| fs::read_to_string(format!("/sys/fs/cgroup/{name}")).ok();
    let limit: u64 = read("memory.max")?.trim().parse().ok()?;
    let used: u64 = read("memory.current")?.trim().parse().ok()?;
    let stat = read("memory.stat").unwrap_or_default();
    let reclaimable: u64 = stat
        .lines()
        .filter_map(|line| line.strip_prefix("inactive_file "))
        .filter_map(|bytes| bytes.trim().parse::<u64>().ok())
        .sum();
    Some(limit.saturating_sub(used.saturating_sub(reclaimable)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_available_line_of_meminfo() {
        let text = "MemTotal:       24000000 kB\nMemFree:   1 kB\nMemAvailable:   23000000 kB\n";
        assert_eq!(meminfo_available(text), Some(23_000_000 * 1024));
        assert_eq!(meminfo_available("MemFree: 1 kB"), None);
    }

    #[test]
    fn this_machine_reports_available_memory() {
        assert!(available_bytes().is_some_and(|bytes| bytes > 1 << 20));
    }
}
