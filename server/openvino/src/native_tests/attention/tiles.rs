//! Tests of the kernels that multiply in bf16, especially of those that use tiles.

use super::{Activations, FloatType, KernelVariant, Layer, OtherSequences, Random};
use crate::cpu::Isa;
use crate::kernels::Precision;
use crate::native_tests::has_real_tiles;

/// The tiles of the processor and the model of the tiles produce the same bits.
#[test]
fn attention_in_tiles_of_the_processor_and_of_the_model_agree() {
    const TOKENS: usize = 700;
    if !has_real_tiles() {
        return;
    }
    for seed in 0..24 {
        let mut random = Random(seed);
        let kv_cache = [Precision::U8, Precision::F32, Precision::Bf16, Precision::F16][seed as usize % 4];
        let layer = Layer::random(&mut random, kv_cache, FloatType::F32);
        let mut layer = Layer { block_scores: false, ..layer };
        let tensors = layer.tensors(&mut random, TOKENS);
        let mut output = |variant| {
            let mut random = Random(seed);
            let chunk = |_| random.pick(&[1, 2, 16, 33, 300]);
            layer.output_in_chunks(variant, &tensors, OtherSequences::Absent, chunk).unwrap()
        };
        // Both variants use AVX-512 vectors, whose width determines the order in which weights are added.
        assert!(
            output(KernelVariant::Kernels(Isa::Amx)) == output(KernelVariant::TileModel(Isa::Avx512)),
            "{seed}"
        );
    }
}

/// The root mean square error of bf16 kernels, relative to the exact output, is below that of plain inference in bf16.
/// Plain inference rounds queries, keys, values, attention weights and outputs once each, and computes exact sums.
#[test]
fn the_noise_of_attention_in_tiles_is_at_most_that_of_bf16_inference() {
    const TOKENS: usize = 300;
    let rounded = |number: f64| {
        let bits = (number as f32).to_bits();
        f64::from(f32::from_bits((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff_0000))
    };
    // With these standard deviations of the scores, the attention weights are nearly equal, spread like those of an
    // ordinary layer, or dominated by a few keys.
    for spread in [0.3, 1.0, 4.0] {
        let mut random = Random(11);
        let layer = Layer::random(&mut random, Precision::F32, FloatType::F32);
        let mut layer = Layer {
            heads: 3 * layer.kv_heads,
            sinks: vec![],
            window: 0,
            fuses_rope: false,
            block_scores: false,
            attention_mass: 0.0,
            ..layer
        };
        let Layer { heads, kv_heads, size, .. } = layer;
        let scale = f64::from(layer.scale());
        // Approximately normally distributed numbers that use all bits of f32.
        let mut bell = |count: usize, scale: f32| -> Vec<f32> {
            let mut number =
                || (0..12).map(|_| random.below(1 << 20) as f32 / (1 << 20) as f32 - 0.5).sum::<f32>();
            (0..count).map(|_| scale * number()).collect()
        };
        let queries = bell(TOKENS * heads * size, spread);
        let [keys, values] = [1.0, 1.0].map(|scale| bell(TOKENS * kv_heads * size, scale));
        layer.sequences[0].keys.clone_from(&keys);
        layer.sequences[0].values.clone_from(&values);
        let in_bf16 = |token: usize, head: usize| {
            let row = |all: &[f32], heads: usize, token: usize, head: usize| -> Vec<f64> {
                all[(token * heads + head) * size..][..size]
                    .iter()
                    .map(|it| rounded(f64::from(*it)))
                    .collect()
            };
            let query = row(&queries, heads, token, head);
            let of_kv_head = |all, token| row(all, kv_heads, token, head / 3);
            let scores: Vec<f64> = (0..=token)
                .map(|key| query.iter().zip(of_kv_head(&keys, key)).map(|(a, b)| a * b).sum::<f64>() * scale)
                .collect();
            let maximum = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let total: f64 = scores.iter().map(|score| (score - maximum).exp()).sum();
            let mut output = vec![0.0; size];
            for (key, score) in scores.iter().enumerate() {
                let weight = rounded((score - maximum).exp() / total);
                for (sum, value) in output.iter_mut().zip(of_kv_head(&values, key)) {
                    *sum += weight * value;
                }
            }
            output.into_iter().map(rounded).collect::<Vec<f64>>()
        };
        let sample: Vec<(usize, usize)> =
            (0..TOKENS).step_by(7).flat_map(|token| (0..heads).map(move |head| (token, head))).collect();
        let exact: Vec<f64> = sample
            .iter()
            .flat_map(|(token, head)| {
                let query = &queries[(token * heads + head) * size..][..size];
                layer.plain(0, *token, *head, query).output
            })
            .collect();
        let noise = |found: &[f64]| {
            let errors: f64 = found.iter().zip(&exact).map(|(found, exact)| (found - exact).powi(2)).sum();
            (errors / exact.iter().map(|exact| exact.powi(2)).sum::<f64>()).sqrt()
        };
        let plain: Vec<f64> = sample.iter().flat_map(|(token, head)| in_bf16(*token, *head)).collect();
        let plain = noise(&plain);
        let activations = Activations { queries: &queries, keys: &keys, values: &values };
        for variant in KernelVariant::all().filter(|variant| variant.multiplies_in_bf16()) {
            let Some(output) = layer.prompt(variant, activations) else { continue };
            let row =
                |(token, head): &(usize, usize)| output[(token * heads + head) * size..][..size].to_vec();
            let found: Vec<f64> = sample.iter().flat_map(row).map(f64::from).collect();
            let found = noise(&found);
            println!(
                "scores with spread {spread}, {variant:?}: noise {found:.5}, of bf16 inference {plain:.5}"
            );
            assert!((0.001..plain).contains(&found), "{spread}, {variant:?}: {found}, {plain}");
        }
    }
}
