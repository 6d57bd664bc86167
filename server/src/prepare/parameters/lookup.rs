//! Whether and how what comes next is guessed: from what was there before, and by a draft model.

use server_engine::{DraftModelParams, PromptLookup};
use server_openai::Generation;

use crate::error::Error;
use crate::model::Model;
use crate::prepare::encode::Encoder;

/// Tokens guessed at a time where neither the request nor the model says, and how many of the last tokens are looked for. As
/// with OVMS.
const TOKENS: u32 = 5;
const NGRAM: u32 = 3;
/// Tokens guessed at a time where a draft model ends by its confidence.
const CONFIDENT_TOKENS: u32 = 20;

/// What a request asks for, or what all get from this model.
pub(super) fn lookup(generation: &Generation, model: &Model) -> Result<Option<PromptLookup>, Error> {
    let predicted = generation.prediction.as_ref().map(|prediction| prediction.text()).unwrap_or_default();
    let is_asked = model.prompt_lookup || generation.max_ngram_size.is_some() || !predicted.is_empty();
    if !is_asked {
        return Ok(None);
    }
    let prediction = Encoder { model, param: "prediction", tokens_max: None }.literal(&predicted)?;
    let defaults = &model.text.defaults;
    Ok(Some(PromptLookup {
        max_ngram_size: generation.max_ngram_size.or(defaults.ngram_max).unwrap_or(NGRAM),
        num_draft_tokens: generation.num_assistant_tokens.or(defaults.assistant_tokens_max).unwrap_or(TOKENS),
        prediction,
    }))
}

/// How a draft model guesses, if there is one. A request says how many or how probable; what it says replaces both of the
/// model's.
pub(super) fn draft(generation: &Generation, model: &Model) -> DraftModelParams {
    let defaults = &model.text.defaults;
    let (tokens, confidence) =
        match (generation.num_assistant_tokens, generation.assistant_confidence_threshold) {
            (None, None) => (defaults.assistant_tokens_max, defaults.assistant_confidence_min),
            asked => asked,
        };
    // Files say what they like.
    let confidence_threshold = confidence.unwrap_or(0.0).clamp(0.0, 1.0);
    let most = if confidence.is_some() { CONFIDENT_TOKENS } else { TOKENS };
    DraftModelParams { num_draft_tokens: tokens.unwrap_or(most), confidence_threshold }
}
