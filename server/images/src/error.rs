//! The errors for images that cannot be processed and for configurations of image processors that cannot be used.

use std::{io, path::PathBuf};

use crate::{ModelFamily, Size};

/// The reason why the configuration of a model's image processor cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The file could not be read, or is too large.
    #[error("failed to read {path}")]
    Read {
        /// The path of the file.
        path: PathBuf,
        /// The error of the operating system, or an error that states the size of a file that is too large.
        #[source]
        source: io::Error,
    },
    /// The file is not valid JSON.
    #[error("{path} is not valid JSON")]
    Json {
        /// The path of the file.
        path: PathBuf,
        /// The error of the JSON parser.
        #[source]
        source: serde_json::Error,
    },
    /// The directory lacks a required file.
    #[error("{directory} has no {file}")]
    NoFile {
        /// The path of the directory.
        directory: PathBuf,
        /// The name of the missing file.
        file: &'static str,
    },
    /// The model has no supported image processor.
    #[error("images are not supported for the model type {model_type:?}; supported: {}", supported_types())]
    Family {
        /// The `model_type` in `config.json`.
        model_type: String,
    },
    /// A field is missing or has an invalid value.
    #[error("{file}: {field} {problem}")]
    Field {
        /// The name of the file.
        file: &'static str,
        /// The path of the field in the file.
        field: String,
        /// The problem, as a phrase that follows the name of the field.
        problem: String,
    },
}

fn supported_types() -> String {
    ModelFamily::ALL.map(ModelFamily::model_type).join(", ")
}

/// The reason why an image cannot be decoded, or why the model cannot process it. The client is at fault in every case.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ImageError {
    /// The file is too large.
    #[error("the image has {bytes} bytes (limit: {limit} bytes)")]
    Bytes {
        /// The size of the file.
        bytes: usize,
        /// The largest allowed size.
        limit: usize,
    },
    /// The bytes do not have a supported format.
    #[error("the format of the image is not supported; supported: PNG, JPEG, WebP, GIF and BMP")]
    Format,
    /// The image has too many pixels.
    #[error("the image has {size} = {} pixels (limit: {limit} pixels)", size.pixels())]
    Pixels {
        /// The size of the image.
        size: Size,
        /// The largest allowed number of pixels.
        limit: u64,
    },
    /// A side of the image is too long.
    #[error("the image has {size} pixels (limit: {limit} pixels for each side)")]
    Side {
        /// The size of the image.
        size: Size,
        /// The largest allowed length of a side, in pixels.
        limit: u32,
    },
    /// The content of the file is invalid or truncated.
    #[error("the {format} image cannot be decoded: {problem}")]
    Content {
        /// The name of the format.
        format: &'static str,
        /// The problem with the header, or the one that the decoder reports.
        problem: String,
    },
    /// One side of the image is too long in relation to the other one.
    #[error(
        "the image of {size} pixels is too elongated for this model: the longer side can be at most {limit} times as long as \
         the shorter one"
    )]
    AspectRatio {
        /// The size of the image.
        size: Size,
        /// The largest allowed ratio of the sides.
        limit: u32,
    },
    /// One side of the resized image would be shorter than the model supports.
    #[error(
        "the image of {size} pixels is too elongated for this model: resized to fit, it would have {resized} \
         pixels (minimum: {limit} pixels for each side)"
    )]
    Narrow {
        /// The size of the image.
        size: Size,
        /// The size after resizing.
        resized: Size,
        /// The smallest allowed length of a side after resizing, in pixels.
        limit: u32,
    },
}
