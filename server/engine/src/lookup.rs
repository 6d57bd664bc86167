//! Prompt lookup: guesses what comes next from where the last tokens were before, in the prompt, in the output or in what
//! the client expects. Many answers repeat parts of their question. (Saxena, "Prompt Lookup Decoding", 2023.)
//!
//! Pure. It guesses and nothing else: how many guesses are worth computing is decided by those who know what that costs.

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

/// In no vocabulary: no run goes from one text into another.
const BETWEEN: TokenId = TokenId::MAX;

/// Tokens of prompts that are indexed in a step, over all requests, so that a long prompt holds up no step.
pub(crate) const INDEXED_TOKENS_MAX: usize = 4096;

/// What the sequences of a request have in common: the prediction and the prompt, and where each of their runs was last. It
/// is indexed bit by bit, and what is not indexed yet is not found.
#[derive(Clone, Debug)]
pub(crate) struct PromptIndex {
    text: Vec<TokenId>,
    /// Leading tokens that are indexed: those that follow a run which can be found.
    indexed: usize,
    runs: Runs,
}

impl PromptIndex {
    pub(crate) fn new(config: &PromptLookup, prompt: &[TokenId]) -> Self {
        let longest = (config.ngram_max as usize).clamp(1, MATCH_MAX);
        let text = config.prediction.iter().copied().chain([BETWEEN]).chain(prompt.iter().copied());
        Self { text: text.collect(), indexed: 0, runs: Runs::new(longest) }
    }

    /// Indexes at most `most` tokens more. Answers how many.
    pub(crate) fn extend(&mut self, most: usize) -> usize {
        let Self { text, indexed, runs } = self;
        let end = text.len().min(*indexed + most);
        let token = |place: usize| text[place];
        (*indexed..end).for_each(|place| runs.insert(place, &token));
        end - std::mem::replace(indexed, end)
    }
}

/// The output of a sequence, and where each run was last that a token of it follows.
#[derive(Clone, Debug)]
pub(crate) struct LookupOutput {
    tokens: Vec<TokenId>,
    runs: Runs,
}

impl LookupOutput {
    pub(crate) fn new(prompt: &PromptIndex) -> Self {
        Self { tokens: Vec::new(), runs: Runs::new(prompt.runs.by_length.len()) }
    }

    /// Adds a token.
    pub(crate) fn push(&mut self, prompt: &PromptIndex, token: TokenId) {
        let Self { tokens, runs } = self;
        // Only now, so that a run is not found where it ends the text.
        runs.insert(prompt.text.len() + tokens.len(), &|place| at(&prompt.text, tokens, place));
        tokens.push(token);
    }

    /// Puts into `guess` what came after the longest run of the last tokens that was there before, the last time: at most
    /// `most` tokens; what came last is taken to come again. Answers how long the run is; 0 if there is none.
    pub(crate) fn guess(&self, prompt: &PromptIndex, most: usize, guess: &mut Vec<TokenId>) -> usize {
        guess.clear();
        let token = |place: usize| at(&prompt.text, &self.tokens, place);
        let end = prompt.text.len() + self.tokens.len();
        let (mut matched, mut from) = (0, 0);
        for (length, hash) in hashes(end, self.runs.by_length.len(), &token) {
            let run = Run { length, end, hash };
            // What is in the output comes after what is in the prompt.
            let found = self.runs.find(run, &token).or_else(|| prompt.runs.find(run, &token));
            let Some(place) = found else { break };
            (matched, from) = (length, place);
        }
        while matched > 0 && guess.len() < most {
            let place = from + guess.len();
            let token = if place < end { token(place) } else { guess[place - end] };
            if token == BETWEEN {
                break;
            }
            guess.push(token);
        }
        if guess.is_empty() { 0 } else { matched }
    }
}

/// A token of the prompt or of the output after it.
fn at(prompt: &[TokenId], output: &[TokenId], place: usize) -> TokenId {
    prompt.get(place).copied().unwrap_or_else(|| output[place - prompt.len()])
}

