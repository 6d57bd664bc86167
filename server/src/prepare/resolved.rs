//! Defines the parameters that all prompts of a request share, and turns each prompt into a request to the engine. A
//! prompt is truncated if requested, and the number of generated tokens is limited.

use std::sync::Arc;

use server_engine::{
    BeamSearch, DraftModelParams, Guide, PromptLookup, Request, Sampling, StopCriteria, TokenId, mix,
};
use server_openai::Generation;

use super::images::{self, AssignedImages, ConversationImage};
use super::prepared::{AnswerOptions, PreparedRequest, Target, TextOptions, UsageReporting};
use crate::error::Error;
use crate::limits::{CHOICES_MAX, ECHO_BYTES_MAX, LOGPROBS_TOTAL_MAX};

/// Tokenized prompts, with the name of their parameter, and with their texts if they are echoed.
pub(super) struct PromptSource {
    pub(super) prompts: Vec<Vec<TokenId>>,
    /// The name of the parameter with the prompts, for errors.
    pub(super) param: &'static str,
    /// The texts of the prompts, or empty if they are not echoed.
    pub(super) echoes: Vec<String>,
    /// The images of the prompt. A request with several prompts has no images.
    pub(super) images: Vec<ConversationImage>,
}

/// The number of tokens at the end of a prompt that remain after truncation.
#[derive(Clone, Copy, Debug)]
pub(super) enum Truncate {
    To(u32),
    /// The prompt is truncated just enough to leave room for the answer.
    ToRoom,
}

/// The limit on the number of generated tokens.
#[derive(Clone, Copy, Debug)]
pub(super) struct TokensMax {
    /// The name of the parameter with the limit, for errors.
    pub(super) param: &'static str,
    pub(super) tokens: u32,
    pub(super) source: LimitSource,
}

/// The source of a limit on the number of generated tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LimitSource {
    /// The client sets the limit. The request is rejected if the answer cannot have that many tokens.
    Request,
    /// The limit is the room that truncation must leave after the prompt. It does not limit the final answer.
    Room,
    /// The limit is a default, which is reduced to the number of tokens that the answer can have.
    Default,
}

/// The reciprocal of the fraction of the context length that truncation leaves for the answer if the request does not
/// limit the length of the answer. With [`Truncate::ToRoom`], truncation leaves less room if the default length is
/// smaller, or if there is no default.
pub(super) const ANSWER_SHARE: u32 = 4;

impl TokensMax {
    /// Returns the limit that a request to the chat or the completions endpoint sets.
    pub(super) fn requested(generation: &Generation) -> Option<Self> {
        let source = LimitSource::Request;
        let limit = |param, tokens: Option<u32>| tokens.map(|tokens| Self { param, tokens, source });
        limit("max_completion_tokens", generation.max_completion_tokens)
            .or(limit("max_tokens", generation.max_tokens))
    }

    /// Returns the limit for requests that set none.
    pub(super) fn default_of(tokens: u32) -> Self {
        Self { param: "max_tokens", tokens, source: LimitSource::Default }
    }
}

/// A request whose images have not been decoded. Attempts to truncate a conversation create such requests, so that they
/// do not decode images.
pub(super) struct UndecodedRequest {
    request: PreparedRequest,
    images: Vec<ConversationImage>,
    /// The name of the parameter with the prompts, for errors.
    param: &'static str,
}

impl UndecodedRequest {
    /// Returns the request without its images.
    pub(super) fn request(&self) -> &PreparedRequest {
        &self.request
    }

    /// Returns the number of tokens of all prompts, including those of the images.
    pub(super) fn num_prompt_tokens(&self) -> u64 {
        self.request.prompts.iter().map(|prompt| prompt.prompt.len() as u64).sum()
    }

    /// Decodes the images and reserves their memory.
    ///
    /// # Errors
    /// An image cannot be decoded, a prompt does not have the number of image tokens that its images need, the memory
    /// for images is exhausted, or the client has disconnected.
    pub(super) fn decode_images(self, target: Target<'_>) -> Result<PreparedRequest, Error> {
        let Self { mut request, mut images, param } = self;
        let Target { model, canceled, .. } = target;
        let Some(reader) = &model.images else { return Ok(request) };
        // A request with several prompts has no images. For a prompt without images, `assign` only checks that it
        // contains no image tokens.
        for prompt in &mut request.prompts {
            let images = std::mem::take(&mut images);
            let assigned = images::assign(images, &prompt.prompt, param, reader, canceled)?;
            if let Some(AssignedImages { images, memory }) = assigned {
                (prompt.images, request.image_memory) = (Some(images), Some(memory));
            }
        }
        Ok(request)
    }
}

