//! Converts a weight tensor of a GGUF file to constants for the graph. The conversion is a pure function of the
//! tensor's bytes.
//!
//! Every quantized type is affine in groups, `w = s q - m`. Runtimes compute `w = (q - z) s`, in which `z = m / s` is
//! rarely an integer, so it is stored as f16. This format is exact up to the rounding of f16, and about as small as the
//! file. The plugin multiplies 8-bit integers only if zero points are integers; the native kernels do not have this
//! restriction.
//!
//! Types without a minimum have integer zero points.

use server_gguf::blocks::{Affine, decode};
use server_gguf::{TensorType, f32_to_f16};

/// The quantized integers of a matrix, or its values if it is not quantized.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Quants {
    /// Two values per byte, the first one in the low half.
    U4(Vec<u8>),
    /// Two 4-bit floating-point numbers per byte, the first one in the low half.
    F4E2M1(Vec<u8>),
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
    /// Two values per byte, the first one in the low half.
    U4(Vec<u8>),
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
    /// Number of values that share a scale, or 0 if the matrix has no scales and `quants` contains the values.
    pub(crate) group: usize,
    pub(crate) quants: Quants,
    pub(crate) scales: Vec<f32>,
    pub(crate) zeros: Zeros,
    /// Whether the quants are integers of at most 6 bits: from 0 to 63, or from -32 to 31.
    pub(crate) fits_six_bits: bool,
    /// Whether the 16 scales of each 256 values are products of one f16 number and 8-bit integers.
    pub(crate) has_super_scales: bool,
}

/// The largest zero point that is stored in f16. If the zero point is larger, the differences within a group are about
/// as small as the rounding error of its minimum.
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
    ) -> Result<Self, server_gguf::Error> {
        let MatrixShape { rows, columns } = shape;
        let plain = match kind {
            TensorType::F16 => Some(Quants::F16(bytes.to_vec())),
            TensorType::Bf16 => Some(Quants::Bf16(bytes.to_vec())),
            TensorType::F32 => Some(Quants::F32(bytes.to_vec())),
            _ => None,
        };
        if let Some(quants) = plain {
            return Ok(Self {
                rows,
                columns,
                group: 0,
                quants,
                scales: Vec::new(),
                zeros: Zeros::None,
                fits_six_bits: false,
                has_super_scales: false,
            });
        }
        let affine = decode(kind, bytes)?;
        let (bits, group) = (affine.bits, affine.group);
        let (quants, scales, zeros) = match kind {
            TensorType::Mxfp4 => e2m1(affine),
            _ if affine.min.is_empty() => symmetric(affine),
            _ => asymmetric(affine),
        };
        let fits_six_bits = bits <= 6 && kind != TensorType::Mxfp4;
        let has_super_scales = matches!(kind, TensorType::Q3K | TensorType::Q6K);
        Ok(Self { rows, columns, group, quants, scales, zeros, fits_six_bits, has_super_scales })
    }

    /// A matrix of one block. It has the form of every matrix of this type.
    ///
    /// # Errors
    /// The type is not supported.
    pub(crate) fn form(kind: TensorType) -> Result<Self, server_gguf::Error> {
        let shape = MatrixShape { rows: 1, columns: kind.block_values() };
        Self::new(kind, shape, &vec![0; kind.block_bytes()])
    }

    /// Asserts that each vector has the length that follows from the sizes, because the shim relies on these lengths.
    ///
    /// # Panics
    /// Panics if a vector has another length.
    pub(crate) fn assert_lengths(&self) {
        let values = self.rows * self.columns;
        let (quants, expected) = match &self.quants {
            Quants::U4(bytes) | Quants::F4E2M1(bytes) => (bytes.len(), values / 2),
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
            Zeros::F16(values) => values.len(),
        };
        assert!(zeros == groups || zeros == groups + 1, "invariant: a zero for each group");
    }
}

/// Reorders the rows within each head: first the even rows, then the odd ones. This order turns a rotation of adjacent
/// pairs into a rotation of halves.
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
    let (pairs, last) = quants.as_chunks::<2>();
    // The compiler vectorizes the loop over pairs.
    let mut packed: Vec<u8> = pairs.iter().map(|[low, high]| low | high << 4).collect();
    packed.extend(last);
    packed
}

/// Converts the quants of MXFP4, which are twice the values plus 12, to codes of E2M1.
fn e2m1(affine: Affine) -> (Quants, Vec<f32>, Zeros) {
    /// Twice the magnitudes of the codes from 0 to 7. The next bit of a code is the sign.
    const DOUBLED: [u8; 8] = [0, 1, 2, 3, 4, 6, 8, 12];
    let Affine { mut quants, mut scale, zero, .. } = affine;
    for quant in &mut quants {
        let code = DOUBLED.iter().position(|doubled| *doubled == quant.abs_diff(zero));
        let code = code.expect("invariant: quants of MXFP4 are those of its codes") as u8;
        *quant = code | u8::from(*quant < zero) << 3;
    }
    scale.iter_mut().for_each(|scale| *scale *= 2.0);
    (Quants::F4E2M1(packed_u4(&quants)), scale, Zeros::None)
}

/// Converts groups with integer zero points: 4-bit quants keep their zero point; all other quants become signed and
/// need no zero point.
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

/// Converts groups whose zero points are not integers.
fn asymmetric(affine: Affine) -> (Quants, Vec<f32>, Zeros) {
    let Affine { bits, group, mut quants, mut scale, min, .. } = affine;
    let mut zeros = Vec::with_capacity(scale.len());
    for ((quants, scale), min) in quants.chunks_exact_mut(group).zip(&mut scale).zip(&min) {
        let zero = min / *scale;
        if zero.abs() <= ZERO_MAX {
            zeros.push(f32_to_f16(zero));
        } else {
            // All values of the group are close to its minimum, so all become the minimum. This case includes a scale
            // of 0.
            quants.fill(1);
            *scale = -min;
            zeros.push(0);
        }
    }
    let quants = if bits <= 4 { Quants::U4(packed_u4(&quants)) } else { Quants::U8(quants) };
    (quants, scale, Zeros::F16(zeros))
}

#[cfg(test)]
mod tests;
