//! The image encoder on OpenVINO. It runs on a request and on threads of its own, beside the language model.

use std::fmt;
use std::sync::Arc;
use std::thread::available_parallelism;

use openvino_sys::ov_element_type_e as ElementType;
use server_engine::{ImageEncoder, ImageFeatures, ImageInput, RunError, SleepLevel};
use server_images::{EncoderInputs, FeatureRow, ModelFamily, QwenPatches};

use super::files::VisionFiles;
use super::qwen::write_window_mask;
use crate::compiled_graph::CompiledGraph;
use crate::config::Config;
use crate::runtime::{Core, Element, Tensor};
use crate::{Error, memory};

/// The reciprocal of the share of the processors that the encoder uses: it runs beside the language model.
const THREADS_DIVISOR: usize = 2;

/// The content of an [`ImageInput`] for this encoder.
#[derive(Clone, Debug, PartialEq)]
pub struct EncoderImage {
    /// The inputs of the encoder's models.
    pub inputs: EncoderInputs,
    /// The row of the encoder's output that each image token reads; `None` if token i reads row i.
    pub feature_rows: Option<Vec<FeatureRow>>,
}

/// How an image encoder is computed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EncoderReport {
    /// The name of the device.
    pub device: String,
    /// The precision of the computations.
    pub precision: String,
    /// Number of threads of the encoder.
    pub threads: usize,
}

impl fmt::Display for EncoderReport {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { device, precision, threads } = self;
        write!(formatter, "image encoder: plugin, {device}, {precision}, {threads} threads")
    }
}

/// The image encoder of a vision-language model.
pub struct OpenVinoImageEncoder {
    /// `None` while the encoder is asleep.
    models: Option<EncoderModels>,
    files: VisionFiles,
    report: EncoderReport,
    width: usize,
}

/// The compiled models of an encoder.
enum EncoderModels {
    /// One model reads the pixels and returns the features.
    Tiles(CompiledGraph),
    /// One model embeds patches, and one merges them to features.
    Qwen { patches: CompiledGraph, merger: CompiledGraph },
}

/// Loads the image encoder of the model of `config`. `None` if it is not a vision-language model.
///
/// # Errors
/// A model is missing, invalid or not supported.
pub fn load_image_encoder(config: &Config) -> Result<Option<OpenVinoImageEncoder>, Error> {
    let Some(files) = VisionFiles::find(&config.model)? else { return Ok(None) };
    let configured = config.plugin_config.iter().rev().find(|(key, _)| key == "INFERENCE_PRECISION_HINT");
    let threads = available_parallelism().map_or(1, usize::from).div_ceil(THREADS_DIVISOR);
    let report = EncoderReport {
        device: "CPU".to_owned(),
        // Half precision changes answers, and the encoder runs once for an image.
        precision: configured.map_or_else(|| "f32".to_owned(), |(_, precision)| precision.clone()),
        threads,
    };
    let models = EncoderModels::load(&files, &report)?;
    let width = models.width()?;
    Ok(Some(OpenVinoImageEncoder { models: Some(models), files, report, width }))
}

impl OpenVinoImageEncoder {
    /// How the encoder is computed.
    pub fn report(&self) -> &EncoderReport {
        &self.report
    }

    fn encode_image(&mut self, image: &EncoderImage) -> Result<Vec<f32>, Error> {
        let models = match &mut self.models {
            Some(models) => models,
            None => self.models.insert(EncoderModels::load(&self.files, &self.report)?),
        };
        let rows = match (models, &image.inputs) {
            (EncoderModels::Tiles(graph), EncoderInputs::Tiles(pixels)) => {
                set(graph, "pixel_values", pixels)?;
                features(graph)?
            }
            (EncoderModels::Qwen { patches, merger }, EncoderInputs::Qwen(input)) => {
                encode_qwen(patches, merger, input)?
            }
            _ => return Err(Error::runtime("encode an image", "the image was prepared for another model")),
        };
        match &image.feature_rows {
            None => Ok(rows),
            Some(order) => reordered(&rows, order, self.width),
        }
    }
}

impl ImageEncoder for OpenVinoImageEncoder {
    fn width(&self) -> usize {
        self.width
    }

    fn encode(&mut self, image: &ImageInput) -> Result<ImageFeatures, RunError> {
        let failed = |message| RunError { message, fatal: false };
        let content = image.content.downcast_ref::<EncoderImage>();
        let content =
            content.ok_or_else(|| failed("the image was prepared for another encoder".to_owned()))?;
        let values = self.encode_image(content).map_err(|error| failed(error.chain()))?;
        if !values.len().is_multiple_of(self.width) {
            return Err(failed(format!(
                "the encoder returned {} values for rows of {}",
                values.len(),
                self.width
            )));
        }
        Ok(ImageFeatures::new(values, self.width))
    }

    fn sleep(&mut self, level: SleepLevel) {
        if level == SleepLevel::Model {
            self.models = None;
            memory::trim();
        }
    }
}

