//! Filling in the middle: what comes before and what comes after a gap, put together as models that were trained
//! for it expect. A vocabulary that has the special tokens of one of the known ways is that of such a model.

use server_engine::TokenId;
use server_openai::Prompt;
use server_text::Tokenizer;

use super::encode::{Encoder, Surround};
use crate::error::Error;
use crate::model::Model;

/// The special tokens before what comes before, before what comes after, and before the middle.
const FORMS: [[&str; 3]; 5] = [
    // Qwen Coder, CodeGemma.
    ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"],
    // StarCoder, Granite Code.
    ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"],
    // SantaCoder.
    ["<fim-prefix>", "<fim-suffix>", "<fim-middle>"],
    // CodeLlama.
    ["▁<PRE>", "▁<SUF>", "▁<MID>"],
    // DeepSeek Coder, where the second stands for the hole.
    ["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"],
];

/// The tokens of the prompts with the gap before `suffix`.
pub(super) fn prompts(
    prompt: Prompt,
    suffix: &str,
    model: &Model,
    tokens_max: Option<u32>,
) -> Result<Vec<Vec<TokenId>>, Error> {
    let encode =
        |text: &str, param: &'static str| Encoder { model, param, tokens_max }.prompt(text, Surround::Absent);
    let tokenizer = &model.text.tokenizer;
    let form = form(tokenizer).ok_or_else(|| {
        Error::coded(
            "unsupported_parameter",
            "suffix",
            "this model was not made to fill in: its vocabulary has no tokens for it",
        )
    })?;
    let after = encode(suffix, "suffix")?;
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
    // What the tokenizer puts before every text goes before the first of the special tokens.
    let first = tokenizer.encode("", true, false).unwrap_or_default();
    let first: Vec<TokenId> = first.into_iter().take_while(|token| Some(*token) == tokenizer.bos()).collect();
    Ok(prefixes.into_iter().map(|before| arrange(&first, form, &before, &after)).collect())
}

fn arrange(
    first: &[TokenId],
    [before, after, middle]: [TokenId; 3],
    prefix: &[TokenId],
    suffix: &[TokenId],
) -> Vec<TokenId> {
    [first, &[before], prefix, &[after], suffix, &[middle]].concat()
}

/// The first form of which the vocabulary has all tokens.
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
    fn the_gap_is_between_what_comes_before_and_what_comes_after() {
        let model = model(&["<fim_prefix>", "<fim_middle>", "<fim_suffix>"]);
        let [before, middle, after] = [259, 260, 261];
        let texts = Prompt::Texts(vec!["ab".to_owned(), String::new()]);
        let expected = [vec![before, 97, 98, after, 99, middle], vec![before, after, 99, middle]];
        assert_eq!(prompts(texts, "c", &model, None).unwrap(), expected);
        let tokens = Prompt::Tokens(vec![vec![97]]);
        assert_eq!(prompts(tokens, "c", &model, None).unwrap(), [[before, 97, after, 99, middle]]);
    }

    #[test]
    fn a_model_that_was_not_made_for_it_is_not_asked() {
        let refused = prompts(Prompt::Texts(vec!["a".to_owned()]), "b", &model(&["<fim_prefix>"]), None);
        let Err(Error::Invalid { code, param, .. }) = refused else { panic!("{refused:?}") };
        assert_eq!((code, param.as_str()), ("unsupported_parameter", "suffix"));
    }
}
