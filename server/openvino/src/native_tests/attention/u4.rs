//! Tests of a cache in u4, whose keys and values are rotated before they are rounded.

use super::{Activations, BLOCK_TOKENS, FloatType, KernelVariant, Layer, Random, number};
use crate::cpu::Isa;
use crate::kernels::Precision;

/// The key or value of a head, which a u4 cache represents exactly. When it is rotated, it consists of integers of
/// `bits` bits, divided by 16; every fourth is the integer with the largest magnitude, which determines the scale.
fn representable(random: &mut Random, size: usize, bits: usize) -> Vec<f32> {
    let half = 1 << (bits - 1);
    let integer = |random: &mut Random| random.below(2 * half) as f32 - half as f32;
    let rotated: Vec<f32> =
        (0..size).map(|index| if index % 4 == 0 { -(half as f32) } else { integer(random) } / 16.0).collect();
    // The rotation is its own inverse.
    let width = 1 << size.trailing_zeros();
    let sign =
        |row: usize, column: usize| if (row & column).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
    let head = (0..size).map(|row| {
        let numbers = rotated[row / width * width..][..width].iter().enumerate();
        numbers.map(|(column, number)| sign(row, column) * number).sum::<f32>() / (width as f32).sqrt()
    });
    head.collect()
}

#[test]
fn a_u4_cache_represents_rotated_integers_exactly() {
    const TOKENS: usize = 150;
    let mut tried = 0;
    for variant in KernelVariant::all() {
        for seed in 0..6 {
            let mut random = Random(seed);
            let layer = Layer::random(&mut random, Precision::U4, FloatType::F32);
            let mut layer = Layer { window: 0, fuses_rope: false, ..layer };
            let Layer { heads, kv_heads, size, .. } = layer;
            let mut heads_of = |bits| -> Vec<f32> {
                (0..TOKENS * kv_heads).flat_map(|_| representable(&mut random, size, bits)).collect()
            };
            let (mut keys, values) = (heads_of(5), heads_of(4));
            // Keys are stored as differences from the first key of their block. With a first key of 0, the differences
            // are the keys themselves.
            for first in keys.chunks_mut(BLOCK_TOKENS * kv_heads * size) {
                first[..kv_heads * size].fill(0.0);
            }
            let queries: Vec<f32> = (0..TOKENS * heads * size).map(|_| number(&mut random)).collect();
            let activations = Activations { queries: &queries, keys: &keys, values: &values };
            let Some(output) = layer.prompt(variant, activations) else { continue };
            tried += 1;
            (layer.sequences[0].keys, layer.sequences[0].values) = (keys, values);
            let tolerance = if variant == KernelVariant::Kernels(Isa::Avx512Bf16) { 0.02 } else { 1e-5 };
            for (index, found) in output.chunks(size).enumerate() {
                let query = &queries[index * size..][..size];
                let expected = layer.plain(0, index / heads, index % heads, query).output;
                for (found, expected) in found.iter().zip(expected) {
                    assert!(
                        (f64::from(*found) - expected).abs() < tolerance,
                        "{variant:?}, seed {seed}, size {size}, token {}: {found}, not {expected}",
                        index / heads
                    );
                }
            }
        }
    }
    assert!(tried >= 6, "{tried}");
}
