//! Quantizes values to the block formats.

use crate::{TensorType, f16_to_f32, f32_to_bf16, f32_to_f16};

/// Encodes `values` as `kind`, each rounded to the nearest value that the scale and the minimum of its group allow.
///
/// # Panics
/// Panics if this module does not support `kind`, or if `values` does not consist of whole blocks.
pub fn quantize(kind: TensorType, values: &[f32]) -> Vec<u8> {
    let bytes = kind.bytes_of(values.len() as u64).expect("invariant: values are whole blocks");
    let mut out = Vec::with_capacity(bytes as usize);
    for block in values.chunks_exact(kind.block_values()) {
        match kind {
            TensorType::F32 => out.extend(block[0].to_le_bytes()),
            TensorType::F16 => out.extend(f32_to_f16(block[0]).to_le_bytes()),
            TensorType::Bf16 => out.extend(f32_to_bf16(block[0]).to_le_bytes()),
            TensorType::Q4_0 | TensorType::Q5_0 => symmetric(kind, block, &mut out),
            TensorType::Q4_1 | TensorType::Q5_1 => with_minimum(kind, block, &mut out),
            TensorType::Q8_0 => q8_0(block, &mut out),
            TensorType::Q4K | TensorType::Q5K => k_with_minima(kind, block, &mut out),
            TensorType::Q6K => q6_k(block, &mut out),
            TensorType::Mxfp4 => mxfp4(block, &mut out),
            _ => panic!("quantizing to {kind} is not supported"),
        }
    }
    out
}

/// Appends `value` in half precision, and returns the value that a reader will decode.
fn put_half(value: f32, out: &mut Vec<u8>) -> f32 {
    let bits = f32_to_f16(value);
    out.extend(bits.to_le_bytes());
    f16_to_f32(bits)
}

/// Returns the integer in `0..=max` nearest to `value / scale`, or 0 if the scale is 0.
fn nearest(value: f32, scale: f32, max: u8) -> u8 {
    if scale == 0.0 { 0 } else { (value / scale).round().clamp(0.0, f32::from(max)) as u8 }
}

fn range(values: &[f32]) -> (f32, f32) {
    values.iter().fold((f32::INFINITY, f32::NEG_INFINITY), |(low, high), &v| (low.min(v), high.max(v)))
}

fn largest(values: &[f32]) -> f32 {
    values.iter().copied().fold(0.0, |largest: f32, v| if v.abs() > largest.abs() { v } else { largest })
}

/// Packs two quants into each byte as the reader expects: the first half of the quants in the low nibbles, the second
/// half in the high nibbles.
fn put_nibbles(quants: &[u8], out: &mut Vec<u8>) {
    let (low, high) = quants.split_at(quants.len() / 2);
    out.extend(low.iter().zip(high).map(|(low, high)| (low & 0xf) | (high << 4)));
}

fn put_fifth_bits(quants: &[u8], out: &mut Vec<u8>) {
    let bits = quants.iter().enumerate().fold(0u32, |bits, (i, q)| bits | (u32::from(q >> 4 & 1) << i));
    out.extend(bits.to_le_bytes());
}

fn symmetric(kind: TensorType, block: &[f32], out: &mut Vec<u8>) {
    let zero = if kind == TensorType::Q4_0 { 8u8 } else { 16 };
    // The value with the largest magnitude maps to the lowest quant, which is one step farther from the zero point than
    // the highest.
    let scale = put_half(largest(block) / -f32::from(zero), out);
    let quants: Vec<u8> = block
        .iter()
        .map(|&v| if scale == 0.0 { zero } else { nearest(v + scale * f32::from(zero), scale, 2 * zero - 1) })
        .collect();
    if kind == TensorType::Q5_0 {
        put_fifth_bits(&quants, out);
    }
    put_nibbles(&quants, out);
}

fn with_minimum(kind: TensorType, block: &[f32], out: &mut Vec<u8>) {
    let max = if kind == TensorType::Q4_1 { 15u8 } else { 31 };
    let (low, high) = range(block);
    let scale = put_half((high - low) / f32::from(max), out);
    let low = put_half(low, out);
    let quants: Vec<u8> = block.iter().map(|v| nearest(v - low, scale, max)).collect();
    if kind == TensorType::Q5_1 {
        put_fifth_bits(&quants, out);
    }
    put_nibbles(&quants, out);
}

