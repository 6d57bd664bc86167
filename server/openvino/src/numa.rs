//! On which NUMA node of the machine the process runs: its processors, and the memory that is theirs.
//!
//! Weights are read from memory in every step, and another node's is slower to read. What is decided here is
//! the calling thread's, and goes on to the threads that it starts; so it is to be called before there are any.

use std::{fs, io, mem};

/// Where the system tells of its nodes.
const NODES: &str = "/sys/devices/system/node";
/// `MPOL_BIND` of `set_mempolicy(2)`.
const BIND: libc::c_int = 2;
/// Most nodes of a machine, as many as Linux is built for at most.
const NODES_MAX: usize = 1024;
const WORDS: usize = NODES_MAX / u64::BITS as usize;

/// Why the process cannot run on a node.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    /// There is none of this number.
    #[error("there is no NUMA node {node} (there are: {})", list(.nodes))]
    Unknown {
        /// The one asked for.
        node: u32,
        /// Those that there are.
        nodes: Vec<u32>,
    },
    /// The process may use no processor of it.
    #[error("NUMA node {0} has no processor that this process may use")]
    NoProcessor(u32),
    /// The system does not allow it.
    #[error("cannot run on NUMA node {node}")]
    Refused {
        /// The one asked for.
        node: u32,
        /// What the system says.
        source: io::Error,
    },
}

/// What a process that runs on a node has of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OnNode {
    /// Processors.
    pub processors: usize,
    /// Whether memory comes from there alone. A container may not be allowed to say so (`set_mempolicy`): then it comes from
    /// there as long as there is some.
    pub is_memory_bound: bool,
}

/// Runs the calling thread, and all that it starts from now on, on the processors of `node` that it may use, with memory of
/// that node.
///
/// # Errors
/// There is no such node, none of its processors may be used, or the system refuses.
pub fn run_on_node(node: u32) -> Result<OnNode, NodeError> {
    let nodes = nodes();
    if !nodes.contains(&node) {
        return Err(NodeError::Unknown { node, nodes });
    }
    let used = processors_of(node, &processors());
    if used.is_empty() {
        return Err(NodeError::NoProcessor(node));
    }
    let mut mask = [0u64; WORDS];
    mask[node as usize / 64] = 1 << (node % 64);
    // SAFETY: the kernel reads as many bits as it is told, one less than are there.
    let bound = unsafe { libc::syscall(libc::SYS_set_mempolicy, BIND, mask.as_ptr(), NODES_MAX) } == 0;
    // SAFETY: a set of processors is plain bits, for which zero is empty; numbers beyond it are left out.
    let status = unsafe {
        let mut set: libc::cpu_set_t = mem::zeroed();
        for &number in used.iter().filter(|&&number| number < libc::CPU_SETSIZE as u32) {
            libc::CPU_SET(number as usize, &mut set);
        }
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set)
    };
    if status != 0 {
        return Err(NodeError::Refused { node, source: io::Error::last_os_error() });
    }
    Ok(OnNode { processors: used.len(), is_memory_bound: bound })
}

/// The nodes whose processors the process may use. More than one is slower than one, for what is read from memory all the time.
#[must_use]
pub fn nodes_in_use() -> Vec<u32> {
    let allowed = processors();
    nodes().into_iter().filter(|&node| !processors_of(node, &allowed).is_empty()).collect()
}

/// Bytes that are free on the nodes to which the thread's memory is bound, or can be freed; `None` if it is bound to none.
pub(crate) fn available_bytes() -> Option<u64> {
    let mut mode: libc::c_int = 0;
    let mut mask = [0u64; WORDS];
    // SAFETY: the kernel writes one number, and as many bits as it is told.
    let status = unsafe {
        libc::syscall(libc::SYS_get_mempolicy, &raw mut mode, mask.as_mut_ptr(), NODES_MAX, 0usize, 0usize)
    };
    if status != 0 || mode != BIND {
        return None;
    }
    let is_bound =
        |node: &u32| mask.get(*node as usize / 64).is_some_and(|word| word >> (node % 64) & 1 == 1);
    let of_node = |node: u32| {
        let text = fs::read_to_string(format!("{NODES}/node{node}/meminfo")).unwrap_or_default();
        available_of(&text)
    };
    Some(nodes().into_iter().filter(is_bound).map(of_node).sum())
}

/// The machine's nodes; none where the system does not tell.
fn nodes() -> Vec<u32> {
    numbers(&fs::read_to_string(format!("{NODES}/online")).unwrap_or_default())
}

/// The processors that the thread may run on; none where the system does not tell.
fn processors() -> Vec<u32> {
    let status = fs::read_to_string("/proc/thread-self/status").unwrap_or_default();
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    numbers(list.unwrap_or_default())
}

/// Those of a node among the `allowed` ones.
fn processors_of(node: u32, allowed: &[u32]) -> Vec<u32> {
    let mut of_node = numbers(&fs::read_to_string(format!("{NODES}/node{node}/cpulist")).unwrap_or_default());
    of_node.retain(|number| allowed.contains(number));
    of_node
}

/// Numbers as the kernel lists them, such as `0-3,8`. What is no number is left out.
fn numbers(list: &str) -> Vec<u32> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.parse::<u32>().ok()?..=last.parse::<u32>().ok()?)
    };
    list.trim().split(',').filter_map(range).flatten().collect()
}

/// What of a node's memory is free or holds what files hold too.
fn available_of(meminfo: &str) -> u64 {
    const USABLE: [&str; 4] = ["MemFree:", "Active(file):", "Inactive(file):", "SReclaimable:"];
    let kib = |line: &str| {
        let mut words = line.split_whitespace().skip(2);
        let (name, value) = (words.next()?, words.next()?);
        USABLE.contains(&name).then(|| value.parse::<u64>().ok())?
    };
    meminfo.lines().filter_map(kib).sum::<u64>() * 1024
}

fn list(nodes: &[u32]) -> String {
    match nodes {
        [] => "none".to_owned(),
        nodes => nodes.iter().map(u32::to_string).collect::<Vec<_>>().join(", "),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read_as_the_kernel_writes_them() {
        assert_eq!(numbers("0-3,8,10-11\n"), [0, 1, 2, 3, 8, 10, 11]);
        assert_eq!(numbers("0\n"), [0]);
        assert!(numbers("\n").is_empty() && numbers("a-b").is_empty());
    }

    #[test]
    fn what_a_node_has_free_is_what_can_be_freed_too() {
        let text = "Node 1 MemTotal:  900 kB\nNode 1 MemFree:  100 kB\nNode 1 Active(file): 20 kB\n\
                    Node 1 Inactive(file): 3 kB\nNode 1 Active(anon): 4000 kB\nNode 1 SReclaimable:  5 kB\n";
        assert_eq!(available_of(text), 128 * 1024);
        assert_eq!(available_of(""), 0);
    }

    #[test]
    fn a_thread_runs_on_a_node_and_on_none_that_is_not_there() {
        // Of its own, since it does not come back.
        std::thread::spawn(|| {
            let unknown = run_on_node(1000).unwrap_err().to_string();
            assert!(unknown.starts_with("there is no NUMA node 1000 (there are: "), "{unknown}");
            let Some(&node) = nodes_in_use().first() else { return };
            let found = run_on_node(node).unwrap();
            assert_eq!(processors().len(), found.processors);
            assert_eq!(nodes_in_use(), [node]);
            // Its memory is told of if it could be bound.
            assert_eq!(available_bytes().is_some(), found.is_memory_bound);
            assert!(available_bytes().is_none_or(|bytes| bytes > 0));
        })
        .join()
        .unwrap();
    }
}
