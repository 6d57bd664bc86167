//! A request to the completions endpoint: prompts in four forms, echoes, and what is to come after the text.

use server_openai::{CompletionRequest, Prompt};

use super::resolved::{Source, TokensMax};
use super::{Prepared, Target, guide, infill, parameters, prompt, requested_tokens};
use crate::error::Error;

/// As OpenAI has it.
const TOKENS_DEFAULT: u32 = 16;

/// Prepares a request to the completions endpoint.
///
/// # Errors
/// It cannot be served.
pub(crate) fn completion(request: CompletionRequest, target: Target<'_>) -> Result<Prepared, Error> {
    let CompletionRequest { generation, prompt, logprobs, echo, suffix } = request;
    let model = parameters::model(&generation, target.model)?;
    let echo = echo.unwrap_or(false);
    let mut resolved = parameters::resolve(&generation, target, ("logprobs", logprobs))?;
    resolved.text.continues_text = true;
    resolved.guide = guide::of_prompt(&generation, target)?;
    if echo && let Some(logprobs) = logprobs {
        resolved.sampling.prompt_logprobs = resolved.prompt_logprobs.max(Some(logprobs));
    }
    let tokens_max = requested_tokens(&generation)
        .or(target.model.text.defaults.tokens_max.map(|tokens| TokensMax { param: "max_tokens", tokens }))
        .unwrap_or(TokensMax { param: "max_tokens", tokens: TOKENS_DEFAULT });
    if tokens_max.tokens == 0 && !echo {
        // There is nothing to answer.
        return Err(Error::coded("integer_below_min_value", tokens_max.param, "must be at least 1"));
    }
    let prompt = prompt.ok_or_else(|| Error::missing("prompt"))?;
    let plain = generation.add_special_tokens.unwrap_or(true);
    let source = match suffix.filter(|suffix| !suffix.is_empty()) {
        None => tokenise(prompt, (plain, echo), target)?,
        Some(_) if echo => return Err(Error::invalid("suffix", "cannot be combined with echo")),
        Some(suffix) => {
            let prompts = infill::prompts(prompt, &suffix, target.model)?;
            Source { prompts, param: "prompt", echoes: Vec::new() }
        }
    };
    resolved.prepare(model, source, Some(tokens_max), target)
}

fn tokenise(prompt: Prompt, (plain, echo): (bool, bool), target: Target<'_>) -> Result<Source, Error> {
    let tokenizer = &target.model.text.tokenizer;
    let (prompts, echoes) = match prompt {
        Prompt::Texts(texts) => {
            let encode = |text: &String| prompt::encode(text, plain, "prompt", target.model);
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
    Ok(Source { prompts, param: "prompt", echoes })
}