fn q8_0(block: &[f32], out: &mut Vec<u8>) {
    let scale = put_half(largest(block).abs() / 127.0, out);
    out.extend(block.iter().map(|v| if scale == 0.0 { 0 } else { (v / scale).round() as i8 as u8 }));
}

fn k_with_minima(kind: TensorType, block: &[f32], out: &mut Vec<u8>) {
    let max = if kind == TensorType::Q4K { 15u8 } else { 31 };
    let groups: Vec<(f32, f32)> = block
        .chunks_exact(32)
        .map(|group| {
            let (low, high) = range(group);
            let low = low.min(0.0);
            ((high.max(low) - low) / f32::from(max), -low)
        })
        .collect();
    let of_63 = |pick: fn(&(f32, f32)) -> f32| groups.iter().map(pick).fold(0.0, f32::max) / 63.0;
    let d = put_half(of_63(|group| group.0), out);
    let d_min = put_half(of_63(|group| group.1), out);
    let scales: Vec<u8> = groups.iter().map(|group| nearest(group.0, d, 63)).collect();
    let minima: Vec<u8> = groups.iter().map(|group| nearest(group.1, d_min, 63)).collect();
    let mut packed = [0u8; 12];
    for group in 0..4 {
        packed[group] = scales[group] | (scales[group + 4] >> 4 << 6);
        packed[group + 4] = minima[group] | (minima[group + 4] >> 4 << 6);
        packed[group + 8] = (scales[group + 4] & 0xf) | (minima[group + 4] << 4);
    }
    out.extend(packed);
    let mut quants = Vec::with_capacity(256);
    for (group, values) in block.chunks_exact(32).enumerate() {
        let (scale, min) = (d * f32::from(scales[group]), d_min * f32::from(minima[group]));
        quants.extend(values.iter().map(|v| nearest(v + min, scale, max)));
    }
    if kind == TensorType::Q5K {
        out.extend(
            (0..32).map(|i| (0..8).fold(0, |bits, plane| bits | (quants[32 * plane + i] >> 4) << plane)),
        );
    }
    quants.chunks_exact(64).for_each(|quants| put_nibbles(quants, out));
}

fn q6_k(block: &[f32], out: &mut Vec<u8>) {
    let exact_scales: Vec<f32> = block.chunks_exact(16).map(|group| largest(group) / -32.0).collect();
    let mut half = Vec::new();
    let d = put_half(largest(&exact_scales).abs() / 127.0, &mut half);
    let scales: Vec<i8> =
        exact_scales.iter().map(|scale| if d == 0.0 { 0 } else { (scale / d).round() as i8 }).collect();
    let mut quants = Vec::with_capacity(256);
    for (group, values) in block.chunks_exact(16).enumerate() {
        let scale = d * f32::from(scales[group]);
        quants.extend(
            values.iter().map(|&v| if scale == 0.0 { 32 } else { nearest(v + 32.0 * scale, scale, 63) }),
        );
    }
    quants.chunks_exact(128).for_each(|quants| put_nibbles(quants, out));
    for quants in quants.chunks_exact(128) {
        out.extend(
            (0..32)
                .map(|i| (0..4).fold(0, |bits, plane| bits | (quants[32 * plane + i] >> 4) << (2 * plane))),
        );
    }
    out.extend(scales.iter().map(|&scale| scale as u8));
    out.extend(half);
}

/// Scales by the power of two that brings the largest magnitude into the range from 4 to 8. Magnitudes above 6 are
/// rounded to 6, which is the largest number of E2M1.
fn mxfp4(block: &[f32], out: &mut Vec<u8>) {
    const MAGNITUDES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let largest = largest(block).abs();
    let exponent = if largest > 0.0 { largest.log2().floor() as i32 - 2 } else { -127 };
    let exponent = exponent.clamp(-126, 126);
    out.push((exponent + 127) as u8);
    let scale = (exponent as f32).exp2();
    let codes: Vec<u8> = block
        .iter()
        .map(|&v| {
            let distance = |code: &usize| (v.abs() / scale - MAGNITUDES[*code]).abs();
            let code = (0..8).min_by(|a, b| distance(a).total_cmp(&distance(b)));
            code.unwrap_or(0) as u8 | if v < 0.0 { 8 } else { 0 }
        })
        .collect();
    put_nibbles(&codes, out);
}
