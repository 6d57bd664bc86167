//! The served model: its names, its tokenizer and chat template, and its fingerprint.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::{Arc, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};

use server_engine::TokenId;
use server_guidance::{Compiler, Vocabulary, VocabularyError};
use server_parsers::{Formats, IncompatibleFormats, ReasoningFormat, ToolFormat, Tools};
use server_text::{ChatTemplate, ModelText, TemplateFeatures, ToolsLocation};

use crate::api_rules::ApiRules;
use crate::args::NamedAdapter;
use crate::error::Error;
use crate::image_reader::ImageReader;
use crate::limits::{TOKENIZER_MEMORY_DEFAULT, TokenizerMemory, TrialProcesses};

/// A model that the server serves.
#[derive(Debug)]
pub struct Model {
    names: Vec<String>,
    /// The tokenizer, the chat template and the default parameters.
    pub(crate) text: ModelText,
    /// The time when the model was loaded, in seconds since 1970.
    pub(crate) created: u64,
    /// A hash of the served names, the name of the model's files, the backend, the precisions, the adapters and the
    /// version of the server. If two fingerprints differ, the answers to the same request may differ.
    pub(crate) fingerprint: String,
    /// The formats of the model's tool calls and reasoning.
    pub(crate) formats: Formats,
    /// The features that the model's chat template supports.
    pub(crate) template_features: TemplateFeatures,
    /// The special tokens that the parser of an answer reads as text if the request has tools, in ascending order.
    pub(crate) visible_tokens_with_tools: Arc<[TokenId]>,
    /// The special tokens that the parser of an answer reads as text if the request has no tools, in ascending order.
    pub(crate) visible_tokens_without_tools: Arc<[TokenId]>,
    /// Whether prompt lookup is enabled for all requests.
    pub(crate) prompt_lookup: bool,
    /// The memory that tokenizers may use.
    pub(crate) tokenizer_memory: TokenizerMemory,
    /// Whether costly grammars are first compiled in a separate process, which runs the executable of this process.
    /// That executable must be the server's.
    pub(crate) grammar_trials: bool,
    /// The API whose rules apply to requests.
    pub(crate) api_rules: ApiRules,
    /// The reader of images; `None` if the model does not accept images.
    pub(crate) images: Option<ImageReader>,
    /// The adapters of the model, in the order of their numbers.
    adapters: Vec<NamedAdapter>,
    /// The compiler for structured output, which is created on first use.
    compiler: OnceLock<Result<Compiler, VocabularyError>>,
}

impl Model {
    /// Creates a model with these names. `computed` describes the backend that runs the model, the precisions and the
    /// adapters.
    ///
    /// # Panics
    /// `names` is empty.
    pub fn new(names: Vec<String>, text: ModelText, computed: &str) -> Self {
        assert!(!names.is_empty(), "a model has a name");
        let mut hasher = DefaultHasher::new();
        (&names, &text.name, computed, env!("CARGO_PKG_VERSION")).hash(&mut hasher);
        let fingerprint = format!("fp_{:012x}", hasher.finish() & 0xffff_ffff_ffff);
        let template_features =
            text.chat_template.as_ref().map_or(TemplateFeatures::NONE, ChatTemplate::features);
        let model = Self {
            names,
            text,
            created: unix_time(),
            fingerprint,
            formats: Formats::default(),
            template_features,
            visible_tokens_with_tools: Arc::default(),
            visible_tokens_without_tools: Arc::default(),
            prompt_lookup: false,
            tokenizer_memory: TokenizerMemory::new(TOKENIZER_MEMORY_DEFAULT),
            grammar_trials: false,
            api_rules: ApiRules::default(),
            images: None,
            adapters: Vec::new(),
            compiler: OnceLock::new(),
        };
        let formats = model.detect_formats(None, None);
        model.set_formats(formats)
    }

    /// Sets the formats of tool calls and of reasoning. A format that is `None` is detected from the chat template,
    /// unless the other format determines it (Harmony).
    ///
    /// # Errors
    /// The formats cannot be combined.
    pub fn with_formats(
        self,
        tool: Option<ToolFormat>,
        reasoning: Option<ReasoningFormat>,
    ) -> Result<Self, IncompatibleFormats> {
        let formats = self.detect_formats(tool, reasoning);
        formats.check()?;
        Ok(self.set_formats(formats))
    }

