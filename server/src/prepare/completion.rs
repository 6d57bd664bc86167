//! Prepares requests to the completions endpoint, including prompts in four forms, echoes, and suffixes.

use server_openai::{CompletionRequest, Prompt};

use super::encode::{Encoder, SpecialTokens};
use super::prepared::{PreparedRequest, Target};
use super::resolved::{PromptSource, TokensMax};
use super::{guide, infill, parameters};
use crate::error::Error;

/// Prepares a request to the completions endpoint.
///
/// # Errors
/// The request is invalid.
pub(crate) fn completion(request: CompletionRequest, target: Target<'_>) -> Result<PreparedRequest, Error> {
    let CompletionRequest { mut generation, prompt, logprobs, echo, suffix } = request;
    let rules = target.model.api_rules;
    rules.complete(&mut generation);
    let model = parameters::model(&generation, target.model)?;
    let echo = echo.unwrap_or(false);
    let mut resolved = parameters::resolve(&generation, target, "logprobs", logprobs)?;
    resolved.text.continues_text = true;
    resolved.guide = guide::of_prompt(&generation, target)?;
    if echo && let Some(logprobs) = logprobs {
        resolved.sampling.prompt_logprobs = resolved.prompt_logprobs.max(Some(logprobs));
    }
    let default = target.model.text.defaults.tokens_max.or(rules.completion_tokens_default());
    let tokens_max = TokensMax::requested(&generation).or(default.map(TokensMax::default_of));
    if let Some(TokensMax { param, tokens: 0, .. }) = tokens_max
        && !echo
    {
        // The answer would be empty without an echo.
        return Err(Error::coded("integer_below_min_value", param, "must be at least 1"));
    }
    let prompt = prompt.ok_or_else(|| Error::missing("prompt"))?;
    let count = match &prompt {
        Prompt::Texts(texts) => texts.len(),
        Prompt::Tokens(prompts) => prompts.len(),
    };
    resolved.check_choices(count)?;
    let special_tokens = SpecialTokens::added_if(generation.add_special_tokens.unwrap_or(true));
    let prompt_tokens_max = resolved.prompt_tokens_max(target);
    let source = match suffix.filter(|suffix| !suffix.is_empty()) {
        None => {
            let encoder = Encoder {
                model: target.model,
                param: "prompt",
                tokens_max: prompt_tokens_max,
                image_tokens: 0,
            };
            tokenize(prompt, encoder, special_tokens, echo)?
        }
        Some(_) if echo => return Err(Error::invalid("suffix", "cannot be combined with echo")),
        Some(suffix) => {
            let prompts = infill::prompts(prompt, &suffix, target.model, prompt_tokens_max)?;
            PromptSource { prompts, param: "prompt", echoes: Vec::new(), images: Vec::new() }
        }
    };
    resolved.prepare(model, source, tokens_max, target)?.decode_images(target)
}

fn tokenize(
    prompt: Prompt,
    encoder: Encoder<'_>,
    special_tokens: SpecialTokens,
    echo: bool,
) -> Result<PromptSource, Error> {
    let tokenizer = &encoder.model.text.tokenizer;
    let (prompts, echoes) = match prompt {
        Prompt::Texts(texts) => {
            let encode = |text: &String| encoder.prompt(text, special_tokens);
            let prompts = texts.iter().map(encode).collect::<Result<_, Error>>()?;
            (prompts, if echo { texts } else { Vec::new() })
        }
        Prompt::Tokens(prompts) => {
            let texts =
                prompts.iter().filter(|_| echo).map(|tokens| tokenizer.decode(tokens, false)).collect();
            (prompts, texts)
        }
    };
    if prompts.is_empty() {
        return Err(Error::coded("empty_array", "prompt", "is empty"));
    }
    Ok(PromptSource { prompts, param: "prompt", echoes, images: Vec::new() })
}
