//! Loads the tokenizer, the templates and the defaults of a model from a GGUF file or a directory.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
};

use serde_json::Value as Json;
use server_gguf::{GgufFile, PartName, Value};

use crate::{
    ChatTemplate, GenerationDefaults, LoadError, Tokenizer,
    json_file::{self, JsonFile},
    template, tokenizer,
};

/// The tokenizer, the templates and the defaults of a model.
#[derive(Debug)]
pub struct ModelText {
    /// Converts text to tokens and back.
    pub tokenizer: Arc<Tokenizer>,
    /// Renders conversations as text; `None` if the model files contain no template, as for most base models.
    pub chat_template: Option<ChatTemplate>,
    /// The generation parameters that the publisher of the model recommends.
    pub defaults: GenerationDefaults,
    /// The largest number of tokens of prompt and response together, if the model files specify it.
    pub context_tokens_max: Option<u32>,
    /// The expected number of logits for a position: the size of the vocabulary according to the configuration or, if
    /// it does not specify one, according to the tokenizer.
    pub vocabulary_size: u32,
    /// The name in the metadata of the GGUF file, or else the name of the file or directory.
    pub name: String,
}

/// An open model file or directory, before its text files are loaded.
#[derive(Debug)]
pub struct TextSource(Source);

#[derive(Debug)]
enum Source {
    Gguf(GgufFile),
    Directory(PathBuf),
}

impl TextSource {
    /// Opens `path`, which is a GGUF file or a directory with `tokenizer.json`.
    ///
    /// # Errors
    /// The path does not exist or is not readable, or the file is not a valid GGUF file.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, LoadError> {
        let path = path.as_ref();
        let metadata =
            fs::metadata(path).map_err(|source| LoadError::Read { path: path.to_owned(), source })?;
        Ok(Self(if metadata.is_dir() {
            Source::Directory(path.to_owned())
        } else {
            Source::Gguf(GgufFile::open(path)?)
        }))
    }

    /// The context length of the model, as in [`ModelText::context_tokens_max`].
    ///
    /// # Errors
    /// The configuration cannot be read or is not valid JSON.
    pub fn context_tokens_max(&self) -> Result<Option<u32>, LoadError> {
        match &self.0 {
            Source::Gguf(file) => Ok(file.get_of_architecture("context_length").and_then(Value::u32)),
            Source::Directory(directory) => Ok(directory_context(&JsonFile::read(directory, "config.json")?)),
        }
    }

    /// Loads the tokenizer, the templates and the defaults.
    ///
    /// # Errors
    /// The errors are the same as those of [`ModelText::load`].
    pub fn load(&self) -> Result<ModelText, LoadError> {
        match &self.0 {
            Source::Gguf(file) => ModelText::from_gguf(file),
            Source::Directory(directory) => ModelText::from_directory(directory),
        }
    }
}

impl ModelText {
    /// Loads the model at `path`, which is a GGUF file or a directory with `tokenizer.json`.
    ///
    /// # Errors
    /// A file is missing, unreadable or invalid; the message names the file and, if a field is invalid, the field.
    pub fn load(path: impl AsRef<Path>) -> Result<Self, LoadError> {
        TextSource::open(path)?.load()
    }

    /// Loads the model from an open GGUF file.
    ///
    /// # Errors
    /// The errors are the same as those of [`ModelText::load`].
    pub fn from_gguf(file: &GgufFile) -> Result<Self, LoadError> {
        let tokenizer = Arc::new(tokenizer::from_gguf(file)?);
        let text = |key: &str| file.get(key).and_then(Value::str);
        Ok(Self {
            chat_template: gguf_template(file, &tokenizer)?,
            defaults: GenerationDefaults::from_gguf(file, &tokenizer)?,
            context_tokens_max: file.get_of_architecture("context_length").and_then(Value::u32),
            vocabulary_size: tokenizer.vocabulary_size(),
            name: text("general.name")
                .filter(|name| !name.is_empty())
                .map_or_else(|| model_name(file.path()), str::to_owned),
            tokenizer,
        })
    }

    fn from_directory(directory: &Path) -> Result<Self, LoadError> {
        let tokenizer_config = JsonFile::read(directory, "tokenizer_config.json")?;
        let config = JsonFile::read(directory, "config.json")?;
        let generation = JsonFile::read(directory, "generation_config.json")?;
        let tokenizer = Arc::new(tokenizer::from_directory(directory, &tokenizer_config)?);
        let vocabulary_size = field(&config, "vocab_size").unwrap_or(tokenizer.vocabulary_size());
        Ok(Self {
            chat_template: directory_template(directory, &tokenizer_config, &tokenizer)?,
            defaults: GenerationDefaults::from_directory(&generation, &config, &tokenizer)?,
            context_tokens_max: directory_context(&config),
            vocabulary_size,
            name: model_name(directory),
            tokenizer,
        })
    }
}

fn directory_context(config: &JsonFile) -> Option<u32> {
    let names = ["max_position_embeddings", "n_positions", "max_seq_len", "seq_length"];
    names.iter().find_map(|name| field(config, name))
}

