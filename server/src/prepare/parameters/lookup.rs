//! Whether and how what comes next is guessed from what was there before.

use server_engine::PromptLookup;
use server_openai::Generation;

use crate::error::Error;
use crate::model::Model;

/// Tokens guessed at a time where the request does not say, and how many of the last tokens are looked for. As with OVMS.
const TOKENS: u32 = 5;
const NGRAM: u32 = 3;

/// What a request asks for, or what all get from this model.
pub(super) fn lookup(generation: &Generation, model: &Model) -> Result<Option<PromptLookup>, Error> {
    let predicted = generation.prediction.as_ref().map(|prediction| prediction.text()).unwrap_or_default();
    let is_asked = model.prompt_lookup || generation.max_ngram_size.is_some() || !predicted.is_empty();
    if !is_asked {
        return Ok(None);
    }
    let prediction = model.text.tokenizer.encode(&predicted, false, false);
    Ok(Some(PromptLookup {
        ngram_max: generation.max_ngram_size.unwrap_or(NGRAM),
        tokens_max: generation.num_assistant_tokens.unwrap_or(TOKENS),
        prediction: prediction.map_err(|error| Error::invalid("prediction", error))?,
    }))
}
