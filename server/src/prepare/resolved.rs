//! What is the same for all prompts of a request, and how each prompt then becomes a request to the engine: cut,
//! if it is to be, and with the tokens that may be generated after it.

use std::sync::Arc;

use server_engine::{
    BeamSearch, DraftModelParams, Guide, PromptLookup, Request, Sampling, StopCriteria, TokenId,
};

use super::{Prepared, Reply, Target, TextRule, UsageRule};
use crate::error::Error;
use crate::limits::CHOICES_MAX;

/// Tokenised prompts, what they come from, and what their texts are if they are echoed.
pub(super) struct Source {
    pub(super) prompts: Vec<Vec<TokenId>>,
    /// The parameter.
    pub(super) param: &'static str,
    /// Empty if they are not.
    pub(super) echoes: Vec<String>,
}

/// Which part of a prompt is kept: its last tokens.
#[derive(Clone, Copy, Debug)]
pub(super) enum Truncate {
    To(u32),
    /// As many as leave room for the answer.
    ToRoom,
}

/// Tokens to generate.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TokensMax {
    /// The parameter.
    pub(super) param: &'static str,
    pub(super) tokens: u32,
}

/// What is the same for all prompts of a request.
pub(super) struct Resolved {
    pub(super) choices: u32,
    /// Of which so many are generated.
    pub(super) candidates: u32,
    /// If they are searched for and not drawn.
    pub(super) beams: Option<BeamSearch>,
    /// How what comes next is guessed, if it is.
    pub(super) lookup: Option<PromptLookup>,
    /// How a draft model guesses, if there is one.
    pub(super) draft: DraftModelParams,
    pub(super) sampling: Sampling,
    pub(super) text: TextRule,
    pub(super) truncate: Option<Truncate>,
    /// Log probabilities of the generated tokens.
    pub(super) logprobs: Option<u32>,
    /// Of the prompt's.
    pub(super) prompt_logprobs: Option<u32>,
    pub(super) stream: bool,
    pub(super) usage: UsageRule,
    pub(super) token_ids: bool,
    pub(super) names_by_id: bool,
    pub(super) salt: u64,
    /// The number of the adapter.
    pub(super) adapter: u32,
    /// What answers are held to.
    pub(super) guide: Option<Arc<dyn Guide>>,
}

impl Resolved {
    /// Checks that `count` prompts do not ask for too many choices, before any of them is tokenized.
    ///
    /// # Errors
    /// They do.
    pub(super) fn check_choices(&self, count: usize) -> Result<(), Error> {
        if count as u64 * u64::from(self.candidates) <= u64::from(CHOICES_MAX) {
            return Ok(());
        }
        let (name, each) =
            if self.candidates > self.choices { ("best_of", self.candidates) } else { ("n", self.choices) };
        let problem = format!("{count} prompts with {name} = {each} are more than {CHOICES_MAX} choices");
        Err(Error::coded("integer_above_max_value", name, problem))
    }

    /// Most tokens that a prompt can have; `None` if longer ones are truncated.
    pub(super) fn prompt_tokens_max(&self, target: Target<'_>) -> Option<u32> {
        self.truncate.is_none().then_some(target.limits.requests.max_model_len)
    }

    /// Without `tokens_max` a prompt gets all the room that there is.
    pub(super) fn prepare(
        self,
        model: String,
        source: Source,
        tokens_max: Option<TokensMax>,
        target: Target<'_>,
    ) -> Result<Prepared, Error> {
        let Source { prompts, param, mut echoes } = source;
        let count = prompts.len();
        let tokenizer = &target.model.text.tokenizer;
        let mut requests = Vec::with_capacity(count);
        for (index, mut prompt) in prompts.into_iter().enumerate() {
            if self.truncate(&mut prompt, tokens_max, target)
                && let Some(echo) = echoes.get_mut(index).filter(|echo| !echo.is_empty())
            {
                *echo = tokenizer.decode(&prompt, false);
            }
            requests.push(self.request(prompt, param, tokens_max, target)?);
        }
        echoes.resize(count, String::new());
        let discards = tokens_max.is_some_and(|most| most.tokens == 0);
        let reply = Reply {
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
                requests.iter().map(|request| request.prompt.clone()).collect()
            } else {
                Vec::new()
            },
        };
        Ok(Prepared { prompts: requests, echoes, text: TextRule { discards, ..self.text }, reply })
    }

    fn request(
        &self,
        prompt: Vec<TokenId>,
        param: &'static str,
        tokens_max: Option<TokensMax>,
        target: Target<'_>,
    ) -> Result<Request, Error> {
        let width = self.beams.as_ref().map(|_| self.candidates);
        let tokens_max = room((&prompt, param), width, tokens_max, target)?;
        let tokens_min = self.text.tokens_min;
        if tokens_min > tokens_max {
            let problem = format!("{tokens_min} is more than the {tokens_max} tokens that may be generated");
            return Err(Error::coded("integer_above_max_value", "min_tokens", problem));
        }
        let stop = StopCriteria {
            stop_token_ids: self.text.stop_tokens.clone(),
            max_tokens: tokens_max,
            min_tokens: tokens_min,
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
        })
    }

    /// Cuts the beginning off a prompt. Answers whether anything went.
    fn truncate(&self, prompt: &mut Vec<TokenId>, tokens_max: Option<TokensMax>, target: Target<'_>) -> bool {
        let kept = match self.truncate {
            None => return false,
            Some(Truncate::To(kept)) => kept,
            Some(Truncate::ToRoom) => {
                let answer = tokens_max.map_or(1, |most| most.tokens.max(1));
                target.limits.requests.max_model_len.saturating_sub(answer).max(1)
            }
        };
        let excess = prompt.len().saturating_sub(kept as usize);
        prompt.drain(..excess);
        excess > 0
    }
}

/// Tokens that may be generated after `prompt`, which came as `param`, none among them; by so many beams, if any.
fn room(
    (prompt, param): (&[TokenId], &'static str),
    width: Option<u32>,
    tokens_max: Option<TokensMax>,
    target: Target<'_>,
) -> Result<u32, Error> {
    let most = target.limits.requests.lockstep_model_len(width.unwrap_or(1));
    let whose = match width {
        Some(width) if most < target.limits.requests.max_model_len => {
            format!("the {most} tokens for which {width} beams have room")
        }
        _ => format!("this model's {most} tokens"),
    };
    if prompt.is_empty() {
        return Err(Error::invalid(param, "is empty"));
    }
    let room = u32::try_from(prompt.len()).ok().and_then(|tokens| most.checked_sub(tokens)).unwrap_or(0);
    let tokens = prompt.len();
    if room == 0 {
        let message = format!("{param}: the prompt of {tokens} tokens leaves no room in {whose}");
        return Err(Error::ContextLength { param: param.to_owned(), message });
    }
    match tokens_max {
        None => Ok(room),
        Some(TokensMax { tokens: wanted, .. }) if wanted <= room => Ok(wanted),
        Some(TokensMax { param, tokens: wanted }) => {
            let message = format!(
                "{param}: a prompt of {tokens} tokens and {wanted} to generate are more than {whose}"
            );
            Err(Error::ContextLength { param: param.to_owned(), message })
        }
    }
}
