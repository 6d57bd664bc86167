//! Binds the process to one NUMA node: to its processors and its memory.
//!
//! Every step reads the weights from memory, and the memory of another node is slower to read. The binding applies to
//! the calling thread and is inherited by the threads that it starts, so the process must be bound before it starts
//! other threads.

use std::{fs, io};

use rustix::thread::{CpuSet, sched_setaffinity};

/// The directory in which the system describes its nodes.
const NODES: &str = "/sys/devices/system/node";
/// `MPOL_BIND` of `set_mempolicy(2)`.
const BIND: libc::c_int = 2;
/// Maximum number of nodes that a Linux kernel supports.
const NODES_MAX: usize = 1024;
const WORDS: usize = NODES_MAX / u64::BITS as usize;

/// The reason why the process cannot run on a node.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    /// The machine has no node with this number.
    #[error("NUMA node {node} does not exist (this machine has: {})", list(.nodes))]
    Unknown {
        /// The number of the requested node.
        node: u32,
        /// The numbers of the existing nodes.
        nodes: Vec<u32>,
    },
    /// The process is not allowed to use any processor of the node.
    #[error("NUMA node {0} has no processor that this process is allowed to use")]
    NoProcessor(u32),
    /// The system rejected the binding.
    #[error("failed to bind the process to NUMA node {node}")]
    Refused {
        /// The number of the requested node.
        node: u32,
        /// The error that the system returned.
        source: io::Error,
    },
}

/// The binding of a process to a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NumaBinding {
    /// Number of the node's processors that the process uses.
    pub processors: usize,
    /// Whether the process allocates memory from the node only. Containers may not be allowed to set this policy
    /// (`set_mempolicy`); their memory still comes from the node while the node has free memory.
    pub is_memory_bound: bool,
}

/// Binds the calling thread, and the threads that it starts later, to the processors of `node` that the process is
/// allowed to use, and to the memory of the node.
///
/// # Errors
/// The node does not exist, none of its processors is allowed, or the system rejects the binding.
pub fn run_on_node(node: u32) -> Result<NumaBinding, NodeError> {
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
    // SAFETY: the kernel reads one bit less than the given number, so it reads NODES_MAX bits, the size of the mask.
    let bound = unsafe { libc::syscall(libc::SYS_set_mempolicy, BIND, mask.as_ptr(), NODES_MAX + 1) } == 0;
    let mut set = CpuSet::new();
    for number in used.iter().map(|&number| number as usize).filter(|&number| number < CpuSet::MAX_CPU) {
        set.set(number);
    }
    sched_setaffinity(None, &set).map_err(|error| NodeError::Refused { node, source: error.into() })?;
    Ok(NumaBinding { processors: used.len(), is_memory_bound: bound })
}

/// The nodes with processors that the process is allowed to use. A process on several nodes reads memory of other
/// nodes, which is slower, unless its threads are divided into groups.
#[must_use]
pub fn nodes_in_use() -> Vec<u32> {
    processors_by_node().into_iter().map(|node| node.number).collect()
}

/// A NUMA node, and those of its processors that the process is allowed to use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NodeProcessors {
    pub(crate) number: u32,
    pub(crate) processors: Vec<u32>,
}

/// The nodes with processors that the process is allowed to use.
pub(crate) fn processors_by_node() -> Vec<NodeProcessors> {
    let allowed = processors();
    let nodes = nodes().into_iter();
    let nodes = nodes.map(|number| NodeProcessors { number, processors: processors_of(number, &allowed) });
    nodes.filter(|node| !node.processors.is_empty()).collect()
}

/// Returns the number of bytes that are free or reclaimable on the nodes to which the thread's memory is bound, or
/// `None` if its memory is not bound.
pub(crate) fn available_bytes() -> Option<u64> {
    let mut mode: libc::c_int = 0;
    let mut mask = [0u64; WORDS];
    // SAFETY: the kernel writes one integer and at most NODES_MAX bits, which is the size of the mask.
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

/// Returns the nodes of the machine, or an empty list if the system does not report them.
fn nodes() -> Vec<u32> {
    numbers(&fs::read_to_string(format!("{NODES}/online")).unwrap_or_default())
}

/// Returns the processors on which the thread is allowed to run, or an empty list if the system does not report them.
fn processors() -> Vec<u32> {
    let status = fs::read_to_string("/proc/thread-self/status").unwrap_or_default();
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    numbers(list.unwrap_or_default())
}

/// The processors of a node that are among the `allowed` ones.
fn processors_of(node: u32, allowed: &[u32]) -> Vec<u32> {
    let mut of_node = numbers(&fs::read_to_string(format!("{NODES}/node{node}/cpulist")).unwrap_or_default());
    of_node.retain(|number| allowed.contains(number));
    of_node
}

/// Parses a list of numbers in the format of the kernel, such as `0-3,8`. Parts that are not numbers are skipped.
fn numbers(list: &str) -> Vec<u32> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.parse::<u32>().ok()?..=last.parse::<u32>().ok()?)
    };
    list.trim().split(',').filter_map(range).flatten().collect()
}

/// Returns the number of bytes of a node's memory that are free or that the kernel can reclaim.
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
    fn lists_in_the_format_of_the_kernel_are_parsed() {
        assert_eq!(numbers("0-3,8,10-11\n"), [0, 1, 2, 3, 8, 10, 11]);
        assert_eq!(numbers("0\n"), [0]);
        assert!(numbers("\n").is_empty() && numbers("a-b").is_empty());
    }

    #[test]
    fn reclaimable_memory_counts_as_available() {
        let text = "Node 1 MemTotal:  900 kB\nNode 1 MemFree:  100 kB\nNode 1 Active(file): 20 kB\n\
                    Node 1 Inactive(file): 3 kB\nNode 1 Active(anon): 4000 kB\nNode 1 SReclaimable:  5 kB\n";
        assert_eq!(available_of(text), 128 * 1024);
        assert_eq!(available_of(""), 0);
    }

    #[test]
    fn a_thread_can_be_bound_to_an_existing_node_only() {
        // The binding cannot be undone, so it is tested on a separate thread.
        std::thread::spawn(|| {
            let unknown = run_on_node(1000).unwrap_err().to_string();
            assert!(unknown.starts_with("NUMA node 1000 does not exist (this machine has: "), "{unknown}");
            let Some(&node) = nodes_in_use().first() else { return };
            let found = run_on_node(node).unwrap();
            assert_eq!(processors().len(), found.processors);
            assert_eq!(nodes_in_use(), [node]);
            assert_eq!(available_bytes().is_some(), found.is_memory_bound);
            assert!(available_bytes().is_none_or(|bytes| bytes > 0));
        })
        .join()
        .unwrap();
    }
}
