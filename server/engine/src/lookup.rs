//! Prompt lookup decoding (Saxena, 2023): finds an earlier occurrence of the latest tokens, and proposes the tokens
//! that followed it. The earlier occurrence can be in the prompt, in the output or in the text that the client
//! predicts. The proposals are often right, because many answers repeat parts of the prompt.
//!
//! The module is pure. The speculator decides how many of the proposed drafts are worth their cost.

use server_scheduler::TokenId;

use crate::hash::mix;

/// Maximum length of a match, in tokens. Longer matches do not predict better.
pub(crate) const MATCH_MAX: usize = 8;

/// The parameters of prompt lookup for a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PromptLookup {
    /// The maximum length of a match, in tokens. Values are clamped to the range from 1 to 8.
    pub max_ngram_size: u32,
    /// The maximum number of draft tokens per sequence in a step.
    pub num_draft_tokens: u32,
    /// The tokens of the predicted output. The list is empty if the client predicts no output.
    pub prediction: Vec<TokenId>,
}

/// The token that separates the prediction from the prompt. It is in no vocabulary and in no n-gram, so no match
/// crosses it.
const SEPARATOR: TokenId = TokenId::MAX;

/// Maximum number of prompt and prediction tokens that are indexed in a step, for all requests together. Without this
/// limit, a long prompt would noticeably delay a step.
pub(crate) const INDEXED_TOKENS_MAX: usize = 4096;

/// The last occurrence of each n-gram in the prediction and the prompt. The sequences of a request share this index.
/// The index is built in parts, and tokens that are not indexed yet are not matched.
#[derive(Clone, Debug)]
pub(crate) struct PromptIndex {
    text: Vec<TokenId>,
    /// Number of leading tokens that are indexed.
    indexed: usize,
    ngrams: NgramIndex,
}

impl PromptIndex {
    pub(crate) fn new(config: &PromptLookup, prompt: &[TokenId]) -> Self {
        let longest = (config.max_ngram_size as usize).clamp(1, MATCH_MAX);
        let text = config.prediction.iter().copied().chain([SEPARATOR]).chain(prompt.iter().copied());
        Self { text: text.collect(), indexed: 0, ngrams: NgramIndex::new(longest) }
    }

    /// Indexes at most `tokens_max` further tokens. Returns their number.
    pub(crate) fn extend(&mut self, tokens_max: usize) -> usize {
        let Self { text, indexed, ngrams } = self;
        let end = text.len().min(*indexed + tokens_max);
        let token = |position: usize| text[position];
        (*indexed..end).for_each(|position| ngrams.insert(position, &token));
        end - std::mem::replace(indexed, end)
    }
}

/// The output of a sequence, and the index of the n-grams that precede the tokens of the output.
#[derive(Clone, Debug)]
pub(crate) struct LookupOutput {
    tokens: Vec<TokenId>,
    ngrams: NgramIndex,
}

impl LookupOutput {
    pub(crate) fn new(prompt: &PromptIndex) -> Self {
        Self { tokens: Vec::new(), ngrams: NgramIndex::new(prompt.ngrams.by_length.len()) }
    }

    /// Appends a token.
    pub(crate) fn push(&mut self, prompt: &PromptIndex, token: TokenId) {
        let Self { tokens, ngrams } = self;
        // An n-gram is indexed when a token follows it, so that it does not match itself at the end of the text.
        ngrams.insert(prompt.text.len() + tokens.len(), &|position| token_at(&prompt.text, tokens, position));
        tokens.push(token);
    }

    /// Fills `drafts` with at most `drafts_max` tokens that followed the last occurrence of the longest matching
    /// n-gram. If the text ends before there are `drafts_max` drafts, the drafts are repeated from the first one.
    /// Returns the length of the n-gram, or 0 if there are no drafts.
    pub(crate) fn propose(
        &self,
        prompt: &PromptIndex,
        drafts_max: usize,
        drafts: &mut Vec<TokenId>,
    ) -> usize {
        drafts.clear();
        let token = |position: usize| token_at(&prompt.text, &self.tokens, position);
        let end = prompt.text.len() + self.tokens.len();
        let (mut matched, mut start) = (0, 0);
        for (length, hash) in hashes(end, self.ngrams.by_length.len(), &token) {
            let ngram = Ngram { length, end, hash };
            // An occurrence in the output is later than any in the prompt, so the output is searched first.
            let occurrence = self.ngrams.find(ngram, &token).or_else(|| prompt.ngrams.find(ngram, &token));
            let Some(position) = occurrence else { break };
            (matched, start) = (length, position);
        }
        while matched > 0 && drafts.len() < drafts_max {
            let position = start + drafts.len();
            let token = if position < end { token(position) } else { drafts[position - end] };
            if token == SEPARATOR {
                break;
            }
            drafts.push(token);
        }
        if drafts.is_empty() { 0 } else { matched }
    }
}

