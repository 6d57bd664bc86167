//! The frequencies of YaRN (Peng et al., 2023), which extends the context of a model. The frequencies of fast pairs are
//! unchanged, those of slow pairs are divided by the factor of the extension, and those in between are mixtures of
//! both.

use std::f64::consts::TAU;

/// Numbers of rotations within the original context: the frequency of a pair with more than `FAST_ROTATIONS` is
/// unchanged, and that of a pair with fewer than `SLOW_ROTATIONS` is divided by the factor.
const FAST_ROTATIONS: f64 = 32.0;
const SLOW_ROTATIONS: f64 = 1.0;

/// The smallest difference between the two ends of the range of mixtures, as in the front end.
const RANGE_MIN: f64 = 0.001;

/// An extension of the context.
pub(super) struct Yarn {
    /// The number of rotated dimensions of a head.
    dimensions: u64,
    factor: f64,
    /// The ends of the range of pairs whose frequencies are mixtures. They need not be integers.
    first: f64,
    last: f64,
}

impl Yarn {
    /// Creates the extension of a context, or returns `None` if a parameter is invalid.
    pub(super) fn new(dimensions: u64, original_context: u64, base: f64, factor: f64) -> Option<Self> {
        if dimensions < 2 || original_context == 0 || base <= 1.0 || factor <= 0.0 {
            return None;
        }
        let pair_of = |rotations: f64| {
            dimensions as f64 * (original_context as f64 / (rotations * TAU)).ln() / (2.0 * base.ln())
        };
        Some(Self { dimensions, factor, first: pair_of(FAST_ROTATIONS), last: pair_of(SLOW_ROTATIONS) })
    }

    /// Returns the divisors that correct the frequencies of a graph for which the ends of the range were rounded to
    /// whole pairs.
    pub(super) fn divisors(&self) -> Vec<f32> {
        let most = self.dimensions as f64 - 1.0;
        let exact = (self.first.max(0.0), self.last.min(most));
        let rounded = (self.first.floor().max(0.0), self.last.ceil().min(most));
        (0..self.dimensions / 2)
            .map(|pair| (self.scale(pair, rounded.0, rounded.1) / self.scale(pair, exact.0, exact.1)) as f32)
            .collect()
    }

    /// Returns the factor by which the frequency of a pair is multiplied.
    fn scale(&self, pair: u64, first: f64, last: f64) -> f64 {
        let slow = ((pair as f64 - first) / (last - first).max(RANGE_MIN)).clamp(0.0, 1.0);
        slow / self.factor + (1.0 - slow)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The test uses the parameters of gpt-oss.
    #[test]
    fn only_pairs_within_the_range_change() {
        let yarn = Yarn::new(64, 4096, 150_000.0, 32.0).unwrap();
        assert!((yarn.first - 8.0925).abs() < 1e-3 && (yarn.last - 17.398).abs() < 1e-3);
        let divisors = yarn.divisors();
        assert_eq!(divisors.len(), 32);
        for (pair, divisor) in divisors.iter().enumerate() {
            assert_eq!(*divisor == 1.0, !(9..18).contains(&pair), "{pair}: {divisor}");
        }
        // The range is from pair 8.0925 to pair 17.398; rounded to whole pairs, it is from 8 to 18.
        let (rounded, exact) = ((12.0 - 8.0) / 10.0, (12.0 - 8.0925) / (17.398 - 8.0925));
        let expected = (rounded / 32.0 + 1.0 - rounded) / (exact / 32.0 + 1.0 - exact);
        assert!((f64::from(divisors[12]) - expected).abs() < 1e-4, "{}", divisors[12]);
    }

    #[test]
    fn parameters_without_meaning_are_rejected() {
        for (dimensions, context, base, factor) in
            [(0, 4096, 1e4, 2.0), (64, 0, 1e4, 2.0), (64, 4096, 1.0, 2.0), (64, 4096, 1e4, 0.0)]
        {
            assert!(Yarn::new(dimensions, context, base, factor).is_none());
        }
    }
}
