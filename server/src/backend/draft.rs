//! Loads the tokenizer of a draft model, and checks that the draft model has the same vocabulary as the model.

use std::path::Path;

use anyhow::{Context as _, bail};
use server_text::{ModelText, Tokenizer};

/// Loads the tokenizer of the draft model at `path`. If the model has no default for a parameter of speculative
/// decoding, the draft model's default applies.
///
/// # Errors
/// The tokenizer cannot be loaded, or its vocabulary differs from that of the model.
pub(super) fn load_text(path: &Path, model: &mut ModelText) -> anyhow::Result<ModelText> {
    let draft = ModelText::load(path).context("failed to load the draft model's tokenizer")?;
    if let Some(difference) = difference(&model.tokenizer, &draft.tokenizer) {
        bail!("{} cannot be the draft model of this model: {difference}", path.display());
    }
    let (known, more) = (&mut model.defaults, &draft.defaults);
    known.assistant_tokens_max = known.assistant_tokens_max.or(more.assistant_tokens_max);
    known.assistant_confidence_min = known.assistant_confidence_min.or(more.assistant_confidence_min);
    Ok(draft)
}

/// Describes the first difference between the vocabularies, if they differ.
fn difference(model: &Tokenizer, draft: &Tokenizer) -> Option<String> {
    let sizes = [model, draft].map(Tokenizer::vocabulary_size);
    if sizes[0] != sizes[1] {
        return Some(format!("its vocabulary has {} tokens, but the model's has {}", sizes[1], sizes[0]));
    }
    let token = (0..sizes[0]).find(|&token| model.token_bytes(token) != draft.token_bytes(token))?;
    let [of_model, of_draft] = [model, draft].map(|tokenizer| tokenizer.token_text(token));
    Some(format!("its token {token} is {of_draft:?}, but that of the model is {of_model:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::{built_in_text, built_in_text_with};

    #[test]
    fn vocabularies_are_compared_by_size_and_by_each_token() {
        let text = |special: &[&str]| built_in_text_with("x", special).unwrap().tokenizer;
        let plain = built_in_text().unwrap().tokenizer;
        assert_eq!(difference(&plain, &plain), None);
        assert_eq!(difference(&plain, &text(&[])), None);
        let larger = difference(&plain, &text(&["<a>"])).unwrap();
        assert_eq!(larger, "its vocabulary has 260 tokens, but the model's has 259");
        let other = difference(&text(&["<a>"]), &text(&["<b>"])).unwrap();
        assert_eq!(other, "its token 259 is \"<b>\", but that of the model is \"<a>\"");
    }
}
