//! The model as the API shows it: its names, its text side, its fingerprint.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};

use server_engine::TokenId;
use server_guidance::{Compiler, Vocabulary, VocabularyError};
use server_parsers::{Formats, IncompatibleFormats, ReasoningFormat, ToolFormat, Tools};
use server_text::{Abilities, ChatTemplate, ModelText, ToolsPlace};

use crate::args::NamedAdapter;
use crate::compat::ApiRules;
use crate::error::Error;
use crate::limits::{TOKENIZER_MEMORY, TokenizerMemory};

/// A model that is served.
#[derive(Debug)]
pub struct Model {
    names: Vec<String>,
    /// Its tokenizer, chat template and defaults.
    pub(crate) text: ModelText,
    /// When it was loaded, in seconds since 1970.
    pub(crate) created: u64,
    /// Changes with what may change its answers.
    pub(crate) fingerprint: String,
    /// How it writes calls and reasoning.
    pub(crate) formats: Formats,
    /// What its chat template shows of tools.
    pub(crate) abilities: Abilities,
    /// Special tokens that are text to the parser of an answer, ascending: with tools and without.
    pub(crate) kept_with_tools: Arc<[TokenId]>,
    pub(crate) kept_without_tools: Arc<[TokenId]>,
    /// Whether what comes next is guessed for all requests.
    pub(crate) prompt_lookup: bool,
    /// The memory that tokenizing requests may take.
    pub(crate) tokenizer_memory: TokenizerMemory,
    /// Whose rules requests follow.
    pub(crate) api_rules: ApiRules,
    /// Its adapters, in the order of their numbers.
    adapters: Vec<NamedAdapter>,
    /// Compiles what answers are held to; made when the first is.
    compiler: OnceLock<Result<Compiler, VocabularyError>>,
}

impl Model {
    /// A model under `names`. `computed` describes how it is computed: backend, precisions and the like.
    ///
    /// # Panics
    /// If it has no name.
    pub fn new(names: Vec<String>, text: ModelText, computed: &str) -> Self {
        assert!(!names.is_empty(), "a model has a name");
        let mut hasher = DefaultHasher::new();
        (&names, &text.name, computed, env!("CARGO_PKG_VERSION")).hash(&mut hasher);
        let fingerprint = format!("fp_{:012x}", hasher.finish() & 0xffff_ffff_ffff);
        let abilities = text.chat_template.as_ref().map_or(Abilities::NONE, ChatTemplate::abilities);
        let model = Self {
            names,
            text,
            created: unix_time(),
            fingerprint,
            formats: Formats::default(),
            abilities,
            kept_with_tools: Arc::default(),
            kept_without_tools: Arc::default(),
            prompt_lookup: false,
            tokenizer_memory: TokenizerMemory::new(TOKENIZER_MEMORY),
            api_rules: ApiRules::default(),
            adapters: Vec::new(),
            compiler: OnceLock::new(),
        };
        let formats = model.detected(None, None);
        model.reads(formats)
    }

    /// The same, with these formats of calls and of reasoning instead of those that its chat template tells.
    ///
    /// # Errors
    /// They cannot be read together.
    pub fn with_formats(
        self,
        tool: Option<ToolFormat>,
        reasoning: Option<ReasoningFormat>,
    ) -> Result<Self, IncompatibleFormats> {
        let formats = self.detected(tool, reasoning);
        formats.check()?;
        Ok(self.reads(formats))
    }

    /// The same with these adapters, which are the engine's in this order.
    #[must_use]
    pub fn with_adapters(self, adapters: Vec<NamedAdapter>) -> Self {
        Self { adapters, ..self }
    }

    /// The same, with this many bytes of memory for texts that are being tokenized.
    #[must_use]
    pub fn with_tokenizer_memory(self, bytes: usize) -> Self {
        Self { tokenizer_memory: TokenizerMemory::new(bytes), ..self }
    }

    /// The same, with requests that follow these rules.
    #[must_use]
    pub fn with_api_rules(self, api_rules: ApiRules) -> Self {
        Self { api_rules, ..self }
    }

    /// How it writes calls and reasoning.
    pub fn formats(&self) -> Formats {
        self.formats
    }

