//! The compiled models of an image encoder.

use std::path::Path;
use std::sync::Arc;

use openvino_sys::ov_element_type_e as ElementType;
use server_images::{EncoderInputs, MaskedTiles, ModelFamily, ResamplerSlice, Tensor as ImageTensor};

use super::files::VisionFiles;
use super::image_tiles::{ImageTiles, gather, tiles_of};
use super::qwen::{MergerAttention, QwenModels};
use crate::compiled_graph::CompiledGraph;
use crate::kernels::EncoderPlan;
use crate::runtime::{Core, Flag, Model};
use crate::{Error, shim};

/// The compiled models of an encoder.
pub(super) enum EncoderModels {
    /// One model reads the pixels of tiles and returns the features.
    Tiles(CompiledGraph),
    /// One model reads tiles whose patches can be masked, and returns the features.
    MaskedTiles(CompiledGraph),
    /// The models of Phi-4-multimodal: one encodes tiles like `MaskedTiles`, and one projects the rows of an image,
    /// learned rows included, to embeddings.
    ProjectedTiles { tiles: CompiledGraph, projection: CompiledGraph },
    /// The models of MiniCPM-V: one encodes a slice, and one resamples it to a fixed number of features.
    Slices { vision: CompiledGraph, resampler: CompiledGraph },
    /// The models of Qwen2-VL, Qwen2.5-VL and Qwen3-VL.
    Qwen(QwenModels),
}

/// Compiles the models of an encoder.
pub(super) struct EncoderCompiler<'a> {
    pub(super) core: Arc<Core>,
    pub(super) device: &'a str,
    pub(super) properties: Vec<(String, String)>,
    pub(super) plan: EncoderPlan,
    /// Numbers of native projections and attention operations in the models compiled so far.
    pub(super) native: NativeOperations,
}

/// Numbers of operations that native kernels compute.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct NativeOperations {
    pub(super) projections: usize,
    pub(super) attention: usize,
}

impl EncoderCompiler<'_> {
    fn graph(&mut self, path: &Path) -> Result<CompiledGraph, Error> {
        let model = shim::read_ir(&self.core, path)?;
        self.compile(model)
    }

    /// Compiles a model. In every attention operation without a mask, all tokens of an image or a tile must attend to
    /// each other.
    fn vision_graph(&mut self, mut model: Model) -> Result<CompiledGraph, Error> {
        shim::replace_patch_convolutions(&mut model)?;
        self.native.attention += shim::replace_encoder_attention(&mut model, self.plan.attention)?;
        self.compile(model)
    }

    fn compile(&mut self, mut model: Model) -> Result<CompiledGraph, Error> {
        if let Some(projections) = self.plan.projections {
            self.native.projections += shim::replace_encoder_projections(&mut model, projections)?;
        }
        let compiled = Arc::new(self.core.compile(&model, self.device, &self.properties)?);
        CompiledGraph::new(Arc::clone(&self.core), compiled)
    }
}

impl EncoderModels {
    pub(super) fn load(files: &VisionFiles, compiler: &mut EncoderCompiler<'_>) -> Result<Self, Error> {
        let vision = shim::read_ir(&compiler.core, &files.vision_embeddings())?;
        let vision = compiler.vision_graph(vision)?;
        Ok(match files.family {
            ModelFamily::Qwen2Vl | ModelFamily::Qwen2_5Vl | ModelFamily::Qwen3Vl => {
                let has_positions = files.family == ModelFamily::Qwen3Vl;
                let positions =
                    if has_positions { Some(compiler.graph(&files.patch_positions())?) } else { None };
                let mut merger = shim::read_ir(&compiler.core, &files.merger())?;
                let replaced = shim::remove_attention_masks(&mut merger)?;
                if replaced == 0 {
                    tracing::warn!(
                        "the image encoder has an unknown structure, so encoding large images needs a lot of memory"
                    );
                }
                Self::Qwen(QwenModels {
                    patches: vision,
                    positions,
                    merger: compiler.vision_graph(merger)?,
                    deepstack_layers: files.deepstack_layers,
                    attention: if replaced > 0 { MergerAttention::Windows } else { MergerAttention::Masks },
                })
            }
            ModelFamily::Idefics3 | ModelFamily::SmolVlm => Self::MaskedTiles(vision),
            ModelFamily::Phi4Multimodal => {
                Self::ProjectedTiles { tiles: vision, projection: compiler.graph(&files.projection())? }
            }
            ModelFamily::MiniCpmV => Self::Slices { vision, resampler: compiler.graph(&files.resampler())? },
            ModelFamily::Gemma3 | ModelFamily::Llava | ModelFamily::LlavaNext | ModelFamily::InternVl => {
                Self::Tiles(vision)
            }
        })
    }