/// The token at `position` in the text that consists of `prompt` and `output`.
fn token_at(prompt: &[TokenId], output: &[TokenId], position: usize) -> TokenId {
    prompt.get(position).copied().unwrap_or_else(|| output[position - prompt.len()])
}

/// The `length` tokens before the position `end`.
#[derive(Clone, Copy)]
struct Ngram {
    length: usize,
    end: usize,
    hash: u64,
}

/// The last occurrence of each n-gram. A table stores only four-byte positions, because the n-grams can be read from
/// the text before these positions.
#[derive(Clone, Debug)]
struct NgramIndex {
    /// The table for n-grams of `n` tokens is at the index `n - 1`.
    by_length: Vec<Table>,
}

/// A hash table with linear probing, which maps each n-gram to the position after its last occurrence.
#[derive(Clone, Debug, Default)]
struct Table {
    /// The positions. The number of slots is a power of two or zero.
    slots: Vec<u32>,
    len: usize,
}

const VACANT: u32 = u32::MAX;

impl NgramIndex {
    fn new(longest: usize) -> Self {
        Self { by_length: vec![Table::default(); longest] }
    }

    /// Records all n-grams that end just before `position`.
    fn insert(&mut self, position: usize, token: &impl Fn(usize) -> TokenId) {
        for (length, hash) in hashes(position, self.by_length.len(), token) {
            self.by_length[length - 1].insert(Ngram { length, end: position, hash }, token);
        }
    }

    fn find(&self, ngram: Ngram, token: &impl Fn(usize) -> TokenId) -> Option<usize> {
        let table = &self.by_length[ngram.length - 1];
        let slot = table.slot(ngram, token)?;
        (table.slots[slot] != VACANT).then(|| table.slots[slot] as usize)
    }
}

impl Table {
    /// The slot of an n-gram, or the vacant slot for it if the table does not contain it. `None` if the table has no
    /// slots.
    fn slot(&self, ngram: Ngram, token: &impl Fn(usize) -> TokenId) -> Option<usize> {
        let mask = self.slots.len().checked_sub(1)?;
        let mut slot = ngram.hash as usize & mask;
        loop {
            let position = self.slots[slot];
            let is_same = |position: usize| {
                (1..=ngram.length).all(|back| token(position - back) == token(ngram.end - back))
            };
            if position == VACANT || is_same(position as usize) {
                return Some(slot);
            }
            slot = (slot + 1) & mask;
        }
    }

    fn insert(&mut self, ngram: Ngram, token: &impl Fn(usize) -> TokenId) {
        if self.len * 4 >= self.slots.len() * 3 {
            self.grow(ngram.length, token);
        }
        let slot = self.slot(ngram, token).expect("invariant: a table that has grown has slots");
        self.len += usize::from(self.slots[slot] == VACANT);
        self.slots[slot] = ngram.end as u32;
    }

    fn grow(&mut self, length: usize, token: &impl Fn(usize) -> TokenId) {
        let larger = vec![VACANT; (self.slots.len() * 2).max(8)];
        for position in std::mem::replace(&mut self.slots, larger) {
            if position == VACANT {
                continue;
            }
            let end = position as usize;
            let (_, hash) = hashes(end, length, token)
                .last()
                .expect("invariant: an n-gram precedes each position in a table");
            let slot = self.slot(Ngram { length, end, hash }, token).expect("invariant: the table has slots");
            self.slots[slot] = position;
        }
    }
}

