//! Which NUMA node each replica of a machine with several runs on: one after the other, in turn.

use std::collections::BTreeSet;
use std::fs;

/// The nodes whose processors may be used here; none where the system does not tell.
pub(super) fn nodes() -> Vec<u32> {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let allowed = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap_or_default();
    let allowed: BTreeSet<u32> = numbers(allowed).collect();
    let folder = "/sys/devices/system/node";
    let online = fs::read_to_string(format!("{folder}/online")).unwrap_or_default();
    let is_usable = |node: &u32| {
        let list = fs::read_to_string(format!("{folder}/node{node}/cpulist")).unwrap_or_default();
        numbers(&list).any(|number| allowed.contains(&number))
    };
    numbers(&online).filter(is_usable).collect()
}

/// What a replica is told, counted from 0; nothing on a machine of one node, or where `flags` say it.
pub(super) fn flag(nodes: &[u32], replica: usize, flags: &[String]) -> Option<String> {
    const FLAG: &str = "--numa-node";
    if nodes.len() < 2 || flags.iter().any(|flag| flag.starts_with(FLAG)) {
        return None;
    }
    Some(format!("{FLAG}={}", nodes[replica % nodes.len()]))
}

/// Numbers as the kernel lists them, such as `0-3,8`.
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
    fn replicas_take_turns_on_the_nodes_unless_they_are_told_otherwise() {
        let told = |nodes: &[u32], flags: &[&str]| -> Vec<Option<String>> {
            let flags: Vec<String> = flags.iter().map(|&flag| flag.to_owned()).collect();
            (0..3).map(|replica| flag(nodes, replica, &flags)).collect()
        };
        let some = |node: u32| Some(format!("--numa-node={node}"));
        assert_eq!(told(&[0, 2], &["--model=m"]), [some(0), some(2), some(0)]);
        assert_eq!(told(&[0], &[]), [None, None, None]);
        assert_eq!(told(&[], &[]), [None, None, None]);
        assert_eq!(told(&[0, 1], &["--numa-node=1"]), [None, None, None]);
    }

    #[test]
    fn the_nodes_of_this_machine_are_told() {
        assert_eq!(numbers(" 0-2,7\n").collect::<Vec<_>>(), [0, 1, 2, 7]);
        if fs::exists("/sys/devices/system/node/online").unwrap_or(false) {
            assert!(!nodes().is_empty());
        }
    }
}
