//! What is known of the guesses for one sequence: where they come from, and how often they were right.

use server_scheduler::{ScheduledSequence, TokenId};

use super::text::Text;
use crate::lookup::{LookupOutput, MATCH_MAX, PromptIndex, PromptLookup};
use crate::request::{DraftCounts, DraftRule};

/// Guesses the next tokens of a sequence.
#[derive(Clone, Debug)]
pub(crate) struct Drafter {
    pub(super) looking: Option<Looking>,
    pub(super) asking: Option<Asking>,
    /// Where the guesses for the step to come are from.
    pub(super) source: Option<Source>,
    pub(in crate::engine::core) counts: DraftCounts,
}

/// Where guesses are from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    /// What was there before.
    Lookup,
    /// The draft model.
    Model,
}

/// Guesses by prompt lookup.
#[derive(Clone, Debug)]
pub(super) struct Looking {
    output: LookupOutput,
    tokens_max: usize,
    /// How often it was right; unknown before its sequence runs.
    hits: Option<Hits>,
    limit: usize,
    /// For the step to come.
    guess: Vec<TokenId>,
    matched: usize,
}

/// Guesses by the draft model.
#[derive(Clone, Debug)]
pub(super) struct Asking {
    pub(super) rule: DraftRule,
    pub(super) text: Text,
    /// Leading tokens of the text that the model had when it was asked last.
    pub(super) known: usize,
    /// How often it was right; unknown before it is asked.
    pub(super) hit: Option<f32>,
    limit: usize,
    /// Steps since it was asked.
    pub(super) idle: u32,
    /// For the step to come.
    pub(super) guess: Vec<TokenId>,
}

/// The probability that a guessed token is right if those before it were, by how many of the last tokens led to it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Hits(pub(super) [f32; MATCH_MAX]);

/// Most guesses that are computed in the first step that has any. Then twice as many when all were right, half when none
/// was, so that a text that is like none before costs little until that is known.
const LIMIT: usize = 2;

const HIT_WEIGHT: f32 = 0.15;
const HIT_WEIGHT_ALL: f32 = 0.02;

/// What is learned of guesses in all sequences.
#[derive(Debug)]
pub(super) struct Learned {
    pub(super) hits: Hits,
    pub(super) hit: f32,
}

impl Default for Learned {
    fn default() -> Self {
        let unknown = std::array::from_fn(|matched| [0.2, 0.4, 0.6].get(matched).copied().unwrap_or(0.7));
        Self { hits: Hits(unknown), hit: 0.7 }
    }
}

/// What the sequences of a request that are guessed have in common.
#[derive(Debug)]
pub(crate) struct Drafters {
    lookup: Option<PromptLookup>,
    draft: Option<DraftRule>,
    prompt: Vec<TokenId>,
    /// Where the runs of the prompt are, if they are looked up and a sequence has begun.
    pub(super) index: Option<PromptIndex>,
    /// One for each sequence, once one has begun: those that wait take no more memory than their prompt.
    pub(in crate::engine::core) each: Vec<Drafter>,
}

impl Drafters {
    /// `None` if nothing is to be guessed.
    pub(crate) fn new(
        lookup: Option<PromptLookup>,
        draft: Option<DraftRule>,
        prompt: &[TokenId],
    ) -> Option<Self> {
        let is_any = lookup.is_some() || draft.is_some();
        is_any.then(|| Self { lookup, draft, prompt: prompt.to_vec(), index: None, each: Vec::new() })
    }

    /// Adds a token of the output of one of so many sequences.
    pub(in crate::engine::core) fn push(&mut self, index: usize, sequences: usize, token: TokenId) {
        if self.each.is_empty() {
            let prompt = std::mem::take(&mut self.prompt);
            self.index = self.lookup.as_ref().map(|lookup| PromptIndex::new(lookup, &prompt));
            let text = self.draft.map(|_| Text::new(&prompt));
            self.each = vec![Drafter::new(self, text); sequences];
        }
        self.each[index].push(self.index.as_ref(), token);
    }
}

impl Drafter {
    fn new(all: &Drafters, text: Option<Text>) -> Self {
        let looking = all.index.as_ref().zip(all.lookup.as_ref()).map(|(index, config)| Looking {
            output: LookupOutput::new(index),
            tokens_max: config.tokens_max as usize,
            hits: None,
            limit: LIMIT,
            guess: Vec::new(),
            matched: 0,
        });
        let asking = all.draft.zip(text).map(|(rule, text)| Asking {
            rule,
            text,
            known: 0,
            hit: None,
            limit: LIMIT,
            idle: 0,
            guess: Vec::new(),
        });
        Self { looking, asking, source: None, counts: DraftCounts::default() }
    }

