//! From a request as it was on the wire to one for the engine, once: defaults resolved, ranges checked, the
//! conversation rendered and tokenised. After this nobody looks at the wire.
//!
//! Pure: it takes no time but computing, and the same request gives the same result.

mod parameters;
mod prompt;

use server_engine::{Request, Sampling, StopRule, TokenId};
use server_openai::{ChatRequest, CompletionRequest};

use crate::error::Error;
use crate::limits::CHOICES_MAX;
use crate::model::Model;

/// What requests are prepared for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Target<'a> {
    pub(crate) model: &'a Model,
    /// What the engine keeps to.
    pub(crate) limits: server_engine::Limits,
    /// For a request that names none.
    pub(crate) seed: u64,
}

/// A request, resolved.
#[derive(Debug)]
pub(crate) struct Prepared {
    /// One for each prompt.
    pub(crate) prompts: Vec<Request>,
    /// What the text of each prompt's choices begins with; empty for none.
    pub(crate) echoes: Vec<String>,
    /// How tokens become text.
    pub(crate) text: TextRule,
    /// How the answer is put.
    pub(crate) reply: Reply,
}

/// How tokens become the text of a choice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TextRule {
    /// Strings that end a choice.
    pub(crate) stops: Vec<String>,
    /// Whether the string or token that ended a choice is part of its text.
    pub(crate) include_stop: bool,
    /// Whether special tokens have no text.
    pub(crate) skip_special: bool,
    /// Whether the text goes on from the prompt's.
    pub(crate) continues_text: bool,
    /// The engine's stop tokens.
    pub(crate) stop_tokens: Vec<TokenId>,
}

/// How the answer is put.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Reply {
    /// The model's name as the request gave it.
    pub(crate) model: String,
    pub(crate) stream: bool,
    pub(crate) include_usage: bool,
    /// `Some(k)`: log probabilities are wanted, of the `k` most probable tokens too.
    pub(crate) logprobs: Option<u32>,
}

/// Prepares a request to the chat endpoint.
///
/// # Errors
/// It cannot be served.
pub(crate) fn chat(request: &ChatRequest, target: Target<'_>) -> Result<Prepared, Error> {
    let model = parameters::model(&request.generation, target.model)?;
    let wanted = request.logprobs.unwrap_or(false);
    if request.top_logprobs.is_some() && !wanted {
        return Err(Error::invalid("top_logprobs", "is given, but logprobs is not true"));
    }
    let logprobs = wanted.then(|| request.top_logprobs.unwrap_or(0));
    let resolved = parameters::resolve(&request.generation, target, ("top_logprobs", logprobs))?;
    let tokens = prompt::render(request, target.model)?;
    let (requested, defaults) = (requested_tokens(&request.generation), &target.model.text.defaults);
    let tokens_max = requested.or(defaults.tokens_max.map(|tokens| ("max_tokens", tokens)));
    resolved.prepare(model, Source { prompts: vec![tokens], param: "messages" }, tokens_max, target)
}

/// Prepares a request to the completions endpoint.
///
/// # Errors
/// It cannot be served.
pub(crate) fn completion(request: CompletionRequest, target: Target<'_>) -> Result<Prepared, Error> {
    /// As OpenAI has it.
    const TOKENS_DEFAULT: u32 = 16;

    let model = parameters::model(&request.generation, target.model)?;
    if request.suffix.is_some_and(|suffix| !suffix.is_empty()) {
        return Err(Error::invalid("suffix", "is not supported"));
    }
    let mut resolved = parameters::resolve(&request.generation, target, ("logprobs", request.logprobs))?;
    resolved.text.continues_text = true;
    let echo = request.echo.unwrap_or(false);
    if echo && request.logprobs.is_some() {
        return Err(Error::invalid(
            "echo",
            "cannot be combined with logprobs: those of prompts are not computed",
        ));
    }
    let prompt = request.prompt.ok_or_else(|| Error::invalid("prompt", "is missing"))?;
    let (prompts, echoes) = prompt::tokenise(prompt, echo, target.model)?;
    let tokens_max = requested_tokens(&request.generation)
        .or(target.model.text.defaults.tokens_max.map(|tokens| ("max_tokens", tokens)))
        .unwrap_or(("max_tokens", TOKENS_DEFAULT));
    let source = Source { prompts, param: "prompt" };
    let prepared = resolved.prepare(model, source, Some(tokens_max), target)?;
    Ok(Prepared { echoes, ..prepared })
}

