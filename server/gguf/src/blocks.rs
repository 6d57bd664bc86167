//! What the bytes of quantised tensors mean.
//!
//! Every supported type is the same thing in a different packing: groups of small integers with a scale, and
//! either an integer zero point or a minimum. [`decode`] gives that form without loss; [`dequantize`]
//! evaluates it in the order of operations of ggml's reference, so that both agree to the last bit with it.

use crate::{Error, TensorType, bf16_to_f32, f16_to_f32};

mod packed;

/// Quantised values taken apart. Value `i`, of group `g = i / group`, is
/// `scale[g] * (quants[i] - zero)`, or, if `min` is not empty, `scale[g] * quants[i] - min[g]`.
#[derive(Clone, Debug, PartialEq)]
pub struct Affine {
    /// Bits of a quant: `quants` are below `1 << bits`.
    pub bits: u32,
    /// Values that share a scale.
    pub group: usize,
    /// The integer zero point; 0 if there are minima. (Q8_0 stores signed bytes; they are given unsigned
    /// here, with zero point 128. Flipping the top bit gives the signed byte again.)
    pub zero: u8,
    /// The integers, in order.
    pub quants: Vec<u8>,
    /// A scale for each group. May be negative.
    pub scale: Vec<f32>,
    /// A minimum for each group, or empty for the types that have none.
    pub min: Vec<f32>,
}

impl Affine {
    /// Value `index`.
    ///
    /// # Panics
    /// If there are not so many.
    pub fn value(&self, index: usize) -> f32 {
        let group = index / self.group;
        let quant = f32::from(i16::from(self.quants[index]) - i16::from(self.zero));
        let product = self.scale[group] * quant;
        if self.min.is_empty() { product } else { product - self.min[group] }
    }
}

/// What the quants of a type look like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Form {
    /// Bits of a quant.
    pub bits: u32,
    /// Values that share a scale.
    pub group: usize,
    /// The integer zero point.
    pub zero: u8,
    /// Whether groups have minima.
    pub has_min: bool,
}

/// What the quants of `kind` look like; `None` if it is not a quantised type supported here.
pub fn form(kind: TensorType) -> Option<Form> {
    let (bits, group, zero, has_min) = match kind {
        TensorType::Q4_0 => (4, 32, 8, false),
        TensorType::Q4_1 => (4, 32, 0, true),
        TensorType::Q5_0 => (5, 32, 16, false),
        TensorType::Q5_1 => (5, 32, 0, true),
        TensorType::Q8_0 => (8, 32, 128, false),
        TensorType::Q2K => (2, 16, 0, true),
        TensorType::Q3K => (3, 16, 4, false),
        TensorType::Q4K => (4, 32, 0, true),
        TensorType::Q5K => (5, 32, 0, true),
        TensorType::Q6K => (6, 16, 32, false),
        _ => return None,
    };
    Some(Form { bits, group, zero, has_min })
}

/// Takes quantised values apart, without loss.
///
/// # Errors
/// `kind` is not a supported quantised type, or `bytes` are not whole blocks.
pub fn decode(kind: TensorType, bytes: &[u8]) -> Result<Affine, Error> {
    let form = form(kind).ok_or(Error::Undecodable(kind))?;
    let values = bytes.len() / kind.block_bytes() * kind.block_values();
    if !bytes.len().is_multiple_of(kind.block_bytes()) {
        return Err(Error::Lengths { kind, bytes: bytes.len(), values });
    }
    let groups = values / form.group;
    let mut affine = Affine {
        bits: form.bits,
        group: form.group,
        zero: form.zero,
        quants: vec![0; values],
        scale: vec![0.0; groups],
        min: vec![0.0; if form.has_min { groups } else { 0 }],
    };
    let unpack = packed::unpacker(kind).expect("invariant: every type with a form has an unpacker");
    let block_groups = kind.block_values() / form.group;
    let quants = affine.quants.chunks_exact_mut(kind.block_values());
    for (index, (block, quants)) in bytes.chunks_exact(kind.block_bytes()).zip(quants).enumerate() {
        let groups = index * block_groups..(index + 1) * block_groups;
        let min = if form.has_min { &mut affine.min[groups.clone()] } else { &mut [] };
        unpack(block, &mut packed::Parts { quants, scale: &mut affine.scale[groups], min });
    }
    Ok(affine)
}

/// Computes the values that `bytes` stand for, bit for bit as ggml's reference does.
///
/// # Errors
/// `kind` is not supported, or `bytes` are not exactly `values.len()` values.
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
    let form = form(kind).expect("invariant: only quantised types get here");
    let unpack = packed::unpacker(kind).expect("invariant: every type with a form has an unpacker");
    let (mut quants, mut scale, mut min) = ([0u8; 256], [0f32; 16], [0f32; 16]);
    let quants = &mut quants[..kind.block_values()];
    let groups = kind.block_values() / form.group;
    let blocks = bytes.chunks_exact(kind.block_bytes());
    for (block, values) in blocks.zip(values.chunks_exact_mut(kind.block_values())) {
        let (scale, min) = (&mut scale[..groups], &mut min[..if form.has_min { groups } else { 0 }]);
        unpack(block, &mut packed::Parts { quants, scale, min });
        let by_group = values.chunks_exact_mut(form.group).zip(quants.chunks_exact(form.group));
        for (group, (values, quants)) in by_group.enumerate() {
            let zero = i16::from(form.zero);
            for (value, &quant) in values.iter_mut().zip(quants) {
                *value = scale[group] * f32::from(i16::from(quant) - zero);
            }
            if form.has_min {
                values.iter_mut().for_each(|value| *value -= min[group]);
            }
        }
    }
}
