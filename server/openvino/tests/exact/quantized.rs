//! Tests that the logits of a model with weights of any tensor type equal those of the reference up to rounding.

use crate::reference::{
    Case, DEFAULT_CACHE, EXACT, ROUNDED, ROUNDED_DIFFERENCE_MAX, difference_allowed, load_file, recipe,
};
use server_gguf::TensorType;

const WITH_MINIMA: [TensorType; 4] = [TensorType::Q4_1, TensorType::Q5_1, TensorType::Q4K, TensorType::Q5K];

fn check(kind: TensorType) {
    let case = Case::new(&recipe("llama", kind));
    let difference = case.difference(&EXACT);
    assert!(difference <= difference_allowed(kind), "{kind}: {difference:.1e}");
    let difference = case.difference(&ROUNDED);
    assert!(difference <= ROUNDED_DIFFERENCE_MAX, "{kind}, rounded: {difference:.1e}");
}

#[test]
fn types_without_minima_are_served_exactly() {
    use TensorType::{Bf16, F16, Mxfp4, Q4_0, Q5_0, Q6K, Q8_0};
    for kind in [Q4_0, Q5_0, Q8_0, Q6K, Mxfp4, F16, Bf16] {
        check(kind);
    }
}

#[test]
fn types_with_minima_are_served_within_a_small_fraction_of_a_step() {
    for kind in WITH_MINIMA {
        check(kind);
    }
}

#[test]
fn a_file_with_another_type_for_values_is_served_exactly() {
    let mut mixed = recipe("llama", TensorType::Q4K);
    mixed.values_kind = TensorType::Q6K;
    let difference = Case::new(&mixed).difference(&EXACT);
    assert!(difference <= difference_allowed(TensorType::Q4K), "{difference:.1e}");
}

#[test]
fn the_default_cache_precision_changes_little() {
    let difference = Case::new(&recipe("llama", TensorType::Q8_0)).difference(&DEFAULT_CACHE);
    assert!(difference <= 0.1, "{difference:.1e}");
}

#[test]
fn invalid_files_are_rejected_with_a_reason() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.gguf");
    let refused = || load_file(&path, &[]).err().unwrap().chain();
    assert!(refused().contains("there is no model at"));
    std::fs::write(&path, [7u8; 4096]).unwrap();
    assert!(refused().contains("failed to read the model file"), "{}", refused());
    recipe("llama", TensorType::Q8_0).write(&path);
    let bytes = std::fs::read(&path).unwrap();
    std::fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
    assert!(refused().contains("failed to read the model file"), "{}", refused());
}
