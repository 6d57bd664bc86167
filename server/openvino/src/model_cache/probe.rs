//! Computes sample logits, to compare a compiled model that was read back with the original.

use std::sync::Arc;

use server_engine::ModelRunner;
use server_scheduler::{Batch, BlockId, ScheduledSequence, SequenceId};

use crate::Error;
use crate::compiled_graph::CompiledGraph;
use crate::kv_cache::CachePorts;
use crate::runner::{OpenVinoRunner, RunnerParts};
use crate::runtime::{CompiledModel, Core};

/// Number of tokens in each step: a prompt in two chunks, which needs more than one block, and a decode.
const STEPS: [u32; 3] = [29, 19, 1];

/// The logits after each step of a fixed sequence of tokens, computed by a new request with a new cache.
pub(super) fn logits(core: Arc<Core>, compiled: Arc<CompiledModel>) -> Result<Vec<f32>, Error> {
    let ports = CachePorts::find(&compiled.inputs()?)?;
    let vocabulary = compiled.vocabulary()?;
    let blocks = STEPS.iter().sum::<u32>().div_ceil(ports.block_tokens);
    let layout = ports.layout(blocks, vocabulary);
    let mut runner = OpenVinoRunner::new(RunnerParts {
        graph: CompiledGraph::new(core, compiled)?,
        cache_writer: None,
        kv_cache: ports.allocate(blocks)?,
        layout,
        adapters: 0,
        kv_heads: ports.kv_heads,
        vision: None,
    })?;
    let mut all = Vec::new();
    let mut past = 0;
    for count in STEPS {
        let tokens = (past..past + count).map(|token| (token * 7919 + 13) % vocabulary).collect();
        past += count;
        let sequence = SequenceId::new(0, 0);
        let batch = Batch {
            tokens,
            blocks: (0..past.div_ceil(layout.block_tokens)).map(BlockId).collect(),
            samples: vec![sequence],
            sequences: vec![ScheduledSequence {
                id: sequence,
                computed_tokens: past - count,
                tokens: 0..count,
                blocks: 0..past.div_ceil(layout.block_tokens),
                samples: 0..1,
                scored_tokens: 0..0,
                num_draft_tokens: 0,
                evicted_tokens: 0,
                adapter: 0,
            }],
            ..Batch::default()
        };
        let logits = runner
            .run(&batch)
            .map_err(|error| Error::runtime("verify the compiled model", &error.message))?;
        logits.rows().for_each(|row| all.extend_from_slice(row));
    }
    Ok(all)
}
