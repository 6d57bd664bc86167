//! Determines the available memory, and returns unused memory to the system.

use std::fs;
use std::path::Path;

use crate::numa;

/// The folder in which the files of control groups are mounted. A container sees those of its own group.
const CONTROL_GROUPS: &str = "/sys/fs/cgroup";

/// Bytes that this process can still allocate: the minimum of the bytes available on the machine, within the limit of
/// its control group, and on the NUMA nodes to which its memory is bound. `None` if the system reports none of these
/// numbers.
pub fn available_bytes() -> Option<u64> {
    let machine = fs::read_to_string("/proc/meminfo").ok().and_then(|text| meminfo_available(&text));
    let group = group_available(Path::new(CONTROL_GROUPS));
    [machine, group, numa::available_bytes()].into_iter().flatten().min()
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

/// The files of the memory controller in a version of control groups.
struct ControllerFiles {
    limit: &'static str,
    usage: &'static str,
    statistics: &'static str,
    /// The statistics of the page cache, all of which the kernel can reclaim.
    page_cache: [&'static str; 2],
}

const VERSION_2: ControllerFiles = ControllerFiles {
    limit: "memory.max",
    usage: "memory.current",
    statistics: "memory.stat",
    page_cache: ["inactive_file", "active_file"],
};

const VERSION_1: ControllerFiles = ControllerFiles {
    limit: "memory/memory.limit_in_bytes",
    usage: "memory/memory.usage_in_bytes",
    statistics: "memory/memory.stat",
    page_cache: ["total_inactive_file", "total_active_file"],
};

/// Bytes that remain within the limit of the control group whose files are in `root`. `None` if the group has no limit.
/// In version 1, a group without a limit has one that exceeds the memory of any machine.
fn group_available(root: &Path) -> Option<u64> {
    [VERSION_2, VERSION_1].iter().find_map(|files| files.available(root))
}

impl ControllerFiles {
    /// The limit minus the used memory that the kernel cannot reclaim, in bytes.
    fn available(&self, root: &Path) -> Option<u64> {
        let read = |name| fs::read_to_string(root.join(name)).ok();
        let limit: u64 = read(self.limit)?.trim().parse().ok()?;
        let used: u64 = read(self.usage)?.trim().parse().ok()?;
        let statistics = read(self.statistics).unwrap_or_default();
        let reclaimable: u64 = statistics
            .lines()
            .filter_map(|line| line.split_once(' '))
            .filter(|(name, _)| self.page_cache.contains(name))
            .filter_map(|(_, bytes)| bytes.trim().parse::<u64>().ok())
            .sum();
        Some(limit.saturating_sub(used.saturating_sub(reclaimable)))
    }
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

    /// Returns the available bytes of a control group with these files.
    fn available_with(files: &[(&str, &str)]) -> Option<u64> {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("memory")).unwrap();
        for (name, text) in files {
            fs::write(root.path().join(name), text).unwrap();
        }
        group_available(root.path())
    }

    #[test]
    fn page_cache_does_not_count_as_used_in_version_2() {
        let statistics =
            "anon 400\nfile 550\ninactive_anon 7\ninactive_file 200\nactive_file 300\nunevictable 50\n";
        let usage = ("memory.current", "1000\n");
        let available = |limit| available_with(&[("memory.max", limit), usage, ("memory.stat", statistics)]);
        assert_eq!(available("4000\n"), Some(4000 - (1000 - 500)));
        // The limit was lowered below the usage.
        assert_eq!(available("400\n"), Some(0));
        assert_eq!(available("max\n"), None);
    }

    #[test]
    fn the_limit_of_version_1_counts() {
        // The values without the prefix exclude those of the groups below.
        let statistics = "inactive_file 1\nactive_file 2\ntotal_inactive_file 200\ntotal_active_file 300\n";
        let available = |limit| {
            available_with(&[
                ("memory/memory.limit_in_bytes", limit),
                ("memory/memory.usage_in_bytes", "1000\n"),
                ("memory/memory.stat", statistics),
            ])
        };
        assert_eq!(available("4000\n"), Some(4000 - (1000 - 500)));
        // The kernel reports this for a group without a limit.
        let unlimited = available("9223372036854771712\n");
        assert!(unlimited.is_some_and(|bytes| bytes > 1 << 60), "{unlimited:?}");
    }

    #[test]
    fn a_machine_without_a_memory_controller_has_no_limit() {
        assert_eq!(available_with(&[]), None);
    }

    #[test]
    fn this_machine_reports_available_memory() {
        assert!(available_bytes().is_some_and(|bytes| bytes > 1 << 20));
    }
}
