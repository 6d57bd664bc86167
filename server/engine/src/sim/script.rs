//! What a simulated model says in a conversation, instead of gibberish: a text for each of its turns. Which turn it
//! is can be told from the tokens alone, so the same conversation has the same answer on every replica, from
//! whatever cache.

use server_scheduler::TokenId;

/// What a model says in each of its turns.
#[derive(Clone, Debug)]
pub struct SimScript {
    /// What opens a turn of the model. Not empty.
    pub opening: Vec<TokenId>,
    /// What it says in the first, the second and so on, with the token that ends it. After the last turn it says the
    /// last again. Not empty.
    pub answers: Vec<Vec<TokenId>>,
}

impl SimScript {
    /// The token that follows `tokens`; `None` in a text without turns.
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
    fn each_turn_has_its_answer_and_those_after_the_last_its() {
        let script = SimScript { opening: vec![1, 2], answers: vec![vec![10, 11], vec![20, 21]] };
        let next = |tokens: &[TokenId]| script.next(tokens);
        assert_eq!(next(&[]), None);
        assert_eq!(next(&[5, 1]), None);
        assert_eq!(next(&[5, 1, 2]), Some(10));
        assert_eq!(next(&[5, 1, 2, 10]), Some(11));
        assert_eq!(next(&[5, 1, 2, 10, 11]), Some(11), "whoever ignores the end gets it again");
        assert_eq!(next(&[5, 1, 2, 10, 11, 6, 1, 2]), Some(20));
        assert_eq!(next(&[1, 2, 1, 2, 1, 2, 20]), Some(21));
    }
}