/// The parameters that all prompts of a request share.
pub(super) struct ResolvedParameters {
    /// Number of returned choices for each prompt.
    pub(super) choices: u32,
    /// Number of generated choices for each prompt.
    pub(super) candidates: u32,
    /// The parameters of beam search, if the choices are not sampled.
    pub(super) beams: Option<BeamSearch>,
    /// The parameters of prompt lookup, if it is enabled.
    pub(super) lookup: Option<PromptLookup>,
    /// The parameters for the draft model, which have no effect if the server has no draft model.
    pub(super) draft: DraftModelParams,
    pub(super) sampling: Sampling,
    pub(super) text: TextOptions,
    pub(super) truncate: Option<Truncate>,
    /// Number of most probable tokens to report with log probabilities for each generated token.
    pub(super) logprobs: Option<u32>,
    /// Number of most probable tokens to report with log probabilities for each token of the prompt.
    pub(super) prompt_logprobs: Option<u32>,
    pub(super) stream: bool,
    pub(super) usage: UsageReporting,
    pub(super) token_ids: bool,
    pub(super) names_by_id: bool,
    pub(super) salt: u64,
    /// The number of the adapter; 0 for none.
    pub(super) adapter: u32,
    /// The constraint on the answers.
    pub(super) guide: Option<Arc<dyn Guide>>,
}

impl ResolvedParameters {
    /// Checks, before any prompt is tokenized, that `count` prompts do not have too many choices.
    ///
    /// # Errors
    /// The prompts together have too many choices.
    pub(super) fn check_choices(&self, count: usize) -> Result<(), Error> {
        if count as u64 * u64::from(self.candidates) <= u64::from(CHOICES_MAX) {
            return Ok(());
        }
        let (name, each) =
            if self.candidates > self.choices { ("best_of", self.candidates) } else { ("n", self.choices) };
        let problem =
            format!("{count} prompts with {name} = {each} exceed the limit of {CHOICES_MAX} choices");
        Err(Error::coded("integer_above_max_value", name, problem))
    }

    /// Checks that the choices do not repeat too many log probabilities or too much text of the prompts.
    ///
    /// # Errors
    /// The answer would contain too many log probabilities of prompt tokens, or too much text of the prompts.
    fn check_repeated(&self, requests: &[Request], echoes: &[String]) -> Result<(), Error> {
        let choices = u64::from(self.choices);
        let param = if choices > 1 { "n" } else { "prompt" };
        let tokens: u64 = requests.iter().map(|request| request.prompt.len() as u64).sum();
        let scored = self.sampling.prompt_logprobs.map_or(0, |top| u64::from(top) + 1);
        if tokens * choices * scored > LOGPROBS_TOTAL_MAX {
            let problem = format!(
                "{tokens} prompt tokens exceed the limit of {LOGPROBS_TOTAL_MAX} log probabilities over all choices \
                 (choices per prompt: {choices}, log probabilities per token: {scored})"
            );
            return Err(Error::coded("integer_above_max_value", param, problem));
        }
        let echoed = echoes.iter().map(|echo| echo.len() as u64).sum::<u64>() * choices;
        if echoed > ECHO_BYTES_MAX {
            let problem =
                format!("the choices would repeat {echoed} bytes of prompts (limit: {ECHO_BYTES_MAX} bytes)");
            return Err(Error::coded("integer_above_max_value", param, problem));
        }
        Ok(())
    }

