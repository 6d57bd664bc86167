//! Tests of attention sinks far from the scores. Many random layers of the other tests have sinks near the scores.

use super::{FloatType, KernelVariant, Layer, Random, tolerance};
use crate::kernels::Precision;

/// If a sink is far above all scores, the weights of all keys vanish; if it is far below them, the sink has
/// no weight.
#[test]
fn a_sink_far_from_the_scores_gets_all_of_the_attention_or_none() {
    let mut tried = 0;
    for variant in KernelVariant::all() {
        for kv_cache in [Precision::F32, Precision::U8, Precision::U4] {
            let layer = Layer::random(&mut Random(9), kv_cache, FloatType::F32);
            let sinks = (0..layer.heads).map(|head| if head % 2 == 0 { 1e4 } else { -1e4 }).collect();
            let mut layer = Layer { sinks, block_scores: true, window: 0, ..layer };
            let mut random = Random(10);
            for counts in [[900, 40, 3, 1], [1, 1, 1, 1], [30, 1, 0, 2]] {
                let Some(worst) = layer.step(&mut random, variant, &counts) else { continue };
                tried += 1;
                assert!(
                    worst < tolerance(variant, kv_cache, FloatType::F32),
                    "{variant:?}, {kv_cache}, {counts:?}: {worst}"
                );
            }
        }
    }
    assert!(tried >= 3 * 3, "{tried}");
}
