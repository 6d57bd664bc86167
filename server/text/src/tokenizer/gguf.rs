//! The tokenizer in the metadata of a GGUF file.

use server_gguf::{GgufFile, Value};
use tokenizers::{
    AddedToken, NormalizerWrapper,
    models::bpe::{BPE, BpeBuilder, Vocab},
    normalizers::replace::Replace,
};

use super::{
    bound::TokenBound,
    encoder::{AddedTokens, Encoder, Tokenizer},
    pipeline::{Pipeline, built},
    pre::{self, PreTokenizer},
    spm::{self, Kind, Options, Pieces, Spm},
};
use crate::{
    LoadError,
    vocabulary::{Vocabulary, byte_level_bytes, fallback_byte},
};

const MODEL: &str = "tokenizer.ggml.model";
const PRE: &str = "tokenizer.ggml.pre";
const TOKENS: &str = "tokenizer.ggml.tokens";
const KINDS: &str = "tokenizer.ggml.token_type";
const SCORES: &str = "tokenizer.ggml.scores";
const MERGES: &str = "tokenizer.ggml.merges";

/// Builds the tokenizer of `file`.
pub(crate) fn from_gguf(file: &GgufFile) -> Result<Tokenizer, LoadError> {
    let metadata = Metadata { file };
    match metadata.require(MODEL, Value::str, "is not a string")? {
        "gpt2" => byte_level(&metadata),
        "gemma4" => sentencepiece_merges(&metadata),
        "llama" => sentencepiece_scores(&metadata),
        other => {
            Err(metadata.fault(MODEL, format!("is {other:?}; only gpt2, llama and gemma4 are supported")))
        }
    }
}

/// Builds a tokenizer with byte-level BPE, which GPT-2 introduced.
fn byte_level(metadata: &Metadata<'_>) -> Result<Tokenizer, LoadError> {
    let name = metadata.optional(PRE, Value::str, "is not a string")?.unwrap_or("default");
    let pre = pre::named(name)
        .ok_or_else(|| metadata.fault(PRE, format!("is {name:?}, which is not a supported pre-tokenizer")))?;
    let tokens = metadata.tokens()?;
    let kinds = metadata.kinds(tokens.len())?;
    let builder = metadata.merges(tokens)?.ignore_merges(pre.ignore_merges);
    let (inner, pipeline) = metadata.pipeline(builder, tokens, &kinds, |inner| set_pre(inner, &pre))?;
    let bytes = |text: &str, kind| match kind {
        Kind::Normal | Kind::Unused => byte_level_bytes(text),
        Kind::Byte => fallback_byte(text).map_or_else(|| text.as_bytes().to_vec(), |byte| vec![byte]),
        Kind::Unknown | Kind::Control | Kind::UserDefined => text.as_bytes().to_vec(),
    };
    let special = metadata.special_tokens(tokens, &SpecialTokens::default())?;
    let vocabulary = vocabulary(tokens, &kinds, &special, bytes);
    Ok(Tokenizer {
        encoder: Encoder::Pipeline(Box::new(pipeline)),
        bound: TokenBound::of_pipeline(&inner, &vocabulary),
        vocabulary,
        added: metadata.added(&special, pre.adds_bos)?,
        bos: special.bos,
        eos: special.eos,
        pad: special.pad,
        space_prefix: false,
    })
}

fn set_pre(inner: &mut tokenizers::Tokenizer, pre: &PreTokenizer) -> Result<(), tokenizers::Error> {
    inner.with_normalizer(pre.normalizer())?;
    inner.with_pre_tokenizer(Some(pre.pre_tokenizer()?));
    Ok(())
}

/// Builds a BPE tokenizer with the alphabet of SentencePiece, and with merges instead of scores (Gemma 4).
fn sentencepiece_merges(metadata: &Metadata<'_>) -> Result<Tokenizer, LoadError> {
    let tokens = metadata.tokens()?;
    let kinds = metadata.kinds(tokens.len())?;
    let special = metadata.special_tokens(tokens, &SpecialTokens::default())?;
    let mut builder = metadata.merges(tokens)?.byte_fallback(true).fuse_unk(true);
    if let Some(unknown) = special.unknown {
        builder = builder.unk_token(tokens[unknown as usize].clone());
    }
    let (inner, pipeline) = metadata.pipeline(builder, tokens, &kinds, |inner| {
        inner.with_normalizer(Some(NormalizerWrapper::Replace(Replace::new(" ", spm::SPACE)?)))?;
        Ok(())
    })?;
    let vocabulary = vocabulary(tokens, &kinds, &special, sentencepiece_bytes);
    Ok(Tokenizer {
        encoder: Encoder::Pipeline(Box::new(pipeline)),
        bound: TokenBound::of_pipeline(&inner, &vocabulary),
        vocabulary,
        added: metadata.added(&special, true)?,
        bos: special.bos,
        eos: special.eos,
        pad: special.pad,
        space_prefix: false,
    })
}