/// What the request asks for, and by which parameter.
fn requested_tokens(generation: &server_openai::Generation) -> Option<(&'static str, u32)> {
    let later = generation.max_completion_tokens.map(|tokens| ("max_completion_tokens", tokens));
    later.or(generation.max_tokens.map(|tokens| ("max_tokens", tokens)))
}

/// Tokenised prompts and the parameter they come from.
struct Source {
    prompts: Vec<Vec<TokenId>>,
    param: &'static str,
}

/// What is the same for all prompts of a request.
struct Resolved {
    choices: u32,
    tokens_min: u32,
    sampling: Sampling,
    text: TextRule,
    stream: bool,
    include_usage: bool,
}

impl Resolved {
    fn prepare(
        self,
        model: String,
        source: Source,
        tokens_max: Option<(&'static str, u32)>,
        target: Target<'_>,
    ) -> Result<Prepared, Error> {
        let prompts = source.prompts.len();
        if prompts as u64 * u64::from(self.choices) > u64::from(CHOICES_MAX) {
            let problem =
                format!("{prompts} prompts with n = {} are more than {CHOICES_MAX} choices", self.choices);
            return Err(Error::invalid("n", problem));
        }
        let requests = source
            .prompts
            .into_iter()
            .map(|prompt| {
                let tokens_max = room(&prompt, source.param, tokens_max, target)?;
                if self.tokens_min > tokens_max {
                    return Err(Error::invalid(
                        "min_tokens",
                        format!(
                            "{} is more than the {tokens_max} tokens that may be generated",
                            self.tokens_min
                        ),
                    ));
                }
                let stop = StopRule {
                    tokens: self.text.stop_tokens.clone(),
                    tokens_max,
                    tokens_min: self.tokens_min,
                };
                let sampling = self.sampling.clone();
                Ok(Request { prompt, sequences: self.choices, sampling, stop, guide: None })
            })
            .collect::<Result<Vec<_>, Error>>()?;
        let reply = Reply {
            model,
            stream: self.stream,
            include_usage: self.include_usage,
            logprobs: self.sampling.logprobs,
        };
        Ok(Prepared { prompts: requests, echoes: vec![String::new(); prompts], text: self.text, reply })
    }
}

/// Tokens that may be generated after `prompt`.
fn room(
    prompt: &[TokenId],
    param: &'static str,
    tokens_max: Option<(&'static str, u32)>,
    target: Target<'_>,
) -> Result<u32, Error> {
    let most = target.limits.sequence_tokens_max;
    if prompt.is_empty() {
        return Err(Error::invalid(param, "is empty"));
    }
    let room = u32::try_from(prompt.len()).ok().and_then(|tokens| most.checked_sub(tokens)).unwrap_or(0);
    let tokens = prompt.len();
    if room == 0 {
        let message =
            format!("{param}: the prompt of {tokens} tokens leaves no room in this model's {most} tokens");
        return Err(Error::ContextLength { param, message });
    }
    match tokens_max {
        None => Ok(room),
        Some((param, 0)) => Err(Error::invalid(param, "must be at least 1")),
        Some((_, wanted)) if wanted <= room => Ok(wanted),
        Some((param, wanted)) => {
            let message = format!(
                "{param}: a prompt of {tokens} tokens and {wanted} to generate are more than this model's {most}"
            );
            Err(Error::ContextLength { param, message })
        }
    }
}
