//! Every common architecture: what is served is the model that the file contains.

use crate::reference::{Case, DEFAULT_CACHE, EXACT, difference_allowed, load_file, recipe};
use server_gguf::TensorType;
use server_openvino::Form;

fn check(architecture: &'static str) {
    for kind in [TensorType::Q8_0, TensorType::Q4K, TensorType::F16] {
        let case = Case::new(&recipe(architecture, kind));
        for form in [Form::Compact, Form::Fine] {
            let difference = case.difference(form, &EXACT);
            assert!(difference <= difference_allowed(kind, form), "{kind} {form:?}: {difference:.1e}");
        }
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

#[test]
fn phi3_with_fused_projections() {
    check("phi3");
}

#[test]
fn gemma3_with_sliding_windows_shorter_than_the_sequence() {
    check("gemma3");
}

#[test]
fn gemma3_keeps_its_window_in_the_default_cache() {
    let difference = Case::new(&recipe("gemma3", TensorType::F16)).difference(Form::Fine, &DEFAULT_CACHE);
    assert!(difference <= 0.15, "{difference:.1e}");
}

#[test]
fn llama_with_factors_for_its_rotation() {
    let mut llama = recipe("llama", TensorType::F16);
    llama.rope_factors = true;
    let difference = Case::new(&llama).difference(Form::Fine, &EXACT);
    assert!(difference <= difference_allowed(TensorType::F16, Form::Fine), "{difference:.1e}");
}

#[test]
fn llama_with_tied_embeddings() {
    let mut llama = recipe("llama", TensorType::F16);
    llama.tied = true;
    let difference = Case::new(&llama).difference(Form::Fine, &EXACT);
    assert!(difference <= difference_allowed(TensorType::F16, Form::Fine), "{difference:.1e}");
}

#[test]
fn an_unknown_architecture_is_refused_by_name() {
    let file = tempfile::NamedTempFile::new().unwrap();
    recipe("nosuch", TensorType::F16).write(file.path());
    let refused = load_file(file.path(), Form::Compact, &[]).err().unwrap().chain();
    assert!(refused.contains("\"nosuch\""), "{refused}");
}
