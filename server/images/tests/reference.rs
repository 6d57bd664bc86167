//! Compares decoding, resampling and the processors of all families with reference values
//! (`tests/conformance/images/generate.py`). Pillow and transformers computed these values, except those of InternVL
//! and MiniCPM-V, which an implementation of their published processing computed. The pixels of a picture depend only
//! on its size.

use std::{fs, path::PathBuf};

use serde_json::Value;
use server_images::{
    DecodeLimits, Detail, EncoderInputs, FeatureRow, Filter, ImageHeader, ImageLayout, ImageProcessor,
    ModelFamily, RgbImage, Size, Tensor, decode, expand_prompt, image_spans, mrope_positions, resize,
};
use sha2::{Digest as _, Sha256};

const SAMPLES: usize = 48;

fn directory() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/reference")
}

fn read(name: &str) -> Value {
    let text = fs::read_to_string(directory().join(name)).expect("the reference was generated");
    serde_json::from_str(&text).expect("the reference is JSON")
}

fn number(value: &Value) -> u32 {
    u32::try_from(value.as_u64().expect("a number")).expect("a small number")
}

fn numbers(value: &Value) -> Vec<i64> {
    value.as_array().expect("a list").iter().map(|value| value.as_i64().expect("an integer")).collect()
}

fn size(value: &Value) -> Size {
    Size::new(number(&value[0]), number(&value[1]))
}

fn sha256(bytes: impl AsRef<[u8]>) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Draws the same picture as `pictures.py`.
fn draw(size: Size) -> RgbImage {
    let mut pixels = Vec::new();
    for y in 0..u64::from(size.height) {
        for x in 0..u64::from(size.width) {
            for color in 0..3_u64 {
                let mixed = ((x * 73_856_093) ^ (y * 19_349_663) ^ (color * 83_492_791)) & 0xffff_ffff;
                let mixed = ((mixed ^ (mixed >> 13)) * 0x5bd1_e995) & 0xffff_ffff;
                let noise = (mixed >> 24) & 63;
                let smooth = match color {
                    0 => x * 191 / u64::from(size.width - 1).max(1),
                    1 => y * 191 / u64::from(size.height - 1).max(1),
                    _ => (x + y) * 3 % 192,
                };
                pixels.push(u8::try_from(smooth + noise).expect("a byte"));
            }
        }
    }
    RgbImage::new(size, pixels).expect("each pixel was drawn")
}

#[test]
fn resampling_equals_pillow_to_the_bit() {
    let cases = read("resize.json");
    for case in cases.as_array().expect("a list") {
        let filter = match case["filter"].as_str() {
            Some("bilinear") => Filter::Bilinear,
            Some("bicubic") => Filter::Bicubic,
            _ => Filter::Lanczos,
        };
        let resized = resize(&draw(size(&case["from"])), size(&case["to"]), filter);
        let first: Vec<i64> = resized.pixels().iter().take(6).map(|value| i64::from(*value)).collect();
        assert_eq!(first, numbers(&case["first"]), "{case}");
        assert_eq!(sha256(resized.pixels()), case["sha256"], "{case}");
    }
}

#[test]
fn files_of_all_formats_have_the_pixels_of_pillow() {
    let files = read("files.json");
    for (name, expected) in files.as_object().expect("an object") {
        let bytes = fs::read(directory().join("files").join(name)).expect("the file was generated");
        let image =
            decode(&bytes, &DecodeLimits::default()).unwrap_or_else(|error| panic!("{name}: {error}"));
        let size = Size::new(number(&expected["width"]), number(&expected["height"]));
        assert_eq!(image.size(), size, "{name}");
        assert_eq!(ImageHeader::read(&bytes).expect("valid").size(), size, "{name}");
        let hex = expected["pixels"].as_str().expect("hexadecimal").as_bytes();
        let digit = |byte: u8| u8::try_from((byte as char).to_digit(16).expect("a digit")).expect("a digit");
        let pixels: Vec<u8> = hex.chunks(2).map(|pair| digit(pair[0]) * 16 + digit(pair[1])).collect();
        let differences = image.pixels().iter().zip(&pixels).map(|(ours, theirs)| ours.abs_diff(*theirs));
        let largest = differences.clone().max().unwrap_or_default();
        // Decoders of lossy formats may differ in rounding and in the interpolation of subsampled colors.
        let (is_lossy, mean) = (name.ends_with(".jpg") || name.starts_with("lossy"), {
            differences.clone().map(f64::from).sum::<f64>() / pixels.len() as f64
        });
        let (largest_allowed, mean_allowed) = if is_lossy { LOSSY_TOLERANCE } else { (0, 0.0) };
        println!("{name}: largest difference {largest}, mean {mean:.3}");
        assert!(largest <= largest_allowed && mean <= mean_allowed, "{name}: {largest}, {mean}");
    }
}

