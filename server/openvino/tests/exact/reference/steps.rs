//! Runs tokens on a runner in mixed batches, and compares the logits of every position.

use server_engine::ModelRunner as _;
use server_openvino::OpenVinoRunner;
use server_scheduler::{Batch, BlockId, ScheduledSequence, SequenceId};

/// The number of tokens of each sequence in a step. The first sequence has one token in each step, so logits are
/// computed at each of its positions. The second sequence has chunks that cross block boundaries, the third has chunks
/// of one block plus one token, and the last has its whole prompt in one step.
const CHUNKS: [usize; 4] = [1, 7, 33, usize::MAX];

/// The largest difference between a computed logit and the expected one, as a fraction of the standard deviation of the
/// expected logits.
pub(crate) fn worst_difference(runner: &mut OpenVinoRunner, tokens: &[u32], expected: &[Vec<f32>]) -> f64 {
    worst_difference_with(runner, tokens, [(0, expected); 4])
}

/// Like [`worst_difference`], but each sequence has an adapter and its own expected logits.
pub(crate) fn worst_difference_with(
    runner: &mut OpenVinoRunner,
    tokens: &[u32],
    expected: [(u32, &[Vec<f32>]); CHUNKS.len()],
) -> f64 {
    let sequences = std::array::from_fn::<_, 4, _>(|index| (CHUNKS[index], expected[index].0));
    let mut worst = 0f32;
    run(runner, tokens, &sequences, |sequence, position, row| {
        let difference = |(a, b): (&f32, &f32)| (a - b).abs();
        for one in row.iter().zip(&expected[sequence].1[position]).map(difference) {
            // `f32::max` would ignore a NaN.
            worst = if worst.is_nan() || one <= worst { worst } else { one };
        }
    });
    f64::from(worst) / deviation(expected[0].1)
}

/// Whether the sequences of mixed batches have bitwise the same logits as a sequence that is computed alone, token by
/// token.
pub(crate) fn is_independent_of_the_batch(runner: &mut OpenVinoRunner, tokens: &[u32]) -> bool {
    let mut alone = Vec::new();
    run(runner, tokens, &[(1, 0)], |_, _, row| alone.push(row.iter().map(|it| it.to_bits()).collect()));
    let mut is_same = true;
    run(runner, tokens, &CHUNKS.map(|chunk| (chunk, 0)), |_, position, row| {
        let expected: &Vec<u32> = &alone[position];
        is_same &= row.iter().map(|it| it.to_bits()).eq(expected.iter().copied());
    });
    is_same
}

/// Computes the tokens in several sequences. Each element of `sequences` is the number of tokens of a sequence in a
/// step and its adapter. Calls `visit` with the index of the sequence, the position and the logits of the last token of
/// each chunk. The first sequence must have the smallest chunks, because the function returns when this sequence ends.
fn run(
    runner: &mut OpenVinoRunner,
    tokens: &[u32],
    sequences: &[(usize, u32)],
    mut visit: impl FnMut(usize, usize, &[f32]),
) {
    let block_tokens = runner.layout().block_tokens as usize;
    let blocks_each = tokens.len().div_ceil(block_tokens);
    assert!(blocks_each * sequences.len() <= runner.layout().blocks_total as usize);
    let mut past = vec![0; sequences.len()];
    while past[0] < tokens.len() {
        let mut batch = Batch::default();
        let mut positions = Vec::new();
        for (sequence, (past, &(chunk, adapter))) in past.iter_mut().zip(sequences).enumerate() {
            let count = chunk.min(tokens.len() - *past);
            if count == 0 {
                continue;
            }
            let used = (*past + count).div_ceil(block_tokens);
            // The block tables of the sequences are interleaved, so that no sequence of a mixed batch has adjacent
            // blocks.
            let table = (0..used).map(|i| BlockId((i * sequences.len() + sequence) as u32));
            let chunk = Chunk { tokens: &tokens[*past..*past + count], past: *past, adapter };
            push(&mut batch, chunk, table);
            *past += count;
            positions.push((sequence, *past - 1));
        }
        let logits = runner.run(&batch).unwrap();
        assert_eq!(logits.rows().count(), positions.len());
        for (row, (sequence, position)) in logits.rows().zip(positions) {
            visit(sequence, position, row);
        }
    }
}

/// The new tokens of a sequence.
#[derive(Clone, Copy)]
struct Chunk<'a> {
    tokens: &'a [u32],
    past: usize,
    adapter: u32,
}

fn push(batch: &mut Batch, chunk: Chunk<'_>, table: impl Iterator<Item = BlockId>) {
    let Chunk { tokens, past, adapter } = chunk;
    let start = (batch.tokens.len() as u32, batch.blocks.len() as u32, batch.samples.len() as u32);
    let sequence = SequenceId::new(batch.sequences.len() as u64, 0);
    batch.tokens.extend(tokens);
    batch.blocks.extend(table);
    batch.samples.push(sequence);
    batch.sequences.push(ScheduledSequence {
        id: sequence,
        computed_tokens: past as u32,
        tokens: start.0..batch.tokens.len() as u32,
        blocks: start.1..batch.blocks.len() as u32,
        samples: start.2..batch.samples.len() as u32,
        scored_tokens: 0..0,
        num_draft_tokens: 0,
        evicted_tokens: 0,
        adapter,
    });
}

/// The standard deviation of all logits.
pub(crate) fn deviation(logits: &[Vec<f32>]) -> f64 {
    let all = || logits.iter().flatten().map(|value| f64::from(*value));
    let count = all().count() as f64;
    let mean = all().sum::<f64>() / count;
    (all().map(|value| (value - mean).powi(2)).sum::<f64>() / count).sqrt()
}
