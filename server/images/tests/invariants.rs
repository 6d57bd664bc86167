//! Tests properties that hold for all images, with random sizes, files and prompts.

use std::{fs, path::PathBuf};

use rand::{Rng as _, RngExt as _, SeedableRng as _, rngs::StdRng};
use serde_json::{Value, json};
use server_images::{
    DecodeLimits, Detail, EncoderInputs, FeatureRow, Filter, ImageError, ImageHeader, ImageLayout,
    ImageProcessor, ModelFamily, RgbImage, Size, decode, expand_prompt, image_spans, mrope_positions, resize,
    token_types,
};

const SEED: u64 = 26;

fn directory() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/reference")
}

fn random() -> StdRng {
    eprintln!("seed: {SEED}");
    StdRng::seed_from_u64(SEED)
}

fn processor(family: ModelFamily) -> ImageProcessor {
    let text =
        fs::read_to_string(directory().join(format!("{family}.json"))).expect("the reference was generated");
    let reference: Value = serde_json::from_str(&text).expect("the reference is JSON");
    ImageProcessor::from_values(reference["config"].clone(), reference["preprocessor_config"].clone())
        .expect("a valid configuration")
}

/// A size with sides from one pixel to hundreds, including narrow ones.
fn random_size(random: &mut StdRng) -> Size {
    let mut side = || match random.random_range(0..4) {
        0 => random.random_range(1..8),
        1 => random.random_range(1..60),
        2 => 14 * random.random_range(1..30),
        _ => random.random_range(1..700),
    };
    Size::new(side(), side())
}

fn random_image(random: &mut StdRng, size: Size) -> RgbImage {
    let mut pixels = vec![0; (size.pixels() * 3) as usize];
    random.fill_bytes(&mut pixels);
    RgbImage::new(size, pixels).expect("each pixel has three bytes")
}

/// The number of rows that the encoder returns for all inputs, given the number of rows of a tile.
fn encoder_rows(inputs: &EncoderInputs, rows_of_a_tile: usize) -> usize {
    match inputs {
        EncoderInputs::Qwen(patches) => patches.hidden_states.shape()[0] / 4,
        EncoderInputs::Tiles(pixel_values) => pixel_values.shape()[0] * rows_of_a_tile,
        EncoderInputs::MaskedTiles(tiles) => tiles.pixel_values.shape()[0] * rows_of_a_tile,
        EncoderInputs::Slices(slices) => slices.len() * rows_of_a_tile,
    }
}

/// The number of rows that the encoder of a test model returns for one tile or slice; 0 for Qwen, which has neither.
fn rows_of_a_tile(family: ModelFamily) -> usize {
    match family {
        ModelFamily::Qwen2Vl | ModelFamily::Qwen2_5Vl | ModelFamily::Qwen3Vl => 0,
        ModelFamily::Gemma3 | ModelFamily::Llava | ModelFamily::LlavaNext => 16,
        ModelFamily::InternVl | ModelFamily::Idefics3 | ModelFamily::SmolVlm => 4,
        ModelFamily::MiniCpmV => 8,
        ModelFamily::Phi4Multimodal => 256,
    }
}