    /// Number of values in the rows that `encode` returns, and in those that `project` returns.
    pub(super) fn widths(&self) -> Result<RowWidths, Error> {
        let encoded = match self {
            Self::Tiles(graph) | Self::MaskedTiles(graph) | Self::ProjectedTiles { tiles: graph, .. } => {
                graph.row_values()?
            }
            Self::Slices { resampler, .. } => resampler.row_values()?,
            Self::Qwen(models) => models.width()?,
        };
        let projected = match self {
            Self::ProjectedTiles { projection, .. } => projection.row_values()?,
            _ => encoded,
        };
        match (encoded, projected) {
            (Some(encoded), Some(projected)) => Ok(RowWidths { encoded, projected }),
            _ => Err(Error::Unsupported("the size of its image features is not static".to_owned())),
        }
    }

    /// Returns the rows of the encoder's output for each image. If the encoder reads tiles, a run may contain tiles of
    /// several images, and has at most `run_pixels` pixels unless a single tile has more.
    pub(super) fn encode(
        &mut self,
        images: &[&EncoderInputs],
        run_pixels: usize,
    ) -> Result<Vec<Vec<f32>>, Error> {
        match self {
            Self::Tiles(graph) => {
                let pixels = images.iter().map(|image| match image {
                    EncoderInputs::Tiles(pixels) => Ok(pixels),
                    _ => Err(prepared_for_another_model()),
                });
                encode_tiles(graph, &pixels.collect::<Result<Vec<_>, _>>()?, &[], run_pixels)
            }
            Self::MaskedTiles(graph) | Self::ProjectedTiles { tiles: graph, .. } => {
                let tiles = images.iter().map(|image| match image {
                    EncoderInputs::MaskedTiles(tiles) => Ok(tiles),
                    _ => Err(prepared_for_another_model()),
                });
                let tiles = tiles.collect::<Result<Vec<_>, _>>()?;
                let pixels: Vec<_> = tiles.iter().map(|tiles| &tiles.pixel_values).collect();
                encode_tiles(graph, &pixels, &tiles, run_pixels)
            }
            Self::Slices { .. } | Self::Qwen(_) => {
                images.iter().map(|image| self.encode_untiled(image)).collect()
            }
        }
    }

    /// Returns the rows for an image that does not consist of tiles of equal size.
    fn encode_untiled(&mut self, image: &EncoderInputs) -> Result<Vec<f32>, Error> {
        match (self, image) {
            (Self::Slices { vision, resampler }, EncoderInputs::Slices(slices)) => {
                let mut rows = Vec::new();
                for slice in slices {
                    encode_slice(vision, resampler, slice, &mut rows)?;
                }
                Ok(rows)
            }
            (Self::Qwen(models), EncoderInputs::Qwen(patches)) => models.encode(patches),
            _ => Err(prepared_for_another_model()),
        }
    }

    /// Turns the rows of an image, of `width` values each, into embeddings of the language model.
    pub(super) fn project(&mut self, rows: Vec<f32>, width: usize) -> Result<Vec<f32>, Error> {
        let Self::ProjectedTiles { projection, .. } = self else { return Ok(rows) };
        projection.set_values("input", &[1, rows.len() / width, width], &rows)?;
        projection.request.infer()?;
        Ok(projection.request.output_at(0)?.values::<f32>()?.to_vec())
    }
}

