//! Assigns replicas to NUMA nodes, round-robin.

use std::collections::BTreeSet;
use std::fs;

/// Returns the nodes whose processors this process may use, or an empty list if the system does not report nodes.
pub(super) fn nodes() -> Vec<u32> {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let allowed = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap_or_default();
    let allowed: BTreeSet<u32> = numbers(allowed).collect();
    let directory = "/sys/devices/system/node";
    let online = fs::read_to_string(format!("{directory}/online")).unwrap_or_default();
    let is_usable = |node: &u32| {
        let list = fs::read_to_string(format!("{directory}/node{node}/cpulist")).unwrap_or_default();
        numbers(&list).any(|number| allowed.contains(&number))
    };
    numbers(&online).filter(is_usable).collect()
}

/// Returns the flag that assigns a replica, numbered from 0, to a node. `None` if there are fewer than two nodes, or if
/// `flags` contain the flag.
pub(super) fn flag(nodes: &[u32], replica: usize, flags: &[String]) -> Option<String> {
    const FLAG: &str = "--numa-node";
    if nodes.len() < 2 || flags.iter().any(|flag| flag.starts_with(FLAG)) {
        return None;
    }
    Some(format!("{FLAG}={}", nodes[replica % nodes.len()]))
}

/// Parses a list of numbers in the format of the kernel, such as `0-3,8`.
fn numbers(list: &str) -> impl Iterator<Item = u32> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.parse::<u32>().ok()?..=last.parse::<u32>().ok()?)
    };
    list.trim().split(',').filter_map(range).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replicas_are_assigned_round_robin_unless_the_flag_is_set() {
        let assigned = |nodes: &[u32], flags: &[&str]| -> Vec<Option<String>> {
            let flags: Vec<String> = flags.iter().map(|&flag| flag.to_owned()).collect();
            (0..3).map(|replica| flag(nodes, replica, &flags)).collect()
        };
        let some = |node: u32| Some(format!("--numa-node={node}"));
        assert_eq!(assigned(&[0, 2], &["--model=m"]), [some(0), some(2), some(0)]);
        assert_eq!(assigned(&[0], &[]), [None, None, None]);
        assert_eq!(assigned(&[], &[]), [None, None, None]);
        assert_eq!(assigned(&[0, 1], &["--numa-node=1"]), [None, None, None]);
    }

    #[test]
    fn the_nodes_of_this_machine_are_detected() {
        assert_eq!(numbers(" 0-2,7\n").collect::<Vec<_>>(), [0, 1, 2, 7]);
        if fs::exists("/sys/devices/system/node/online").unwrap_or(false) {
            assert!(!nodes().is_empty());
        }
    }
}