fn check(processor: &ImageProcessor, image: &RgbImage, detail: Detail) {
    let family = processor.family();
    let place = format!("{family} {} {detail:?}", image.size());
    let layout = processor.layout(image.size(), detail);
    let inputs = processor.preprocess(image, detail);
    let (layout, inputs) = match (layout, inputs) {
        (Ok(layout), Ok(inputs)) => (layout, inputs),
        (Err(layout), Err(inputs)) => return assert_eq!(layout, inputs, "{place}"),
        (layout, inputs) => panic!("{place}: {layout:?} but {:?}", inputs.err()),
    };
    assert_eq!(layout.input_bytes, inputs.size_bytes(), "{place}");
    let text = layout.prompt_text(0);
    assert_eq!(text.matches(processor.image_token()).count(), layout.num_tokens, "{place}");
    let rows = encoder_rows(&inputs, rows_of_a_tile(family));
    if let Some(features) = &layout.feature_rows {
        assert_eq!(features.len(), layout.num_tokens, "{place}");
        let mut encoder: Vec<u32> = features
            .iter()
            .filter_map(|row| if let FeatureRow::Encoder(row) = row { Some(*row) } else { None })
            .collect();
        assert!(encoder.iter().all(|row| (*row as usize) < rows), "{place}");
        let count = encoder.len();
        encoder.sort_unstable();
        encoder.dedup();
        assert_eq!(encoder.len(), count, "{place}: a row is used twice");
    } else {
        assert_eq!(layout.num_tokens, rows, "{place}");
    }
    if let Some(grid) = layout.grid {
        assert_eq!((grid.rows * grid.columns) as usize, layout.num_tokens, "{place}");
    }
    if let EncoderInputs::Qwen(patches) = &inputs
        && let Some(windows) = &patches.windows
    {
        let mut index = windows.window_index.clone();
        index.sort_unstable();
        assert!(index.iter().enumerate().all(|(at, token)| at as i64 == *token), "{place}");
        let patches = patches.hidden_states.shape()[0];
        assert_eq!(windows.window_patches.iter().sum::<usize>(), patches, "{place}");
    }
}

#[test]
fn layouts_and_inputs_of_all_families_agree() {
    let mut random = random();
    for family in ModelFamily::ALL {
        let processor = processor(family);
        let images = if family == ModelFamily::Phi4Multimodal { 6 } else { 25 };
        for _ in 0..images {
            let size = random_size(&mut random);
            let image = random_image(&mut random, size);
            check(&processor, &image, Detail::Auto);
            check(&processor, &image, Detail::Low);
        }
    }
}

#[test]
fn the_memory_of_the_inputs_is_known_from_the_size_of_an_image() {
    /// Tiny and odd sizes, and those of images with many tiles.
    const USUAL: [[u32; 2]; 8] =
        [[1, 1], [2, 3], [11, 10], [13, 17], [333, 777], [501, 499], [1301, 907], [1200, 1200]];
    /// Sizes that some families reject.
    const NARROW: [[u32; 2]; 5] = [[1, 150], [190, 1], [11, 2000], [1999, 13], [4000, 28]];
    for family in ModelFamily::ALL {
        let processor = processor(family);
        let mut num_accepted = 0;
        for [width, height] in USUAL.into_iter().chain(NARROW) {
            let image = RgbImage::filled(Size::new(width, height), [1, 2, 3]);
            for detail in [Detail::Auto, Detail::Low] {
                let place = format!("{family} {} {detail:?}", image.size());
                match (processor.layout(image.size(), detail), processor.preprocess(&image, detail)) {
                    (Ok(layout), Ok(inputs)) => {
                        assert_eq!(layout.input_bytes, inputs.size_bytes(), "{place}");
                        num_accepted += 1;
                    }
                    (layout, inputs) => assert_eq!(layout.err(), inputs.err(), "{place}"),
                }
            }
        }
        assert!(num_accepted >= 2 * USUAL.len(), "{family}: {num_accepted} images");
    }
}

#[test]
fn low_detail_takes_no_more_tokens() {
    let mut random = random();
    for family in ModelFamily::ALL {
        let processor = processor(family);
        for _ in 0..200 {
            let size = random_size(&mut random);
            let tokens = |detail| processor.layout(size, detail).map(|layout| layout.num_tokens);
            if let (Ok(low), Ok(high)) = (tokens(Detail::Low), tokens(Detail::High)) {
                assert!(low <= high, "{family} {size}: {low} {high}");
            }
        }
    }
}

