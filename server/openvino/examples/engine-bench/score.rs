//! `score`: computes the log probability of each token of a sequence after the first, given the tokens before it.

use std::path::Path;

use anyhow::Context as _;
use serde_json::{Value, json};
use server_engine::ModelRunner;
use server_scheduler::{Batch, BlockId, ScheduledSequence, SequenceId};

use crate::Runner;
use crate::scenario::Score;

/// Number of tokens computed in one step with logits for each token. The logits take 100 MB with a vocabulary of 49,152
/// tokens.
const CHUNK_TOKENS: usize = 512;

pub(crate) fn run(mut runner: Runner, scenario: &Score, directory: &Path) -> anyhow::Result<Value> {
    let mut wanted = vec![Vec::new(); scenario.logits.as_ref().map_or(0, |logits| logits.rows.len())];
    let mut sequences = Vec::new();
    for (index, sequence) in scenario.sequences.iter().enumerate() {
        let mut scores = Vec::new();
        each_position(&mut runner, sequence, |position, logits| {
            if let Some(next) = sequence.get(position + 1) {
                scores.push(logprob(logits, *next));
            }
            let rows = scenario.logits.iter().flat_map(|logits| &logits.rows).zip(&mut wanted);
            for (_, row) in rows.filter(|(row, _)| **row == (index, position)) {
                *row = logits.to_vec();
            }
        })?;
        sequences.push(scores);
    }
    if let Some(logits) = &scenario.logits {
        let bytes: Vec<u8> = wanted.iter().flatten().flat_map(|value| value.to_le_bytes()).collect();
        std::fs::write(directory.join(&logits.file), bytes)
            .with_context(|| format!("failed to write {}", logits.file))?;
    }
    Ok(json!({ "vocabulary": runner.layout().vocabulary, "sequences": sequences }))
}

/// Computes a sequence from an empty context, in chunks, and calls `visit` with the logits of each position.
fn each_position(
    runner: &mut Runner,
    sequence: &[u32],
    mut visit: impl FnMut(usize, &[f32]),
) -> anyhow::Result<()> {
    let block_tokens = runner.layout().block_tokens as usize;
    let (mut batch, mut past) = (Batch::default(), 0);
    let wanted: Vec<u32> = (0..CHUNK_TOKENS as u32).collect();
    for chunk in sequence.chunks(CHUNK_TOKENS) {
        batch.clear();
        batch.tokens.extend(chunk);
        let blocks = (past + chunk.len()).div_ceil(block_tokens) as u32;
        batch.blocks.extend((0..blocks).map(BlockId));
        batch.sequences.push(ScheduledSequence {
            id: SequenceId::new(0, 0),
            computed_tokens: past as u32,
            tokens: 0..chunk.len() as u32,
            blocks: 0..blocks,
            samples: 0..0,
            scored_tokens: 0..0,
            num_draft_tokens: 0,
            evicted_tokens: 0,
            adapter: 0,
        });
        let logits = runner.score(&batch, &wanted[..chunk.len()])?;
        for (offset, row) in logits.rows().enumerate() {
            visit(past + offset, row);
        }
        past += chunk.len();
    }
    Ok(())
}

fn logprob(logits: &[f32], token: u32) -> f64 {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|logit| f64::from(logit - largest).exp()).sum();
    f64::from(logits[token as usize] - largest) - sum.ln()
}