impl EncoderModels {
    fn load(files: &VisionFiles, report: &EncoderReport) -> Result<Self, Error> {
        let core = Arc::new(Core::new()?);
        let properties = [
            ("INFERENCE_PRECISION_HINT", report.precision.clone()),
            ("INFERENCE_NUM_THREADS", report.threads.to_string()),
            ("PERFORMANCE_HINT", "LATENCY".to_owned()),
            // The language model uses the same processors.
            ("ENABLE_CPU_PINNING", "NO".to_owned()),
        ]
        .map(|(key, value)| (key.to_owned(), value));
        let graph = |path: &std::path::Path| {
            let model = core.read_model(path)?;
            let compiled = Arc::new(core.compile(&model, &report.device, &properties)?);
            CompiledGraph::new(Arc::clone(&core), compiled)
        };
        let vision = graph(&files.vision_embeddings())?;
        Ok(match files.family {
            ModelFamily::Qwen2Vl | ModelFamily::Qwen2_5Vl => {
                Self::Qwen { patches: vision, merger: graph(&files.merger())? }
            }
            _ => Self::Tiles(vision),
        })
    }

    /// Number of values in a row of features.
    fn width(&self) -> Result<usize, Error> {
        let (Self::Tiles(last) | Self::Qwen { merger: last, .. }) = self;
        let output = last.compiled.first_output()?;
        let width = output.shape.last().copied().flatten().and_then(|width| usize::try_from(width).ok());
        width
            .filter(|width| *width > 0)
            .ok_or_else(|| Error::Unsupported("the size of its image features is not static".to_owned()))
    }
}

fn encode_qwen(
    patches: &mut CompiledGraph,
    merger: &mut CompiledGraph,
    input: &QwenPatches,
) -> Result<Vec<f32>, Error> {
    set(patches, "hidden_states", &input.hidden_states)?;
    patches.request.infer()?;
    let count = input.hidden_states.shape().first().copied().unwrap_or(0);
    // The output of one model is the input of the other, without a copy.
    let embedded = patches.request.output_at(0)?;
    merger.request.set("hidden_states", &embedded)?;
    set(merger, "rotary_pos_emb", &input.rotary_pos_emb)?;
    // All patches of an image attend to each other.
    let mut mask = Tensor::new(f32::TYPE, &[1, count as i64, count as i64])?;
    mask.values_mut::<f32>()?.fill(0.0);
    merger.request.set("attention_mask", &mask)?;
    if let Some(windows) = &input.windows {
        let mut mask = Tensor::new(f32::TYPE, &[1, count as i64, count as i64])?;
        if !write_window_mask(windows, count, mask.values_mut::<f32>()?) {
            return Err(Error::runtime("encode an image", "its windows do not cover its patches"));
        }
        merger.request.set("window_attention_mask", &mask)?;
        let mut index = Tensor::new(ElementType::I64, &[windows.window_index.len() as i64])?;
        index.values_mut::<i64>()?.copy_from_slice(&windows.window_index);
        merger.request.set("window_index", &index)?;
    }
    features(merger)
}

/// Binds a copy of a tensor of the image processor to an input.
fn set(graph: &mut CompiledGraph, name: &str, values: &server_images::Tensor<f32>) -> Result<(), Error> {
    let shape: Vec<i64> = values.shape().iter().map(|size| *size as i64).collect();
    let mut tensor = Tensor::new(f32::TYPE, &shape)?;
    tensor.values_mut::<f32>()?.copy_from_slice(values.values());
    graph.request.set(name, &tensor)
}

/// Runs a model and returns its first output.
fn features(graph: &mut CompiledGraph) -> Result<Vec<f32>, Error> {
    graph.request.infer()?;
    Ok(graph.request.output_at(0)?.values::<f32>()?.to_vec())
}

/// The rows in the order in which the image tokens read them.
fn reordered(rows: &[f32], order: &[FeatureRow], width: usize) -> Result<Vec<f32>, Error> {
    let mut ordered = Vec::with_capacity(order.len() * width);
    for row in order {
        let values = match row {
            FeatureRow::Encoder(row) => rows.get(*row as usize * width..(*row as usize + 1) * width),
            FeatureRow::RowEnd | FeatureRow::GlobalSeparator => None,
        };
        let values = values.ok_or_else(|| {
            Error::runtime("encode an image", &format!("the encoder has no row for {row:?}"))
        })?;
        ordered.extend_from_slice(values);
    }
    Ok(ordered)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn image_tokens_read_rows_in_any_order() {
        let rows = [1.0, 2.0, 3.0, 4.0];
        let order = [FeatureRow::Encoder(1), FeatureRow::Encoder(0), FeatureRow::Encoder(1)];
        assert_eq!(reordered(&rows, &order, 2).unwrap(), [3.0, 4.0, 1.0, 2.0, 3.0, 4.0]);
        assert!(reordered(&rows, &[FeatureRow::Encoder(2)], 2).is_err());
        assert!(reordered(&rows, &[FeatureRow::RowEnd], 2).is_err());
    }
}
