//! Converts half-precision and bfloat16 numbers to `f32` exactly, and back with rounding to nearest, ties to even.

/// Converts IEEE binary16 bits to the value they represent.
pub fn f16_to_f32(bits: u16) -> f32 {
    let sign = u32::from(bits >> 15) << 31;
    let exponent = u32::from(bits >> 10) & 0x1f;
    let fraction = u32::from(bits) & 0x3ff;
    match exponent {
        // A zero or subnormal number is fraction * 2^-24, which f32 represents exactly.
        0 => f32::from_bits(sign | (fraction as f32 * f32::from_bits(0x3380_0000)).to_bits()),
        0x1f => f32::from_bits(sign | 0x7f80_0000 | (fraction << 13)),
        _ => f32::from_bits(sign | ((exponent + 112) << 23) | (fraction << 13)),
    }
}

/// Converts `value` to the nearest IEEE binary16 value, as bits; values beyond the range of the format become infinite.
pub fn f32_to_f16(value: f32) -> u16 {
    let bits = value.to_bits();
    let sign = (bits >> 16) as u16 & 0x8000;
    let magnitude = bits & 0x7fff_ffff;
    if magnitude > 0x7f80_0000 {
        return sign | 0x7e00;
    }
    // 65520 is the first value that rounds to infinity.
    if magnitude >= 0x477f_f000 {
        return sign | 0x7c00;
    }
    let (significand, shift) = if magnitude < 0x3880_0000 {
        // Subnormal result: shift the significand (with its hidden bit) so that its lowest bit represents 2^-24.
        let shift = 126 - (magnitude >> 23);
        if shift > 24 {
            return sign;
        }
        ((magnitude & 0x7f_ffff) | 0x80_0000, shift)
    } else {
        (magnitude - 0x3800_0000, 13)
    };
    let half = 1u32 << (shift - 1);
    let odd = (significand >> shift) & 1;
    sign | ((significand + (half - 1) + odd) >> shift) as u16
}

/// Converts bfloat16 bits to the value they represent.
pub fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// Converts `value` to the nearest bfloat16 value, as bits.
pub fn f32_to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    if value.is_nan() {
        return (bits >> 16) as u16 | 0x40;
    }
    let odd = (bits >> 16) & 1;
    ((u64::from(bits) + 0x7fff + u64::from(odd)) >> 16) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_survives_a_round_trip_through_f32() {
        for bits in 0..=u16::MAX {
            let value = f16_to_f32(bits);
            if value.is_nan() {
                assert!(f16_to_f32(f32_to_f16(value)).is_nan());
            } else {
                assert_eq!(f32_to_f16(value), bits);
            }
            let value = bf16_to_f32(bits);
            if value.is_nan() {
                assert!(bf16_to_f32(f32_to_bf16(value)).is_nan());
            } else {
                assert_eq!(f32_to_bf16(value), bits);
            }
        }
    }

    #[test]
    fn known_halves_convert_to_their_values() {
        assert_eq!(f16_to_f32(0x3c00), 1.0);
        assert_eq!(f16_to_f32(0xc000), -2.0);
        assert_eq!(f16_to_f32(0x0001), 2f32.powi(-24));
        assert_eq!(f16_to_f32(0x03ff), 1023.0 * 2f32.powi(-24));
        assert_eq!(f16_to_f32(0x7bff), 65504.0);
        assert_eq!(f16_to_f32(0x7c00), f32::INFINITY);
        assert_eq!(f16_to_f32(0x8000).to_bits(), 0x8000_0000);
    }

    #[test]
    fn values_between_two_halves_round_to_nearest_with_ties_to_even() {
        for bits in 0..0x7bffu16 {
            let (low, high) = (f16_to_f32(bits), f16_to_f32(bits + 1));
            let middle = (low + high) / 2.0;
            assert_eq!(f32_to_f16(middle), bits + (bits & 1));
            assert_eq!(f32_to_f16(middle.next_down()), bits);
            assert_eq!(f32_to_f16(middle.next_up()), bits + 1);
        }
        assert_eq!(f32_to_f16(65519.99), 0x7bff);
        assert_eq!(f32_to_f16(65520.0), 0x7c00);
    }
}
