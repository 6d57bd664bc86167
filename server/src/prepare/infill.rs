//! Builds fill-in-the-middle prompts: the text before and the text after a gap, in a format that models were trained
//! with. A model supports a format if its vocabulary has the special tokens of the format.

use server_engine::TokenId;
use server_openai::Prompt;
use server_text::Tokenizer;

use super::encode::{Encoder, SpecialTokens};
use crate::error::Error;
use crate::model::Model;

/// The special tokens before the prefix, before the suffix, and before the middle.
const FORMS: [[&str; 3]; 5] = [
    // These are the tokens of Qwen Coder and CodeGemma.
    ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"],
    // These are the tokens of StarCoder and Granite Code.
    ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"],
    // These are the tokens of SantaCoder.
    ["<fim-prefix>", "<fim-suffix>", "<fim-middle>"],
    // These are the tokens of CodeLlama.
    ["▁<PRE>", "▁<SUF>", "▁<MID>"],
    // These are the tokens of DeepSeek Coder. The second token marks the gap.
    ["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"],
];

/// Returns the tokens of fill-in-the-middle prompts whose gap is between `prompt` and `suffix`.
pub(super) fn prompts(
    prompt: Prompt,
    suffix: &str,
    model: &Model,
    tokens_max: Option<u32>,
) -> Result<Vec<Vec<TokenId>>, Error> {
    let encode = |text: &str, param: &'static str| {
        Encoder { model, param, tokens_max, image_tokens: 0 }.prompt(text, SpecialTokens::Absent)
    };
    let tokenizer = &model.text.tokenizer;
    let form = form(tokenizer).ok_or_else(|| {
        Error::coded(
            "unsupported_parameter",
            "suffix",
            "this model does not support fill-in-the-middle: its vocabulary has no tokens for it",
        )
    })?;
    let suffix = encode(suffix, "suffix")?;
    let prefixes = match prompt {
        Prompt::Texts(texts) => texts
            .iter()
            .map(|text| if text.is_empty() { Ok(Vec::new()) } else { encode(text, "prompt") })
            .collect(),
        Prompt::Tokens(prompts) => Ok(prompts),
    };
    let prefixes: Vec<Vec<TokenId>> = prefixes?;
    if prefixes.is_empty() {
        return Err(Error::coded("empty_array", "prompt", "is empty"));
    }
    // If the tokenizer adds a BOS token, that token comes before the first special token of the format.
    let first = tokenizer.encode("", true, false).unwrap_or_default();
    let first: Vec<TokenId> = first.into_iter().take_while(|token| Some(*token) == tokenizer.bos()).collect();
    let [before, after, middle] = form;
    let arrange =
        |prefix: Vec<TokenId>| [&first, &[before][..], &prefix, &[after], &suffix, &[middle]].concat();
    Ok(prefixes.into_iter().map(arrange).collect())
}

/// Returns the first format whose special tokens are all in the vocabulary.
fn form(tokenizer: &Tokenizer) -> Option<[TokenId; 3]> {
    FORMS.into_iter().find_map(|[before, after, middle]| {
        Some([tokenizer.token_id(before)?, tokenizer.token_id(after)?, tokenizer.token_id(middle)?])
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::built_in_text_with;

    fn model(special_tokens: &[&str]) -> Model {
        Model::new(vec!["m".to_owned()], built_in_text_with("", special_tokens).unwrap(), "test")
    }

    #[test]
    fn the_gap_is_between_the_prefix_and_the_suffix() {
        let model = model(&["<fim_prefix>", "<fim_middle>", "<fim_suffix>"]);
        let [before, middle, after] = [259, 260, 261];
        let texts = Prompt::Texts(vec!["ab".to_owned(), String::new()]);
        let expected = [vec![before, 97, 98, after, 99, middle], vec![before, after, 99, middle]];
        assert_eq!(prompts(texts, "c", &model, None).unwrap(), expected);
        let tokens = Prompt::Tokens(vec![vec![97]]);
        assert_eq!(prompts(tokens, "c", &model, None).unwrap(), [[before, 97, after, 99, middle]]);
    }

    #[test]
    fn a_model_without_the_tokens_rejects_a_suffix() {
        let refused = prompts(Prompt::Texts(vec!["a".to_owned()]), "b", &model(&["<fim_prefix>"]), None);
        let Err(Error::Invalid { code, param, .. }) = refused else { panic!("{refused:?}") };
        assert_eq!((code, param.as_str()), ("unsupported_parameter", "suffix"));
    }
}
