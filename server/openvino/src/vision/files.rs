//! The files of a vision-language model.

use std::path::{Path, PathBuf};

use serde_json::Value;
use server_images::{ImageProcessor, LearnedRows, ModelFamily};

use crate::Error;
use crate::error::chain;

/// Size of the `config.json` of a vision-language model.
///
/// If exceeded: the server does not start.
const CONFIG_BYTES_MAX: u64 = 64 << 20;

/// The directory of a vision-language model.
#[derive(Clone, Debug)]
pub(crate) struct VisionFiles {
    directory: PathBuf,
    pub(crate) family: ModelFamily,
    /// Number of layers of the language model, counted from the first, that read rows of images (Qwen3-VL).
    pub(crate) deepstack_layers: usize,
}

impl VisionFiles {
    /// Finds the vision-language model in a directory. Returns `None` if the directory has none.
    ///
    /// # Errors
    /// The family of the model is not supported, its `config.json` cannot be read or is invalid, or a file of its
    /// models is missing.
    pub(crate) fn find(directory: &Path) -> Result<Option<Self>, Error> {
        if !directory.join("openvino_language_model.xml").is_file() {
            return Ok(None);
        }
        let config = read_config(directory)?;
        let family = family(&config)?;
        let deepstack_layers = if family == ModelFamily::Qwen3Vl { deepstack_layers(&config)? } else { 0 };
        let files = Self { directory: directory.to_owned(), family, deepstack_layers };
        if let Some(missing) = files.paths().iter().find(|path| !path.is_file()) {
            let name = missing.file_name().unwrap_or_default().to_string_lossy();
            return Err(Error::Unsupported(format!("it is a vision-language model, but {name} is missing")));
        }
        Ok(Some(files))
    }

    /// The model that reads embeddings and returns logits.
    pub(crate) fn language_model(&self) -> PathBuf {
        self.directory.join("openvino_language_model.xml")
    }

    /// The model that returns the embeddings of tokens.
    pub(crate) fn text_embeddings(&self) -> PathBuf {
        self.directory.join("openvino_text_embeddings_model.xml")
    }

    /// The model that reads pixels.
    pub(crate) fn vision_embeddings(&self) -> PathBuf {
        self.directory.join("openvino_vision_embeddings_model.xml")
    }

    /// The model that merges the patches of Qwen's encoder.
    pub(crate) fn merger(&self) -> PathBuf {
        self.directory.join("openvino_vision_embeddings_merger_model.xml")
    }

    /// The model that returns the position embeddings of patches (Qwen3-VL).
    pub(crate) fn patch_positions(&self) -> PathBuf {
        self.directory.join("openvino_vision_embeddings_pos_model.xml")
    }

    /// The model that resamples the features of a slice (MiniCPM-V).
    pub(crate) fn resampler(&self) -> PathBuf {
        self.directory.join("openvino_resampler_model.xml")
    }

    /// The model that projects features and learned rows to embeddings (Phi-4-multimodal).
    pub(crate) fn projection(&self) -> PathBuf {
        self.directory.join("openvino_vision_projection_model.xml")
    }

    /// The learned rows that are inserted between the rows of the encoder's output.
    ///
    /// # Errors
    /// The configuration of the image processor is missing or invalid.
    pub(crate) fn learned_rows(&self) -> Result<LearnedRows, Error> {
        if !matches!(self.family, ModelFamily::LlavaNext | ModelFamily::Phi4Multimodal) {
            return Ok(LearnedRows::default());
        }
        let processor = ImageProcessor::load(&self.directory);
        let processor = processor.map_err(|error| {
            Error::Unsupported(format!("its image processor cannot be loaded: {}", chain(&error)))
        })?;
        Ok(processor.learned_rows().clone())
    }

    /// The files of all models in the directory: the graphs and their weights.
    pub(crate) fn paths(&self) -> Vec<PathBuf> {
        let mut models = vec![self.language_model(), self.text_embeddings(), self.vision_embeddings()];
        match self.family {
            ModelFamily::Qwen2Vl | ModelFamily::Qwen2_5Vl => models.push(self.merger()),
            ModelFamily::Qwen3Vl => models.extend([self.merger(), self.patch_positions()]),
            ModelFamily::MiniCpmV => models.push(self.resampler()),
            ModelFamily::Phi4Multimodal => models.push(self.projection()),
            _ => {}
        }
        models.into_iter().flat_map(|model| [model.with_extension("bin"), model]).collect()
    }

    /// The position of the first token.
    pub(crate) fn first_position(&self) -> i64 {
        // Gemma 3 is trained and run with positions that start at 1.
        i64::from(self.family == ModelFamily::Gemma3)
    }
}

