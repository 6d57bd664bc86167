//! Tests that every common architecture is computed exactly.

use crate::reference::{
    CONTEXT, Case, DEFAULT_CACHE, EXACT, EXPERTS, ROUNDED, ROUNDED_DIFFERENCE_MAX, difference_allowed,
    load_file, recipe,
};
use server_gguf::TensorType;

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

#[test]
fn phi3_with_fused_projections_and_sliding_windows_shorter_than_the_sequence() {
    check("phi3");
}

#[test]
fn phi3_extended_to_a_long_context() {
    let mut phi3 = recipe("phi3", TensorType::F16);
    let allowed = difference_allowed(TensorType::F16);
    // The original context is as long as that of the model, shorter than that of the model, as long as the limit, and
    // shorter than the limit.
    for (original, served) in [(CONTEXT, None), (256, None), (256, Some(256)), (256, Some(257))] {
        phi3.original_context = Some(original);
        let difference = Case::within(&phi3, served).difference(&EXACT);
        assert!(difference <= allowed, "{original} {served:?}: {difference:.1e}");
    }
}

#[test]
fn cached_models_compute_the_same() {
    for architecture in ["llama", "qwen2", "qwen3", "qwen3moe", "phi3", "gemma3"] {
        let mut model = recipe(architecture, TensorType::Q8_0);
        if architecture == "phi3" {
            model.original_context = Some(256);
        }
        let allowed = difference_allowed(TensorType::Q8_0);
        // The runtime cannot read back the operations of experts from a compiled model.
        let is_cached = architecture != "qwen3moe";
        let case = Case::new(&model);
        let [cold, compiled, graph] = case.differences_cold_and_warm(&EXACT, is_cached);
        assert!(cold <= allowed && graph <= allowed, "{architecture}: {cold:.1e}, {graph:.1e}");
        assert_eq!(compiled, cold, "{architecture}");
        if is_cached {
            let [cold, compiled, graph] = case.differences_cold_and_warm(&ROUNDED, is_cached);
            assert_eq!((compiled, graph), (cold, cold), "{architecture}, rounded");
        }
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
