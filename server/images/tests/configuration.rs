//! Tests configurations of published models, and the messages for configurations that cannot be used.

use std::{fs, path::Path};

use serde_json::{Value, json};
use server_images::{Detail, EncoderInputs, ImageProcessor, LoadError, RgbImage, Size};

fn processor(config: Value, preprocessor: Value) -> Result<ImageProcessor, LoadError> {
    ImageProcessor::from_values(config, preprocessor)
}

fn message(config: Value, preprocessor: Value) -> String {
    processor(config, preprocessor).expect_err("the configuration is invalid").to_string()
}

/// The number of tokens of an image.
fn tokens(processor: &ImageProcessor, size: Size) -> usize {
    processor.layout(size, Detail::Auto).expect("the proportions are usual").num_tokens
}

#[test]
fn llava_1_5_has_numbers_or_objects_as_sizes() {
    let config = json!({
        "model_type": "llava", "vision_feature_select_strategy": "default",
        "vision_config": {"model_type": "clip_vision_model", "patch_size": 14, "image_size": 336}
    });
    let numbers = json!({"size": 336, "crop_size": 336, "do_center_crop": true, "resample": 3});
    let objects = json!({"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}});
    let image = RgbImage::filled(Size::new(50, 20), [1, 2, 3]);
    let inputs = [numbers, objects].map(|preprocessor| {
        let processor = processor(config.clone(), preprocessor).expect("valid");
        assert_eq!(tokens(&processor, image.size()), 576);
        processor.preprocess(&image, Detail::Auto).expect("valid")
    });
    assert_eq!(inputs[0], inputs[1]);
    let EncoderInputs::Tiles(pixel_values) = &inputs[0] else { panic!("LLaVA has tiles") };
    assert_eq!(pixel_values.shape(), [1, 3, 336, 336]);
}

#[test]
fn llava_with_siglip_neither_crops_nor_has_a_class_token() {
    let config = json!({
        "model_type": "llava", "vision_feature_select_strategy": "full",
        "vision_config": {"model_type": "siglip_vision_model", "patch_size": 14, "image_size": 384}
    });
    let processor = processor(config, json!({"size": {"height": 384, "width": 384}})).expect("valid");
    assert_eq!(tokens(&processor, Size::new(640, 480)), 729);
}

#[test]
fn qwen_has_limits_by_two_names() {
    let config = json!({"model_type": "qwen2_vl", "vision_config": {"embed_dim": 1280, "num_heads": 16}});
    let size = Size::new(4000, 3000);
    for preprocessor in [
        json!({"min_pixels": 3136, "max_pixels": 1_003_520}),
        json!({"size": {"shortest_edge": 3136, "longest_edge": 1_003_520}}),
        json!({}),
    ] {
        let processor = processor(config.clone(), preprocessor).expect("valid");
        assert_eq!(tokens(&processor, size), 41 * 30);
        let low = processor.layout(size, Detail::Low).expect("valid").num_tokens;
        assert!(low * 28 * 28 <= 512 * 512, "{low} tokens");
    }
}

#[test]
fn smolvlm_splits_into_tiles_of_512_pixels() {
    let config = json!({
        "model_type": "smolvlm", "scale_factor": 4, "vision_config": {"image_size": 512, "patch_size": 16}
    });
    let preprocessor = json!({"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}});
    let processor = processor(config, preprocessor).expect("valid");
    assert_eq!(tokens(&processor, Size::new(800, 600)), (4 * 3 + 1) * 64);
    assert_eq!(processor.layout(Size::new(800, 600), Detail::Low).expect("valid").num_tokens, 64);
}

#[test]
fn files_are_read_from_the_directory_of_a_model() {
    let path = &Path::new(env!("CARGO_TARGET_TMPDIR")).join("images-configuration");
    // A previous run may have left files.
    let _ = fs::remove_dir_all(path);
    fs::create_dir(path).expect("a directory");
    let missing = ImageProcessor::load(path).expect_err("no files").to_string();
    assert!(missing.ends_with("has no config.json"), "{missing}");
    fs::write(path.join("config.json"), r#"{"model_type": "gemma3"}"#).expect("written");
    let missing = ImageProcessor::load(path).expect_err("one file").to_string();
    assert!(missing.ends_with("has no preprocessor_config.json"), "{missing}");
    let size = r#""size": {"height": 896, "width": 896}"#;
    // This is the format of transformers 5 and later.
    let nested = format!(r#"{{"image_seq_length": 256, "image_processor": {{{size}}}}}"#);
    fs::write(path.join("processor_config.json"), nested).expect("written");
    assert_eq!(tokens(&ImageProcessor::load(path).expect("valid"), Size::new(1, 1)), 256);
    fs::write(path.join("preprocessor_config.json"), "{").expect("written");
    let invalid = ImageProcessor::load(path).expect_err("invalid").to_string();
    assert!(invalid.ends_with("preprocessor_config.json is not valid JSON"), "{invalid}");
}

#[test]
fn unsupported_configurations_are_named() {
    let supported = "supported: qwen2_vl, qwen2_5_vl, qwen3_vl, gemma3, llava, llava_next, internvl_chat, idefics3, \
                     smolvlm, minicpmv, phi4_multimodal";
    assert_eq!(
        message(json!({"model_type": "llama"}), json!({})),
        format!("images are not supported for the model type \"llama\"; {supported}")
    );
    let gemma = || json!({"model_type": "gemma3"});
    let size = json!({"height": 8, "width": 8});
    for (preprocessor, expected) in [
        (json!({}), "size.width is missing"),
        (
            json!({"size": {"height": 0, "width": 8}}),
            "size.height is 0; an integer from 1 to 4294967295 is expected",
        ),
        (json!({"size": {"height": 8, "width": 100_000}}), "size.width is 100000; at most 4096 is supported"),
        (json!({"size": size, "do_pan_and_scan": true}), "do_pan_and_scan is true; only false is supported"),
        (
            json!({"size": size, "resample": 0}),
            "resample is 0; supported: 1 (Lanczos), 2 (bilinear) and 3 (bicubic)",
        ),
        (json!({"size": size, "image_std": [0.5, 0, 0.5]}), "image_std contains 0"),
    ] {
        assert_eq!(message(gemma(), preprocessor), format!("preprocessor_config.json: {expected}"));
    }
}

#[test]
fn errors_name_the_field_that_determines_the_size_of_a_tile() {
    let config = |model_type: &str| json!({"model_type": model_type, "vision_config": {"patch_size": 14}});
    for (field, preprocessor) in [
        ("size", json!({"size": {"height": 8, "width": 8}})),
        ("crop_size", json!({"size": {"height": 16, "width": 16}, "crop_size": 8})),
    ] {
        assert_eq!(
            message(config("llava"), preprocessor),
            format!(
                "preprocessor_config.json: {field} is 8x8, which yields no image tokens with patches of 14x14 pixels"
            )
        );
    }
    for (field, preprocessor) in [
        ("size", json!({"size": {"height": 56, "width": 28}})),
        ("crop_size", json!({"size": 56, "crop_size": {"height": 56, "width": 28}})),
    ] {
        assert_eq!(
            message(config("llava_next"), preprocessor),
            format!("preprocessor_config.json: {field} is 28x56; a square is expected")
        );
    }
}
