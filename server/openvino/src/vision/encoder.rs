//! The image encoder on OpenVINO. It has a separate inference request and separate threads, and runs concurrently with
//! the language model.

use std::fmt;
use std::sync::Arc;
use std::thread::available_parallelism;

use server_engine::{ImageEncoder, ImageFeatures, ImageInput, RunError, SleepLevel};
use server_images::{EncoderInputs, FeatureRow, LearnedRows};

use super::files::VisionFiles;
use super::image_tiles::fit_in_one_run;
use super::models::{EncoderCompiler, EncoderModels, NativeOperations, RowWidths};
use crate::config::Config;
use crate::cpu::CpuFeatures;
use crate::device::{DeviceOptions, configured_property};
use crate::kernels::{EncoderPlan, plan_encoder};
use crate::runtime::Core;
use crate::{Error, memory};

/// Number of pixels per thread that one run of the image encoder processes: 64 patches of 14 x 14 pixels. With fewer
/// patches, reading the weights takes a large share of a thread's time. With more patches, a run takes longer without
/// becoming more efficient.
///
/// If exceeded: further tiles are processed in the next runs. A tile with more pixels than a run is processed alone.
const RUN_PIXELS_PER_THREAD: usize = 64 * 14 * 14;

/// The content of an [`ImageInput`] for this encoder.
#[derive(Clone, Debug, PartialEq)]
pub struct EncoderImage {
    /// The inputs of the encoder's models.
    pub inputs: EncoderInputs,
    /// The row that each image token reads: a row of the encoder's output or a learned row. `None` if token i reads row
    /// i of the output.
    pub feature_rows: Option<Vec<FeatureRow>>,
}

/// The device, the precision and the kernels of an image encoder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EncoderReport {
    /// The name of the device.
    pub device: String,
    /// The precision of the plugin's computations.
    pub precision: String,
    /// Size of the groups of activations that share a scale when the plugin quantizes activations to 8 bits; 0 disables
    /// the quantization.
    pub quantization_group: String,
    /// Number of threads of the encoder.
    pub threads: usize,
    /// The kernels of the projections, with the number of native projections if there are any.
    pub projections: String,
    /// The kernels of the attention, with the number of native operations if there are any.
    pub attention: String,
}

impl EncoderReport {
    fn compiler(&self, core: Arc<Core>, plan: EncoderPlan) -> EncoderCompiler<'_> {
        let properties = [
            ("INFERENCE_PRECISION_HINT", self.precision.clone()),
            ("INFERENCE_NUM_THREADS", self.threads.to_string()),
            ("PERFORMANCE_HINT", "LATENCY".to_owned()),
            ("DYNAMIC_QUANTIZATION_GROUP_SIZE", self.quantization_group.clone()),
            // Do not bind the threads to processors, because the language model uses the same processors.
            ("ENABLE_CPU_PINNING", "NO".to_owned()),
        ];
        let properties = properties.map(|(key, value)| (key.to_owned(), value)).into();
        EncoderCompiler { core, device: &self.device, properties, plan, native: NativeOperations::default() }
    }
}

impl fmt::Display for EncoderReport {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { device, precision, quantization_group: _, threads, projections, attention } = self;
        write!(
            formatter,
            "image encoder: {device}, {precision}, {threads} threads; projections: {projections}; attention: {attention}"
        )
    }
}

/// The image encoder of a vision-language model.
pub struct OpenVinoImageEncoder {
    /// `None` while the encoder is asleep.
    models: Option<EncoderModels>,
    files: VisionFiles,
    report: EncoderReport,
    plan: EncoderPlan,
    widths: RowWidths,
    learned_rows: LearnedRows,
    /// Largest number of pixels in a run of an encoder that reads tiles.
    run_pixels: usize,
}

/// Loads the image encoder of the model in `config`. Returns `None` if the model is not a vision-language model.
///
/// # Errors
/// A file of the model is missing or invalid, or the model is not supported.
pub fn load_image_encoder(config: &Config) -> Result<Option<OpenVinoImageEncoder>, Error> {
    let Some(files) = VisionFiles::find(&config.model)? else { return Ok(None) };
    let configured = |key: &str, default: &str| {
        configured_property(&config.plugin_config, key).unwrap_or(default).to_owned()
    };
    let threads = available_parallelism().map_or(1, usize::from);
    let mut report = EncoderReport {
        device: "CPU".to_owned(),
        // The default is f32, because lower precisions change answers, and the encoder runs only once per image.
        precision: configured("INFERENCE_PRECISION_HINT", "f32"),
        quantization_group: configured("DYNAMIC_QUANTIZATION_GROUP_SIZE", "0"),
        threads,
        projections: "plugin".to_owned(),
        attention: "plugin".to_owned(),
    };
    let core = Arc::new(Core::new()?);
    let device = DeviceOptions::read(&core, &report.device, &config.plugin_config);
    let plan = plan_encoder(&config.into(), &device, CpuFeatures::detect(), &report.precision);
    let mut compiler = report.compiler(core, plan);
    let models = EncoderModels::load(&files, &mut compiler)?;
    let native = compiler.native;
    if let Some(projections) = plan.projections.filter(|_| native.projections > 0) {
        report.projections = format!("{} {projections}", native.projections);
    }
    if let Some(isa) = plan.attention.filter(|_| native.attention > 0) {
        report.attention = format!("{} native {isa}", native.attention);
    }
    let widths = models.widths()?;
    let learned_rows = files.learned_rows()?;
    for row in [&learned_rows.row_end, &learned_rows.global_separator].into_iter().flatten() {
        if row.len() != widths.encoded {
            let message = format!(
                "a separator embedding in its config.json (image_newline, sub_GN or glb_GN) has {} values \
                 instead of {}",
                row.len(),
                widths.encoded
            );
            return Err(Error::Unsupported(message));
        }
    }
    let run_pixels = RUN_PIXELS_PER_THREAD.saturating_mul(threads);
    let models = Some(models);
    Ok(Some(OpenVinoImageEncoder { models, files, report, plan, widths, learned_rows, run_pixels }))
}

