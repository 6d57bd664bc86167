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
        let mut logits = logits.rows();
        for row in &batch.rows {
            for (place, logits) in row.scored.clone().zip(&mut logits) {
                score(
                    row.sequence,
                    (row.past + place - row.tokens.start) as usize,
                    logits,
                    (&mut *requests, &mut *sampler),
                );
            }
            if row.samples.is_empty() {
                continue;
            }
            let logits = logits.next().expect("invariant: there is a row of logits for each token wanted");
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

/// Takes the log probability of the token after the one at `position` of a prompt.
fn score(
    sequence: SequenceId,
    position: usize,
    logits: &[f32],
    (requests, sampler): (&mut Requests, &mut Sampler),
) {
    let live = requests.live.get_mut(&request_of(sequence)).expect("invariant: what is scheduled is live");
    let scores = live.scores.as_mut().zip(live.sampling.prompt_logprobs);
    let (scores, count) = scores.expect("invariant: whose scores are wanted has asked for them");
    assert_eq!(scores.tokens.len(), position, "invariant: a prompt is scored in order");
    scores.tokens.push(sampler.score(logits, scores.prompt[position + 1], count));
}

fn sample(
    sequence: SequenceId,
    logits: &[f32],
    requests: &mut Requests,
    sampler: &mut Sampler,
) -> Result<(TokenId, Outcome), String> {
    let live = requests.live.get_mut(&request_of(sequence)).expect("invariant: what is scheduled is live");
    let index = index_of(sequence);
    let history = &live.histories[index as usize];
    let slot = live.guides.get_mut(index as usize);
    let mut choice = Choice { sampling: &live.sampling, stop: &live.stop, history, index, allowed: None };
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
