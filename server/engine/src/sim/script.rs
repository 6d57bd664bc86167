//! The answers of a simulated model in a conversation: one text for each turn. The turn is determined from the tokens
//! alone, so the same conversation gets the same answer on every replica, whatever the replica's cache contains.

use server_scheduler::TokenId;

/// The answers of a model in each of its turns.
#[derive(Clone, Debug)]
pub struct SimScript {
    /// The tokens that open a turn of the model. At least one token is required.
    pub opening: Vec<TokenId>,
    /// The answers in the order of the turns, each including the token that ends it. The last answer is repeated in
    /// further turns. At least one answer is required.
    pub answers: Vec<Vec<TokenId>>,
}

impl SimScript {
    /// The token that follows `tokens`, or `None` if `tokens` does not contain [`Self::opening`].
    pub(super) fn next(&self, tokens: &[TokenId]) -> Option<TokenId> {
        let length = self.opening.len();
        let mut openings = tokens.windows(length).enumerate().filter(|(_, window)| *window == self.opening);
        let mut turn = openings.next().map(|(at, _)| (0, at + length))?;
        for (at, _) in openings {
            turn = (turn.0 + 1, at + length);
        }
        let answer = self.answers.get(turn.0).or(self.answers.last())?;
        answer.get(tokens.len() - turn.1).or(answer.last()).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_turn_has_its_answer_and_the_last_is_repeated() {
        let script = SimScript { opening: vec![1, 2], answers: vec![vec![10, 11], vec![20, 21]] };
        let next = |tokens: &[TokenId]| script.next(tokens);
        assert_eq!(next(&[]), None);
        assert_eq!(next(&[5, 1]), None);
        assert_eq!(next(&[5, 1, 2]), Some(10));
        assert_eq!(next(&[5, 1, 2, 10]), Some(11));
        assert_eq!(next(&[5, 1, 2, 10, 11]), Some(11), "the end is repeated if it is ignored");
        assert_eq!(next(&[5, 1, 2, 10, 11, 6, 1, 2]), Some(20));
        assert_eq!(next(&[1, 2, 1, 2, 1, 2, 20]), Some(21));
    }
}