/// The lengths and hashes of the n-grams that end just before the position `end`, shortest first.
fn hashes(
    end: usize,
    longest: usize,
    token: &impl Fn(usize) -> TokenId,
) -> impl Iterator<Item = (usize, u64)> {
    let last = (0..end).rev().map(token).take_while(|&token| token != SEPARATOR);
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
        let config = PromptLookup { max_ngram_size: 3, num_draft_tokens: 5, prediction: tokens(prediction) };
        PromptIndex::new(&config, &tokens(text))
    }

    /// Proposes draft tokens for a text, and checks that they do not depend on where the prompt ends and the output
    /// begins.
    fn lookup(prediction: &str, text: &str, most: usize) -> (usize, String) {
        let proposals: Vec<_> = (0..=text.len())
            .map(|end| {
                let mut prompt = prompt(prediction, &text[..end]);
                while prompt.extend(2) > 0 {}
                let mut output = LookupOutput::new(&prompt);
                text[end..].bytes().for_each(|token| output.push(&prompt, token.into()));
                let mut drafts = Vec::new();
                let matched = output.propose(&prompt, most, &mut drafts);
                (matched, drafts.into_iter().map(|token| char::from(token as u8)).collect::<String>())
            })
            .collect();
        assert!(proposals.windows(2).all(|pair| pair[0] == pair[1]), "{text}: {proposals:?}");
        proposals[0].clone()
    }

    #[test]
    fn proposes_what_followed_the_last_occurrence_of_the_longest_ngram() {
        let proposal = |matched, text: &str| (matched, text.to_owned());
        assert_eq!(lookup("", "abcxabcyab", 4), proposal(2, "cyab"));
        assert_eq!(lookup("", "abcd1bcd2xcd", 2), proposal(2, "2x"));
        assert_eq!(lookup("", "abcd1bcd2abcd", 9), proposal(3, "2abcd2abc"));
        assert_eq!(lookup("", "abcd", 4), proposal(0, ""));
        assert_eq!(lookup("", "aa", 4), proposal(1, "aaaa"));
        assert_eq!(lookup("", "", 4), proposal(0, ""));
    }

    #[test]
    fn matches_the_prediction_and_nothing_across_its_end() {
        assert_eq!(lookup("hello", "xhel", 4), (3, "lo".to_owned()));
        assert_eq!(lookup("hello", "ello", 4), (0, String::new()));
        assert_eq!(lookup("ab", "cab", 4), (0, String::new()));
    }

    #[test]
    fn agrees_with_a_search_through_the_whole_text() {
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
                let expected = (1..=3.min(text.len() - 1)).rev().find_map(|length| {
                    let last = &text[text.len() - length..];
                    let position =
                        (length..text.len()).rev().find(|&end| &text[end - length..end] == last)?;
                    Some((length, text[position..].iter().copied().cycle().take(4).collect::<Vec<_>>()))
                });
                let mut drafts = Vec::new();
                let matched = lookup.propose(&prompt, 4, &mut drafts);
                assert_eq!((matched, drafts), expected.unwrap_or_default());
            }
        }
    }

    #[test]
    fn sequences_share_the_index_of_the_prompt_which_needs_little_memory() {
        let tokens: Vec<TokenId> = (0..30_000).map(|position| mix(position) as u32 % 50_000).collect();
        let config = PromptLookup { max_ngram_size: 8, num_draft_tokens: 5, prediction: Vec::new() };
        let mut prompt = PromptIndex::new(&config, &tokens);
        while prompt.extend(INDEXED_TOKENS_MAX) > 0 {}
        let bytes = |ngrams: &NgramIndex| {
            ngrams.by_length.iter().map(|table| 4 * table.slots.capacity()).sum::<usize>()
        };
        assert!(bytes(&prompt.ngrams) <= 8 * 4 * (1 << 16), "{}", bytes(&prompt.ngrams));
        let mut outputs = vec![LookupOutput::new(&prompt); 128];
        for (output, &token) in outputs.iter_mut().zip(&tokens) {
            output.push(&prompt, token);
            let mut drafts = Vec::new();
            output.propose(&prompt, 3, &mut drafts);
            let position =
                tokens.iter().rposition(|other| *other == token).expect("the token is in the prompt");
            assert_eq!(drafts.first(), tokens.get(position + 1).or(Some(&token)));
        }
        assert!(outputs.iter().map(|output| bytes(&output.ngrams)).sum::<usize>() < 128 * 1024);
    }
}
