//! Converts a weight tensor of a GGUF file to constants for the graph. Pure: it maps bytes to bytes.
//!
//! Every quantized type is affine in groups, `w = s q - m`. Runtimes compute `w = (q - z) s`, and the fast ones need `z` to be
//! a small integer, which `m / s` is not. Three formats follow from that:
//!
//! - [`WeightFormat::Compact`]: `q` as stored, `z` in f16. Exact. The plugin leaves its int8 path for it; the native kernels do
//!   not.
//! - [`WeightFormat::Fine`]: `q` and `z` on a grid up to 17 times as fine, in 8 bits: `(k q - round(k z)) s / k`, with the `k`
//!   of each group that rounds `z` least. Exact to a few thousandths of a quantization step, and on the plugin's int8 path, at
//!   8 bits per weight.
//! - [`WeightFormat::Rounded`]: `z` rounded to an integer, as other servers do. It increases the perplexity.
//!
//! Types without a minimum have integer zero points, and are the same in every format.

use server_gguf::blocks::{Affine, decode};
use server_gguf::{TensorType, f32_to_f16};

/// The format of quantized weights whose zero points are not integers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightFormat {
    /// The zero points are stored as f16.
    Compact,
    /// The weights and zero points are integers on a finer grid.
    Fine,
    /// The zero points are rounded to the nearest integer.
    Rounded,
}

/// The quantized integers of a matrix, or its values if it is not quantized.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Quants {
    /// Two to a byte, the first in the low half.
    U4(Vec<u8>),
    U8(Vec<u8>),
    I8(Vec<u8>),
    F16(Vec<u8>),
    Bf16(Vec<u8>),
    F32(Vec<u8>),
}

/// The zero points of the groups.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Zeros {
    None,
    /// Two to a byte, the first in the low half.
    U4(Vec<u8>),
    U8(Vec<u8>),
    F16(Vec<u16>),
}

/// The shape of a matrix, or of a stack of matrices whose rows follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MatrixShape {
    pub(crate) rows: usize,
    pub(crate) columns: usize,
}

/// A matrix in the format of the shim: `w = (q - z) s` in groups along its rows.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Matrix {
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    /// Number of values that share a scale; 0 if there are no scales and `quants` are values.
    pub(crate) group: usize,
    pub(crate) quants: Quants,
    pub(crate) scales: Vec<f32>,
    pub(crate) zeros: Zeros,
}

/// The largest f16 zero point. Beyond it, the differences within a group are less than the rounding of its minimum.
const ZERO_MAX: f32 = 60_000.0;

impl Matrix {
    /// Converts the bytes of a tensor.
    ///
    /// # Errors
    /// The type of the tensor is not supported.
    pub(crate) fn new(
        kind: TensorType,
        shape: MatrixShape,
        bytes: &[u8],
        format: WeightFormat,
    ) -> Result<Self, server_gguf::Error> {
        let MatrixShape { rows, columns } = shape;
        let plain = match kind {
            TensorType::F16 => Some(Quants::F16(bytes.to_vec())),
            TensorType::Bf16 => Some(Quants::Bf16(bytes.to_vec())),
            TensorType::F32 => Some(Quants::F32(bytes.to_vec())),
            _ => None,
        };
        if let Some(quants) = plain {
            return Ok(Self { rows, columns, group: 0, quants, scales: Vec::new(), zeros: Zeros::None });
        }
        let affine = decode(kind, bytes)?;
        let group = affine.group;
        let (quants, scales, zeros) =
            if affine.min.is_empty() { symmetric(affine) } else { asymmetric(affine, format) };
        Ok(Self { rows, columns, group, quants, scales, zeros })
    }

    /// # Panics
    /// If a vector does not have the length that follows from the sizes, by which the shim reads it.
    pub(crate) fn assert_lengths(&self) {
        let values = self.rows * self.columns;
        let (quants, expected) = match &self.quants {
            Quants::U4(bytes) => (bytes.len(), values / 2),
            Quants::U8(bytes) | Quants::I8(bytes) => (bytes.len(), values),
            Quants::F16(bytes) | Quants::Bf16(bytes) => (bytes.len(), values * 2),
            Quants::F32(bytes) => (bytes.len(), values * 4),
        };
        assert_eq!(quants, expected, "invariant: quants fill the matrix");
        if self.group == 0 {
            assert!(self.scales.is_empty(), "invariant: values have no scales");
            return;
        }
        let groups = values / self.group;
        assert_eq!(self.scales.len(), groups, "invariant: a scale for each group");
        let zeros = match &self.zeros {
            Zeros::None => groups,
            Zeros::U4(bytes) => bytes.len() * 2,
            Zeros::U8(bytes) => bytes.len(),
            Zeros::F16(values) => values.len(),
        };
        assert!(zeros == groups || zeros == groups + 1, "invariant: a zero for each group");
    }
}