/// The last tokens before a place.
#[derive(Clone, Copy)]
struct Run {
    length: usize,
    end: usize,
    hash: u64,
}

/// Where runs were last. A table holds places alone, four bytes each, since the text says which runs are before them.
#[derive(Clone, Debug)]
struct Runs {
    /// By the length of the run less one.
    by_length: Vec<Table>,
}

/// Open addressing with linear probing: places by the hashes of the runs before them.
#[derive(Clone, Debug, Default)]
struct Table {
    /// A power of two of them, or none.
    slots: Vec<u32>,
    places: usize,
}

const VACANT: u32 = u32::MAX;

impl Runs {
    fn new(longest: usize) -> Self {
        Self { by_length: vec![Table::default(); longest] }
    }

    /// All runs before `place` were there last.
    fn insert(&mut self, place: usize, token: &impl Fn(usize) -> TokenId) {
        for (length, hash) in hashes(place, self.by_length.len(), token) {
            self.by_length[length - 1].insert(Run { length, end: place, hash }, token);
        }
    }

    fn find(&self, run: Run, token: &impl Fn(usize) -> TokenId) -> Option<usize> {
        let table = &self.by_length[run.length - 1];
        let slot = table.slot(run, token)?;
        (table.slots[slot] != VACANT).then(|| table.slots[slot] as usize)
    }
}

impl Table {
    /// The slot of a run, or a vacant one for it. `None` if there are no slots.
    fn slot(&self, run: Run, token: &impl Fn(usize) -> TokenId) -> Option<usize> {
        let mask = self.slots.len().checked_sub(1)?;
        let mut slot = run.hash as usize & mask;
        loop {
            let place = self.slots[slot];
            let is_same =
                |place: usize| (1..=run.length).all(|back| token(place - back) == token(run.end - back));
            if place == VACANT || is_same(place as usize) {
                return Some(slot);
            }
            slot = (slot + 1) & mask;
        }
    }

    fn insert(&mut self, run: Run, token: &impl Fn(usize) -> TokenId) {
        if self.places * 4 >= self.slots.len() * 3 {
            self.grow(run.length, token);
        }
        let slot = self.slot(run, token).expect("invariant: it has just grown");
        self.places += usize::from(self.slots[slot] == VACANT);
        self.slots[slot] = run.end as u32;
    }

    fn grow(&mut self, length: usize, token: &impl Fn(usize) -> TokenId) {
        let more = vec![VACANT; (self.slots.len() * 2).max(8)];
        for place in std::mem::replace(&mut self.slots, more) {
            if place == VACANT {
                continue;
            }
            let end = place as usize;
            let (_, hash) =
                hashes(end, length, token).last().expect("invariant: what is in a table follows a run");
            let slot = self.slot(Run { length, end, hash }, token).expect("invariant: there are slots");
            self.slots[slot] = place;
        }
    }
}

