//! Decodes the blocks of quantized tensors.
//!
//! All supported quantized types store the same kinds of data in different layouts: groups of small integers with a
//! scale, and either an integer zero point or a minimum. [`decode`] returns these data without loss. [`dequantize`]
//! computes the values in the order of operations of ggml's reference implementation, so that the results are
//! bit-exact.

use crate::{Error, TensorType, bf16_to_f32, f16_to_f32};

mod packed;

/// Quantized values as integers, scales and minima. Value `i`, of group `g = i / group`, is
/// `scale[g] * (quants[i] - zero)`, or, if `min` is not empty, `scale[g] * quants[i] - min[g]`.
#[derive(Clone, Debug, PartialEq)]
pub struct Affine {
    /// The number of bits of a quantized value: all `quants` are below `1 << bits`.
    pub bits: u32,
    /// The number of values that share a scale.
    pub group: usize,
    /// The integer zero point, or 0 if the groups have minima. (Q8_0 stores signed bytes. `quants` represents them as
    /// unsigned bytes with zero point 128; flipping the top bit restores the signed byte.)
    pub zero: u8,
    /// The quantized values, in order.
    pub quants: Vec<u8>,
    /// The scale of each group, which may be negative.
    pub scale: Vec<f32>,
    /// The minimum of each group; empty for types without minima.
    pub min: Vec<f32>,
}

impl Affine {
    /// Computes the value at `index`.
    ///
    /// # Panics
    /// Panics if `index` is not below the number of values.
    pub fn value(&self, index: usize) -> f32 {
        let group = index / self.group;
        let quant = f32::from(i16::from(self.quants[index]) - i16::from(self.zero));
        let product = self.scale[group] * quant;
        if self.min.is_empty() { product } else { product - self.min[group] }
    }
}

/// Decodes quantized values without loss.
///
/// # Errors
/// [`Error`] if `kind` is not a supported quantized type or `bytes` does not consist of whole blocks.
pub fn decode(kind: TensorType, bytes: &[u8]) -> Result<Affine, Error> {
    let layout = kind.quant_layout().ok_or(Error::Undecodable(kind))?;
    let values = bytes.len() / kind.block_bytes() * kind.block_values();
    if !bytes.len().is_multiple_of(kind.block_bytes()) {
        return Err(Error::Lengths { kind, bytes: bytes.len(), values });
    }
    let groups = values / layout.group;
    let mut affine = Affine {
        bits: layout.bits,
        group: layout.group,
        zero: layout.zero,
        quants: vec![0; values],
        scale: vec![0.0; groups],
        min: vec![0.0; if layout.has_min { groups } else { 0 }],
    };
    let unpack = packed::unpacker(kind).expect("invariant: every type with a layout has an unpacker");
    let block_groups = kind.block_values() / layout.group;
    let quants = affine.quants.chunks_exact_mut(kind.block_values());
    for (index, (block, quants)) in bytes.chunks_exact(kind.block_bytes()).zip(quants).enumerate() {
        let groups = index * block_groups..(index + 1) * block_groups;
        let min = if layout.has_min { &mut affine.min[groups.clone()] } else { &mut [] };
        unpack(block, &mut packed::UnpackedBlock { quants, scale: &mut affine.scale[groups], min });
    }
    Ok(affine)
}

/// Decodes `bytes` into `values`, bit-exact with ggml's reference implementation.
///
/// # Errors
/// [`Error`] if `kind` is not supported or `bytes` does not contain exactly `values.len()` values.
pub fn dequantize(kind: TensorType, bytes: &[u8], values: &mut [f32]) -> Result<(), Error> {
    if !kind.is_decodable() {
        return Err(Error::Undecodable(kind));
    }
    if kind.bytes_of(values.len() as u64) != Some(bytes.len() as u64) {
        return Err(Error::Lengths { kind, bytes: bytes.len(), values: values.len() });
    }
    match kind {
        TensorType::F32 => {
            for (value, bytes) in values.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *value = f32::from_le_bytes(*bytes);
            }
        }
        TensorType::F16 | TensorType::Bf16 => {
            let convert = if kind == TensorType::F16 { f16_to_f32 } else { bf16_to_f32 };
            for (value, bytes) in values.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *value = convert(u16::from_le_bytes(*bytes));
            }
        }
        _ => dequantize_blocks(kind, bytes, values),
    }
    Ok(())
}

fn dequantize_blocks(kind: TensorType, bytes: &[u8], values: &mut [f32]) {
    let layout = kind.quant_layout().expect("invariant: `dequantize` calls this for quantized types only");
    let unpack = packed::unpacker(kind).expect("invariant: every type with a layout has an unpacker");
    let (mut quants, mut scale, mut min) = ([0u8; 256], [0f32; 16], [0f32; 16]);
    let quants = &mut quants[..kind.block_values()];
    let groups = kind.block_values() / layout.group;
    let blocks = bytes.chunks_exact(kind.block_bytes());
    for (block, values) in blocks.zip(values.chunks_exact_mut(kind.block_values())) {
        let (scale, min) = (&mut scale[..groups], &mut min[..if layout.has_min { groups } else { 0 }]);
        unpack(block, &mut packed::UnpackedBlock { quants, scale, min });
        let by_group = values.chunks_exact_mut(layout.group).zip(quants.chunks_exact(layout.group));
        for (group, (values, quants)) in by_group.enumerate() {
            let zero = i16::from(layout.zero);
            for (value, &quant) in values.iter_mut().zip(quants) {
                *value = scale[group] * f32::from(i16::from(quant) - zero);
            }
            if layout.has_min {
                values.iter_mut().for_each(|value| *value -= min[group]);
            }
        }
    }
}
