//! Binds the process to one NUMA node, or binds groups of its threads to several nodes. The process must be bound
//! before it starts a second thread.

/// Binds the process to a node or, without a node, divides its threads into `tensor_parallel_size` groups. Warns if a
/// single group of threads runs on several nodes.
#[cfg(feature = "openvino")]
pub(crate) fn bind(numa_node: Option<u32>, tensor_parallel_size: u32) -> anyhow::Result<()> {
    let Some(node) = numa_node else {
        let nodes = server_openvino::nodes_in_use();
        if tensor_parallel_size > 1 {
            let groups = server_openvino::divide_threads(tensor_parallel_size);
            tracing::info!(%groups, "divided the threads into groups");
        } else if nodes.len() > 1 {
            tracing::warn!(
                ?nodes,
                "the server runs on several NUMA nodes, and access to the memory of other nodes is slower: run one replica \
                 per node (--numa-node) or one thread group per node (--tensor-parallel-size)"
            );
        }
        return Ok(());
    };
    anyhow::ensure!(
        tensor_parallel_size == 1,
        "--numa-node cannot be combined with --tensor-parallel-size {tensor_parallel_size}: the threads of one node \
         form one group"
    );
    let server_openvino::NumaBinding { processors, is_memory_bound } = server_openvino::run_on_node(node)?;
    tracing::info!(node, processors, is_memory_bound, "bound the process to a NUMA node");
    Ok(())
}

/// Rejects `--numa-node`, and any `--tensor-parallel-size` other than 1, because only the OpenVINO crate can bind the
/// process and divide its threads.
#[cfg(not(feature = "openvino"))]
pub(crate) fn bind(numa_node: Option<u32>, tensor_parallel_size: u32) -> anyhow::Result<()> {
    anyhow::ensure!(
        numa_node.is_none(),
        "--numa-node is not supported, because this server was built without OpenVINO"
    );
    anyhow::ensure!(
        tensor_parallel_size == 1,
        "--tensor-parallel-size must be 1, not {tensor_parallel_size}, because this server was built without OpenVINO"
    );
    Ok(())
}