/// The hashes of the last tokens before a place, one, two and so on.
fn hashes(
    end: usize,
    longest: usize,
    token: &impl Fn(usize) -> TokenId,
) -> impl Iterator<Item = (usize, u64)> {
    let last = (0..end).rev().map(token).take_while(|&token| token != BETWEEN);
    let hashed = last.take(longest).scan(0, |hash, token| {
        *hash = mix(*hash ^ u64::from(token));
        Some(*hash)
    });
    (1..).zip(hashed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prompt(prediction: &str, text: &str) -> PromptIndex {
        let tokens = |text: &str| text.bytes().map(TokenId::from).collect::<Vec<_>>();
        let config = PromptLookup { ngram_max: 3, tokens_max: 5, prediction: tokens(prediction) };
        PromptIndex::new(&config, &tokens(text))
    }

    /// What is guessed after a text, the same wherever in it the prompt ends.
    fn lookup(prediction: &str, text: &str, most: usize) -> (usize, String) {
        let guesses: Vec<_> = (0..=text.len())
            .map(|end| {
                let mut prompt = prompt(prediction, &text[..end]);
                while prompt.extend(2) > 0 {}
                let mut output = LookupOutput::new(&prompt);
                text[end..].bytes().for_each(|token| output.push(&prompt, token.into()));
                let mut guess = Vec::new();
                let matched = output.guess(&prompt, most, &mut guess);
                (matched, guess.into_iter().map(|token| char::from(token as u8)).collect::<String>())
            })
            .collect();
        assert!(guesses.windows(2).all(|pair| pair[0] == pair[1]), "{text}: {guesses:?}");
        guesses[0].clone()
    }

    #[test]
    fn what_followed_the_longest_run_the_last_time_is_guessed() {
        let found = |matched, text: &str| (matched, text.to_owned());
        assert_eq!(lookup("", "abcxabcyab", 4), found(2, "cyab"));
        assert_eq!(lookup("", "abcd1bcd2xcd", 2), found(2, "2x"));
        assert_eq!(lookup("", "abcd1bcd2abcd", 9), found(3, "2abcd2abc"));
        assert_eq!(lookup("", "abcd", 4), found(0, ""));
        assert_eq!(lookup("", "aa", 4), found(1, "aaaa"));
        assert_eq!(lookup("", "", 4), found(0, ""));
    }

    #[test]
    fn what_is_expected_is_looked_at_and_no_run_goes_over_its_end() {
        assert_eq!(lookup("hello", "xhel", 4), (3, "lo".to_owned()));
        assert_eq!(lookup("hello", "ello", 4), (0, String::new()));
        assert_eq!(lookup("ab", "cab", 4), (0, String::new()));
    }

    #[test]
    fn it_is_what_looking_through_the_whole_text_would_find() {
        let mut state = 1;
        for _ in 0..200 {
            let prompt = prompt("", "");
            let mut lookup = LookupOutput::new(&prompt);
            let mut text: Vec<TokenId> = Vec::new();
            for _ in 0..60 {
                state = mix(state);
                let token = (state % 3) as TokenId;
                lookup.push(&prompt, token);
                text.push(token);
                let found = (1..=3.min(text.len() - 1)).rev().find_map(|length| {
                    let last = &text[text.len() - length..];
                    let place = (length..text.len()).rev().find(|&end| &text[end - length..end] == last)?;
                    Some((length, text[place..].iter().copied().cycle().take(4).collect::<Vec<_>>()))
                });
                let mut guess = Vec::new();
                let matched = lookup.guess(&prompt, 4, &mut guess);
                assert_eq!((matched, guess), found.unwrap_or_default());
            }
        }
    }

    #[test]
    fn the_sequences_of_a_prompt_share_its_index_which_takes_little_memory() {
        let tokens: Vec<TokenId> = (0..30_000).map(|place| mix(place) as u32 % 50_000).collect();
        let config = PromptLookup { ngram_max: 8, tokens_max: 5, prediction: Vec::new() };
        let mut prompt = PromptIndex::new(&config, &tokens);
        while prompt.extend(INDEXED_TOKENS_MAX) > 0 {}
        let bytes =
            |runs: &Runs| runs.by_length.iter().map(|table| 4 * table.slots.capacity()).sum::<usize>();
        assert!(bytes(&prompt.runs) <= 8 * 4 * (1 << 16), "{}", bytes(&prompt.runs));
        let mut outputs = vec![LookupOutput::new(&prompt); 128];
        for (output, &token) in outputs.iter_mut().zip(&tokens) {
            output.push(&prompt, token);
            let mut guess = Vec::new();
            output.guess(&prompt, 3, &mut guess);
            let place = tokens.iter().rposition(|other| *other == token).expect("it is there");
            assert_eq!(guess.first(), tokens.get(place + 1).or(Some(&token)));
        }
        assert!(outputs.iter().map(|output| bytes(&output.runs)).sum::<usize>() < 128 * 1024);
    }
}
