//! Wraps a pipeline of the `tokenizers` crate, with and without parsing of special tokens.

use std::{
    collections::HashMap,
    fmt,
    panic::{self, AssertUnwindSafe},
    path::{Path, PathBuf},
    sync::Arc,
};

use tokenizers::{
    AddedVocabulary, DecoderWrapper, Model, ModelWrapper, NormalizerWrapper, PostProcessorWrapper,
    PreTokenizerWrapper, Token, TokenizerImpl,
};

use crate::error::EncodeError;

type Inner =
    TokenizerImpl<SharedModel, NormalizerWrapper, PreTokenizerWrapper, PostProcessorWrapper, DecoderWrapper>;

/// Builds a tokenizer with the library, which panics on some inconsistent vocabularies, such as one that lacks the
/// result of a merge. A panic is converted to an error.
pub(super) fn built<T>(build: impl FnOnce() -> Result<T, tokenizers::Error>) -> Result<T, tokenizers::Error> {
    // Values that a panic leaves in an inconsistent state are dropped.
    panic::catch_unwind(AssertUnwindSafe(build))
        .unwrap_or_else(|_| Err("its parts contradict each other".into()))
}

/// In the `tokenizers` crate, parsing of special tokens is a property of the pipeline, so this type contains two
/// pipelines. They share the model, which accounts for nearly all of the memory.
pub(super) struct Pipeline {
    parsing_special: Inner,
    plain: Inner,
}

impl Pipeline {
    /// Copies the pipeline of `tokenizer` without its truncation and padding: a server rejects long prompts instead of
    /// truncating them.
    pub(super) fn new(tokenizer: &tokenizers::Tokenizer) -> Result<Self, tokenizers::Error> {
        let mut added: AddedVocabulary = tokenizer.get_added_vocabulary().clone();
        added.set_encode_special_tokens(false);
        let parsing_special: Inner = tokenizers::TokenizerBuilder::new()
            .with_model(SharedModel(Arc::new(tokenizer.get_model().clone())))
            .with_normalizer(tokenizer.get_normalizer().cloned())
            .with_pre_tokenizer(tokenizer.get_pre_tokenizer().cloned())
            .with_post_processor(tokenizer.get_post_processor().cloned())
            .with_decoder(None)
            .with_added_vocabulary(added)
            .build()?;
        let mut plain = parsing_special.clone();
        plain.set_encode_special_tokens(true);
        Ok(Self { parsing_special, plain })
    }

    pub(super) fn encode(
        &self,
        text: &str,
        post_process: bool,
        parse_special: bool,
    ) -> Result<Vec<u32>, EncodeError> {
        let inner = if parse_special { &self.parsing_special } else { &self.plain };
        let encoding =
            inner.encode_fast(text, post_process).map_err(|error| EncodeError(error.to_string()))?;
        Ok(encoding.get_ids().to_vec())
    }

    pub(super) fn token_id(&self, text: &str) -> Option<u32> {
        self.plain.token_to_id(text)
    }
}

impl fmt::Debug for Pipeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pipeline").finish_non_exhaustive()
    }
}

/// A model that is cheap to clone.
#[derive(Clone)]
struct SharedModel(Arc<ModelWrapper>);

impl Model for SharedModel {
    type Trainer = <ModelWrapper as Model>::Trainer;

    fn tokenize(&self, sequence: &str) -> tokenizers::Result<Vec<Token>> {
        self.0.tokenize(sequence)
    }

    fn token_to_id(&self, token: &str) -> Option<u32> {
        self.0.token_to_id(token)
    }

    fn id_to_token(&self, id: u32) -> Option<String> {
        self.0.id_to_token(id)
    }

    fn get_vocab(&self) -> HashMap<String, u32> {
        self.0.get_vocab()
    }

    fn get_vocab_size(&self) -> usize {
        self.0.get_vocab_size()
    }

    fn save(&self, directory: &Path, prefix: Option<&str>) -> tokenizers::Result<Vec<PathBuf>> {
        self.0.save(directory, prefix)
    }

    fn get_trainer(&self) -> Self::Trainer {
        self.0.get_trainer()
    }
}
