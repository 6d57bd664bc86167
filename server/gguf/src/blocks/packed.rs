//! Unpacks blocks of the quantized types that this crate supports. The layouts are those of `ggml-common.h`.

use crate::{TensorType, f16_to_f32};

/// The destination of one unpacked block.
pub(super) struct UnpackedBlock<'a> {
    /// One element for each value of the block.
    pub(super) quants: &'a mut [u8],
    /// One element for each group of the block.
    pub(super) scale: &'a mut [f32],
    /// One element for each group of the block, or none if the type has no minima.
    pub(super) min: &'a mut [f32],
}

/// A function that unpacks one block.
pub(super) type Unpack = fn(&[u8], &mut UnpackedBlock<'_>);

/// Returns the function that unpacks a block of `kind`, if `kind` is a quantized type that this crate supports.
pub(super) fn unpacker(kind: TensorType) -> Option<Unpack> {
    Some(match kind {
        TensorType::Q4_0 => q4_0,
        TensorType::Q4_1 => q4_1,
        TensorType::Q5_0 => q5_0,
        TensorType::Q5_1 => q5_1,
        TensorType::Q8_0 => q8_0,
        TensorType::Q2K => q2_k,
        TensorType::Q3K => q3_k,
        TensorType::Q4K => q4_k,
        TensorType::Q5K => q5_k,
        TensorType::Q6K => q6_k,
        TensorType::Mxfp4 => mxfp4,
        _ => return None,
    })
}

fn read_half(block: &[u8], at: usize) -> f32 {
    f16_to_f32(u16::from_le_bytes([block[at], block[at + 1]]))
}

/// Unpacks two quants from each byte: low nibbles are the first half of the quants, high nibbles the second half.
fn unpack_nibbles(packed: &[u8], quants: &mut [u8]) {
    let (low, high) = quants.split_at_mut(packed.len());
    for ((low, high), &byte) in low.iter_mut().zip(high).zip(packed) {
        *low = byte & 0xf;
        *high = byte >> 4;
    }
}

/// Adds the fifth bits of 32 quants.
fn add_fifth_bits(packed: &[u8], quants: &mut [u8]) {
    let bits = u32::from_le_bytes([packed[0], packed[1], packed[2], packed[3]]);
    for (index, quant) in quants.iter_mut().enumerate() {
        *quant |= ((bits >> index & 1) << 4) as u8;
    }
}

fn q4_0(block: &[u8], unpacked: &mut UnpackedBlock<'_>) {
    unpacked.scale[0] = read_half(block, 0);
    unpack_nibbles(&block[2..18], unpacked.quants);
}

fn q4_1(block: &[u8], unpacked: &mut UnpackedBlock<'_>) {
    unpacked.scale[0] = read_half(block, 0);
    unpacked.min[0] = -read_half(block, 2);
    unpack_nibbles(&block[4..20], unpacked.quants);
}

fn q5_0(block: &[u8], unpacked: &mut UnpackedBlock<'_>) {
    unpacked.scale[0] = read_half(block, 0);
    unpack_nibbles(&block[6..22], unpacked.quants);
    add_fifth_bits(&block[2..6], unpacked.quants);
}

fn q5_1(block: &[u8], unpacked: &mut UnpackedBlock<'_>) {
    unpacked.scale[0] = read_half(block, 0);
    unpacked.min[0] = -read_half(block, 2);
    unpack_nibbles(&block[8..24], unpacked.quants);
    add_fifth_bits(&block[4..8], unpacked.quants);
}

fn q8_0(block: &[u8], unpacked: &mut UnpackedBlock<'_>) {
    unpacked.scale[0] = read_half(block, 0);
    for (quant, &byte) in unpacked.quants.iter_mut().zip(&block[2..34]) {
        *quant = byte ^ 0x80;
    }
}

/// The layout is `scales[16], qs[64], d, dmin`, with a 4-bit scale and a 4-bit minimum for every 16 values.
fn q2_k(block: &[u8], unpacked: &mut UnpackedBlock<'_>) {
    let (d, d_min) = (read_half(block, 80), read_half(block, 82));
    for (group, &packed) in block[..16].iter().enumerate() {
        unpacked.scale[group] = d * f32::from(packed & 0xf);
        unpacked.min[group] = d_min * f32::from(packed >> 4);
    }
    unpack_two_bits(&block[16..80], unpacked.quants);
}

/// Unpacks 128 quants from every 32 bytes: the first 32 quants are in the lowest two bits of the bytes, the next 32 in
/// the next two bits, and so on.
fn unpack_two_bits(packed: &[u8], quants: &mut [u8]) {
    for (packed, quants) in packed.chunks_exact(32).zip(quants.chunks_exact_mut(128)) {
        for (plane, quants) in quants.chunks_exact_mut(32).enumerate() {
            for (quant, &byte) in quants.iter_mut().zip(packed) {
                *quant = byte >> (2 * plane) & 3;
            }
        }
    }
}

/// The layout is `hmask[32], qs[64], scales[12], d`, with signed 6-bit scales and the third bits in the bit planes of
/// `hmask`.
fn q3_k(block: &[u8], unpacked: &mut UnpackedBlock<'_>) {
    let d = read_half(block, 108);
    let packed = &block[96..108];
    for (group, scale) in unpacked.scale.iter_mut().enumerate() {
        let low = if group < 8 { packed[group] & 0xf } else { packed[group - 8] >> 4 };
        let high = packed[8 + group % 4] >> (2 * (group / 4)) & 3;
        *scale = d * f32::from((low | high << 4) as i8 - 32);
    }
    unpack_two_bits(&block[32..96], unpacked.quants);
    for (plane, quants) in unpacked.quants.chunks_exact_mut(32).enumerate() {
        for (quant, &byte) in quants.iter_mut().zip(&block[..32]) {
            *quant |= (byte >> plane & 1) << 2;
        }
    }
}

/// Unpacks the eight 6-bit scales and minima of Q4_K and Q5_K from 12 bytes.
fn unpack_scales_and_minima(block: &[u8], scale: &mut [f32], min: &mut [f32]) {
    let (d, d_min) = (read_half(block, 0), read_half(block, 2));
    let packed = &block[4..16];
    for group in 0..8 {
        let (s, m) = if group < 4 {
            (packed[group] & 63, packed[group + 4] & 63)
        } else {
            (
                packed[group + 4] & 0xf | packed[group - 4] >> 6 << 4,
                packed[group + 4] >> 4 | packed[group] >> 6 << 4,
            )
        };
        scale[group] = d * f32::from(s);
        min[group] = d_min * f32::from(m);
    }
}

/// The layout is `d, dmin, scales[12], qs[128]`.
fn q4_k(block: &[u8], unpacked: &mut UnpackedBlock<'_>) {
    unpack_scales_and_minima(block, unpacked.scale, unpacked.min);
    for (packed, quants) in block[16..144].chunks_exact(32).zip(unpacked.quants.chunks_exact_mut(64)) {
        unpack_nibbles(packed, quants);
    }
}

/// The layout is `d, dmin, scales[12], qh[32], qs[128]`, with the fifth bits in the bit planes of `qh`.
fn q5_k(block: &[u8], unpacked: &mut UnpackedBlock<'_>) {
    unpack_scales_and_minima(block, unpacked.scale, unpacked.min);
    for (packed, quants) in block[48..176].chunks_exact(32).zip(unpacked.quants.chunks_exact_mut(64)) {
        unpack_nibbles(packed, quants);
    }
    for (plane, quants) in unpacked.quants.chunks_exact_mut(32).enumerate() {
        for (quant, &byte) in quants.iter_mut().zip(&block[16..48]) {
            *quant |= (byte >> plane & 1) << 4;
        }
    }
}

/// The layout is `ql[128], qh[64], scales[16], d`, with a signed 8-bit scale for every 16 values.
fn q6_k(block: &[u8], unpacked: &mut UnpackedBlock<'_>) {
    let d = read_half(block, 208);
    for (scale, &byte) in unpacked.scale.iter_mut().zip(&block[192..208]) {
        *scale = d * f32::from(byte as i8);
    }
    let halves = block[..128].chunks_exact(64).zip(block[128..192].chunks_exact(32));
    for ((low, high), quants) in halves.zip(unpacked.quants.chunks_exact_mut(128)) {
        unpack_nibbles(low, quants);
        for (plane, quants) in quants.chunks_exact_mut(32).enumerate() {
            for (quant, &byte) in quants.iter_mut().zip(high) {
                *quant |= (byte >> (2 * plane) & 3) << 4;
            }
        }
    }
}

/// The quant of each code of E2M1, a 4-bit floating-point format: twice the number that the code represents, plus 12.
const QUANTS_OF_E2M1: [u8; 16] = [12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0];

/// The layout is `e, qs[16]`. The scale is a power of two, and `e` is its exponent plus 127.
fn mxfp4(block: &[u8], unpacked: &mut UnpackedBlock<'_>) {
    // The quants represent doubled numbers, so the scale is half of the scale in the file. For the exponents 0 and 1,
    // this half is subnormal.
    unpacked.scale[0] = match block[0] {
        exponent @ 0..=1 => f32::from_bits(0x0020_0000 << exponent),
        exponent => f32::from_bits(u32::from(exponent - 1) << 23),
    };
    unpack_nibbles(&block[1..17], unpacked.quants);
    for quant in unpacked.quants.iter_mut() {
        *quant = QUANTS_OF_E2M1[usize::from(*quant)];
    }
}
