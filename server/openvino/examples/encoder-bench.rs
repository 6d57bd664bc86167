//! Measures the image encoder of a vision-language model: the time to encode an image of noise, and the difference
//! between its features and those that the plugin computes in f32.

use std::io::Write as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use anyhow::Context as _;
use clap::Parser;
use serde_json::json;
use server_engine::{ImageDigest, ImageEncoder as _, ImageInput};
use server_images::{Detail, ImageProcessor, RgbImage, Size};
use server_openvino::{ActivationPrecision, Config, EncoderImage, load_image_encoder};

/// Measures the image encoder and prints the result as JSON.
#[derive(Debug, Parser)]
struct Args {
    /// The directory of an OpenVINO IR of a vision-language model.
    #[arg(long)]
    model: PathBuf,
    /// Width and height of the image in pixels.
    #[arg(long, default_value_t = 512)]
    edge: u32,
    /// Number of measured rounds, each of which encodes the image once. The result contains the median and the minimum
    /// of their times.
    #[arg(long, default_value_t = 9)]
    rounds: usize,
    /// The precision in which native projections multiply activations: auto or int8.
    #[arg(long, default_value = "auto", value_parser = activation_precision)]
    activation_precision: ActivationPrecision,
    /// A property for the device's plugin, `KEY=VALUE`. Repeatable.
    #[arg(long)]
    plugin_config: Vec<String>,
}

impl Args {
    fn config(&self) -> anyhow::Result<Config> {
        let properties = self.plugin_config.iter().map(|property| {
            let (key, value) =
                property.split_once('=').with_context(|| format!("'{property}' is not KEY=VALUE"))?;
            Ok((key.to_owned(), value.to_owned()))
        });
        let plugin_config = properties.collect::<anyhow::Result<_>>()?;
        let Self { activation_precision, .. } = *self;
        Ok(Config { plugin_config, activation_precision, ..Config::new(self.model.clone()) })
    }
}

fn activation_precision(name: &str) -> Result<ActivationPrecision, String> {
    match name {
        "auto" => Ok(ActivationPrecision::Auto),
        "int8" => Ok(ActivationPrecision::Int8),
        _ => Err("not one of auto, int8".to_owned()),
    }
}

/// The features of an image, and how they were computed.
struct EncodedImage {
    report: String,
    features: Vec<f32>,
    /// The durations of the rounds in seconds, ascending.
    seconds: Vec<f64>,
}

fn encode(config: &Config, image: &ImageInput, rounds: usize) -> anyhow::Result<EncodedImage> {
    let mut encoder = load_image_encoder(config)?.context("the model does not support images")?;
    let mut features = encoder.encode(image)?;
    let mut seconds = Vec::with_capacity(rounds);
    for _ in 0..rounds {
        let started = Instant::now();
        features = encoder.encode(image)?;
        seconds.push(started.elapsed().as_secs_f64());
    }
    seconds.sort_by(f64::total_cmp);
    let report = encoder.report().to_string();
    Ok(EncodedImage { report, features: features.values(0..features.rows()).to_vec(), seconds })
}

/// The root mean square of the difference from `reference`, relative to the root mean square of `reference`.
fn noise(features: &[f32], reference: &[f32]) -> f64 {
    let squares =
        |values: &mut dyn Iterator<Item = f32>| values.map(|value| f64::from(value).powi(2)).sum::<f64>();
    let difference =
        squares(&mut features.iter().zip(reference).map(|(feature, reference)| feature - reference));
    (difference / squares(&mut reference.iter().copied())).sqrt()
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let processor = ImageProcessor::load(&args.model)?;
    let size = Size { width: args.edge, height: args.edge };
    let mut state = 1u32;
    let pixels = (0..size.pixels() * 3).map(|_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    });
    let image = RgbImage::new(size, pixels.collect()).context("the image has no pixels")?;
    let layout = processor.layout(image.size(), Detail::Auto)?;
    let content = EncoderImage {
        inputs: processor.preprocess(&image, Detail::Auto)?,
        feature_rows: layout.feature_rows.clone(),
    };
    let input = ImageInput {
        digest: ImageDigest(processor.digest(&image, Detail::Auto).0),
        rows: u32::try_from(layout.num_tokens)?,
        content: Arc::new(content),
    };
    let exact = [("INFERENCE_PRECISION_HINT", "f32"), ("DYNAMIC_QUANTIZATION_GROUP_SIZE", "0")];
    let exact = exact.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
    let reference = encode(&Config { plugin_config: exact, ..Config::new(args.model.clone()) }, &input, 0)?;
    let EncodedImage { report, features, seconds } = encode(&args.config()?, &input, args.rounds.max(1))?;
    let result = json!({
        "encoder": report,
        "image_tokens": input.rows,
        "seconds": { "median": seconds[seconds.len() / 2], "min": seconds[0] },
        "noise": noise(&features, &reference.features),
    });
    writeln!(std::io::stdout().lock(), "{result:#}")?;
    Ok(())
}
