//! What a step samples: a token for each sequence, with its log probabilities, or that it has ended.

use server_scheduler::{Batch, SequenceId, TokenId};

use super::guides::Next;
use super::{Requests, index_of, request_of};
use crate::request::TokenLogprobs;
use crate::runner::Logits;
use crate::sampler::{Choice, Sampler};

#[derive(Default)]
pub(super) struct Samples {
    /// In the order of the batch's samples; a sequence that has no new token has some.
    pub(super) tokens: Vec<(SequenceId, TokenId)>,
    /// As long as `tokens`.
    pub(super) outcomes: Vec<Outcome>,
    /// Requests whose logits or guides gave no token, and why.
    pub(super) failed: Vec<(u64, String)>,
}

/// What a sampled token is.
pub(super) enum Outcome {
    /// A token of the sequence.
    Token(Option<Box<TokenLogprobs>>),
    /// Its last token: its guide lets nothing follow.
    Last(Option<Box<TokenLogprobs>>),
    /// None: the sequence had ended before.
    Nothing,
}

impl Samples {
    /// Forgets the last step's.
    pub(super) fn clear(&mut self) {
        self.tokens.clear();
        self.outcomes.clear();
        self.failed.clear();
    }

    /// Samples a token for each sequence of `batch` that samples.
    pub(super) fn take(
        &mut self,
        batch: &Batch,
        logits: Logits<'_>,
        requests: &mut Requests,
        sampler: &mut Sampler,
    ) {
        for (row, logits) in batch.sampling_rows().zip(logits.rows()) {
            for &sequence in batch.row_samples(row) {
                let (token, outcome) = match sample(sequence, logits, requests, sampler) {
                    Ok(sampled) => sampled,
                    Err(message) => {
                        self.failed.push((request_of(sequence), message));
                        (0, Outcome::Nothing)
                    }
                };
                self.tokens.push((sequence, token));
                self.outcomes.push(outcome);
            }
        }
    }
}

fn sample(
    sequence: SequenceId,
    logits: &[f32],
    requests: &mut Requests,
    sampler: &mut Sampler,
) -> Result<(TokenId, Outcome), String> {
    let live =
        requests.live.get_mut(&request_of(sequence)).expect("invariant: what is scheduled is live");
    let index = index_of(sequence);
    let history = &live.histories[index as usize];
    let slot = live.guides.get_mut(index as usize);
    let mut choice =
        Choice { sampling: &live.sampling, stop: &live.stop, history, index, allowed: None };
    let Some(slot) = slot else {
        let token = sampler.sample(logits, &choice).map_err(|error| error.to_string())?;
        return Ok((token, Outcome::Token(logprobs(&choice, logits, token, sampler))));
    };
    match slot.next(&live.stop, history.generated()).map_err(|error| error.to_string())? {
        Next::End => return Ok((0, Outcome::Nothing)),
        Next::Sample(allowed) => choice.allowed = Some(allowed),
    }
    let token = sampler.sample(logits, &choice).map_err(|error| error.to_string())?;
    let logprobs = logprobs(&choice, logits, token, sampler);
    let ends = slot.commit(token, &live.stop).map_err(|error| error.to_string())?;
    Ok((token, if ends { Outcome::Last(logprobs) } else { Outcome::Token(logprobs) }))
}

fn logprobs(
    choice: &Choice<'_>,
    logits: &[f32],
    token: TokenId,
    sampler: &mut Sampler,
) -> Option<Box<TokenLogprobs>> {
    choice.sampling.logprobs.map(|count| Box::new(sampler.logprobs(logits, token, count)))
}
