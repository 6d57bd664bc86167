//! Selects the best choices of each prompt (`best_of`).

use super::delta::ChoiceDelta;

/// Selects the `returned` choices with the greatest mean log probability per token from the `candidates` choices of
/// each prompt. Returns their deltas with new choice indices, so that the best choice of each prompt comes first.
pub(super) fn best(deltas: Vec<ChoiceDelta>, candidates: u32, returned: u32) -> Vec<ChoiceDelta> {
    let choices = deltas.iter().map(|delta| delta.choice() + 1).max().unwrap_or(0);
    let mut scores = vec![(0.0, 0_usize); choices as usize];
    for delta in &deltas {
        let (ChoiceDelta::Text { choice, tokens, .. }
        | ChoiceDelta::Reasoning { choice, tokens, .. }
        | ChoiceDelta::CallArguments { choice, tokens, .. }) = delta
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
    // The sort is stable, so the first of several equal choices wins.
    order.sort_by(|&a, &b| (a / candidates).cmp(&(b / candidates)).then(mean(b).total_cmp(&mean(a))));
    let mut numbers = vec![None; choices as usize];
    for (place, choice) in (0..).zip(order) {
        let (prompt, rank) = (place / candidates, place % candidates);
        numbers[choice as usize] = (rank < returned).then_some(prompt * returned + rank);
    }
    let mut best: Vec<ChoiceDelta> = deltas
        .into_iter()
        .filter_map(|delta| numbers[delta.choice() as usize].map(|number| delta.with_choice(number)))
        .collect();
    best.sort_by_key(ChoiceDelta::choice);
    best
}

#[cfg(test)]
mod tests {
    use server_openai::ChoiceFinishReason;

    use super::*;
    use crate::respond::TokenText;

    #[test]
    fn the_most_probable_choices_per_token_are_returned_in_order() {
        let text = |choice, text: &str, logprobs: &[f32]| ChoiceDelta::Text {
            choice,
            text: text.to_owned(),
            tokens: logprobs
                .iter()
                .map(|&logprob| TokenText { token: 0, start: 0, logprob, top: Vec::new() })
                .collect(),
        };
        let end = |choice| ChoiceDelta::End { choice, reason: ChoiceFinishReason::Stop, tokens: Vec::new() };
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
        let chosen = best(deltas, 3, 2);
        let expected = vec![
            text(0, "b", &[-0.5, -0.5]),
            text(0, "e", &[-0.2]),
            end(0),
            text(1, "a", &[-1.0]),
            text(1, "d", &[-0.0]),
            end(1),
        ];
        assert_eq!(chosen, expected);
    }

    #[test]
    fn each_prompt_has_its_own_best() {
        let delta = |choice, text: &str, logprob| ChoiceDelta::Text {
            choice,
            text: text.to_owned(),
            tokens: vec![TokenText { token: 0, start: 0, logprob, top: Vec::new() }],
        };
        let deltas = vec![delta(0, "a", -2.0), delta(3, "d", -5.0), delta(1, "b", -3.0), delta(2, "c", -6.0)];
        assert_eq!(best(deltas, 2, 1), [delta(0, "a", -2.0), delta(1, "d", -5.0)]);
    }
}
