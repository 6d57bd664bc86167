//! The parameters of speculative decoding: prompt lookup and a draft model.

use server_engine::{DraftModelParams, PromptLookup};
use server_openai::Generation;

use crate::error::Error;
use crate::model::Model;
use crate::prepare::encode::Encoder;
use crate::prepare::prepared::Target;

/// The default number of draft tokens, as in OVMS.
const NUM_DRAFT_TOKENS_DEFAULT: u32 = 5;
/// The default maximum size of the n-grams that prompt lookup searches for, as in OVMS.
const NGRAM_SIZE_DEFAULT: u32 = 3;
/// The default maximum number of draft tokens if a confidence threshold can end the draft earlier.
const CONFIDENT_DRAFT_TOKENS_DEFAULT: u32 = 20;

/// Returns the parameters of prompt lookup, if the request or the server enables it.
pub(super) fn lookup(generation: &Generation, target: Target<'_>) -> Result<Option<PromptLookup>, Error> {
    let model = target.model;
    let predicted = generation.prediction.as_ref().map(|prediction| prediction.text()).unwrap_or_default();
    let is_enabled = model.prompt_lookup || generation.max_ngram_size.is_some() || !predicted.is_empty();
    if !is_enabled {
        return Ok(None);
    }
    let mut prediction =
        Encoder { model, param: "prediction", tokens_max: None, image_tokens: 0 }.literal(&predicted)?;
    // No answer is longer than the context length.
    prediction.truncate(target.limits.requests.max_model_len as usize);
    prediction.shrink_to_fit();
    let defaults = &model.text.defaults;
    Ok(Some(PromptLookup {
        max_ngram_size: generation.max_ngram_size.or(defaults.ngram_max).unwrap_or(NGRAM_SIZE_DEFAULT),
        num_draft_tokens: generation
            .num_assistant_tokens
            .or(defaults.assistant_tokens_max)
            .unwrap_or(NUM_DRAFT_TOKENS_DEFAULT),
        prediction,
    }))
}

/// Returns the parameters for the draft model. They have no effect if the server has no draft model. If a request sets
/// the number of draft tokens or the confidence threshold, neither default of the model is used.
pub(super) fn draft(generation: &Generation, model: &Model) -> DraftModelParams {
    let defaults = &model.text.defaults;
    let (tokens, confidence) =
        match (generation.num_assistant_tokens, generation.assistant_confidence_threshold) {
            (None, None) => (defaults.assistant_tokens_max, defaults.assistant_confidence_min),
            requested => requested,
        };
    // The value from the model's files may be out of range.
    let confidence_threshold = confidence.unwrap_or(0.0).clamp(0.0, 1.0);
    let default =
        if confidence.is_some() { CONFIDENT_DRAFT_TOKENS_DEFAULT } else { NUM_DRAFT_TOKENS_DEFAULT };
    DraftModelParams { num_draft_tokens: tokens.unwrap_or(default), confidence_threshold }
}