/// The limits for the largest and the mean difference from Pillow's decoders of lossy formats, in steps of 1/255.
const LOSSY_TOLERANCE: (u8, f64) = (6, 1.0);

/// Compares some values of a tensor, and the sum of the absolute values of all, with the reference.
fn check_floats(tensor: &Tensor<f32>, expected: &Value, tolerance: f64, place: &str) {
    let shape: Vec<i64> = tensor.shape().iter().map(|side| *side as i64).collect();
    assert_eq!(shape, numbers(&expected["shape"]), "{place}");
    let values = tensor.values();
    let samples = expected["samples"].as_array().expect("a list");
    for (index, sample) in samples.iter().enumerate().take(SAMPLES) {
        let index = index * 7919 % values.len();
        let (ours, theirs) = (f64::from(values[index]), sample.as_f64().expect("a number"));
        assert!(
            (ours - theirs).abs() <= tolerance * theirs.abs().max(1.0),
            "{place}[{index}]: {ours} {theirs}"
        );
    }
    let sum: f64 = values.iter().map(|value| f64::from(value.abs())).sum();
    let expected = expected["sum"].as_f64().expect("a number");
    assert!((sum - expected).abs() <= tolerance * expected.max(1.0), "{place}: sum {sum} {expected}");
}

/// Compares normalized pixels as [`check_floats`] does. Then undoes the normalization, and checks that the 8-bit pixels
/// are equal to those of the reference.
fn check_pixels(tensor: &Tensor<f32>, expected: &Value, reference: &Value, place: &str) {
    check_floats(tensor, expected, 1e-6, place);
    let plane = expected["plane"].as_u64().expect("a number") as usize;
    let statistic = |name: &str, color: usize| reference[name][color].as_f64().expect("a number");
    let level = |(index, value): (usize, &f32)| {
        let color = index / plane % 3;
        let level = f64::from(*value) * statistic("std", color) + statistic("mean", color);
        (level * 255.0).round_ties_even() as u8
    };
    let levels: Vec<u8> = tensor.values().iter().enumerate().map(level).collect();
    assert_eq!(sha256(levels), expected["sha256"], "{place}");
}

fn check_integers(shape: &[usize], values: &[i64], expected: &Value, place: &str) {
    let shape: Vec<i64> = shape.iter().map(|side| *side as i64).collect();
    assert_eq!(shape, numbers(&expected["shape"]), "{place}");
    assert_eq!(values[..values.len().min(8)], numbers(&expected["first"]), "{place}");
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    assert_eq!(sha256(bytes), expected["sha256"], "{place}");
}

/// Replaces each run of the image token with its length in brackets.
fn compact(text: &str, token: &str) -> String {
    let mut compact = String::new();
    let mut rest = text;
    while let Some(start) = rest.find(token) {
        compact.push_str(&rest[..start]);
        rest = &rest[start..];
        let mut count = 0;
        while let Some(behind) = rest.strip_prefix(token) {
            rest = behind;
            count += 1;
        }
        compact += &format!("[{count}]");
    }
    compact + rest
}

