//! Which blocks a sequence leaves behind while it generates: those to which its tokens attended least.
//!
//! Heavy hitters, as in H2O (Zhang et al., 2023): the weight that generated tokens gave to a block, per token, decides, and the first
//! and the last blocks stay in any case (Xiao et al., 2023). It knows nothing of who else holds a block.

/// Leading blocks that stay.
const FIRST: usize = 1;

/// Tokens that a sequence generates, from where it went on, before anything is left: what they attended to is all that is known.
const OBSERVED: u32 = 8;

/// The fewest blocks that a sequence may be held to.
pub const SEQUENCE_BLOCKS_MIN: u32 = 4;

/// What is known of a sequence's blocks, in the order of its table.
#[derive(Clone, Debug, Default)]
pub(crate) struct Attended {
    blocks: Vec<Weight>,
    tokens: u32,
}

#[derive(Clone, Copy, Debug, Default)]
struct Weight {
    sum: f32,
    tokens: u32,
}

impl Weight {
    fn mean(self) -> f32 {
        self.sum / self.tokens.max(1) as f32
    }
}

impl Attended {
    pub(crate) fn clear(&mut self) {
        self.blocks.clear();
        self.tokens = 0;
    }

    /// A token gave so much to each block.
    pub(crate) fn add(&mut self, weights: &[f32]) {
        self.tokens = self.tokens.saturating_add(1);
        self.blocks.resize(weights.len().max(self.blocks.len()), Weight::default());
        for (block, weight) in self.blocks.iter_mut().zip(weights) {
            block.sum += weight;
            block.tokens += 1;
        }
    }

    /// The places, in order, of those blocks to leave of which there are more than `blocks_max`: of `full` blocks that are full,
    /// and not of the first `held`.
    pub(crate) fn to_leave(&self, full: usize, held: usize, blocks_max: u32) -> Vec<usize> {
        let blocks_max = blocks_max as usize;
        let last = blocks_max / 4;
        if self.tokens < OBSERVED || full <= blocks_max {
            return Vec::new();
        }
        let mean = |place: &usize| self.blocks.get(*place).copied().unwrap_or_default().mean();
        let mut places: Vec<usize> = (held.max(FIRST)..full - last).collect();
        let count = places.len().min(full - blocks_max);
        // Of equals the older.
        places.sort_by(|a, b| mean(a).total_cmp(&mean(b)).then(a.cmp(b)));
        places.truncate(count);
        places.sort_unstable();
        places
    }

    /// The blocks of these places, which are in order, are not the sequence's any more.
    pub(crate) fn leave(&mut self, places: &[usize]) {
        for &place in places.iter().rev() {
            if place < self.blocks.len() {
                self.blocks.remove(place);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attended(tokens: u32, weights: &[f32]) -> Attended {
        let mut attended = Attended::default();
        (0..tokens).for_each(|_| attended.add(weights));
        attended
    }

    #[test]
    fn the_lightest_go_but_for_the_first_and_the_last() {
        let weights = [0.0, 0.3, 0.1, 0.4, 0.2, 0.5, 0.6, 0.0];
        assert_eq!(attended(8, &weights).to_leave(8, 0, 6), [2, 4]);
        assert_eq!(attended(8, &weights).to_leave(8, 3, 6), [3, 4], "what is held by others stays");
        assert_eq!(attended(8, &weights).to_leave(6, 0, 6), [0; 0], "there are no more than may be");
        assert_eq!(attended(7, &weights).to_leave(8, 0, 6), [0; 0], "too little is known");
        assert_eq!(attended(8, &[0.0; 8]).to_leave(8, 0, 4), [1, 2, 3, 4], "of equals the older");
    }

    #[test]
    fn what_is_new_is_judged_by_its_own_tokens() {
        let mut attended = attended(20, &[1.0, 0.2, 0.3]);
        (0..4).for_each(|_| attended.add(&[1.0, 0.2, 0.3, 0.25, 1.0]));
        assert_eq!(attended.to_leave(5, 0, 4), [1]);
        attended.leave(&[1]);
        assert_eq!(attended.to_leave(5, 0, 4), [2], "places are those of the blocks that are left");
    }
}