    /// The formats, told by the chat template where they are not given.
    fn detected(&self, tool: Option<ToolFormat>, reasoning: Option<ReasoningFormat>) -> Formats {
        let template = self.text.chat_template.as_ref().map(ChatTemplate::source);
        let told = template.as_deref().map_or(Formats::default(), Formats::detect);
        // Harmony frames the whole text: what is one is the other, unless it is said to be none.
        let is_harmony = tool == Some(ToolFormat::Gptoss) || reasoning == Some(ReasoningFormat::Gptoss);
        let fits = |format: Formats| is_harmony || format.check().is_ok();
        let detected = match (told.tool, told.reasoning) {
            _ if is_harmony => Formats { tool: ToolFormat::Gptoss, reasoning: ReasoningFormat::Gptoss },
            // Whose template shows no tools is told of them in words, which name this format.
            (tool, reasoning) if template.is_some() && self.is_told_as_hermes(tool) => {
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
        // One is given that does not go with the Harmony that the template tells: the other is read as text.
        Formats {
            tool: tool.unwrap_or(ToolFormat::None),
            reasoning: reasoning.unwrap_or(ReasoningFormat::None),
        }
    }

    /// Whether a model whose template tells this format learns in Hermes' words how to write calls.
    fn is_told_as_hermes(&self, told: ToolFormat) -> bool {
        match told {
            ToolFormat::None => true,
            ToolFormat::DeepSeek | ToolFormat::Gptoss => false,
            _ => self.abilities.tools == ToolsPlace::Nowhere,
        }
    }

    fn reads(self, formats: Formats) -> Self {
        let tokenizer = &self.text.tokenizer;
        let kept = |formats: Formats| {
            let is_kept = |token: &TokenId| {
                tokenizer.is_special(*token) && formats.needs_token(&tokenizer.token_text(*token))
            };
            (0..tokenizer.vocabulary_size()).filter(is_kept).collect()
        };
        let (kept_with_tools, kept_without_tools) =
            (kept(formats), kept(formats.with_tools(&Tools::default())));
        Self { formats, kept_with_tools, kept_without_tools, ..self }
    }

    /// The name in the list of models.
    pub fn name(&self) -> &str {
        &self.names[0]
    }

    /// All names, the first as in [`Self::name`].
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// All names that a request may give, those of adapters last.
    pub(crate) fn served_names(&self) -> impl Iterator<Item = &String> {
        self.names.iter().chain(self.adapters.iter().map(|adapter| &adapter.name))
    }

    /// The number of the adapter of this name; 0 if it is none's.
    pub(crate) fn adapter_number(&self, name: &str) -> u32 {
        let at = self.adapters.iter().position(|adapter| adapter.name == name);
        at.map_or(0, |at| at as u32 + 1)
    }

    /// The adapter of this number.
    pub(crate) fn adapter(&self, number: u32) -> Option<&NamedAdapter> {
        self.adapters.get((number as usize).checked_sub(1)?)
    }

    /// Compiles what answers are held to. The first call takes some tenths of a second, for the vocabulary.
    pub(crate) fn compiler(&self) -> Result<&Compiler, Error> {
        let compiler = self.compiler.get_or_init(|| {
            let tokenizer = &self.text.tokenizer;
            let tokens = 0..tokenizer.vocabulary_size();
            let vocabulary = Vocabulary::new(
                tokens.map(|token| (tokenizer.token_bytes(token), tokenizer.is_special(token))),
            )?;
            Compiler::new(vocabulary, server_engine::guide_threads())
        });
        compiler.as_ref().map_err(|error| Error::Internal(error.to_string()))
    }

    pub(crate) fn has_name(&self, name: &str) -> bool {
        self.served_names().any(|known| known == name)
    }
}

/// The name of a model that was given none: that of its file or directory.
pub(crate) fn name_of(path: &Path) -> String {
    let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let name = if path.is_dir() { path.file_name() } else { path.file_stem() };
    name.map_or_else(|| "model".to_owned(), |name| name.to_string_lossy().into_owned())
}

/// Seconds since 1970.
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

    /// Their names, or why they cannot be read together.
    fn formats(
        template: &str,
        tool: Option<ToolFormat>,
        reasoning: Option<ReasoningFormat>,
    ) -> Result<[&'static str; 2], String> {
        let model = model(template, &[]).with_formats(tool, reasoning).map_err(|error| error.to_string())?;
        Ok([model.formats().tool.name(), model.formats().reasoning.name()])
    }

    #[test]
    fn formats_that_are_given_win_over_those_that_the_template_tells() {
        const QWEN: &str = "<tool_call><think>";
        const HARMONY: &str = "<|channel|><|message|>";
        assert_eq!(formats(QWEN, None, None), Ok(["hermes3", "qwen3"]));
        assert_eq!(formats("plain", None, None), Ok(["hermes3", "none"]), "it is told of tools in words");
        const GRANITE: &str = "<|tool_call|>";
        assert_eq!(formats(GRANITE, None, None), Ok(["hermes3", "none"]), "and so is this");
        assert_eq!(formats("{{ tools }}<|tool_call|>", None, None), Ok(["granite", "none"]));
        assert_eq!(formats("plain", Some(ToolFormat::None), None), Ok(["none", "none"]));
        assert_eq!(formats(QWEN, Some(ToolFormat::Llama3), None), Ok(["llama3", "qwen3"]));
        assert_eq!(formats(QWEN, None, Some(ReasoningFormat::None)), Ok(["hermes3", "none"]));
        // Harmony frames the whole text: one is the other unless it is said to be none.
        assert_eq!(formats(HARMONY, None, None), Ok(["gptoss", "gptoss"]));
        assert_eq!(formats(QWEN, Some(ToolFormat::Gptoss), None), Ok(["gptoss", "gptoss"]));
        assert_eq!(formats(QWEN, None, Some(ReasoningFormat::Gptoss)), Ok(["gptoss", "gptoss"]));
        assert_eq!(formats(HARMONY, Some(ToolFormat::None), None), Ok(["none", "gptoss"]));
        assert_eq!(formats(HARMONY, Some(ToolFormat::Hermes3), None), Ok(["hermes3", "none"]));
        let refused = formats("plain", Some(ToolFormat::Hermes3), Some(ReasoningFormat::Gptoss));
        assert!(refused.unwrap_err().contains("is not compatible with"));
    }

    #[test]
    fn special_tokens_of_the_formats_are_kept_and_no_others() {
        let template = "{{ tools | tojson }}[TOOL_CALLS]<think>";
        let model = model(template, &["[TOOL_CALLS]", "<think>", "</think>", "[INST]"]);
        assert_eq!(
            (model.formats().tool, model.formats().reasoning),
            (ToolFormat::Mistral, ReasoningFormat::Qwen3)
        );
        let texts = |tokens: &[TokenId]| -> Vec<String> {
            tokens.iter().map(|token| model.text.tokenizer.token_text(*token)).collect()
        };
        assert_eq!(texts(&model.kept_with_tools), ["[TOOL_CALLS]", "<think>", "</think>"]);
        assert_eq!(texts(&model.kept_without_tools), ["<think>", "</think>"]);
    }
}
