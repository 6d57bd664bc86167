//! The NUMA node that the process runs on, decided before it has a second thread.

/// Runs on the node that was asked for, or says that it runs on several.
#[cfg(feature = "openvino")]
pub(crate) fn place(wanted: Option<u32>) -> anyhow::Result<()> {
    let Some(node) = wanted else {
        let nodes = server_openvino::nodes_in_use();
        if nodes.len() > 1 {
            tracing::warn!(
                ?nodes,
                "runs on several NUMA nodes: one replica on each, with --numa-node, is faster"
            );
        }
        return Ok(());
    };
    let server_openvino::OnNode { processors, is_memory_bound } = server_openvino::run_on_node(node)?;
    tracing::info!(node, processors, is_memory_bound, "runs on a NUMA node");
    Ok(())
}

/// There is nothing here that reads weights.
#[cfg(not(feature = "openvino"))]
pub(crate) fn place(wanted: Option<u32>) -> anyhow::Result<()> {
    anyhow::ensure!(wanted.is_none(), "--numa-node: this server was built without OpenVINO");
    Ok(())
}
