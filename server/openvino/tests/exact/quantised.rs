//! Every tensor type: what is served is the model that the file contains.

use crate::reference::{
    Case, DEFAULT_CACHE, EXACT, ROUNDED, ROUNDED_DIFFERENCE_MAX, difference_allowed, load_file, recipe,
};
use server_gguf::TensorType;
use server_openvino::Form;

const WITH_MINIMA: [TensorType; 4] = [TensorType::Q4_1, TensorType::Q5_1, TensorType::Q4K, TensorType::Q5K];

fn check(kind: TensorType) {
    let case = Case::new(&recipe("llama", kind));
    for form in [Form::Compact, Form::Fine] {
        let difference = case.difference(form, &EXACT);
        assert!(difference <= difference_allowed(kind, form), "{kind} {form:?}: {difference:.1e}");
    }
    let difference = case.difference(Form::Compact, &ROUNDED);
    assert!(difference <= ROUNDED_DIFFERENCE_MAX, "{kind}, rounded: {difference:.1e}");
}

#[test]
fn types_without_minima_are_served_exactly() {
    use TensorType::{Bf16, F16, Q4_0, Q5_0, Q6K, Q8_0};
    for kind in [Q4_0, Q5_0, Q8_0, Q6K, F16, Bf16] {
        check(kind);
    }
}

#[test]
fn types_with_minima_are_served_to_a_small_part_of_a_step() {
    for kind in WITH_MINIMA {
        check(kind);
    }
}

#[test]
fn rounded_zero_points_are_another_model() {
    for kind in WITH_MINIMA {
        let difference = Case::new(&recipe("llama", kind)).difference(Form::Rounded, &EXACT);
        assert!(difference > 2.0 * difference_allowed(kind, Form::Fine), "{kind}: {difference:.1e}");
    }
}

#[test]
fn a_mixed_file_with_other_types_for_values_is_served_as_it_is() {
    let mut mixed = recipe("llama", TensorType::Q4K);
    mixed.values_kind = TensorType::Q6K;
    let difference = Case::new(&mixed).difference(Form::Compact, &EXACT);
    assert!(difference <= difference_allowed(TensorType::Q4K, Form::Compact), "{difference:.1e}");
}

#[test]
fn the_default_cache_costs_little() {
    let difference = Case::new(&recipe("llama", TensorType::Q8_0)).difference(Form::Fine, &DEFAULT_CACHE);
    assert!(difference <= 0.1, "{difference:.1e}");
}

#[test]
fn unsound_files_are_refused_with_a_reason() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let refused = || load_file(&path, Form::Compact, &[]).err().unwrap().chain();
    assert!(refused().contains("there is no model at"));
    std::fs::write(&path, [7u8; 4096]).unwrap();
    assert!(refused().contains("failed to read the model file"), "{}", refused());
    recipe("llama", TensorType::Q8_0).write(&path);
    let bytes = std::fs::read(&path).unwrap();
    std::fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
    assert!(refused().contains("failed to read the model file"), "{}", refused());
}