impl OpenVinoImageEncoder {
    /// The device, the precision and the kernels of the encoder.
    pub fn report(&self) -> &EncoderReport {
        &self.report
    }

    /// Sets the largest number of pixels in a run of an encoder that reads tiles. A tile with more pixels is encoded
    /// alone.
    #[must_use]
    pub fn with_run_pixels(self, run_pixels: usize) -> Self {
        Self { run_pixels, ..self }
    }

    /// The features of each image.
    fn encode_images(&mut self, images: &[&ImageInput]) -> Result<Vec<ImageFeatures>, RunError> {
        let failed = |message| RunError { message, fatal: false };
        let contents: Option<Vec<_>> = images.iter().map(|image| content(image)).collect();
        let contents =
            contents.ok_or_else(|| failed("the image was prepared for another encoder".to_owned()))?;
        let values = self.encode_contents(&contents).map_err(|error| failed(error.chain()))?;
        let width = self.widths.projected;
        let features = values.into_iter().map(|values| match values.len() {
            len if len.is_multiple_of(width) => Ok(ImageFeatures::new(values, width)),
            len => Err(failed(format!(
                "the encoder returned {len} values, which do not form complete rows of {width} values"
            ))),
        });
        features.collect()
    }

    fn encode_contents(&mut self, images: &[&EncoderImage]) -> Result<Vec<Vec<f32>>, Error> {
        let models = match &mut self.models {
            Some(models) => models,
            None => {
                let mut compiler = self.report.compiler(Arc::new(Core::new()?), self.plan);
                self.models.insert(EncoderModels::load(&self.files, &mut compiler)?)
            }
        };
        let inputs: Vec<_> = images.iter().map(|image| &image.inputs).collect();
        let width = self.widths.encoded;
        let rows = models.encode(&inputs, self.run_pixels)?.into_iter().zip(images).map(|(rows, image)| {
            let rows = match &image.feature_rows {
                None => rows,
                Some(order) => reordered(&rows, order, width, &self.learned_rows)?,
            };
            models.project(rows, width)
        });
        rows.collect()
    }
}

/// The content of an image, or `None` if the image was prepared for another encoder.
fn content(image: &ImageInput) -> Option<&EncoderImage> {
    image.content.downcast_ref()
}

impl ImageEncoder for OpenVinoImageEncoder {
    fn width(&self) -> usize {
        self.widths.projected
    }

    fn encode(&mut self, image: &ImageInput) -> Result<ImageFeatures, RunError> {
        let mut features = self.encode_images(&[image])?;
        features
            .pop()
            .ok_or_else(|| RunError { message: "the encoder has no output".to_owned(), fatal: false })
    }

    fn can_join(&self, batch: &[Arc<ImageInput>], image: &ImageInput) -> bool {
        let inputs = |image| content(image).map(|content| &content.inputs);
        let batch: Option<Vec<_>> = batch.iter().map(|image| inputs(image)).collect();
        batch.zip(inputs(image)).is_some_and(|(batch, image)| fit_in_one_run(&batch, image, self.run_pixels))
    }

    fn encode_batch(&mut self, images: &[Arc<ImageInput>]) -> Result<Vec<ImageFeatures>, RunError> {
        self.encode_images(&images.iter().map(|image| &**image).collect::<Vec<_>>())
    }

    fn sleep(&mut self, level: SleepLevel) {
        if level == SleepLevel::Model {
            self.models = None;
            memory::trim();
        }
    }
}

/// Returns the rows in the order in which the image tokens read them, with learned rows between them.
fn reordered(
    rows: &[f32],
    order: &[FeatureRow],
    width: usize,
    learned: &LearnedRows,
) -> Result<Vec<f32>, Error> {
    let mut ordered = Vec::with_capacity(order.len() * width);
    for row in order {
        let values = match row {
            FeatureRow::Encoder(row) => rows.get(*row as usize * width..(*row as usize + 1) * width),
            FeatureRow::RowEnd => learned.row_end.as_deref(),
            FeatureRow::GlobalSeparator => learned.global_separator.as_deref(),
        };
        let values = values.ok_or_else(|| {
            let message =
                format!("the row {row:?} is neither a row of the encoder's output nor a learned row");
            Error::runtime("run the image encoder", &message)
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
        let learned = LearnedRows { row_end: Some(vec![5.0, 6.0]), global_separator: None };
        let reordered = |order: &[FeatureRow]| reordered(&rows, order, 2, &learned);
        assert_eq!(reordered(&order).unwrap(), [3.0, 4.0, 1.0, 2.0, 3.0, 4.0]);
        let order = [FeatureRow::Encoder(1), FeatureRow::RowEnd];
        assert_eq!(reordered(&order).unwrap(), [3.0, 4.0, 5.0, 6.0]);
        assert!(reordered(&[FeatureRow::Encoder(2)]).is_err());
        assert!(reordered(&[FeatureRow::GlobalSeparator]).is_err());
    }
}