/// Reorders the rows within each head: first the even rows, then the odd ones. This turns a rotation of adjacent pairs into a
/// rotation of halves.
pub(crate) fn permute_rows(bytes: &mut [u8], row_bytes: usize, head_size: usize) {
    let mut head = vec![0; row_bytes * head_size];
    for chunk in bytes.chunks_exact_mut(row_bytes * head_size) {
        head.copy_from_slice(chunk);
        for (to, row) in chunk.chunks_exact_mut(row_bytes).enumerate() {
            let half = head_size / 2;
            let from = if to < half { 2 * to } else { 2 * (to - half) + 1 };
            row.copy_from_slice(&head[from * row_bytes..(from + 1) * row_bytes]);
        }
    }
}

fn packed_u4(quants: &[u8]) -> Vec<u8> {
    quants.chunks(2).map(|pair| pair[0] | pair.get(1).copied().unwrap_or(0) << 4).collect()
}

/// Converts groups with integer zero points: 4-bit quants keep their zero point, wider ones become signed and need none.
fn symmetric(affine: Affine) -> (Quants, Vec<f32>, Zeros) {
    let Affine { bits, zero, mut quants, scale, .. } = affine;
    if bits == 4 {
        let zeros = vec![zero | zero << 4; scale.len().div_ceil(2)];
        return (Quants::U4(packed_u4(&quants)), scale, Zeros::U4(zeros));
    }
    for quant in &mut quants {
        *quant = quant.wrapping_sub(zero);
    }
    (Quants::I8(quants), scale, Zeros::None)
}

fn asymmetric(affine: Affine, format: WeightFormat) -> (Quants, Vec<f32>, Zeros) {
    match format {
        WeightFormat::Compact => compact(affine),
        WeightFormat::Fine => fine(affine),
        WeightFormat::Rounded => rounded(affine),
    }
}

fn compact(affine: Affine) -> (Quants, Vec<f32>, Zeros) {
    let Affine { bits, group, mut quants, mut scale, min, .. } = affine;
    let mut zeros = Vec::with_capacity(scale.len());
    for ((quants, scale), min) in quants.chunks_exact_mut(group).zip(&mut scale).zip(&min) {
        let zero = min / *scale;
        if zero.abs() <= ZERO_MAX {
            zeros.push(f32_to_f16(zero));
        } else {
            // All values of the group are close to its minimum. This covers a scale of 0.
            quants.fill(1);
            *scale = -min;
            zeros.push(0);
        }
    }
    let quants = if bits <= 4 { Quants::U4(packed_u4(&quants)) } else { Quants::U8(quants) };
    (quants, scale, Zeros::F16(zeros))
}

fn fine(affine: Affine) -> (Quants, Vec<f32>, Zeros) {
    let Affine { bits, group, mut quants, mut scale, min, .. } = affine;
    let top = ((1u32 << bits) - 1) as f32;
    let mut zeros = Vec::with_capacity(scale.len());
    for ((quants, scale), min) in quants.chunks_exact_mut(group).zip(&mut scale).zip(&min) {
        let zero = min / *scale;
        // All quants and the zero point must fit into 0..=255.
        let (low, high) = (zero.min(0.0), zero.max(top));
        if !zero.is_finite() || high - low > 255.0 {
            quants.fill(1);
            *scale = -min;
            zeros.push(0);
            continue;
        }
        let finest = (255.0 / (high - low)).floor().max(1.0);
        let error = |k: f32| ((k * zero).round() - k * zero).abs() / k;
        let coarsest = (finest / 2.0).floor().max(1.0);
        let mut best = finest;
        let mut k = finest;
        while k >= coarsest {
            if error(k) < error(best) {
                best = k;
            }
            k -= 1.0;
        }
        let shift = (-best * low).ceil().clamp(0.0, 255.0);
        for quant in quants {
            *quant = (best * f32::from(*quant) + shift).min(255.0) as u8;
        }
        zeros.push(((best * zero).round() + shift).clamp(0.0, 255.0) as u8);
        *scale /= best;
    }
    (Quants::U8(quants), scale, Zeros::U8(zeros))
}

fn rounded(affine: Affine) -> (Quants, Vec<f32>, Zeros) {
    let Affine { bits, mut quants, group, mut scale, min, .. } = affine;
    let top = if bits <= 4 { 15.0 } else { 255.0 };
    let mut zeros = Vec::with_capacity(scale.len());
    for ((quants, scale), min) in quants.chunks_exact_mut(group).zip(&mut scale).zip(&min) {
        if *scale == 0.0 {
            quants.fill(1);
            *scale = -min;
            zeros.push(0);
        } else {
            zeros.push((min / *scale).round().clamp(0.0, top) as u8);
        }
    }
    if bits <= 4 {
        (Quants::U4(packed_u4(&quants)), scale, Zeros::U4(packed_u4(&zeros)))
    } else {
        (Quants::U8(quants), scale, Zeros::U8(zeros))
    }
}

#[cfg(test)]
mod tests;
