//! What a compiled model computes, so that one that was read back can be compared with what was written.

use std::sync::Arc;

use server_engine::ModelRunner;
use server_scheduler::{Batch, BlockId, ScheduledSequence, SequenceId};

use crate::Error;
use crate::cache::CachePorts;
use crate::load::vocabulary;
use crate::runner::{OpenVinoRunner, Parts};
use crate::runtime::{CompiledModel, Core};
use crate::unpacked::{Graph, Unpacked};

/// Tokens of the steps: a prompt in two parts, beyond a block, and one token.
const STEPS: [u32; 3] = [29, 19, 1];

/// The logits after each step of a text, by a request and with a cache of their own.
pub(super) fn logits(core: Arc<Core>, compiled: Arc<CompiledModel>) -> Result<Vec<f32>, Error> {
    let ports = CachePorts::find(&compiled.inputs()?)?;
    let vocabulary = vocabulary(&compiled)?;
    let blocks = STEPS.iter().sum::<u32>().div_ceil(ports.block_tokens);
    let graph = Graph::over(core, compiled)?;
    let (cache, layout) = (ports.allocate(blocks)?, ports.layout(blocks, vocabulary));
    let unpacked = Unpacked::none();
    let mut runner = OpenVinoRunner::new(Parts {
        graph,
        unpacked,
        keeping: None,
        cache,
        layout,
        adapters: 0,
        kv_heads: ports.kv_heads,
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
        let rows =
            runner.run(&batch).map_err(|error| Error::runtime("try the compiled model", &error.message))?;
        rows.rows().for_each(|row| all.extend_from_slice(row));
    }
    Ok(all)
}
