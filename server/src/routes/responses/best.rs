//! The deltas of an answer, of which only the best choices may be wanted: then all have to be there before any is
//! passed on.

use server_openai::Usage;

use crate::error::Error;
use crate::respond::{Answer, Delta};

/// The deltas of the choices that are wanted.
#[derive(Debug)]
pub(super) struct Deltas {
    answer: Answer,
    /// How many are generated, and how many are wanted, where these differ.
    best_of: Option<(u32, u32)>,
}

impl Deltas {
    pub(super) fn new(answer: Answer, candidates: u32, wanted: u32) -> Self {
        Self { answer, best_of: (candidates > wanted).then_some((candidates, wanted)) }
    }

    /// What is new; nothing once all choices have ended.
    pub(super) async fn next(&mut self) -> Option<Result<Vec<Delta>, Error>> {
        let Some((candidates, wanted)) = self.best_of else { return self.answer.next().await };
        let mut all = Vec::new();
        while let Some(deltas) = self.answer.next().await {
            match deltas {
                Ok(deltas) => all.extend(deltas),
                Err(error) => return Some(Err(error)),
            }
        }
        self.best_of = None;
        Some(Ok(best(all, candidates as usize, wanted as usize)))
    }

    /// The tokens used so far.
    pub(super) fn usage(&self) -> Usage {
        self.answer.usage()
    }
}

/// The deltas of the choices with the greatest log probability per token, numbered by that, best first.
fn best(deltas: Vec<Delta>, candidates: usize, wanted: usize) -> Vec<Delta> {
    let mut scores = vec![(0.0, 0_usize); candidates];
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
    let mean = |choice: usize| scores[choice].0 / scores[choice].1.max(1) as f64;
    let mut order: Vec<usize> = (0..candidates).collect();
    // Stable: the first of equals.
    order.sort_by(|&a, &b| mean(b).total_cmp(&mean(a)));
    let place = |delta: &Delta| order.iter().position(|&choice| choice == delta.choice() as usize);
    let mut kept: Vec<(usize, Delta)> = deltas
        .into_iter()
        .filter_map(|delta| Some((place(&delta)?, delta)))
        .filter(|(place, _)| *place < wanted)
        .collect();
    kept.sort_by_key(|(place, _)| *place);
    kept.into_iter().map(|(place, delta)| numbered(delta, place as u32)).collect()
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
}