    /// Limits the number of generated tokens so that the answer does not have too many log probabilities. The engine
    /// also reports them for `best_of` and for token IDs.
    ///
    /// # Errors
    /// An answer of the requested length, or of the minimum length, would have too many log probabilities.
    fn limit_logprobs(&self, requests: &mut [Request], tokens_max: Option<TokensMax>) -> Result<(), Error> {
        let Some(top) = self.sampling.logprobs else { return Ok(()) };
        let choices = requests.len() as u64 * u64::from(self.candidates);
        let logprobs = u64::from(top) + 1;
        let limit = LOGPROBS_TOTAL_MAX / (choices * logprobs).max(1);
        let limit = u32::try_from(limit).unwrap_or(u32::MAX);
        for request in requests.iter_mut().filter(|request| request.stop.max_tokens > limit) {
            if let Some(TokensMax { param, tokens, source: LimitSource::Request }) = tokens_max {
                let problem = match self.implied_logprobs() {
                    None => format!(
                        "{tokens} tokens per choice exceed the limit of {LOGPROBS_TOTAL_MAX} log probabilities over all \
                         choices (choices: {choices}, log probabilities per token: {logprobs})"
                    ),
                    Some(cause) => format!(
                        "with {cause}, {tokens} tokens per choice exceed the limit of {LOGPROBS_TOTAL_MAX} tokens over all \
                         choices (choices: {choices})"
                    ),
                };
                return Err(Error::coded("integer_above_max_value", param, problem));
            }
            self.check_tokens_min(limit)?;
            request.stop.max_tokens = limit;
        }
        Ok(())
    }

