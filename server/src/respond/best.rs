//! The deltas of an answer, of which only the best choices of each prompt may be wanted: then all have to be there
//! before any is passed on.

use std::sync::Arc;

use server_engine::ScoredToken;
use server_openai::Usage;

use super::{Answer, Delta};
use crate::error::Error;

/// The deltas of the choices that are wanted.
#[derive(Debug)]
pub(crate) struct Deltas {
    answer: Answer,
    /// How many are generated for each prompt, and how many are wanted, where these differ.
    best_of: Option<(u32, u32)>,
}

impl Deltas {
    pub(crate) fn new(answer: Answer, candidates: u32, wanted: u32) -> Self {
        Self { answer, best_of: (candidates > wanted).then_some((candidates, wanted)) }
    }

    /// As [`Answer::next`].
    pub(crate) async fn next(&mut self) -> Option<Result<Vec<Delta>, Error>> {
        let Some((candidates, wanted)) = self.best_of else { return self.answer.next().await };
        let mut all = Vec::new();
        while let Some(deltas) = self.answer.next().await {
            match deltas {
                Ok(deltas) => all.extend(deltas),
                Err(error) => return Some(Err(error)),
            }
        }
        self.best_of = None;
        Some(Ok(best(all, candidates, wanted)))
    }

    /// As [`Answer::scores`].
    pub(crate) fn scores(&self) -> Vec<Option<Arc<[ScoredToken]>>> {
        self.answer.scores()
    }

    /// The tokens used so far.
    pub(crate) fn usage(&self) -> Usage {
        self.answer.usage()
    }
}

/// Of the choices of each prompt those with the greatest log probability per token, numbered by that, best first.
fn best(deltas: Vec<Delta>, candidates: u32, wanted: u32) -> Vec<Delta> {
    let choices = deltas.iter().map(|delta| delta.choice() + 1).max().unwrap_or(0);
    let mut scores = vec![(0.0, 0_usize); choices as usize];
    for delta in &deltas {
        let (Delta::Text { choice, tokens, .. }
        | Delta::Reasoning { choice, tokens, .. }
        | Delta::CallArguments { choice, tokens, .. }) = delta
        else {
            continue;
        };
        let (sum, count) = &mut scores[*choice as usize];
        *sum += tokens.iter().map(|token| f64::from(token.logprob)).sum::<f64>();
        *count += tokens.len();
    }
    let mean = |choice: u32| {
        let (sum, count) = scores[choice as usize];
        sum / count.max(1) as f64
    };
    let mut order: Vec<u32> = (0..choices).collect();
    // Prompt by prompt. Stable: the first of equals.
    order.sort_by(|&a, &b| (a / candidates).cmp(&(b / candidates)).then(mean(b).total_cmp(&mean(a))));
    let mut numbers = vec![None; choices as usize];
    for (place, choice) in (0..).zip(order) {
        let (prompt, rank) = (place / candidates, place % candidates);
        numbers[choice as usize] = (rank < wanted).then_some(prompt * wanted + rank);
    }
    let mut kept: Vec<Delta> = deltas
        .into_iter()
        .filter_map(|delta| numbers[delta.choice() as usize].map(|number| numbered(delta, number)))
        .collect();
    kept.sort_by_key(Delta::choice);
    kept
}

fn numbered(mut delta: Delta, number: u32) -> Delta {
    match &mut delta {
        Delta::Text { choice, .. }
        | Delta::Reasoning { choice, .. }
        | Delta::CallBegin { choice, .. }
        | Delta::CallArguments { choice, .. }
        | Delta::CallEnd { choice, .. }
        | Delta::End { choice, .. } => *choice = number,
    }
    delta
}

#[cfg(test)]
mod tests {
    use server_openai::FinishReason;

    use super::*;
    use crate::respond::TokenText;

    #[test]
    fn the_most_probable_per_token_are_kept_in_that_order() {
        let text = |choice, text: &str, logprobs: &[f32]| Delta::Text {
            choice,
            text: text.to_owned(),
            tokens: logprobs
                .iter()
                .map(|&logprob| TokenText { token: 0, start: 0, logprob, top: Vec::new() })
                .collect(),
        };
        let end = |choice| Delta::End { choice, reason: FinishReason::Stop };
        let deltas = vec![
            text(0, "a", &[-1.0]),
            text(1, "b", &[-0.5, -0.5]),
            text(2, "c", &[-3.0]),
            text(0, "d", &[-0.0]),
            text(1, "e", &[-0.2]),
            end(2),
            end(0),
            end(1),
        ];
        let kept = best(deltas, 3, 2);
        let expected = vec![
            text(0, "b", &[-0.5, -0.5]),
            text(0, "e", &[-0.2]),
            end(0),
            text(1, "a", &[-1.0]),
            text(1, "d", &[-0.0]),
            end(1),
        ];
        assert_eq!(kept, expected);
    }

    #[test]
    fn each_prompt_has_its_own_best() {
        let delta = |choice, text: &str, logprob| Delta::Text {
            choice,
            text: text.to_owned(),
            tokens: vec![TokenText { token: 0, start: 0, logprob, top: Vec::new() }],
        };
        let deltas = vec![delta(0, "a", -2.0), delta(3, "d", -5.0), delta(1, "b", -3.0), delta(2, "c", -6.0)];
        assert_eq!(best(deltas, 2, 1), [delta(0, "a", -2.0), delta(1, "d", -5.0)]);
    }
}