    /// Sets the adapters, in the order of the engine's adapters.
    #[must_use]
    pub fn with_adapters(self, adapters: Vec<NamedAdapter>) -> Self {
        Self { adapters, ..self }
    }

    /// Sets the memory that tokenizers may use, in bytes.
    #[must_use]
    pub fn with_tokenizer_memory(self, bytes: usize) -> Self {
        Self { tokenizer_memory: TokenizerMemory::new(bytes), ..self }
    }

    /// Sets the API whose rules apply to requests.
    #[must_use]
    pub fn with_api_rules(self, api_rules: ApiRules) -> Self {
        Self { api_rules, ..self }
    }

    /// Sets the reader of images.
    #[must_use]
    pub(crate) fn with_images(self, images: Option<ImageReader>) -> Self {
        Self { images, ..self }
    }

    /// Returns the formats of the model's tool calls and reasoning.
    pub fn formats(&self) -> Formats {
        self.formats
    }

    /// Returns the given formats. A format that is not given is detected from the chat template, unless the other
    /// format determines it (Harmony).
    fn detect_formats(&self, tool: Option<ToolFormat>, reasoning: Option<ReasoningFormat>) -> Formats {
        let template = self.text.chat_template.as_ref().map(ChatTemplate::source);
        let of_template = template.as_deref().map_or(Formats::default(), Formats::detect);
        // Harmony frames the whole text, so if either of the given formats is Harmony, the other defaults to Harmony.
        let is_harmony = tool == Some(ToolFormat::Gptoss) || reasoning == Some(ReasoningFormat::Gptoss);
        let fits = |format: Formats| is_harmony || format.check().is_ok();
        let detected = match (of_template.tool, of_template.reasoning) {
            _ if is_harmony => Formats { tool: ToolFormat::Gptoss, reasoning: ReasoningFormat::Gptoss },
            // If the template does not render tools, a built-in description of the tools instructs the model to use the
            // format of Hermes.
            (tool, reasoning) if template.is_some() && self.uses_hermes_description(tool) => {
                Formats { tool: ToolFormat::Hermes3, reasoning }
            }
            (tool, reasoning) => Formats { tool, reasoning },
        };
        let chosen = Formats {
            tool: tool.unwrap_or(detected.tool),
            reasoning: reasoning.unwrap_or(detected.reasoning),
        };
        if fits(chosen) {
            return chosen;
        }
        // The given format cannot be combined with Harmony, which the template uses, so the format that is not given is
        // disabled.
        Formats {
            tool: tool.unwrap_or(ToolFormat::None),
            reasoning: reasoning.unwrap_or(ReasoningFormat::None),
        }
    }

    /// Whether tools are described to the model in the format of Hermes, given the format that the template uses.
    fn uses_hermes_description(&self, format: ToolFormat) -> bool {
        match format {
            ToolFormat::None => true,
            ToolFormat::DeepSeek | ToolFormat::Gptoss => false,
            _ => self.template_features.tools_location == ToolsLocation::Unsupported,
        }
    }

    fn set_formats(self, formats: Formats) -> Self {
        let tokenizer = &self.text.tokenizer;
        let visible = |formats: Formats| {
            let is_visible = |token: &TokenId| {
                tokenizer.is_special(*token) && formats.needs_token(&tokenizer.token_text(*token))
            };
            (0..tokenizer.vocabulary_size()).filter(is_visible).collect()
        };
        let (visible_tokens_with_tools, visible_tokens_without_tools) =
            (visible(formats), visible(formats.with_tools(&Tools::default())));
        Self { formats, visible_tokens_with_tools, visible_tokens_without_tools, ..self }
    }

    /// Returns the first name, which is the parent of adapters in the list of models.
    pub fn name(&self) -> &str {
        &self.names[0]
    }

    /// Returns all names of the model itself, without the names of its adapters.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// Returns all names that a request may use: first those of the model, and then those of its adapters.
    pub(crate) fn served_names(&self) -> impl Iterator<Item = &String> {
        self.names.iter().chain(self.adapters.iter().map(|adapter| &adapter.name))
    }

    /// Returns the number of the adapter with this name, or 0 if there is none.
    pub(crate) fn adapter_number(&self, name: &str) -> u32 {
        let at = self.adapters.iter().position(|adapter| adapter.name == name);
        at.map_or(0, |at| at as u32 + 1)
    }

    pub(crate) fn adapter(&self, number: u32) -> Option<&NamedAdapter> {
        self.adapters.get((number as usize).checked_sub(1)?)
    }

