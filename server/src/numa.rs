//! Binds the process to a NUMA node. This must happen before it starts a second thread.

/// Binds the process to a node. Without a node, warns if the process runs on several nodes.
#[cfg(feature = "openvino")]
pub(crate) fn bind(numa_node: Option<u32>) -> anyhow::Result<()> {
    let Some(node) = numa_node else {
        let nodes = server_openvino::nodes_in_use();
        if nodes.len() > 1 {
            tracing::warn!(
                ?nodes,
                "the server runs on several NUMA nodes; one replica per node (--numa-node) is faster"
            );
        }
        return Ok(());
    };
    let server_openvino::NumaBinding { processors, is_memory_bound } = server_openvino::run_on_node(node)?;
    tracing::info!(node, processors, is_memory_bound, "bound the process to a NUMA node");
    Ok(())
}

/// Rejects a node: only the OpenVINO crate can bind the process.
#[cfg(not(feature = "openvino"))]
pub(crate) fn bind(numa_node: Option<u32>) -> anyhow::Result<()> {
    anyhow::ensure!(numa_node.is_none(), "--numa-node: this server was built without OpenVINO");
    Ok(())
}
