//! The draft model's side of starting: whether its tokens are the model's, and what the simulator has for one.

use std::path::Path;

use anyhow::{Context as _, bail};
use server_engine::ModelRunner;
use server_text::{ModelText, Tokenizer};

use super::Config;

/// The text side of the draft model at `path`. What it recommends of guessing is taken where the model says nothing.
///
/// # Errors
/// It cannot be read, or its tokens are not those of the model.
pub(super) fn text(path: &Path, model: &mut ModelText) -> anyhow::Result<ModelText> {
    let draft = ModelText::load(path).context("failed to load the draft model's tokenizer")?;
    if let Some(difference) = difference(&model.tokenizer, &draft.tokenizer) {
        bail!("{} cannot guess for this model: {difference}", path.display());
    }
    let (known, more) = (&mut model.defaults, &draft.defaults);
    known.assistant_tokens_max = known.assistant_tokens_max.or(more.assistant_tokens_max);
    known.assistant_confidence_min = known.assistant_confidence_min.or(more.assistant_confidence_min);
    Ok(draft)
}

/// In what the vocabularies differ, if they do.
fn difference(model: &Tokenizer, draft: &Tokenizer) -> Option<String> {
    let sizes = [model, draft].map(Tokenizer::vocabulary_size);
    if sizes[0] != sizes[1] {
        return Some(format!("it has {} tokens, the model {}", sizes[1], sizes[0]));
    }
    let token = (0..sizes[0]).find(|&token| model.token_bytes(token) != draft.token_bytes(token))?;
    let [of_model, of_draft] = [model, draft].map(|tokenizer| tokenizer.token_text(token));
    Some(format!("its token {token} is {of_draft:?}, the model's {of_model:?}"))
}

/// The simulated model, and if it is to have a draft model, itself once more at a tenth of the costs.
pub(super) fn sim(config: &Config, text: &ModelText) -> anyhow::Result<Vec<Box<dyn ModelRunner>>> {
    let mut runners = vec![super::sim(config, text)?];
    if config.draft_model.is_some() {
        let mut draft = config.clone();
        for time in [
            &mut draft.sim.sim_step_time,
            &mut draft.sim.sim_prefill_token_time,
            &mut draft.sim.sim_decode_row_time,
        ] {
            *time /= 10;
        }
        draft.sim.sim_fatal_step = None;
        runners.push(super::sim(&draft, text)?);
    }
    Ok(runners)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::{built_in_text, built_in_text_with};

    #[test]
    fn vocabularies_are_the_same_in_size_and_in_each_text() {
        let text = |special: &[&str]| built_in_text_with("x", special).unwrap().tokenizer;
        let plain = built_in_text().unwrap().tokenizer;
        assert_eq!(difference(&plain, &plain), None);
        assert_eq!(difference(&plain, &text(&[])), None);
        let larger = difference(&plain, &text(&["<a>"])).unwrap();
        assert_eq!(larger, "it has 260 tokens, the model 259");
        let other = difference(&text(&["<a>"]), &text(&["<b>"])).unwrap();
        assert_eq!(other, "its token 259 is \"<b>\", the model's \"<a>\"");
    }
}
