//! Tests of prompts that attend only to keys with a large part of the attention mass.

use super::{Activations, FloatType, KernelVariant, Layer, Random};
use crate::kernels::Precision;

/// The keys of two ranges of tokens equal the queries, and all other keys equal the negated queries. The values of a
/// range in between are infinite, so the output shows whether the kernels read them.
#[test]
fn a_sparse_prompt_attends_only_to_keys_with_a_large_mass() {
    const TOKENS: usize = 3000;
    const HEAVY: [std::ops::Range<usize>; 2] = [700..720, 1900..1960];
    let mut tried = 0;
    for variant in KernelVariant::all() {
        for kv_cache in [Precision::F32, Precision::U8, Precision::U4] {
            for attention_mass in [0.0, 0.9] {
                let mut layer = Layer {
                    window: 0,
                    fuses_rope: false,
                    attention_mass,
                    ..Layer::random(&mut Random(3), kv_cache, FloatType::F32)
                };
                let Layer { heads, kv_heads, size, .. } = layer;
                let is_heavy = |token: usize| HEAVY.iter().any(|range| range.contains(&token));
                let is_infinite = |token: usize| (1024..1536).contains(&token);
                let tensor = |per_token: usize, of: &dyn Fn(usize) -> f32| -> Vec<f32> {
                    (0..TOKENS).flat_map(|token| vec![of(token); per_token]).collect()
                };
                let sign = |token: usize| if is_heavy(token) { 2.0 } else { -2.0 };
                let queries = tensor(heads * size, &|_| 2.0);
                let keys = tensor(kv_heads * size, &sign);
                let values = tensor(kv_heads * size, &|token| match token {
                    _ if is_infinite(token) => f32::INFINITY,
                    _ if is_heavy(token) => 1.0,
                    _ => -1.0,
                });
                let activations = Activations { queries: &queries, keys: &keys, values: &values };
                let Some(output) = layer.prompt(variant, activations) else { continue };
                tried += 1;
                // The outputs at positions after the heavy and the infinite ranges. The keys at these positions have
                // little mass.
                let late = &output[2560 * heads * size..];
                if attention_mass > 0.0 {
                    let worst = late.iter().map(|it| (it - 1.0).abs()).fold(0.0, f32::max);
                    assert!(worst < 0.02, "{variant:?}, {kv_cache}: off by {worst}");
                } else {
                    assert!(late.iter().all(|it| !it.is_finite()), "some infinite values were not read");
                }
            }
        }
    }
    assert!(tried >= 3 * 2, "{tried}");
}