    /// Returns the parameter that makes the engine report log probabilities that the request does not ask for; `None`
    /// if the request asks for them.
    fn implied_logprobs(&self) -> Option<&'static str> {
        let cause = if !self.text.detokenize {
            "detokenize = false"
        } else if self.token_ids {
            "return_token_ids"
        } else {
            "best_of"
        };
        self.logprobs.is_none().then_some(cause)
    }

    /// Checks that the minimum number of generated tokens is not above the maximum.
    fn check_tokens_min(&self, tokens_max: u32) -> Result<(), Error> {
        let tokens_min = self.text.tokens_min;
        if tokens_min > tokens_max {
            let problem =
                format!("{tokens_min} is greater than {tokens_max}, the maximum number of generated tokens");
            return Err(Error::coded("integer_above_max_value", "min_tokens", problem));
        }
        Ok(())
    }

    /// Returns the context length; `None` if longer prompts are truncated.
    pub(super) fn prompt_tokens_max(&self, target: Target<'_>) -> Option<u32> {
        self.truncate.is_none().then_some(target.limits.requests.max_model_len)
    }

    /// Creates the requests to the engine. Without `tokens_max`, an answer may fill the context length.
    pub(super) fn prepare(
        self,
        model: String,
        source: PromptSource,
        tokens_max: Option<TokensMax>,
        target: Target<'_>,
    ) -> Result<UndecodedRequest, Error> {
        let PromptSource { prompts, param, mut echoes, images } = source;
        if !images.is_empty() && self.sampling.prompt_logprobs.is_some() {
            return Err(Error::invalid("prompt_logprobs", "cannot be combined with images"));
        }
        let count = prompts.len();
        let tokenizer = &target.model.text.tokenizer;
        let mut requests = Vec::with_capacity(count);
        for (index, mut prompt) in prompts.into_iter().enumerate() {
            let is_truncated = self.truncate(&mut prompt, tokens_max, target);
            if is_truncated && !images.is_empty() {
                let problem = "cannot remove the beginning of a prompt with images";
                return Err(Error::invalid("truncate_prompt_tokens", problem));
            }
            if is_truncated && let Some(echo) = echoes.get_mut(index).filter(|echo| !echo.is_empty()) {
                *echo = tokenizer.decode(&prompt, false);
            }
            let mut request = self.request(prompt, &images, param, tokens_max, target)?;
            if index > 0 && request.sampling.seed == target.seed {
                // The request sets no seed, so its prompts get different seeds, which make their choices independent.
                request.sampling.seed = mix(target.seed ^ mix(index as u64));
            }
            requests.push(request);
        }
        self.check_repeated(&requests, &echoes)?;
        self.limit_logprobs(&mut requests, tokens_max)?;
        echoes.resize(count, String::new());
        let discards = tokens_max.is_some_and(|max| max.tokens == 0);
        let answer_options = AnswerOptions {
            model,
            stream: self.stream,
            usage: self.usage,
            choices: self.choices,
            logprobs: self.logprobs,
            prompt_logprobs: self.prompt_logprobs,
            token_ids: self.token_ids,
            names_by_id: self.names_by_id,
            calls_functions: false,
            prompts: if self.token_ids || self.sampling.prompt_logprobs.is_some() {
                requests.iter().map(|request| Arc::from(request.prompt.as_slice())).collect()
            } else {
                Vec::new()
            },
        };
        let text = TextOptions { discards, ..self.text };
        let request = PreparedRequest { prompts: requests, image_memory: None, echoes, text, answer_options };
        Ok(UndecodedRequest { request, images, param })
    }

    fn request(
        &self,
        prompt: Vec<TokenId>,
        images: &[ConversationImage],
        param: &'static str,
        tokens_max: Option<TokensMax>,
        target: Target<'_>,
    ) -> Result<Request, Error> {
        let tokens_max = self.room(&prompt, images, param, tokens_max, target)?;
        self.check_tokens_min(tokens_max)?;
        let stop = StopCriteria {
            stop_token_ids: self.text.stop_tokens.clone(),
            max_tokens: tokens_max,
            min_tokens: self.text.tokens_min,
        };
        let sampling = self.sampling.clone();
        let guide = self.guide.clone();
        let (beams, lookup) = (self.beams.clone(), self.lookup.clone());
        Ok(Request {
            prompt,
            num_sequences: self.candidates,
            beam_search: beams,
            lookup,
            draft: Some(self.draft),
            sampling,
            stop,
            guide,
            cache_salt: self.salt,
            adapter: self.adapter,
            tenant: 0,
            images: None,
        })
    }

    /// Removes the beginning of a prompt if truncation is requested. Returns whether the prompt was truncated.
    fn truncate(&self, prompt: &mut Vec<TokenId>, tokens_max: Option<TokensMax>, target: Target<'_>) -> bool {
        let tokens_left = match self.truncate {
            None => return false,
            Some(Truncate::To(tokens)) => tokens,
            Some(Truncate::ToRoom) => {
                let length = target.limits.requests.max_model_len;
                let answer = match tokens_max {
                    None => 1,
                    // The default length of the answer may exceed the context length. Cap it, because the prompt takes
                    // precedence over a default.
                    Some(TokensMax { tokens, source: LimitSource::Default, .. }) => {
                        tokens.min(length / ANSWER_SHARE)
                    }
                    Some(TokensMax { tokens, .. }) => tokens,
                };
                length.saturating_sub(answer.max(1)).max(1)
            }
        };
        let excess = prompt.len().saturating_sub(tokens_left as usize);
        prompt.drain(..excess);
        excess > 0
    }

    /// Returns the number of tokens that may be generated after `prompt`. `param` is the name of the prompt's
    /// parameter.
    fn room(
        &self,
        prompt: &[TokenId],
        images: &[ConversationImage],
        param: &'static str,
        tokens_max: Option<TokensMax>,
        target: Target<'_>,
    ) -> Result<u32, Error> {
        let width = if self.beams.is_some() { self.candidates } else { 1 };
        let length = target.limits.requests.lockstep_model_len(width);
        let limit = if length < target.limits.requests.max_model_len {
            format!("the {length} tokens available to each of {width} beams")
        } else {
            format!("the context length of {length} tokens")
        };
        if prompt.is_empty() {
            return Err(Error::invalid(param, "is empty"));
        }
        let tokens = prompt.len();
        let for_images = images::image_tokens_note(images::num_tokens(images));
        let room = u32::try_from(tokens).ok().and_then(|tokens| length.checked_sub(tokens)).unwrap_or(0);
        if room == 0 {
            let message = format!(
                "{param}: the prompt has {tokens} tokens{for_images}, which leaves no room for generated tokens in \
                 {limit}"
            );
            return Err(Error::ContextLength { param: param.to_owned(), message });
        }
        match tokens_max {
            None => Ok(room),
            Some(max) if max.tokens <= room => Ok(max.tokens),
            Some(TokensMax { source: LimitSource::Default, .. }) => Ok(room),
            Some(TokensMax { param, tokens: requested, .. }) => {
                let message = format!(
                    "{param}: {tokens} prompt tokens{for_images} and {requested} generated tokens exceed {limit}"
                );
                Err(Error::ContextLength { param: param.to_owned(), message })
            }
        }
    }
}

#[cfg(test)]
mod tests;