/// Returns a number in the configuration or, for multimodal models, in `text_config`.
fn field(config: &JsonFile, name: &str) -> Option<u32> {
    let value = config.get(name).or_else(|| config.get("text_config")?.get(name))?;
    u32::try_from(value.as_u64()?).ok()
}

/// Returns the default name of a model: the name of its directory, the name of its file without the extension, or the
/// common part of the names of a split model's files.
#[must_use]
pub fn model_name(path: &Path) -> String {
    let path: PathBuf = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let part = path.file_name().and_then(|name| PartName::parse(name.to_str()?));
    match part {
        Some(part) if !path.is_dir() => return part.prefix.to_owned(),
        _ => {}
    }
    let name = if path.is_dir() { path.file_name() } else { path.file_stem() };
    name.map_or_else(|| "model".to_owned(), |name| name.to_string_lossy().into_owned())
}

/// Returns the named templates of a GGUF file: `tokenizer.chat_template` and `tokenizer.chat_template.{name}`.
fn gguf_template(file: &GgufFile, tokenizer: &Tokenizer) -> Result<Option<ChatTemplate>, LoadError> {
    const KEY: &str = "tokenizer.chat_template";
    let fault = |key: &str, problem: String| LoadError::Field {
        path: file.path().to_owned(),
        field: key.to_owned(),
        problem,
    };
    let mut sources = Vec::new();
    for (key, value) in file.metadata() {
        let name = match key.strip_prefix(KEY) {
            Some("") => template::DEFAULT,
            Some(rest) if rest.starts_with('.') => &rest[1..],
            _ => continue,
        };
        let source = value.str().ok_or_else(|| fault(key, "is not a string".to_owned()))?;
        sources.push((name.to_owned(), source.to_owned()));
    }
    let written = |token: Option<u32>| token.map(|token| tokenizer.token_text(token));
    chat_template(sources, written(tokenizer.bos()), written(tokenizer.eos()))
        .map_err(|problem| fault(KEY, problem))
}

/// Returns the templates of a directory. `chat_template.jinja` takes precedence over `tokenizer_config.json`, which
/// takes precedence over `chat_template.json`.
fn directory_template(
    directory: &Path,
    config: &JsonFile,
    tokenizer: &Tokenizer,
) -> Result<Option<ChatTemplate>, LoadError> {
    const FIELD: &str = "chat_template";
    let path = directory.join("chat_template.jinja");
    let written = |field: &str, token: Option<u32>| -> Result<Option<String>, LoadError> {
        let text = config.token(field)?.map(str::to_owned);
        Ok(text.or_else(|| token.map(|token| tokenizer.token_text(token))))
    };
    let bos = written("bos_token", tokenizer.bos())?;
    let eos = written("eos_token", tokenizer.eos())?;
    if let Some(source) = json_file::read_text(&path)? {
        let mut sources = vec![(template::DEFAULT.to_owned(), source)];
        sources.extend(additional_templates(&directory.join("additional_chat_templates"))?);
        let fault = |problem| LoadError::Field { path, field: "the template".to_owned(), problem };
        return chat_template(sources, bos, eos).map_err(fault);
    }
    // Some multimodal models store the template in this file instead of `tokenizer_config.json`.
    let own = JsonFile::read(directory, "chat_template.json")?;
    let file = if config.get(FIELD).is_some() { config } else { &own };
    let sources = match file.get(FIELD) {
        None => Vec::new(),
        Some(Json::String(source)) => vec![(template::DEFAULT.to_owned(), source.clone())],
        Some(Json::Array(named)) => named
            .iter()
            .map(|named| {
                let text = |field: &str| named.get(field)?.as_str().map(str::to_owned);
                text("name").zip(text("template"))
            })
            .collect::<Option<_>>()
            .ok_or_else(|| file.fault(FIELD, "has an element without a name or a template"))?,
        Some(_) => return Err(file.fault(FIELD, "is neither a string nor a list")),
    };
    chat_template(sources, bos, eos).map_err(|problem| file.fault(FIELD, &problem))
}

/// Returns the templates in the files `{name}.jinja` of `directory`, or none if the directory does not exist.
fn additional_templates(directory: &Path) -> Result<Vec<(String, String)>, LoadError> {
    let failed = |source| LoadError::Read { path: directory.to_owned(), source };
    let entries = match fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(failed(error)),
    };
    let mut sources = Vec::new();
    for entry in entries {
        let path = entry.map_err(failed)?.path();
        if path.extension().is_some_and(|extension| extension == "jinja")
            && let Some(source) = json_file::read_text(&path)?
        {
            sources.push((model_name(&path), source));
        }
    }
    sources.sort();
    Ok(sources)
}

fn chat_template(
    sources: Vec<(String, String)>,
    bos: Option<String>,
    eos: Option<String>,
) -> Result<Option<ChatTemplate>, String> {
    if sources.is_empty() {
        return Ok(None);
    }
    ChatTemplate::new(sources, bos, eos).map(Some).map_err(|error| error.to_string())
}
