//! A model in several files computes the same logits as in a single file. With f32 weights, the logits may differ
//! slightly.

use std::fs;

use server_gguf::TensorType;
use server_gguf::{GgufFile, write::write_parts};
use server_openvino::{Config, load};

use crate::reference::{Case, EXACT, config, difference_allowed, load_file, recipe};

#[test]
fn every_architecture_computes_the_same_in_one_file_and_in_parts() {
    for architecture in ["llama", "qwen2", "qwen3", "qwen3moe", "phi3", "gemma3"] {
        let case = |kind| {
            let mut model = recipe(architecture, kind);
            model.rope_factors = architecture == "llama";
            model.original_context = (architecture == "phi3").then_some(256);
            Case::new(&model)
        };
        for kind in [TensorType::Q4K, TensorType::F16] {
            let case = case(kind);
            assert_eq!(case.difference_in_parts(&EXACT), case.difference(&EXACT), "{architecture} {kind}");
        }
        // The plugin's order of computation with f32 weights depends on their addresses in memory, so the results may
        // differ slightly.
        let difference = case(TensorType::F32).difference_in_parts(&EXACT);
        assert!(difference <= difference_allowed(TensorType::F32), "{architecture}: {difference:.1e}");
    }
}

#[test]
fn a_cached_model_is_not_used_for_another_part() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("whole.gguf");
    recipe("llama", TensorType::Q8_0).write(&path);
    let first = write_parts(&GgufFile::open(path).unwrap(), directory.path(), "model", 3).unwrap();
    let is_cached = || {
        let cache_dir = Some(directory.path().join("cache"));
        load(&Config { cache_dir, ..config(&first, &EXACT) }, &mut |_| {}).unwrap().1.from_cache
    };
    assert_eq!([is_cached(), is_cached()], [false, true]);
    for part in ["model-00002-of-00003.gguf", "model-00003-of-00003.gguf"] {
        let part = directory.path().join(part);
        let mut bytes = fs::read(&part).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(&part, bytes).unwrap();
        assert_eq!([is_cached(), is_cached()], [false, true], "{}", part.display());
    }
}

#[test]
fn the_error_names_the_part_that_is_the_reason() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("whole.gguf");
    recipe("llama", TensorType::Q8_0).write(&path);
    let first = write_parts(&GgufFile::open(path).unwrap(), directory.path(), "model", 3).unwrap();
    let refused = |name: &str| {
        let error = load_file(&directory.path().join(name), &[]).err().unwrap().chain();
        assert!(error.contains("failed to read the model file"), "{error}");
        error
    };
    let second = "model-00002-of-00003.gguf";
    assert!(refused(second).contains("part 2 of 3"), "{}", refused(second));
    fs::remove_file(directory.path().join(second)).unwrap();
    let error = refused(first.file_name().unwrap().to_str().unwrap());
    assert!(error.contains(second), "{error}");
}