/// Number of values in the rows of an image.
#[derive(Clone, Copy, Debug)]
pub(super) struct RowWidths {
    /// The number of values in a row before the projection, if the models include one.
    pub(super) encoded: usize,
    /// The number of values in a row after the projection. These rows are in the order of the image tokens.
    pub(super) projected: usize,
}

fn prepared_for_another_model() -> Error {
    Error::runtime("run the image encoder", "the image was prepared for another model")
}

/// Encodes the tiles of images in runs of at most `run_pixels` pixels, or of one tile. `masks` contains the masks and
/// the positions of the patches of each image, or nothing if the model does not read them. Returns the rows of each
/// image.
fn encode_tiles(
    graph: &mut CompiledGraph,
    pixels: &[&ImageTensor<f32>],
    masks: &[&MaskedTiles],
    run_pixels: usize,
) -> Result<Vec<Vec<f32>>, Error> {
    let mut rows = vec![Vec::new(); pixels.len()];
    let Some(ImageTiles { tiles, tiles_per_run }) = tiles_of(pixels, run_pixels) else {
        return Err(Error::runtime(
            "run the image encoder",
            "the tiles of the images have no pixels or different sizes",
        ));
    };
    for run in tiles.chunks(tiles_per_run) {
        let values = gather(pixels, run);
        graph.set_values("pixel_values", values.shape(), values.values())?;
        if !masks.is_empty() {
            let mask: Vec<_> = masks.iter().map(|image| &image.patch_attention_mask).collect();
            set_mask(graph, "patch_attention_mask", &gather(&mask, run))?;
            let positions: Vec<_> = masks.iter().map(|image| &image.patch_position_ids).collect();
            let positions = gather(&positions, run);
            graph.set_values("patch_position_ids", positions.shape(), positions.values())?;
        }
        graph.request.infer()?;
        let output = graph.request.output_at(0)?;
        let output = output.values::<f32>()?;
        if !output.len().is_multiple_of(run.len()) || output.is_empty() {
            return Err(Error::runtime(
                "run the image encoder",
                "the output cannot be divided equally among the tiles",
            ));
        }
        for (tile, features) in run.iter().zip(output.chunks_exact(output.len() / run.len())) {
            rows[tile.image].extend_from_slice(features);
        }
    }
    Ok(rows)
}

/// Encodes a slice of MiniCPM-V, and appends its features to `rows`.
fn encode_slice(
    vision: &mut CompiledGraph,
    resampler: &mut CompiledGraph,
    slice: &ResamplerSlice,
    rows: &mut Vec<f32>,
) -> Result<(), Error> {
    let ResamplerSlice { pixel_values, patch_attention_mask, position_ids, pos_embed, key_padding_mask } =
        slice;
    vision.set_values("pixel_values", pixel_values.shape(), pixel_values.values())?;
    set_mask(vision, "patch_attention_mask", patch_attention_mask)?;
    vision.set_values("position_ids", position_ids.shape(), position_ids.values())?;
    vision.request.infer()?;
    // The resampler reads the output of the vision model without a copy.
    resampler.request.set("image_feature", &vision.request.output_at(0)?)?;
    resampler.set_values("pos_embed", pos_embed.shape(), pos_embed.values())?;
    resampler.set_values("key_padding_mask", key_padding_mask.shape(), key_padding_mask.values())?;
    resampler.request.infer()?;
    rows.extend_from_slice(resampler.request.output_at(0)?.values::<f32>()?);
    Ok(())
}

/// Binds a mask to an input, whose elements are booleans or f32 numbers.
fn set_mask(graph: &mut CompiledGraph, input: &str, mask: &ImageTensor<bool>) -> Result<(), Error> {
    let ports = graph.compiled.inputs()?;
    let is_number = ports.iter().any(|port| port.name == input && port.element == ElementType::F32);
    if is_number {
        let numbers: Vec<f32> = mask.values().iter().map(|is_valid| f32::from(u8::from(*is_valid))).collect();
        graph.set_values(input, mask.shape(), &numbers)
    } else {
        let flags: Vec<Flag> = mask.values().iter().map(|is_valid| Flag::from(*is_valid)).collect();
        graph.set_values(input, mask.shape(), &flags)
    }
}
