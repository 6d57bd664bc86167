//! Tests that the logits of every common architecture equal those of the reference up to rounding.

use crate::reference::{
    CONTEXT, CacheContent, Case, DEFAULT_CACHE, EXACT, EXPERTS, ROUNDED, ROUNDED_DIFFERENCE_MAX,
    difference_allowed, is_independent_of_the_batch, load_file, recipe, worst_difference,
};
use server_gguf::TensorType;
use server_gguf::write::GgufWriter;

fn check(architecture: &'static str) {
    for kind in [TensorType::Q8_0, TensorType::Q4K, TensorType::F16] {
        let case = Case::new(&recipe(architecture, kind));
        let difference = case.difference(&EXACT);
        assert!(difference <= difference_allowed(kind), "{kind}: {difference:.1e}");
        let difference = case.difference(&ROUNDED);
        assert!(difference <= ROUNDED_DIFFERENCE_MAX, "{kind}, rounded: {difference:.1e}");
    }
}

#[test]
fn qwen2_with_biases_and_tied_embeddings() {
    check("qwen2");
}

#[test]
fn qwen3_with_norms_of_q_and_k() {
    check("qwen3");
}

fn check_experts(architecture: &'static str) {
    use TensorType::{Bf16, F16, Q4_0, Q4_1, Q4K, Q5K, Q6K, Q8_0};
    let mut model = recipe(architecture, F16);
    model.experts_used = 2;
    for kind in [Q4_0, Q8_0, Q6K, F16, Bf16] {
        (model.kind, model.values_kind) = (kind, kind);
        let difference = Case::new(&model).difference(&EXACT);
        assert!(difference <= difference_allowed(kind), "{kind}: {difference:.1e}");
    }
    // All experts are used, so that a small error cannot change the selection.
    model.experts_used = EXPERTS;
    for (kind, values_kind) in [(Q4_1, Q4_1), (Q4K, Q6K), (Q5K, Q5K)] {
        (model.kind, model.values_kind) = (kind, values_kind);
        let case = Case::new(&model);
        let difference = case.difference(&EXACT);
        assert!(difference <= difference_allowed(kind), "{kind}: {difference:.1e}");
        let difference = case.difference(&ROUNDED);
        assert!(difference <= ROUNDED_DIFFERENCE_MAX, "{kind}, rounded: {difference:.1e}");
    }
}

#[test]
fn qwen3moe_with_experts() {
    check_experts("qwen3moe");
}

#[test]
fn llama_with_experts_as_in_mixtral() {
    check_experts("llama");
}

/// The largest allowed difference with native experts and products of 16-bit integers (measured: 4e-4 to 2e-3).
const NATIVE_DIFFERENCE_MAX: f64 = 5e-3;

#[test]
fn native_experts_compute_a_token_exactly_whatever_else_is_in_the_step() {
    for architecture in ["llama", "qwen3moe"] {
        for (kind, experts_used) in [(TensorType::Q4_0, 2), (TensorType::Q8_0, 2), (TensorType::Q6K, EXPERTS)]
        {
            let mut model = recipe(architecture, kind);
            model.experts_used = experts_used;
            let case = Case::new(&model);
            let (mut runner, report) = load_file(case.path(), &[EXACT[0], EXACT[1]]).unwrap();
            if report.kernels.starts_with("projections: plugin") {
                // This processor has no native projections.
                assert!(report.kernels.contains("experts: plugin"), "{}", report.kernels);
                return;
            }
            assert!(
                report.kernels.contains("experts: native") && report.native_kernels,
                "{}",
                report.kernels
            );
            assert!(is_independent_of_the_batch(&mut runner, &case.tokens), "{architecture} {kind}");
            // The rounding errors of bf16 can change the selection of experts.
            if report.kernels.contains("int16 products") {
                let difference = worst_difference(&mut runner, &case.tokens, &case.logits);
                assert!(difference <= NATIVE_DIFFERENCE_MAX, "{architecture} {kind}: {difference:.1e}");
            }
        }
    }
}

#[test]
fn experts_that_are_not_quantized_are_left_to_the_plugin() {
    let (_, report) = load_file(Case::new(&recipe("qwen3moe", TensorType::F16)).path(), &ROUNDED).unwrap();
    assert!(report.kernels.contains("experts: plugin") && !report.native_kernels, "{}", report.kernels);
}

#[test]
fn a_token_may_have_a_single_expert() {
    for architecture in ["llama", "qwen3moe"] {
        let mut model = recipe(architecture, TensorType::Q8_0);
        model.experts_used = 1;
        let case = Case::new(&model);
        let difference = case.difference(&EXACT);
        assert!(difference <= difference_allowed(TensorType::Q8_0), "{architecture}: {difference:.1e}");
        let (mut runner, report) = load_file(case.path(), &[EXACT[0], EXACT[1]]).unwrap();
        if report.kernels.contains("int16 products") {
            let difference = worst_difference(&mut runner, &case.tokens, &case.logits);
            assert!(difference <= NATIVE_DIFFERENCE_MAX, "{architecture}: {difference:.1e}");
        }
    }
}