fn check_layout(processor: &ImageProcessor, layout: &ImageLayout, case: &Value, place: &str) {
    assert_eq!(layout.num_tokens as u64, case["num_tokens"], "{place}");
    let prompt = format!("a{}b", processor.tag(0));
    let text = expand_prompt(&prompt, processor.markers(), std::slice::from_ref(layout)).expect("one marker");
    assert_eq!(compact(&text, processor.image_token()), case["text"], "{place}");
    if let Some(expected) = case.get("feature_rows") {
        let row = |row: &FeatureRow| match row {
            FeatureRow::Encoder(row) => i64::from(*row),
            FeatureRow::RowEnd => -1,
            FeatureRow::GlobalSeparator => -2,
        };
        let rows: Vec<i64> = layout.feature_rows.as_ref().expect("an order").iter().map(row).collect();
        check_integers(&[rows.len()], &rows, expected, place);
    }
    if let Some(expected) = case.get("grid") {
        let grid = layout.grid.expect("a grid");
        assert_eq!([i64::from(grid.rows), i64::from(grid.columns)].to_vec(), numbers(expected), "{place}");
    }
}

/// Checks the positions of a prompt that consists of text, the image twice, and text.
fn check_positions(layout: &ImageLayout, expected: &Value, place: &str) {
    let image = vec![7; layout.num_tokens];
    let span = [&[9], image.as_slice(), &[10]].concat();
    let tokens = [&[1, 2, 3], span.as_slice(), span.as_slice(), &[4, 5]].concat();
    let spans = image_spans(&tokens, 7, &[layout.clone(), layout.clone()]).expect("all image tokens");
    let positions = mrope_positions(tokens.len(), &spans);
    let ids = [positions.temporal, positions.height, positions.width].concat();
    check_integers(&[3, tokens.len()], &ids, &expected["ids"], place);
    assert_eq!(positions.delta, expected["delta"].as_i64().expect("an integer"), "{place}");
}

fn check_inputs(inputs: &EncoderInputs, case: &Value, reference: &Value, place: &str) {
    match inputs {
        EncoderInputs::Qwen(patches) => {
            check_pixels(&patches.hidden_states, &case["hidden_states"], reference, place);
            check_floats(&patches.rotary_pos_emb, &case["rotary_pos_emb"], 1e-6, place);
            if let Some(windows) = &patches.windows {
                let index = &windows.window_index;
                check_integers(&[index.len()], index, &case["window_index"], place);
                let patches: Vec<i64> = windows.window_patches.iter().map(|count| *count as i64).collect();
                check_integers(&[patches.len()], &patches, &case["window_patches"], place);
            }
            assert_eq!(patches.windows.is_some(), case.get("window_index").is_some(), "{place}");
            if let Some(positions) = &patches.position_embeddings {
                let count = positions.weights.shape()[1];
                let corners = positions.indices.values().iter().zip(positions.weights.values());
                let mut sums = vec![0.0; count];
                for (at, (index, weight)) in corners.enumerate() {
                    sums[at % count] += *index as f32 * weight;
                }
                check_floats(&Tensor::new(vec![count], sums), &case["position_sums"], 1e-5, place);
            }
            assert_eq!(patches.position_embeddings.is_some(), case.get("position_sums").is_some(), "{place}");
        }
        EncoderInputs::Tiles(pixel_values) => {
            check_pixels(pixel_values, &case["pixel_values"], reference, place);
        }
        EncoderInputs::MaskedTiles(tiles) => {
            if case.get("pixel_values").is_some() {
                check_pixels(&tiles.pixel_values, &case["pixel_values"], reference, place);
                assert!(tiles.patch_attention_mask.values().iter().all(|is_valid| *is_valid), "{place}");
            } else {
                let [count, colors, height, width] =
                    <[usize; 4]>::try_from(tiles.pixel_values.shape()).expect("four dimensions");
                let (global, others) = tiles.pixel_values.values().split_at(colors * height * width);
                let global = Tensor::new(vec![1, colors, height, width], global.to_vec());
                check_floats(&global, &case["global_view"], 2e-5, place);
                let others = Tensor::new(vec![count - 1, colors, height, width], others.to_vec());
                check_pixels(&others, &case["tiles"], reference, place);
                let mask = &tiles.patch_attention_mask;
                let bits: Vec<i64> = mask.values().iter().map(|is_valid| i64::from(*is_valid)).collect();
                check_integers(mask.shape(), &bits, &case["patch_attention_mask"], place);
            }
            let ids = &tiles.patch_position_ids;
            check_integers(ids.shape(), ids.values(), &case["patch_position_ids"], place);
        }
        EncoderInputs::Slices(slices) => {
            let expected = case["slices"].as_array().expect("a list");
            assert_eq!(slices.len(), expected.len(), "{place}");
            for (slice, expected) in slices.iter().zip(expected) {
                check_pixels(&slice.pixel_values, &expected["pixel_values"], reference, place);
                let ids = &slice.position_ids;
                check_integers(ids.shape(), ids.values(), &expected["position_ids"], place);
                check_floats(&slice.pos_embed, &expected["pos_embed"], 1e-5, place);
            }
        }
    }
}

