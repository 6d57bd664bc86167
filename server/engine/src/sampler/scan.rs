//! Operations on all logits, written so that the compiler vectorizes them: fixed lanes, and neither branches nor calls
//! in the inner loop.

use server_scheduler::TokenId;

/// Number of logits in a block. It is a multiple of [`LANES`].
pub(super) const BLOCK: usize = 256;
/// Number of logits that are compared or summed together.
pub(super) const LANES: usize = 16;

/// The greatest logit, and the lowest token id with this logit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Peak {
    pub(super) value: f32,
    pub(super) token: TokenId,
}

/// Logits, and the greatest logit of each block.
#[derive(Clone, Copy, Debug)]
pub(super) struct Blocks<'a> {
    pub(super) logits: &'a [f32],
    /// The maxima that [`peak`] found.
    pub(super) maxima: &'a [f32],
}

impl<'a> Blocks<'a> {
    /// The blocks in order, each with its greatest logit.
    pub(super) fn iter(self) -> impl Iterator<Item = (&'a [f32], f32)> {
        self.logits.chunks(BLOCK).zip(self.maxima.iter().copied())
    }
}

/// The peak of `logits`. `None` if one of them is NaN or positive infinity. Fills `maxima` with the greatest logit of
/// each block. Only the first block with the greatest logit is searched for the token.
pub(super) fn peak(logits: &[f32], maxima: &mut Vec<f32>) -> Option<Peak> {
    maxima.clear();
    let mut finite = [1u32; LANES];
    for block in logits.chunks(BLOCK) {
        let mut lanes = [f32::NEG_INFINITY; LANES];
        let (whole, rest) = block.as_chunks::<LANES>();
        for values in whole {
            for lane in 0..LANES {
                let value = values[lane];
                lanes[lane] = if value > lanes[lane] { value } else { lanes[lane] };
                finite[lane] &= u32::from(value <= f32::MAX);
            }
        }
        for (lane, &value) in rest.iter().enumerate() {
            lanes[lane] = if value > lanes[lane] { value } else { lanes[lane] };
            finite[lane] &= u32::from(value <= f32::MAX);
        }
        maxima.push(greatest(&lanes));
    }
    if finite.contains(&0) {
        return None;
    }
    let value = maxima.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let start = maxima.iter().position(|&greatest| greatest == value).unwrap_or(0) * BLOCK;
    let token = logits.iter().skip(start).position(|&logit| logit == value).map_or(0, |index| start + index);
    Some(Peak { value, token: token as TokenId })
}

/// The greatest of the lanes, none of which is NaN. Each step halves their number, so that the compiler vectorizes the
/// comparisons.
pub(super) fn greatest(lanes: &[f32; LANES]) -> f32 {
    let mut lanes = *lanes;
    let mut half = LANES / 2;
    while half > 0 {
        for lane in 0..half {
            let (a, b) = (lanes[lane], lanes[lane + half]);
            lanes[lane] = if b > a { b } else { a };
        }
        half /= 2;
    }
    lanes[0]
}

/// The sum of `exp((logit - max) * scale)`. `sums` receives the sum of each block. Blocks whose exponentials are
/// all zero are not read.
pub(super) fn sum_exp(blocks: Blocks<'_>, max: f32, scale: f32, sums: &mut Vec<f64>) -> f64 {
    sums.clear();
    let mut total = 0.0;
    for (block, greatest) in blocks.iter() {
        if (greatest - max) * scale < X_MIN {
            sums.push(0.0);
            continue;
        }
        let mut lanes = [0f32; LANES];
        let (whole, rest) = block.as_chunks::<LANES>();
        for values in whole {
            for lane in 0..LANES {
                lanes[lane] += exp((values[lane] - max) * scale);
            }
        }
        for (lane, &value) in rest.iter().enumerate() {
            lanes[lane] += exp((value - max) * scale);
        }
        let sum = lanes.into_iter().map(f64::from).sum();
        sums.push(sum);
        total += sum;
    }
    total
}

/// Below this limit, [`exp`] returns zero, because the exact result is close to or below the smallest normal number.
const X_MIN: f32 = -87.3;