fn read_config(directory: &Path) -> Result<Value, Error> {
    let path = directory.join("config.json");
    let unusable = |why: String| Error::Unsupported(format!("its config.json {why}"));
    let bytes = std::fs::metadata(&path).map(|metadata| metadata.len());
    if bytes.is_ok_and(|bytes| bytes > CONFIG_BYTES_MAX) {
        return Err(unusable(format!("has more than {CONFIG_BYTES_MAX} bytes")));
    }
    let text = std::fs::read(&path).map_err(|error| unusable(format!("cannot be read: {error}")))?;
    serde_json::from_slice(&text).map_err(|error| unusable(format!("is not valid JSON: {error}")))
}

/// The family of the model, which must be supported.
fn family(config: &Value) -> Result<ModelFamily, Error> {
    let model_type = config.get("model_type").and_then(Value::as_str).unwrap_or_default();
    ModelFamily::from_model_type(model_type).ok_or_else(|| {
        let supported = ModelFamily::ALL.map(ModelFamily::model_type).join(", ");
        Error::Unsupported(format!(
            "vision-language models of type {model_type:?} are not supported (supported types: {supported})"
        ))
    })
}

/// Number of layers of the language model that read rows of images.
fn deepstack_layers(config: &Value) -> Result<usize, Error> {
    let indices = config.get("vision_config").and_then(|vision| vision.get("deepstack_visual_indexes"));
    let count = indices.and_then(Value::as_array).map(Vec::len).filter(|count| *count > 0);
    count.ok_or_else(|| {
        Error::Unsupported("its config.json has no list vision_config.deepstack_visual_indexes".to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn directory(config: &str, files: &[&str]) -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("config.json"), config).unwrap();
        for file in files {
            for extension in ["xml", "bin"] {
                std::fs::write(directory.path().join(format!("openvino_{file}_model.{extension}")), "")
                    .unwrap();
            }
        }
        directory
    }

    const TILES: [&str; 3] = ["language", "text_embeddings", "vision_embeddings"];

    #[test]
    fn a_directory_is_recognized_by_its_language_model() {
        let llava = directory(r#"{"model_type": "llava"}"#, &TILES);
        let found = VisionFiles::find(llava.path()).unwrap().unwrap();
        assert_eq!((found.family, found.first_position()), (ModelFamily::Llava, 0));
        assert_eq!(found.paths().len(), 6);
        let gemma = directory(r#"{"model_type": "gemma3"}"#, &TILES);
        assert_eq!(VisionFiles::find(gemma.path()).unwrap().unwrap().first_position(), 1);
        let text = directory(r#"{"model_type": "gemma3"}"#, &[]);
        assert!(VisionFiles::find(text.path()).unwrap().is_none());
    }

    #[test]
    fn an_incomplete_or_unsupported_model_is_refused_by_name() {
        let refusal = |config: &str, files: &[&str]| {
            VisionFiles::find(directory(config, files).path()).unwrap_err().to_string()
        };
        let message = refusal(r#"{"model_type": "qwen2_vl"}"#, &TILES);
        assert!(message.contains("openvino_vision_embeddings_merger_model.bin"), "{message}");
        let message = refusal(r#"{"model_type": "phi3_v"}"#, &TILES);
        assert!(message.contains(r#""phi3_v" are not supported"#), "{message}");
        assert!(refusal("{", &TILES).contains("not valid JSON"));
        for (family, file) in [("minicpmv", "resampler"), ("phi4_multimodal", "vision_projection")] {
            let config = format!(r#"{{"model_type": "{family}"}}"#);
            assert!(refusal(&config, &TILES).contains(&format!("openvino_{file}_model.bin")));
            let complete = directory(&config, &[&TILES[..], &[file]].concat());
            assert_eq!(VisionFiles::find(complete.path()).unwrap().unwrap().paths().len(), 8);
        }
        let qwen3 = r#"{"model_type": "qwen3_vl"}"#;
        assert!(refusal(qwen3, &TILES).contains("vision_config.deepstack_visual_indexes"));
        let qwen3 = r#"{"model_type": "qwen3_vl", "vision_config": {"deepstack_visual_indexes": [0, 1]}}"#;
        let with_merger = ["language", "text_embeddings", "vision_embeddings", "vision_embeddings_merger"];
        assert!(refusal(qwen3, &with_merger).contains("openvino_vision_embeddings_pos_model.bin"));
        let complete = [&with_merger[..], &["vision_embeddings_pos"]].concat();
        let complete = VisionFiles::find(directory(qwen3, &complete).path()).unwrap().unwrap();
        assert_eq!((complete.deepstack_layers, complete.paths().len()), (2, 10));
    }
}
