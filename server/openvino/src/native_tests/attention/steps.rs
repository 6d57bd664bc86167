//! Compares steps of random layers with the plain computation in every precision, and compares the outputs of a prompt
//! that is divided into chunks in different ways.

use super::super::{THREADS, Threads, on_threads};
use super::{Activations, FloatType, KernelVariant, Layer, OtherSequences, Random, tolerance};
use crate::cpu::Isa;
use crate::kernels::Precision;

#[test]
fn kernels_compute_the_same_as_a_plain_computation() {
    let mut tried = 0;
    for variant in KernelVariant::all() {
        let precisions = [Precision::F32, Precision::Bf16, Precision::F16, Precision::U8, Precision::U4];
        let activations = [FloatType::F32, FloatType::Bf16];
        for (kv_cache, activations) in
            precisions.into_iter().flat_map(|kv_cache| activations.map(|activations| (kv_cache, activations)))
        {
            // The model of the tiles is slow, so fewer cases use it. `make sanitize` computes more cases with the
            // model.
            let seeds = match variant {
                KernelVariant::Kernels(_) => 2,
                KernelVariant::TileModel(Isa::Portable) if kv_cache != Precision::U8 => 0,
                KernelVariant::TileModel(_) => u64::from(activations == FloatType::F32),
            };
            for seed in 0..seeds {
                let mut random = Random(seed * 1000 + variant.isa() as u64);
                let mut layer = Layer::random(&mut random, kv_cache, activations);
                // The steps are chunks of several prompts, decodes, short drafts, and mixtures of these.
                let steps: [[usize; 4]; 6] = [
                    [1500, 0, 3, 1],
                    [70, 33, 29, 0],
                    [1, 1, 1, 1],
                    [1, 1, 0, 40],
                    [5, 2, 3, 1],
                    [1, 200, 1, 17],
                ];
                for counts in steps {
                    let Some(worst) = layer.step(&mut random, variant, &counts) else {
                        continue;
                    };
                    tried += 1;
                    assert!(
                        worst < tolerance(variant, kv_cache, activations),
                        "{variant:?}, {kv_cache}, {activations:?}, seed {seed}, {counts:?}, {} heads of size {}, {} KV \
                         heads, window {}: off by {worst}",
                        layer.heads,
                        layer.size,
                        layer.kv_heads,
                        layer.window
                    );
                }
            }
        }
    }
    // The portable kernels run on every processor.
    assert!(tried >= 5 * 2 * 2 * 6, "{tried}");
}

/// A prompt is computed as a whole, in chunks of random sizes and, from token 900 on, token by token. In some cases,
/// each step also computes another sequence.
#[test]
fn the_output_of_a_token_does_not_depend_on_chunks_or_other_sequences() {
    const TOKENS: usize = 1300;
    let mut tried = 0;
    for variant in KernelVariant::all() {
        let seeds = match variant {
            KernelVariant::TileModel(Isa::Portable) => 1,
            KernelVariant::TileModel(_) => 2,
            KernelVariant::Kernels(_) => 10,
        };
        for seed in 0..seeds {
            let mut random = Random(seed);
            let precisions = [Precision::U8, Precision::F32, Precision::U4, Precision::Bf16, Precision::F16];
            let kv_cache = precisions[seed as usize % 5];
            let activations = if seed % 4 == 1 { FloatType::Bf16 } else { FloatType::F32 };
            let layer = Layer::random(&mut random, kv_cache, activations);
            let mut layer = Layer { block_scores: false, ..layer };
            let tensors = layer.tensors(&mut random, TOKENS);
            let Some(whole) = layer.output_in_chunks(variant, &tensors, OtherSequences::Absent, |_| TOKENS)
            else {
                continue;
            };
            tried += 1;
            let Layer { heads, kv_heads, size, window, .. } = layer;
            let mut expect_equal = |others, way: &str, chunk: &mut dyn FnMut(usize) -> usize| {
                let found = layer.output_in_chunks(variant, &tensors, others, chunk).unwrap();
                let at = found.iter().zip(&whole).position(|(found, expected)| found != expected);
                let token = at.map(|at| at / (whole.len() / TOKENS));
                assert!(
                    found.len() == whole.len() && token.is_none(),
                    "{variant:?}, {kv_cache}, {activations:?}, seed {seed}, {heads} heads of size {size}, {kv_heads} \
                     KV heads, window {window}: {way}: token {token:?} differs"
                );
            };
            expect_equal(OtherSequences::Present, "with another sequence", &mut |_| TOKENS);
            expect_equal(OtherSequences::Absent, "in chunks", &mut |_| 1 + random.below(300));
            expect_equal(OtherSequences::Present, "in small chunks", &mut |_| 1 + random.below(40));
            // Decode before and after a boundary between the parts into which a sequence is divided for the threads.
            expect_equal(OtherSequences::Present, "token by token", &mut |past| {
                if past < 900 { 900 } else { 1 }
            });
        }
    }
    assert!(tried >= 10, "{tried}");
}

