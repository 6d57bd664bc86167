//! Prompt lookup: guesses what comes next from where the last tokens were before, in the prompt, in the output or in what
//! the client expects. Many answers repeat parts of their question. (Saxena, "Prompt Lookup Decoding", 2023.)
//!
//! Pure. It guesses and nothing else: how many guesses are worth computing is decided by those who know what that costs.

use std::collections::HashMap;

use server_scheduler::TokenId;

use crate::sampler::mix;

/// More tokens than these say no more about what follows.
pub(crate) const MATCH_MAX: usize = 8;

/// Whether and how the next tokens of a request's sequences are guessed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PromptLookup {
    /// How many of the last tokens are looked for, at most; more than eight are as eight.
    pub ngram_max: u32,
    /// Most tokens that are guessed at a time.
    pub tokens_max: u32,
    /// What the output is expected to be, if anything is.
    pub prediction: Vec<TokenId>,
}

/// A text, and where each of its runs of tokens was last.
#[derive(Clone, Debug)]
pub(crate) struct Lookup {
    text: Vec<TokenId>,
    /// By the length of the run less one, and its hash: where the token after it is.
    places: Vec<HashMap<u64, u32>>,
}

/// In no vocabulary: no run goes from one text into another.
const BETWEEN: TokenId = TokenId::MAX;

impl Lookup {
    pub(crate) fn new(config: &PromptLookup, prompt: &[TokenId]) -> Self {
        let longest = (config.ngram_max as usize).clamp(1, MATCH_MAX);
        let mut lookup = Self { text: Vec::new(), places: vec![HashMap::new(); longest] };
        let prediction = config.prediction.iter().copied().chain([BETWEEN]);
        prediction.chain(prompt.iter().copied()).for_each(|token| lookup.push(token));
        lookup
    }

    /// Adds a token of the output.
    pub(crate) fn push(&mut self, token: TokenId) {
        let place = self.text.len() as u32;
        // Only now, so that a run is not found where it ends the text.
        for (length, hash) in hashes(&self.text, self.places.len()) {
            self.places[length - 1].insert(hash, place);
        }
        self.text.push(token);
    }

    /// Puts into `guess` what came after the longest run of the last tokens that was there before, the last time: at most
    /// `most` tokens; what came last is taken to come again. Answers how long the run is; 0 if there is none.
    pub(crate) fn guess(&self, most: usize, guess: &mut Vec<TokenId>) -> usize {
        guess.clear();
        let (mut matched, mut from) = (0, 0);
        for (length, hash) in hashes(&self.text, self.places.len()) {
            let Some(&place) = self.places[length - 1].get(&hash) else { break };
            let place = place as usize;
            let (run, last) = (&self.text[place - length..place], &self.text[self.text.len() - length..]);
            if run == last {
                (matched, from) = (length, place);
            }
        }
        while matched > 0 && guess.len() < most {
            let place = from + guess.len();
            let token = self.text.get(place).copied().unwrap_or_else(|| guess[place - self.text.len()]);
            if token == BETWEEN {
                break;
            }
            guess.push(token);
        }
        if guess.is_empty() { 0 } else { matched }
    }
}

/// The hashes of the last tokens, one, two and so on.
fn hashes(text: &[TokenId], longest: usize) -> impl Iterator<Item = (usize, u64)> {
    let last = text.iter().rev().take_while(|&&token| token != BETWEEN);
    let hashed = last.take(longest).scan(0, |hash, &token| {
        *hash = mix(*hash ^ u64::from(token));
        Some(*hash)
    });
    (1..).zip(hashed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lookup(prediction: &str, text: &str) -> Lookup {
        let tokens = |text: &str| text.bytes().map(TokenId::from).collect::<Vec<_>>();
        let config = PromptLookup { ngram_max: 3, tokens_max: 5, prediction: tokens(prediction) };
        Lookup::new(&config, &tokens(text))
    }

    fn guess(lookup: &Lookup, most: usize) -> (usize, String) {
        let mut guess = Vec::new();
        let matched = lookup.guess(most, &mut guess);
        (matched, guess.into_iter().map(|token| char::from(token as u8)).collect())
    }

    #[test]
    fn what_followed_the_longest_run_the_last_time_is_guessed() {
        let found = |matched, text: &str| (matched, text.to_owned());
        assert_eq!(guess(&lookup("", "abcxabcyab"), 4), found(2, "cyab"));
        assert_eq!(guess(&lookup("", "abcd1bcd2xcd"), 2), found(2, "2x"));
        assert_eq!(guess(&lookup("", "abcd1bcd2abcd"), 9), found(3, "2abcd2abc"));
        assert_eq!(guess(&lookup("", "abcd"), 4), found(0, ""));
        assert_eq!(guess(&lookup("", "aa"), 4), found(1, "aaaa"));
        assert_eq!(guess(&lookup("", ""), 4), found(0, ""));
    }

    #[test]
    fn what_is_expected_is_looked_at_and_no_run_goes_over_its_end() {
        assert_eq!(guess(&lookup("hello", "xhel"), 4), (3, "lo".to_owned()));
        assert_eq!(guess(&lookup("hello", "ello"), 4), (0, String::new()));
        assert_eq!(guess(&lookup("ab", "cab"), 4), (0, String::new()));
    }

    #[test]
    fn it_is_what_looking_through_the_whole_text_would_find() {
        let mut state = 1;
        for _ in 0..200 {
            let mut lookup = lookup("", "");
            let mut text: Vec<TokenId> = Vec::new();
            for _ in 0..60 {
                state = mix(state);
                let token = (state % 3) as TokenId;
                lookup.push(token);
                text.push(token);
                let found = (1..=3.min(text.len() - 1)).rev().find_map(|length| {
                    let last = &text[text.len() - length..];
                    let place = (length..text.len()).rev().find(|&end| &text[end - length..end] == last)?;
                    Some((length, text[place..].iter().copied().cycle().take(4).collect::<Vec<_>>()))
                });
                let mut guess = Vec::new();
                let matched = lookup.guess(4, &mut guess);
                assert_eq!((matched, guess), found.unwrap_or_default());
            }
        }
    }
}
