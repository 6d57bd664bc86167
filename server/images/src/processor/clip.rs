//! The processor of CLIP, which LLaVA applies to the image and LLaVA-NeXT to every tile: the shorter edge is resized to
//! a fixed length, and the image is cropped to its center. A processor of SigLIP instead resizes the image to a fixed
//! size.

use serde_json::Value;

use crate::{
    config::{JsonFile, ModelConfig},
    error::LoadError,
    normalize::{ColorStatistics, Normalization},
    preprocess::{TILE_EDGE_MAX, divide, read_filter},
    raster::{RgbImage, Size},
    resample::{Filter, ImageRegion, resize_region},
};

#[derive(Debug)]
pub(super) struct Clip {
    resize: ClipResize,
    pub(super) crop: Size,
    /// The field of the preprocessor's configuration that determines `crop`.
    pub(super) crop_field: &'static str,
    pub(super) filter: Filter,
    pub(super) normalization: Normalization,
    /// The edge of a patch of the encoder, in pixels.
    pub(super) patch: u32,
    /// The number of image tokens of one picture.
    pub(super) num_tokens: u32,
}

/// The rule for resizing a picture before it is cropped.
#[derive(Clone, Copy, Debug)]
pub(super) enum ClipResize {
    /// The shorter edge is resized to this length, and the proportions are preserved.
    ShortestEdge(u32),
    /// The picture is resized to this size.
    Exact(Size),
}

impl Clip {
    pub(super) fn read(config: &ModelConfig) -> Result<Self, LoadError> {
        let ModelConfig { model, preprocessor } = config;
        preprocessor.expect_bool("do_resize", true)?;
        let resize = read_size(preprocessor)?;
        let smallest = match resize {
            ClipResize::ShortestEdge(edge) => Size::square(edge),
            ClipResize::Exact(size) => size,
        };
        let is_cropped = preprocessor.optional_bool("do_center_crop")?;
        let (crop, crop_field) = match resize {
            // The processor of SigLIP does not crop.
            ClipResize::Exact(size) if !is_cropped.unwrap_or(preprocessor.get("crop_size").is_some()) => {
                (size, "size")
            }
            ClipResize::ShortestEdge(_) if is_cropped == Some(false) => {
                let problem = "is false, but size has only the shortest edge";
                return Err(preprocessor.fault("do_center_crop", problem));
            }
            ClipResize::ShortestEdge(_) | ClipResize::Exact(_) => (read_crop(preprocessor)?, "crop_size"),
        };
        if crop.width > smallest.width || crop.height > smallest.height {
            let problem = format!(
                "is {crop}, which does not fit into the smallest possible resized image ({smallest})"
            );
            return Err(preprocessor.fault("crop_size", problem));
        }
        let patch = model.count_up_to("vision_config.patch_size", TILE_EDGE_MAX)?;
        let patches = (crop.width / patch) * (crop.height / patch);
        // CLIP has a class token in addition to the patches; SigLIP has none. The default strategy drops the first
        // token.
        let has_class_token = model.optional_str("vision_config.model_type")? == Some("clip_vision_model");
        let drops_first = match model.optional_str("vision_feature_select_strategy")? {
            None | Some("default") => true,
            Some("full") => false,
            Some(other) => {
                let problem = format!("is {other:?}; supported: \"default\" and \"full\"");
                return Err(model.fault("vision_feature_select_strategy", problem));
            }
        };
        let num_tokens = (patches + u32::from(has_class_token)).saturating_sub(u32::from(drops_first));
        if num_tokens == 0 {
            let problem =
                format!("is {crop}, which yields no image tokens with patches of {patch}x{patch} pixels");
            return Err(preprocessor.fault(crop_field, problem));
        }
        Ok(Self {
            resize,
            crop,
            crop_field,
            filter: read_filter(preprocessor, Filter::Bicubic)?,
            normalization: Normalization::read(preprocessor, ColorStatistics::CLIP)?,
            patch,
            num_tokens,
        })
    }

    /// The size to which LLaVA-NeXT resizes the image before it computes the tile of the global view.
    pub(super) fn global_size(&self) -> Size {
        match self.resize {
            ClipResize::ShortestEdge(edge) => Size::square(edge),
            ClipResize::Exact(size) => size,
        }
    }

    /// Resizes and crops a picture. Only the part that remains is computed, so a very long picture costs no more than a
    /// square one.
    pub(super) fn tile(&self, image: &RgbImage) -> RgbImage {
        let Size { width, height } = image.size();
        let size = match self.resize {
            ClipResize::ShortestEdge(edge) => {
                let longer = |long: u32, short: u32| {
                    divide(u64::from(edge) * u64::from(long), u64::from(short)) as u32
                };
                if width <= height {
                    Size::new(edge, longer(height, width))
                } else {
                    Size::new(longer(width, height), edge)
                }
            }
            ClipResize::Exact(size) => size,
        };
        let region = ImageRegion {
            left: (size.width - self.crop.width) / 2,
            top: (size.height - self.crop.height) / 2,
            size: self.crop,
        };
        resize_region(image, size, self.filter, region)
    }
}

/// Reads the field `size`; a number is the length of the shortest edge.
fn read_size(preprocessor: &JsonFile) -> Result<ClipResize, LoadError> {
    let edge = |field| preprocessor.count_up_to(field, TILE_EDGE_MAX);
    if preprocessor.get("size").is_some_and(Value::is_number) {
        Ok(ClipResize::ShortestEdge(edge("size")?))
    } else if preprocessor.get("size.shortest_edge").is_some() {
        Ok(ClipResize::ShortestEdge(edge("size.shortest_edge")?))
    } else {
        Ok(ClipResize::Exact(Size::new(edge("size.width")?, edge("size.height")?)))
    }
}

/// Reads the field `crop_size`; a number is the edge of a square.
fn read_crop(preprocessor: &JsonFile) -> Result<Size, LoadError> {
    let edge = |field| preprocessor.count_up_to(field, TILE_EDGE_MAX);
    if preprocessor.get("crop_size").is_some_and(Value::is_number) {
        Ok(Size::square(edge("crop_size")?))
    } else {
        Ok(Size::new(edge("crop_size.width")?, edge("crop_size.height")?))
    }
}