/// Checks that the sizes of the inputs match the number of features that the layout reads.
fn check_encoder_tokens(inputs: &EncoderInputs, layout: &ImageLayout, place: &str) {
    let rows = layout.feature_rows.as_ref().map_or(layout.num_tokens, |rows| {
        let encoder = rows.iter().filter(|row| matches!(row, FeatureRow::Encoder(_)));
        encoder.count()
    });
    match inputs {
        EncoderInputs::Qwen(patches) => assert_eq!(patches.hidden_states.shape()[0], 4 * rows, "{place}"),
        EncoderInputs::Slices(slices) => assert_eq!(rows % slices.len(), 0, "{place}"),
        EncoderInputs::Tiles(pixels) if layout.feature_rows.is_none() => {
            assert_eq!(rows % pixels.shape()[0], 0, "{place}");
        }
        EncoderInputs::MaskedTiles(tiles) if layout.feature_rows.is_none() => {
            assert_eq!(rows % tiles.pixel_values.shape()[0], 0, "{place}");
        }
        EncoderInputs::Tiles(_) | EncoderInputs::MaskedTiles(_) => {}
    }
}

fn check_family(family: ModelFamily) {
    let reference = read(&format!("{family}.json"));
    let config = reference["config"].clone();
    let processor = ImageProcessor::from_values(config, reference["preprocessor_config"].clone())
        .expect("a valid configuration");
    assert_eq!(processor.family(), family);
    let cases = reference["images"].as_array().expect("a list");
    assert!(cases.len() >= 9, "{family}: {} images", cases.len());
    for case in cases {
        let size = Size::new(number(&case["width"]), number(&case["height"]));
        let place = format!("{family} {size}");
        let layout = processor.layout(size, Detail::Auto);
        let inputs = processor.preprocess(&draw(size), Detail::Auto);
        if case.get("error").is_some() {
            assert!(layout.is_err() && inputs.is_err(), "{place}");
            continue;
        }
        let layout = layout.unwrap_or_else(|error| panic!("{place}: {error}"));
        let inputs = inputs.unwrap_or_else(|error| panic!("{place}: {error}"));
        check_layout(&processor, &layout, case, &place);
        check_inputs(&inputs, case, &reference, &place);
        check_encoder_tokens(&inputs, &layout, &place);
        if let Some(expected) = case.get("positions") {
            check_positions(&layout, expected, &place);
        }
    }
}

#[test]
fn qwen2_vl_equals_transformers() {
    check_family(ModelFamily::Qwen2Vl);
}

#[test]
fn qwen2_5_vl_equals_transformers() {
    check_family(ModelFamily::Qwen2_5Vl);
}

#[test]
fn qwen3_vl_equals_transformers() {
    check_family(ModelFamily::Qwen3Vl);
}

#[test]
fn gemma_3_equals_transformers() {
    check_family(ModelFamily::Gemma3);
}

#[test]
fn llava_equals_transformers() {
    check_family(ModelFamily::Llava);
}

#[test]
fn llava_next_equals_transformers() {
    check_family(ModelFamily::LlavaNext);
}

#[test]
fn internvl_equals_its_published_code() {
    check_family(ModelFamily::InternVl);
}

#[test]
fn idefics3_equals_transformers() {
    check_family(ModelFamily::Idefics3);
}

#[test]
fn smolvlm_equals_transformers() {
    check_family(ModelFamily::SmolVlm);
}

#[test]
fn minicpm_v_equals_its_published_code() {
    check_family(ModelFamily::MiniCpmV);
}

#[test]
fn phi_4_multimodal_equals_transformers() {
    check_family(ModelFamily::Phi4Multimodal);
}
