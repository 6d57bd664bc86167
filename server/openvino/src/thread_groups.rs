//! Divides the threads that compute models into groups, usually one for each NUMA node. The native kernels divide
//! weights and KV heads among the groups, so that each group reads weights and cached keys and values mostly from
//! its node. All groups read the same activations.

use std::fmt;

use crate::numa::{NodeProcessors, processors_by_node};

/// The same as `ovfleet_thread_group` in `shim/shim.h`.
#[repr(C)]
struct RawThreadGroup {
    processors: *const u32,
    processor_count: usize,
    node: i32,
}

unsafe extern "C" {
    fn ovfleet_set_thread_groups(groups: *const RawThreadGroup, count: usize);
}

/// The groups of threads. `None` stands for a group that is not bound.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ThreadGroups(Vec<Option<NodeGroup>>);

/// The nodes to which a group of threads is bound. There is at least one.
#[derive(Clone, Debug, PartialEq, Eq)]
struct NodeGroup {
    /// The numbers of the nodes.
    nodes: Vec<u32>,
    /// The processors of these nodes.
    processors: Vec<u32>,
}

impl ThreadGroups {
    /// Assigns consecutive nodes, which are often those of one socket, to each group. If there are fewer nodes than
    /// groups, the groups are not bound.
    fn of_nodes(count: usize, nodes: Vec<NodeProcessors>) -> Self {
        let mut groups: Vec<Option<NodeGroup>> = vec![None; count];
        let total = nodes.len();
        if total < count {
            return Self(groups);
        }
        for (index, NodeProcessors { number, processors }) in nodes.into_iter().enumerate() {
            match &mut groups[index * count / total] {
                Some(group) => {
                    group.nodes.push(number);
                    group.processors.extend(processors);
                }
                group => *group = Some(NodeGroup { nodes: vec![number], processors }),
            }
        }
        Self(groups)
    }
}

impl fmt::Display for ThreadGroups {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, group) in self.0.iter().enumerate() {
            formatter.write_str(if index == 0 { "" } else { "; " })?;
            match group {
                Some(NodeGroup { nodes, processors }) => {
                    let numbers: Vec<String> = nodes.iter().map(u32::to_string).collect();
                    let noun = if nodes.len() == 1 { "node" } else { "nodes" };
                    write!(formatter, "{noun} {}: {} processors", numbers.join(", "), processors.len())?;
                }
                None => formatter.write_str("not bound to a node")?,
            }
        }
        Ok(())
    }
}

/// Divides the threads of all models of the process into groups. Call this before a model is loaded. The native kernels
/// place a group's part of the weights on the group's first node.
#[must_use]
pub fn divide_threads(count: u32) -> ThreadGroups {
    let groups = ThreadGroups::of_nodes(count as usize, processors_by_node());
    let raw = |group: &Option<NodeGroup>| match group {
        Some(NodeGroup { nodes, processors }) => RawThreadGroup {
            processors: processors.as_ptr(),
            processor_count: processors.len(),
            node: i32::try_from(nodes[0]).unwrap_or(-1),
        },
        None => RawThreadGroup { processors: std::ptr::null(), processor_count: 0, node: -1 },
    };
    let raw: Vec<RawThreadGroup> = groups.0.iter().map(raw).collect();
    // SAFETY: the call copies the groups and their processors, which live until it returns.
    unsafe { ovfleet_set_thread_groups(raw.as_ptr(), raw.len()) };
    groups
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_run_on_consecutive_nodes() {
        let node = |number: u32| NodeProcessors { number, processors: vec![2 * number, 2 * number + 1] };
        let groups = |count, nodes: &[u32]| {
            ThreadGroups::of_nodes(count, nodes.iter().map(|number| node(*number)).collect()).to_string()
        };
        assert_eq!(groups(2, &[0, 1]), "node 0: 2 processors; node 1: 2 processors");
        assert_eq!(groups(2, &[0, 1, 2, 3]), "nodes 0, 1: 4 processors; nodes 2, 3: 4 processors");
        assert_eq!(groups(2, &[4, 5, 6]), "nodes 4, 5: 4 processors; node 6: 2 processors");
        assert_eq!(groups(2, &[0]), "not bound to a node; not bound to a node");
    }
}