#[test]
fn prompts_of_several_images_have_consistent_positions() {
    let mut random = random();
    for family in ModelFamily::ALL {
        let processor = processor(family);
        for _ in 0..20 {
            let sizes: Vec<Size> = (0..random.random_range(0..4)).map(|_| random_size(&mut random)).collect();
            let layouts: Result<Vec<ImageLayout>, ImageError> =
                sizes.iter().map(|size| processor.layout(*size, Detail::Auto)).collect();
            let Ok(layouts) = layouts else { continue };
            let tags: Vec<String> = (0..layouts.len()).map(|number| processor.tag(number)).collect();
            let prompt = format!("Text {} more text", tags.join(" and "));
            assert_eq!(processor.reserved_text(&prompt).is_some(), !layouts.is_empty());
            let text =
                expand_prompt(&prompt, processor.markers(), &layouts).expect("a marker for each image");
            // Each image token becomes one token, and each of the remaining characters becomes one token.
            let mut tokens = Vec::new();
            for (number, part) in text.split(processor.image_token()).enumerate() {
                tokens.extend((number > 0).then_some(1));
                tokens.extend(part.chars().map(|_| 2));
            }
            let spans = image_spans(&tokens, 1, &layouts).expect("all image tokens");
            let types = token_types(tokens.len(), &spans);
            assert!(tokens.iter().zip(&types).all(|(token, kind)| i64::from(*token == 1) == *kind));
            if layouts.iter().all(|layout| layout.grid.is_some()) {
                let positions = mrope_positions(tokens.len(), &spans);
                assert!(positions.delta <= 0);
                let streams = [&positions.temporal, &positions.height, &positions.width];
                assert!(streams.iter().all(|stream| stream.len() == tokens.len()));
                let largest = streams.iter().filter_map(|stream| stream.iter().max()).max();
                assert_eq!(largest.expect("a token") + 1, tokens.len() as i64 + positions.delta);
                assert!(positions.temporal.is_sorted(), "temporal positions do not decrease");
            }
        }
    }
}

#[test]
fn the_digest_depends_on_pixels_size_detail_and_configuration() {
    let image = RgbImage::filled(Size::new(6, 4), [1, 2, 3]);
    let turned = RgbImage::filled(Size::new(4, 6), [1, 2, 3]);
    let mut pixels = image.pixels().to_vec();
    pixels[71] += 1;
    let other = RgbImage::new(image.size(), pixels).expect("each pixel has three bytes");
    let gemma = |edge: u32| {
        let config = json!({"model_type": "gemma3", "mm_tokens_per_image": 4});
        ImageProcessor::from_values(config, json!({"size": {"width": edge, "height": edge}})).expect("valid")
    };
    let (gemma, larger) = (gemma(8), gemma(16));
    let digest = gemma.digest(&image, Detail::Auto);
    assert_eq!(digest, gemma.digest(&image.clone(), Detail::High));
    for different in [
        gemma.digest(&turned, Detail::Auto),
        gemma.digest(&other, Detail::Auto),
        gemma.digest(&image, Detail::Low),
        larger.digest(&image, Detail::Auto),
    ] {
        assert_ne!(digest, different);
    }
}

/// The filters of Pillow, implemented independently of the crate.
fn filter_value(filter: Filter, x: f64) -> f64 {
    let sinc =
        |x: f64| if x == 0.0 { 1.0 } else { (x * std::f64::consts::PI).sin() / (x * std::f64::consts::PI) };
    let x = x.abs();
    match filter {
        Filter::Bilinear => (1.0 - x).max(0.0),
        Filter::Bicubic if x < 1.0 => 1.5 * x.powi(3) - 2.5 * x.powi(2) + 1.0,
        Filter::Bicubic if x < 2.0 => -0.5 * x.powi(3) + 2.5 * x.powi(2) - 4.0 * x + 2.0,
        Filter::Lanczos if x < 3.0 => sinc(x) * sinc(x / 3.0),
        Filter::Bicubic | Filter::Lanczos => 0.0,
    }
}

