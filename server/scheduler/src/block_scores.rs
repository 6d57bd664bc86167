//! The attention scores of a sequence's blocks, by which the blocks to evict are selected while the sequence generates.
//!
//! The policy follows H2O (Zhang et al., 2023): the blocks to which generated tokens pay the least attention on average
//! are evicted, except for the first block and the most recent ones (Xiao et al., 2023).

/// Number of leading blocks that are never evicted (attention sinks).
const SINK_BLOCKS: usize = 1;

/// Number of tokens whose attention must be recorded before any block is evicted.
const RECORDED_TOKENS_MIN: u32 = 8;

/// The attention scores of a sequence's blocks, in the order of its block table.
#[derive(Clone, Debug, Default)]
pub(crate) struct BlockScores {
    blocks: Vec<Score>,
    tokens: u32,
}

#[derive(Clone, Copy, Debug, Default)]
struct Score {
    sum: f32,
    tokens: u32,
}

impl Score {
    fn mean(self) -> f32 {
        self.sum / self.tokens.max(1) as f32
    }
}

impl BlockScores {
    pub(crate) fn clear(&mut self) {
        self.blocks.clear();
        self.tokens = 0;
    }

    /// Records the attention of one token to each block.
    pub(crate) fn record(&mut self, attention: &[f32]) {
        self.tokens = self.tokens.saturating_add(1);
        self.blocks.resize(attention.len().max(self.blocks.len()), Score::default());
        for (block, attention) in self.blocks.iter_mut().zip(attention) {
            block.sum += attention;
            block.tokens += 1;
        }
    }

    /// Returns the indices, in ascending order, of the blocks to evict so that at most `blocks_max` of the first `full`
    /// blocks remain. The first block, the first `pinned` blocks and the most recent ones are not evicted, even if more
    /// blocks remain. No block is evicted until the attention of enough tokens has been recorded.
    pub(crate) fn blocks_to_evict(&self, full: usize, pinned: usize, blocks_max: u32) -> Vec<usize> {
        let blocks_max = blocks_max as usize;
        let recent = blocks_max / 4;
        if self.tokens < RECORDED_TOKENS_MIN || full <= blocks_max {
            return Vec::new();
        }
        let mean = |index: &usize| self.blocks.get(*index).copied().unwrap_or_default().mean();
        let mut indices: Vec<usize> = (pinned.max(SINK_BLOCKS)..full - recent).collect();
        let count = indices.len().min(full - blocks_max);
        // If blocks have equal scores, the older ones are evicted.
        indices.sort_by(|a, b| mean(a).total_cmp(&mean(b)).then(a.cmp(b)));
        indices.truncate(count);
        indices.sort_unstable();
        indices
    }

    /// Removes the scores of the blocks with these ascending indices.
    pub(crate) fn remove(&mut self, indices: &[usize]) {
        for &index in indices.iter().rev() {
            if index < self.blocks.len() {
                self.blocks.remove(index);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scores(tokens: u32, attention: &[f32]) -> BlockScores {
        let mut scores = BlockScores::default();
        (0..tokens).for_each(|_| scores.record(attention));
        scores
    }

    #[test]
    fn evicts_the_lowest_scores_but_not_the_first_and_the_recent_blocks() {
        let attention = [0.0, 0.3, 0.1, 0.4, 0.2, 0.5, 0.6, 0.0];
        assert_eq!(scores(8, &attention).blocks_to_evict(8, 0, 6), [2, 4]);
        assert_eq!(scores(8, &attention).blocks_to_evict(8, 3, 6), [3, 4], "pinned blocks are not evicted");
        assert_eq!(scores(8, &attention).blocks_to_evict(6, 0, 6), [0; 0], "the limit is not exceeded");
        assert_eq!(scores(7, &attention).blocks_to_evict(8, 0, 6), [0; 0], "too few tokens are recorded");
        assert_eq!(
            scores(8, &[0.0; 8]).blocks_to_evict(8, 0, 4),
            [1, 2, 3, 4],
            "among equal scores, older blocks are evicted"
        );
    }

    #[test]
    fn a_recent_block_is_scored_by_the_tokens_after_it() {
        let mut scores = scores(20, &[1.0, 0.2, 0.3]);
        (0..4).for_each(|_| scores.record(&[1.0, 0.2, 0.3, 0.25, 1.0]));
        assert_eq!(scores.blocks_to_evict(5, 0, 4), [1]);
        scores.remove(&[1]);
        assert_eq!(scores.blocks_to_evict(5, 0, 4), [2], "indices are those of the remaining blocks");
    }
}
