//! A pseudorandom number generator whose sequence never changes.

/// SplitMix64.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number in `0..end`.
    pub(crate) fn below(&mut self, end: u32) -> u32 {
        (self.next() % u64::from(end)) as u32
    }

    /// Returns `true` with a probability of one in `times`.
    pub(crate) fn once_in(&mut self, times: u32) -> bool {
        self.below(times) == 0
    }
}