/// Resamples a line in floating point. Every input pixel contributes, even if its weight is almost 0.
fn resample_line(line: &[f64], to: u32, filter: Filter) -> Vec<f64> {
    let scale = line.len() as f64 / f64::from(to);
    let stretch = scale.max(1.0);
    let pixel = |x: u32| {
        let center = (f64::from(x) + 0.5) * scale;
        let weights = (0..line.len()).map(|at| filter_value(filter, (at as f64 + 0.5 - center) / stretch));
        let sum: f64 = weights.clone().sum();
        let weighted: f64 = weights.zip(line).map(|(weight, value)| weight * value).sum();
        (weighted / sum).clamp(0.0, 255.0)
    };
    (0..to).map(pixel).collect()
}

#[test]
fn resampling_is_close_to_floating_point() {
    let mut random = random();
    for filter in [Filter::Bilinear, Filter::Bicubic, Filter::Lanczos] {
        for _ in 0..60 {
            let (from, to) = (random.random_range(1..80), random.random_range(1..80));
            let image = random_image(&mut random, Size::new(from, 1));
            let resized = resize(&image, Size::new(to, 1), filter);
            let turned = RgbImage::new(Size::new(1, from), image.pixels().to_vec()).expect("the same pixels");
            assert_eq!(resize(&turned, Size::new(1, to), filter).pixels(), resized.pixels());
            for color in 0..3 {
                let line = |image: &RgbImage| -> Vec<f64> {
                    image.pixels()[color..].iter().step_by(3).map(|value| f64::from(*value)).collect()
                };
                let expected = resample_line(&line(&image), to, filter);
                for (ours, exact) in line(&resized).iter().zip(expected) {
                    // The values differ, because `resize` rounds the weights and the result, and, like Pillow, omits
                    // a pixel at the end of a window if the weight of the pixel is almost 0.
                    assert!((ours - exact).abs() <= 1.5, "{filter:?} {from} to {to}: {ours} {exact}");
                }
            }
        }
    }
}

#[test]
fn damaged_files_are_errors_or_images_of_the_size_in_the_header() {
    let mut random = random();
    let limits = DecodeLimits { pixels_max: 100_000, side_max: 1000, ..DecodeLimits::default() };
    let files = fs::read_dir(directory().join("files")).expect("the files were generated");
    let mut paths: Vec<PathBuf> = files.map(|entry| entry.expect("an entry").path()).collect();
    paths.sort();
    assert!(paths.len() > 20, "{} files", paths.len());
    for path in paths {
        let original = fs::read(&path).expect("the file can be read");
        for round in 0..60 {
            let mut bytes = original.clone();
            if round % 3 == 0 {
                bytes.truncate(random.random_range(0..bytes.len()));
            } else {
                for _ in 0..random.random_range(1..6) {
                    let at = random.random_range(0..bytes.len());
                    bytes[at] = random.random();
                }
            }
            match (ImageHeader::read(&bytes), decode(&bytes, &limits)) {
                (Ok(header), Ok(image)) => assert_eq!(header.size(), image.size(), "{}", path.display()),
                (Err(header), Ok(_)) => panic!("{}: decoded despite {header}", path.display()),
                (_, Err(error)) => assert!(!error.to_string().is_empty()),
            }
        }
    }
}

#[test]
fn limits_are_checked_before_pixels_are_decoded() {
    // A PNG header that declares 60,000 x 60,000 pixels, without any data.
    let mut png = b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR".to_vec();
    png.extend([60_000_u32.to_be_bytes(), 60_000_u32.to_be_bytes()].concat());
    png.extend([8, 2, 0, 0, 0]);
    let size = Size::new(60_000, 60_000);
    let limits = DecodeLimits::default();
    assert_eq!(decode(&png, &limits), Err(ImageError::Pixels { size, limit: limits.pixels_max }));
    let limits = DecodeLimits { pixels_max: u64::MAX, ..limits };
    assert_eq!(decode(&png, &limits), Err(ImageError::Side { size, limit: limits.side_max }));
}