/// Builds a SentencePiece BPE tokenizer with scores (Llama 2, Mistral, Gemma, Phi-3 and others).
fn sentencepiece_scores(metadata: &Metadata<'_>) -> Result<Tokenizer, LoadError> {
    let tokens = metadata.tokens()?;
    let kinds = metadata.kinds(tokens.len())?;
    let scores = metadata.require(SCORES, Value::f32s, "is not an array of floats")?;
    if scores.len() < tokens.len() {
        return Err(metadata.fault(SCORES, "has fewer elements than there are tokens".to_owned()));
    }
    if scores.iter().any(|score| score.is_nan()) {
        return Err(metadata.fault(SCORES, "has an element that is NaN".to_owned()));
    }
    let defaults = SpecialTokens { bos: Some(1), eos: Some(2), pad: None, unknown: Some(0) };
    let special = metadata.special_tokens(tokens, &defaults)?;
    let flag = |key: &str, default: bool| -> Result<bool, LoadError> {
        Ok(metadata.optional(key, Value::bool, "is not a boolean")?.unwrap_or(default))
    };
    let name = metadata.file.get("general.name").and_then(Value::str).unwrap_or_default().to_lowercase();
    let options = Options {
        add_space_prefix: flag("tokenizer.ggml.add_space_prefix", true)?,
        remove_extra_whitespaces: flag("tokenizer.ggml.remove_extra_whitespaces", false)?,
        strip_after_special: name.contains("phi-3") || name.contains("phi3"),
    };
    let pieces = Pieces { tokens, scores, kinds: &kinds, unknown: special.unknown, options };
    let spm = Spm::new(&pieces).map_err(|problem| metadata.fault(TOKENS, problem))?;
    let vocabulary = vocabulary(tokens, &kinds, &special, sentencepiece_bytes);
    Ok(Tokenizer {
        encoder: Encoder::Spm(Box::new(spm)),
        bound: TokenBound::of_pieces(&pieces, &vocabulary),
        vocabulary,
        added: metadata.added(&special, true)?,
        bos: special.bos,
        eos: special.eos,
        pad: special.pad,
        space_prefix: options.add_space_prefix,
    })
}

fn sentencepiece_bytes(text: &str, kind: Kind) -> Vec<u8> {
    match kind {
        Kind::Byte => fallback_byte(text).map_or_else(|| text.as_bytes().to_vec(), |byte| vec![byte]),
        Kind::Normal | Kind::Unused => text.replace(spm::SPACE, " ").into_bytes(),
        Kind::Unknown | Kind::Control | Kind::UserDefined => text.as_bytes().to_vec(),
    }
}

fn vocabulary(
    tokens: &[String],
    kinds: &[Kind],
    special: &SpecialTokens,
    bytes: impl Fn(&str, Kind) -> Vec<u8>,
) -> Vocabulary {
    let mut vocabulary = Vocabulary::default();
    for (id, (text, &kind)) in (0..).zip(tokens.iter().zip(kinds)) {
        let is_special = kind.is_special() || special.bos == Some(id) || special.eos == Some(id);
        vocabulary.push(&bytes(text, kind), is_special);
    }
    vocabulary
}

#[derive(Debug, Default)]
struct SpecialTokens {
    bos: Option<u32>,
    eos: Option<u32>,
    pad: Option<u32>,
    unknown: Option<u32>,
}

struct Metadata<'a> {
    file: &'a GgufFile,
}

impl<'a> Metadata<'a> {
    fn fault(&self, key: &str, problem: String) -> LoadError {
        LoadError::Field { path: self.file.path().to_owned(), field: key.to_owned(), problem }
    }