    /// Returns the compiler for structured output. The first call takes a few tenths of a second to process the
    /// vocabulary.
    pub(crate) fn compiler(&self) -> Result<&Compiler, Error> {
        let compiler = self.compiler.get_or_init(|| {
            let tokenizer = &self.text.tokenizer;
            let tokens = 0..tokenizer.vocabulary_size();
            let vocabulary = Vocabulary::new(
                tokens.map(|token| (tokenizer.token_bytes(token), tokenizer.is_special(token))),
            )?;
            let compiler = Compiler::new(vocabulary, server_engine::guide_threads())?;
            Ok(match self.grammar_trials {
                true => compiler.with_trial(Box::new(TrialProcesses)),
                false => compiler,
            })
        });
        compiler.as_ref().map_err(|error| Error::Internal(error.to_string()))
    }

    pub(crate) fn has_name(&self, name: &str) -> bool {
        self.served_names().any(|known| known == name)
    }
}

/// Returns the number of seconds since 1970.
pub(crate) fn unix_time() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::built_in_text_with;

    fn model(template: &str, special_tokens: &[&str]) -> Model {
        Model::new(vec!["m".to_owned()], built_in_text_with(template, special_tokens).unwrap(), "test")
    }

    /// Returns the names of the formats, or the reason why they cannot be combined.
    fn formats(
        template: &str,
        tool: Option<ToolFormat>,
        reasoning: Option<ReasoningFormat>,
    ) -> Result<[&'static str; 2], String> {
        let model = model(template, &[]).with_formats(tool, reasoning).map_err(|error| error.to_string())?;
        Ok([model.formats().tool.name(), model.formats().reasoning.name()])
    }

    #[test]
    fn given_formats_override_those_of_the_template() {
        const QWEN: &str = "<tool_call><think>";
        const HARMONY: &str = "<|channel|><|message|>";
        assert_eq!(formats(QWEN, None, None), Ok(["hermes3", "qwen3"]));
        assert_eq!(formats("plain", None, None), Ok(["hermes3", "none"]), "the template has no tools");
        const GRANITE: &str = "<|tool_call|>";
        assert_eq!(formats(GRANITE, None, None), Ok(["hermes3", "none"]), "the template has no tools");
        assert_eq!(formats("{{ tools }}<|tool_call|>", None, None), Ok(["granite", "none"]));
        assert_eq!(formats("plain", Some(ToolFormat::None), None), Ok(["none", "none"]));
        assert_eq!(formats(QWEN, Some(ToolFormat::Llama3), None), Ok(["llama3", "qwen3"]));
        assert_eq!(formats(QWEN, None, Some(ReasoningFormat::None)), Ok(["hermes3", "none"]));
        // Harmony frames the whole text, so each format implies the other unless the other is set explicitly.
        assert_eq!(formats(HARMONY, None, None), Ok(["gptoss", "gptoss"]));
        assert_eq!(formats(QWEN, Some(ToolFormat::Gptoss), None), Ok(["gptoss", "gptoss"]));
        assert_eq!(formats(QWEN, None, Some(ReasoningFormat::Gptoss)), Ok(["gptoss", "gptoss"]));
        assert_eq!(formats(HARMONY, Some(ToolFormat::None), None), Ok(["none", "gptoss"]));
        assert_eq!(formats(HARMONY, Some(ToolFormat::Hermes3), None), Ok(["hermes3", "none"]));
        let refused = formats("plain", Some(ToolFormat::Hermes3), Some(ReasoningFormat::Gptoss));
        assert!(refused.unwrap_err().contains("is not compatible with"));
    }

    #[test]
    fn only_the_special_tokens_of_the_formats_are_visible() {
        let template = "{{ tools | tojson }}[TOOL_CALLS]<think>";
        let model = model(template, &["[TOOL_CALLS]", "<think>", "</think>", "[INST]"]);
        assert_eq!(
            (model.formats().tool, model.formats().reasoning),
            (ToolFormat::Mistral, ReasoningFormat::Qwen3)
        );
        let texts = |tokens: &[TokenId]| -> Vec<String> {
            tokens.iter().map(|token| model.text.tokenizer.token_text(*token)).collect()
        };
        assert_eq!(texts(&model.visible_tokens_with_tools), ["[TOOL_CALLS]", "<think>", "</think>"]);
        assert_eq!(texts(&model.visible_tokens_without_tools), ["<think>", "</think>"]);
    }
}