#[test]
fn gpt_oss_with_sinks_biases_and_an_extended_context() {
    for experts_used in [1, 2, EXPERTS] {
        let mut model = recipe("gpt-oss", TensorType::Q8_0);
        model.experts_used = experts_used;
        let case = Case::new(&model);
        let difference = case.difference(&EXACT);
        assert!(difference <= difference_allowed(TensorType::Q8_0), "{experts_used}: {difference:.1e}");
        let difference = case.difference_in_parts(&EXACT);
        assert!(
            difference <= difference_allowed(TensorType::Q8_0),
            "{experts_used}, parts: {difference:.1e}"
        );
        for kv_cache in [Some(EXACT[1]), None] {
            let properties: Vec<_> = std::iter::once(EXACT[0]).chain(kv_cache).collect();
            let (mut runner, report) = load_file(case.path(), &properties).unwrap();
            if report.kernels.starts_with("projections: plugin") {
                // This processor has no native projections.
                continue;
            }
            assert!(
                report.kernels.contains("experts: native") && report.native_kernels,
                "{}",
                report.kernels
            );
            assert!(is_independent_of_the_batch(&mut runner, &case.tokens), "{experts_used}");
            // The rounding errors of bf16 or of the default cache can change the selection of experts.
            if report.kernels.contains("int16 products") && (kv_cache.is_some() || experts_used == EXPERTS) {
                let difference = worst_difference(&mut runner, &case.tokens, &case.logits);
                let allowed = if kv_cache.is_some() { NATIVE_DIFFERENCE_MAX } else { 0.15 };
                assert!(difference <= allowed, "{experts_used} {kv_cache:?}: {difference:.1e}");
            }
        }
    }
}

#[test]
fn phi3_with_fused_projections_and_sliding_windows_shorter_than_the_sequence() {
    check("phi3");
}

#[test]
fn phi3_extended_to_a_long_context() {
    let mut phi3 = recipe("phi3", TensorType::F16);
    let allowed = difference_allowed(TensorType::F16);
    // The original context is as long as the model's context in the first case, and shorter than it in the second. It
    // is as long as the limit on the length of sequences in the third case, and shorter than this limit in the fourth.
    for (original, served) in [(CONTEXT, None), (256, None), (256, Some(256)), (256, Some(257))] {
        phi3.original_context = Some(original);
        let difference = Case::within(&phi3, served).difference(&EXACT);
        assert!(difference <= allowed, "{original} {served:?}: {difference:.1e}");
    }
}

#[test]
fn cached_models_compute_the_same() {
    for architecture in ["llama", "qwen2", "qwen3", "qwen3moe", "gpt-oss", "phi3", "gemma3"] {
        let mut model = recipe(architecture, TensorType::Q8_0);
        if architecture == "phi3" {
            model.original_context = Some(256);
        }
        let allowed = difference_allowed(TensorType::Q8_0);
        let case = Case::new(&model);
        // The runtime cannot read back the plugin's operation for experts.
        let has_experts = model.experts_used > 0;
        let cached = if has_experts { CacheContent::Nothing } else { CacheContent::CompiledModel };
        let [cold, compiled, again] = case.differences_cold_and_warm(&EXACT, cached);
        assert!(cold <= allowed && again <= allowed, "{architecture}: {cold:.1e}, {again:.1e}");
        assert_eq!(compiled, cold, "{architecture}");
        let (_, report) = load_file(case.path(), &ROUNDED).unwrap();
        if has_experts && !report.kernels.contains("experts: native") {
            continue;
        }
        let [cold, compiled, again] = case.differences_cold_and_warm(&ROUNDED, CacheContent::CompiledModel);
        assert_eq!((compiled, again), (cold, cold), "{architecture}, rounded");
    }
}

#[test]
fn gemma3_with_sliding_windows_shorter_than_the_sequence() {
    check("gemma3");
}

#[test]
fn gemma3_has_its_sliding_window_in_the_default_cache() {
    let difference = Case::new(&recipe("gemma3", TensorType::F16)).difference(&DEFAULT_CACHE);
    assert!(difference <= 0.15, "{difference:.1e}");
}

#[test]
fn llama_with_factors_for_its_rotation() {
    let mut llama = recipe("llama", TensorType::F16);
    llama.rope_factors = true;
    let difference = Case::new(&llama).difference(&EXACT);
    assert!(difference <= difference_allowed(TensorType::F16), "{difference:.1e}");
}

#[test]
fn llama_with_tied_embeddings() {
    let mut llama = recipe("llama", TensorType::F16);
    llama.tied = true;
    let difference = Case::new(&llama).difference(&EXACT);
    assert!(difference <= difference_allowed(TensorType::F16), "{difference:.1e}");
}

#[test]
fn experts_of_an_unsupported_architecture_are_rejected_by_name() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let mut olmoe = recipe("olmoe", TensorType::Q4K);
    olmoe.experts_used = 2;
    olmoe.write(file.path());
    let refused = load_file(file.path(), &[]).err().unwrap().chain();
    assert!(refused.contains("\"olmoe\" is not supported with experts"), "{refused}");
}

#[test]
fn an_unknown_architecture_is_rejected_by_name() {
    let file = tempfile::NamedTempFile::new().unwrap();
    recipe("nosuch", TensorType::F16).write(file.path());
    let refused = load_file(file.path(), &[]).err().unwrap().chain();
    assert!(refused.contains("\"nosuch\""), "{refused}");
}

#[test]
fn a_type_that_cannot_be_decoded_is_rejected_by_name() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let mut writer = GgufWriter::new("llama");
    let kind = TensorType::Iq4Xs;
    writer.tensor("blk.0.attn_q.weight", &[256, 2], kind, vec![0; 2 * kind.block_bytes()]);
    writer.write(file.path()).unwrap();
    let refused = load_file(file.path(), &[]).err().unwrap().chain();
    assert!(refused.contains("the type IQ4_XS of its tensor blk.0.attn_q.weight"), "{refused}");
}