    fn optional<T>(
        &self,
        key: &str,
        convert: impl Fn(&'a Value) -> Option<T>,
        problem: &str,
    ) -> Result<Option<T>, LoadError> {
        let Some(value) = self.file.get(key) else { return Ok(None) };
        convert(value).map(Some).ok_or_else(|| self.fault(key, problem.to_owned()))
    }

    fn require<T>(
        &self,
        key: &str,
        convert: impl Fn(&'a Value) -> Option<T>,
        problem: &str,
    ) -> Result<T, LoadError> {
        self.optional(key, convert, problem)?.ok_or_else(|| self.fault(key, "is missing".to_owned()))
    }

    fn tokens(&self) -> Result<&'a [String], LoadError> {
        let tokens = self.require(TOKENS, Value::strs, "is not an array of strings")?;
        if tokens.is_empty() {
            return Err(self.fault(TOKENS, "is empty".to_owned()));
        }
        Ok(tokens)
    }

    /// The kind of each token. If the file does not specify the kinds, all tokens are normal.
    fn kinds(&self, tokens: usize) -> Result<Vec<Kind>, LoadError> {
        let Some(numbers) = self.optional(KINDS, Value::i64s, "is not an array of integers")? else {
            return Ok(vec![Kind::Normal; tokens]);
        };
        if numbers.len() < tokens {
            return Err(self.fault(KINDS, "has fewer elements than there are tokens".to_owned()));
        }
        Ok(numbers.into_iter().take(tokens).map(Kind::from_number).collect())
    }

    fn merges(&self, tokens: &[String]) -> Result<BpeBuilder, LoadError> {
        let mut vocab = Vocab::with_capacity(tokens.len());
        for (id, token) in (0..).zip(tokens) {
            if vocab.insert(token.clone(), id).is_some() {
                return Err(self.fault(TOKENS, format!("has {token:?} twice")));
            }
        }
        let merges = self.require(MERGES, Value::strs, "is not an array of strings")?;
        let merges = merges
            .iter()
            .map(|merge| {
                // The separator is the first space after the first character: in vocabularies with literal spaces, the
                // first token of a merge may begin with a space, but the second token never does.
                let at = merge.char_indices().skip(1).find(|(_, c)| *c == ' ').map(|(at, _)| at);
                let (left, right) = merge.split_at(at?);
                Some((left.to_owned(), right[1..].to_owned()))
            })
            .collect::<Option<Vec<_>>>()
            .ok_or_else(|| self.fault(MERGES, "has an element that is not a pair of tokens".to_owned()))?;
        Ok(BPE::builder().vocab_and_merges(vocab, merges))
    }

    /// Builds a pipeline for BPE; `set` configures the steps before BPE.
    fn pipeline(
        &self,
        builder: BpeBuilder,
        tokens: &[String],
        kinds: &[Kind],
        set: impl FnOnce(&mut tokenizers::Tokenizer) -> Result<(), tokenizers::Error>,
    ) -> Result<(tokenizers::Tokenizer, Pipeline), LoadError> {
        let build = || {
            let mut inner = tokenizers::Tokenizer::new(builder.build()?);
            set(&mut inner)?;
            let verbatim = tokens.iter().zip(kinds).filter(|(text, kind)| {
                (kind.is_special() || **kind == Kind::UserDefined) && !text.is_empty()
            });
            inner
                .add_tokens(verbatim.map(|(text, kind)| {
                    AddedToken::from(text.clone(), kind.is_special()).normalized(false)
                }))?;
            let pipeline = Pipeline::new(&inner)?;
            Ok((inner, pipeline))
        };
        built(build).map_err(|error| self.fault(MERGES, format!("cannot be used: {error}")))
    }

    /// The special tokens that the file specifies. For a key that the file lacks, the token in `defaults` is used.
    fn special_tokens(
        &self,
        tokens: &[String],
        defaults: &SpecialTokens,
    ) -> Result<SpecialTokens, LoadError> {
        let find = |key: &str, default: Option<u32>| -> Result<Option<u32>, LoadError> {
            let id = self.optional(key, Value::u32, "is not a token ID")?;
            match id {
                Some(id) if (id as usize) < tokens.len() => Ok(Some(id)),
                // Some programs, such as llama.cpp, write `u32::MAX` if the model has no such token.
                Some(u32::MAX) => Ok(None),
                Some(id) => {
                    Err(self.fault(key, format!("is {id}, but the vocabulary has {} tokens", tokens.len())))
                }
                None => Ok(default.filter(|&id| (id as usize) < tokens.len())),
            }
        };
        Ok(SpecialTokens {
            bos: find("tokenizer.ggml.bos_token_id", defaults.bos)?,
            eos: find("tokenizer.ggml.eos_token_id", defaults.eos)?,
            pad: find("tokenizer.ggml.padding_token_id", defaults.pad)?,
            unknown: find("tokenizer.ggml.unknown_token_id", defaults.unknown)?,
        })
    }

    fn added(&self, special: &SpecialTokens, adds_bos: bool) -> Result<AddedTokens, LoadError> {
        let wanted = |key: &str, default: bool, id: Option<u32>| -> Result<Option<u32>, LoadError> {
            match (self.optional(key, Value::bool, "is not a boolean")?, id) {
                (Some(true), None) => Err(self.fault(key, "is true, but there is no such token".to_owned())),
                (Some(true), id) => Ok(id),
                (Some(false), _) => Ok(None),
                (None, id) => Ok(id.filter(|_| default)),
            }
        };
        Ok(AddedTokens::Tokens {
            before: wanted("tokenizer.ggml.add_bos_token", adds_bos, special.bos)?,
            after: wanted("tokenizer.ggml.add_eos_token", false, special.eos)?,
        })
    }
}
