//! Determines the available memory, and returns unused memory to the system.

use std::fs;
use std::path::Path;

use crate::numa;

/// The directory in which control groups are mounted.
const CONTROL_GROUPS: &str = "/sys/fs/cgroup";

/// Returns the number of bytes that this process can still allocate: the minimum of the bytes available on the machine,
/// within the limits of its control groups, and on the NUMA nodes to which its memory is bound. Returns `None` if the
/// system reports none of these numbers.
pub fn available_bytes() -> Option<u64> {
    let machine = fs::read_to_string("/proc/meminfo").ok().and_then(|text| meminfo_available(&text));
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let group = group_available(Path::new(CONTROL_GROUPS), &groups);
    [machine, group, numa::available_bytes()].into_iter().flatten().min()
}

/// Returns the free memory of the C library's allocator to the system, in whole pages. Only glibc supports this.
pub fn trim() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: the call touches only free memory, under the allocator's locks.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Limits the C library's allocator to one arena, instead of up to eight per processor. A thread that already uses
/// another arena continues to use it. Only glibc supports this.
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
    /// The names of the statistics that report the size of the page cache, all of which the kernel can reclaim.
    page_cache: [&'static str; 2],
}

const VERSION_2: ControllerFiles = ControllerFiles {
    limit: "memory.max",
    usage: "memory.current",
    statistics: "memory.stat",
    page_cache: ["inactive_file", "active_file"],
};

const VERSION_1: ControllerFiles = ControllerFiles {
    limit: "memory.limit_in_bytes",
    usage: "memory.usage_in_bytes",
    statistics: "memory.stat",
    page_cache: ["total_inactive_file", "total_active_file"],
};

/// Returns the number of bytes that remain within the limits of the control groups of a process and of their ancestors,
/// or `None` if no group has a limit. In version 1, the kernel reports a limit that exceeds the memory of any machine
/// for a group without a limit.
///
/// `groups` is the content of `/proc/PID/cgroup`. Its paths can be those of the host, while only the process's own
/// group is mounted, at the root.
fn group_available(mount: &Path, groups: &str) -> Option<u64> {
    let limit = |line: &str| {
        let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
        let (files, root) = match controllers {
            "" => (VERSION_2, mount.to_owned()),
            _ if controllers.split(',').any(|name| name == "memory") => (VERSION_1, mount.join("memory")),
            _ => return None,
        };
        let group = root.join(path.trim_start_matches('/'));
        let groups = group.ancestors().take_while(|directory| directory.starts_with(&root));
        groups.filter_map(|directory| files.available(directory)).min()
    };
    groups.lines().filter_map(limit).min()
}

impl ControllerFiles {
    /// The limit minus the used memory that the kernel cannot reclaim, in bytes.
    fn available(&self, directory: &Path) -> Option<u64> {
        let read = |name| fs::read_to_string(directory.join(name)).ok();
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

    /// Returns the available bytes of a process in these groups, given the files of the groups.
    fn available_in(groups: &str, files: &[(&str, &str)]) -> Option<u64> {
        let root = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = root.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        group_available(root.path(), groups)
    }

    fn available_with(files: &[(&str, &str)]) -> Option<u64> {
        available_in("4:cpu,memory:/\n0::/\n", files)
    }

    #[test]
    fn the_smallest_limit_of_the_group_and_those_around_it_counts() {
        let files = [
            ("system.slice/memory.max", "900\n"),
            ("system.slice/memory.current", "500\n"),
            ("system.slice/a.service/memory.max", "800\n"),
            ("system.slice/a.service/memory.current", "100\n"),
            ("system.slice/b.service/memory.max", "10\n"),
            ("system.slice/b.service/memory.current", "1\n"),
        ];
        assert_eq!(available_in("0::/system.slice/a.service\n", &files), Some(400));
        assert_eq!(available_in("0::/system.slice/b.service\n", &files), Some(9));
        // In a container, the path may be the group's path on the host, although only the group itself is mounted.
        let own = [("memory/memory.limit_in_bytes", "70\n"), ("memory/memory.usage_in_bytes", "20\n")];
        assert_eq!(available_in("7:memory:/docker/1\n0::/\n", &own), Some(50));
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
        // The values without the prefix `total_` exclude those of child groups.
        let statistics = "inactive_file 1\nactive_file 2\ntotal_inactive_file 200\ntotal_active_file 300\n";
        let available = |limit| {
            available_with(&[
                ("memory/memory.limit_in_bytes", limit),
                ("memory/memory.usage_in_bytes", "1000\n"),
                ("memory/memory.stat", statistics),
            ])
        };
        assert_eq!(available("4000\n"), Some(4000 - (1000 - 500)));
        // The kernel reports this number for a group without a limit.
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