/// Decodes are divided into parts if there are few of them for the number of threads.
#[test]
fn attention_does_not_depend_on_the_number_of_threads() {
    const TOKENS: usize = 1100;
    let precisions = [Precision::U8, Precision::F32, Precision::U4];
    let mut tried = 0;
    for (seed, kv_cache) in precisions.into_iter().enumerate() {
        let layer = Layer::random(&mut Random(seed as u64), kv_cache, FloatType::F32);
        let window = if seed == 1 { 700 } else { 0 };
        let mut layer = Layer { block_scores: false, attention_mass: 0.0, window, ..layer };
        let tensors = layer.tensors(&mut Random(9), TOKENS);
        for variant in KernelVariant::all() {
            if variant.is_tile_model() && seed > 0 {
                continue;
            }
            // The first parts of a sequence have 512 tokens each. Compute a chunk of a prompt, decodes on both sides of
            // the end of the first part, another chunk, and decodes in the third part.
            let chunk = |past| match past {
                0 => 505,
                520 => 570,
                _ => 1,
            };
            let mut output = |threads| {
                on_threads(threads, || {
                    layer.output_in_chunks(variant, &tensors, OtherSequences::Absent, chunk)
                })
            };
            let Some(expected) = output(Threads::ONE) else { continue };
            tried += 1;
            for threads in THREADS {
                assert!(output(threads).as_ref() == Some(&expected), "{variant:?}, {kv_cache}, {threads:?}");
            }
        }
    }
    assert!(tried >= 3, "{tried}");
}

/// One KV head has more query heads than fit into the vector registers: the scratch memory must have room for the block
/// scores of all of them.
#[test]
fn decodes_with_many_query_heads_per_kv_head_report_their_block_scores() {
    let mut tried = 0;
    for variant in KernelVariant::all() {
        for group in [16, 17, 48] {
            let layer = Layer::random(&mut Random(5), Precision::U8, FloatType::F32);
            let heads = layer.kv_heads * group;
            let mut layer = Layer { heads, sinks: vec![1.0; heads], block_scores: true, window: 0, ..layer };
            layer.step(&mut Random(6), variant, &[200, 40, 0, 0]);
            let step = layer.step(&mut Random(7), variant, &[1, 1, 0, 0]);
            let Some(worst) = step else { continue };
            tried += 1;
            assert!(
                worst < tolerance(variant, Precision::U8, FloatType::F32),
                "{variant:?}, group {group}: {worst}"
            );
        }
    }
    assert!(tried >= 3, "{tried}");
}

#[test]
fn numbers_beyond_the_range_of_f16_are_stored_as_its_largest() {
    const LARGEST: f32 = 65504.0;
    const TOKENS: usize = 40;
    let mut tried = 0;
    for variant in KernelVariant::all() {
        let layer = Layer::random(&mut Random(5), Precision::F16, FloatType::F32);
        let mut layer = Layer { window: 0, fuses_rope: false, attention_mass: 0.0, ..layer };
        let Layer { heads, kv_heads, size, .. } = layer;
        let queries = vec![0.001; TOKENS * heads * size];
        let keys = vec![1e6; TOKENS * kv_heads * size];
        let values: Vec<f32> =
            (0..TOKENS * kv_heads * size).map(|index| if index % 2 == 0 { 1e6 } else { -1e6 }).collect();
        let activations = Activations { queries: &queries, keys: &keys, values: &values };
        let Some(output) = layer.prompt(variant, activations) else { continue };
        tried += 1;
        for (index, found) in output.iter().enumerate() {
            let expected = if index % 2 == 0 { LARGEST } else { -LARGEST };
            // Kernels that multiply in bf16 round the largest value to 8 bits.
            let tolerance = if variant.multiplies_in_bf16() { LARGEST / 256.0 } else { 1.0 };
            assert!((found - expected).abs() < tolerance, "{variant:?}, {index}: {found}, not {expected}");
        }
    }
    assert!(tried >= 1, "{tried}");
}