    /// Adds a token of the output.
    fn push(&mut self, index: Option<&PromptIndex>, token: TokenId) {
        if let Some((looking, index)) = self.looking.as_mut().zip(index) {
            looking.output.push(index, token);
        }
        if let Some(asking) = &mut self.asking {
            asking.text.push(token);
        }
    }

    /// Guesses nothing yet.
    pub(super) fn rest(&mut self) {
        self.source = None;
        if let Some(looking) = &mut self.looking {
            looking.guess.clear();
        }
        if let Some(asking) = &mut self.asking {
            asking.guess.clear();
            asking.idle = asking.idle.saturating_add(1);
        }
    }

    /// The draft model's part, if it is to guess in this step.
    pub(super) fn asking_now(&mut self) -> Option<&mut Asking> {
        self.asking.as_mut().filter(|_| self.source == Some(Source::Model))
    }

    /// The text, if the draft model reads it.
    pub(super) fn text(&self) -> Option<&Text> {
        self.asking.as_ref().map(|asking| &asking.text)
    }

    /// The guesses for the step to come.
    pub(super) fn guess(&self) -> &[TokenId] {
        let looked = self.looking.as_ref().map(|looking| &looking.guess);
        let asked = self.asking.as_ref().map(|asking| &asking.guess);
        let guess = match self.source {
            Some(Source::Lookup) => looked,
            Some(Source::Model) => asked,
            None => None,
        };
        guess.map_or(&[], Vec::as_slice)
    }

    /// Takes in which guesses for a row were right: so many of its drafts, after which `token` was sampled.
    pub(super) fn learn(
        &mut self,
        row: &ScheduledSequence,
        (accepted, token): (u32, TokenId),
        all: &mut Learned,
    ) {
        self.counts.accepted += accepted;
        self.counts.rejected += row.num_draft_tokens - accepted;
        let source = self.source.filter(|_| row.num_draft_tokens > 0);
        let first = self.guess().first().copied().filter(|_| accepted > 0).unwrap_or(token);
        if let Some(looking) = &mut self.looking {
            let place = looking.matched.max(1) - 1;
            let mut hits = looking.hits.as_mut().map(|hits| &mut hits.0[place]);
            let all = &mut all.hits.0[place];
            if source == Some(Source::Lookup) {
                looking.limit = limit(looking.limit, looking.tokens_max, (accepted, row.num_draft_tokens));
                follow_row(hits, all, (accepted, row.num_draft_tokens));
            } else if let Some(&guessed) = looking.guess.first() {
                // It was not computed, but is known now.
                follow(&mut hits, all, guessed == first);
            }
        }
        if let Some(asking) = self.asking.as_mut().filter(|_| source == Some(Source::Model)) {
            asking.limit =
                limit(asking.limit, asking.rule.tokens_max as usize, (accepted, row.num_draft_tokens));
            follow_row(asking.hit.as_mut(), &mut all.hit, (accepted, row.num_draft_tokens));
        }
    }
}

impl Looking {
    /// Guesses anew, and answers how many guesses are worth computing, and how probably each is right.
    pub(super) fn look(&mut self, index: &PromptIndex, all: &Hits, threshold: f32) -> (usize, f32) {
        self.matched = self.output.guess(index, self.tokens_max, &mut self.guess);
        let hit = self.hits.get_or_insert(*all).0[self.matched.max(1) - 1];
        let most = self.guess.len().min(self.limit);
        let mut probability = hit;
        let mut count = 0;
        while count < most && probability >= threshold {
            count += 1;
            probability *= hit;
        }
        (count, hit)
    }
}

impl Asking {
    /// Most guesses it may make now.
    pub(super) fn most(&self) -> usize {
        self.limit.min(self.rule.tokens_max as usize)
    }

    /// Tokens that the model would have to read before it guesses.
    pub(super) fn unread(&self) -> usize {
        self.text.len() - self.known.min(self.text.len())
    }
}

/// How many guesses are computed next, of at most `most`.
fn limit(now: usize, most: usize, (accepted, drafts): (u32, u32)) -> usize {
    match accepted {
        0 => (now / 2).max(1),
        all if all == drafts => (now * 2).min(most.max(1)),
        _ => now,
    }
}

/// Those that were accepted were right, and the first of the others was wrong.
fn follow_row(mut own: Option<&mut f32>, all: &mut f32, (accepted, drafts): (u32, u32)) {
    (0..accepted).for_each(|_| follow(&mut own, all, true));
    if accepted < drafts {
        follow(&mut own, all, false);
    }
}

fn follow(own: &mut Option<&mut f32>, all: &mut f32, is_right: bool) {
    let right = f32::from(u8::from(is_right));
    if let Some(own) = own {
        **own += HIT_WEIGHT * (right - **own);
    }
    *all += HIT_WEIGHT_ALL * (right - *all);
}