/// Returns `e` to the power of `x`, for `x <= 0`, with a relative error below 2e-7. The result is zero below [`X_MIN`]
/// and for NaN. `f32::exp` is a call to the C library, which prevents vectorization.
#[inline]
pub(super) fn exp(x: f32) -> f32 {
    /// Adding this number to a value rounds the value to an integer, and leaves the integer plus the exponent bias in
    /// the low bits of the mantissa.
    const ROUND: f32 = 12_582_912.0 + 127.0;
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;

    let clamped = if x > X_MIN { x } else { X_MIN };
    let shifted = clamped * std::f32::consts::LOG2_E + ROUND;
    let power = f32::from_bits(shifted.to_bits() << 23);
    let n = shifted - ROUND;
    let r = clamped - n * LN_2_HIGH - n * LN_2_LOW;
    // This is the polynomial of Cephes' `expf` on [-ln 2 / 2, ln 2 / 2].
    let p = 1.987_569_1e-4;
    let p = p * r + 1.398_2e-3;
    let p = p * r + 8.333_452e-3;
    let p = p * r + 4.166_579_6e-2;
    let p = p * r + 1.666_666_5e-1;
    let p = p * r + 5e-1;
    let result = (p * r * r + r + 1.0) * power;
    if x >= X_MIN { result } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_agrees_with_the_standard_library() {
        for step in 0..=870_000 {
            let x = -(step as f32) * 1e-4;
            let exact = f64::from(x).exp();
            let error = (f64::from(exp(x)) - exact).abs() / exact;
            assert!(error < 2e-7, "exp({x}) is off by {error}");
        }
        assert_eq!(exp(0.0), 1.0);
        for x in [f32::NEG_INFINITY, -1e30, -88.0, f32::NAN] {
            assert_eq!(exp(x), 0.0, "exp({x})");
        }
    }

    #[test]
    fn the_peak_is_the_first_of_equal_logits() {
        for length in [1, 15, 16, 17, 255, 256, 257, 1000] {
            for position in 0..length {
                let mut logits = vec![-1.0; length];
                logits[position] = 2.5;
                logits[length - 1] = 2.5;
                let mut maxima = Vec::new();
                assert_eq!(peak(&logits, &mut maxima), Some(Peak { value: 2.5, token: position as TokenId }));
                let expected: Vec<f32> = logits
                    .chunks(BLOCK)
                    .map(|block| block.iter().copied().fold(f32::NEG_INFINITY, f32::max))
                    .collect();
                assert_eq!(maxima, expected);
            }
        }
        assert_eq!(
            peak(&[f32::NEG_INFINITY; 20], &mut Vec::new()).map(|peak| peak.value),
            Some(f32::NEG_INFINITY)
        );
    }

    #[test]
    fn invalid_logits_have_no_peak() {
        for bad in [f32::NAN, f32::INFINITY, -f32::NAN] {
            for position in 0..300 {
                let mut logits = vec![0.5; 300];
                logits[position] = bad;
                assert_eq!(peak(&logits, &mut Vec::new()), None, "{bad} at {position}");
            }
        }
    }
    #[test]
    fn blocks_without_weight_are_not_read_and_change_no_sum() {
        let mut logits = vec![-1e3; 10 * BLOCK + 7];
        (logits[3 * BLOCK], logits[9 * BLOCK - 1], logits[10 * BLOCK + 6]) = (0.0, -5.0, -80.0);
        let (mut maxima, mut sums, mut expected) = (Vec::new(), Vec::new(), Vec::new());
        peak(&logits, &mut maxima).expect("all logits are finite");
        for scale in [0.01, 1.0, 2.0] {
            let total = sum_exp(Blocks { logits: &logits, maxima: &maxima }, 0.0, scale, &mut sums);
            // With these maxima, every block is read.
            let all = Blocks { logits: &logits, maxima: &[0.0; 11] };
            let read_all = sum_exp(all, 0.0, scale, &mut expected);
            assert_eq!((total, &sums), (read_all, &expected), "scale {scale}");
            assert_eq!(sums.len(), 11);
        }
    }
}
