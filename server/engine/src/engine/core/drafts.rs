//! Which guesses of what comes next are worth computing beside the token that is known.
//!
//! A guess that is right saves its sequence a step, and costs what one more token costs in a step. So what is worth it
//! is decided from two things that are measured all the time: how often guesses are right (also of those that were not
//! computed), and what tokens and steps cost with as many sequences as there are. Nothing is computed that would cost
//! more than it is likely to save.
//!
//! Guesses change nothing but the time: each token is sampled as it would be without them.

use std::time::Duration;

use server_scheduler::{Batch, Row, Scheduler, TokenId};

use super::{Requests, index_of, request_of, sequence_of};
use crate::lookup::{Lookup, MATCH_MAX, PromptLookup};
use crate::request::DraftCounts;

/// Guesses the next tokens of a sequence.
#[derive(Clone, Debug)]
pub(crate) struct Drafter {
    lookup: Lookup,
    tokens_max: usize,
    /// How often it was right; unknown before its sequence runs.
    hits: Option<Hits>,
    /// Most guesses that are computed in a step: twice as many when all were right, half when none was, so that a text
    /// that is like none before costs little until that is known.
    limit: usize,
    /// For the step to come.
    guess: Vec<TokenId>,
    matched: usize,
    pub(super) counts: DraftCounts,
}

/// The probability that a guessed token is right if those before it were, by how many of the last tokens led to it.
#[derive(Clone, Copy, Debug)]
struct Hits([f32; MATCH_MAX]);

/// What steps cost in which only one token is taken by each sequence, and what every token beside these costs.
#[derive(Debug)]
struct Costs {
    /// By the number of sequences: see [`place`].
    by_rows: [Cost; PLACES],
}

#[derive(Clone, Copy, Debug, Default)]
struct Cost {
    /// Seconds for a sequence.
    row: Option<f64>,
    /// Seconds for a draft.
    draft: Option<f64>,
    /// Steps with drafts since the last one without.
    since_plain: u32,
}

/// All that is known of guesses.
#[derive(Debug)]
pub(super) struct Drafting {
    costs: Costs,
    /// Of all sequences.
    hits: Hits,
}

/// After so many steps with drafts one without tells what they save.
const PLAIN_EVERY: u32 = 64;
/// A draft has to be so many times as probable as one that just pays: what is measured is not exact.
const MARGIN: f32 = 1.15;
/// What a draft is thought to cost before that is measured, as part of what a sequence costs.
const DRAFT_COST: f64 = 0.4;
/// How fast the averages follow.
const WEIGHT: f64 = 0.2;
const HIT_WEIGHT: f32 = 0.15;
const HIT_WEIGHT_ALL: f32 = 0.02;

/// How many guesses are computed in the first step that has any.
const LIMIT: usize = 2;

const EXACT_ROWS: usize = 16;
const PLACES: usize = EXACT_ROWS + 4 * 16;

/// Where the costs with so many sequences are kept: each by itself while they are few, then by quarters of an octave.
fn place(rows: u32) -> usize {
    let rows = rows.max(1) as usize;
    if rows <= EXACT_ROWS {
        return rows - 1;
    }
    let octaves = (rows as f64 / EXACT_ROWS as f64).log2();
    (EXACT_ROWS + (octaves * 4.0) as usize).min(PLACES - 1)
}

impl Drafter {
    pub(crate) fn new(config: &PromptLookup, prompt: &[TokenId]) -> Self {
        Self {
            lookup: Lookup::new(config, prompt),
            tokens_max: config.tokens_max as usize,
            hits: None,
            limit: LIMIT,
            guess: Vec::new(),
            matched: 0,
            counts: DraftCounts::default(),
        }
    }

    /// Adds a token of the output.
    pub(super) fn push(&mut self, token: TokenId) {
        self.lookup.push(token);
    }

    /// Guesses anew.
    fn look(&mut self) {
        self.matched = self.lookup.guess(self.tokens_max, &mut self.guess);
    }
}

impl Default for Drafting {
    fn default() -> Self {
        let unknown = std::array::from_fn(|matched| [0.2, 0.4, 0.6].get(matched).copied().unwrap_or(0.7));
        Self { costs: Costs { by_rows: [Cost::default(); PLACES] }, hits: Hits(unknown) }
    }
}

impl Drafting {
    /// Guesses for all sequences that generate, and asks for room for the guesses that are worth it.
    pub(super) fn propose(&mut self, requests: &mut Requests, scheduler: &mut Scheduler) {
        if !requests.have_drafters {
            return;
        }
        let threshold = self.costs.threshold(scheduler.load().running);
        for (&number, live) in &mut requests.live {
            for (index, drafter) in (0..).zip(&mut live.drafters) {
                let place = index as usize;
                if live.ended[place] || live.histories[place].generated() == 0 {
                    continue;
                }
                drafter.look();
                let hit = drafter.hits.get_or_insert(self.hits).0[drafter.matched.max(1) - 1];
                let mut probability = hit;
                let mut count = 0;
                while count < drafter.guess.len().min(drafter.limit) && probability >= threshold {
                    count += 1;
                    probability *= hit;
                }
                scheduler.propose(sequence_of(number, index), count as u32);
            }
        }
    }

    /// Writes the guesses into a batch that has room for them.
    pub(super) fn fill(batch: &mut Batch, requests: &Requests) {
        let Batch { rows, tokens, .. } = batch;
        for row in rows.iter().filter(|row| row.drafts > 0) {
            let live = &requests.live[&request_of(row.sequence)];
            let guess = &live.drafters[index_of(row.sequence) as usize].guess[..row.drafts as usize];
            let end = row.tokens.end as usize;
            tokens[end - guess.len()..end].copy_from_slice(guess);
        }
    }

    /// Takes in which guesses for a row were right: so many of its drafts, after which `token` was sampled.
    pub(super) fn learn(&mut self, row: &Row, drafter: &mut Drafter, accepted: u32, token: TokenId) {
        drafter.counts.accepted += accepted;
        drafter.counts.rejected += row.drafts - accepted;
        if row.drafts > 0 {
            drafter.limit = match accepted {
                0 => (drafter.limit / 2).max(1),
                all if all == row.drafts => (drafter.limit * 2).min(drafter.tokens_max.max(1)),
                _ => drafter.limit,
            };
        }
        let place = drafter.matched.max(1) - 1;
        let mut hit = |is_right: bool| {
            let right = f32::from(u8::from(is_right));
            if let Some(Hits(hits)) = &mut drafter.hits {
                hits[place] += HIT_WEIGHT * (right - hits[place]);
            }
            self.hits.0[place] += HIT_WEIGHT_ALL * (right - self.hits.0[place]);
        };
        (0..accepted).for_each(|_| hit(true));
        if accepted < row.drafts {
            hit(false);
        } else if row.drafts == 0
            && let Some(&first) = drafter.guess.first()
        {
            // It was not computed, but is known now.
            hit(first == token);
        }
    }

    /// Takes in what a step took that computed nothing but a token of each sequence and drafts.
    pub(super) fn took(&mut self, batch: &Batch, time: Duration) {
        let drafts = batch.rows.iter().map(|row| row.drafts).sum();
        self.costs.took(batch.rows.len() as u32, drafts, time.as_secs_f64());
    }
}

impl Costs {
    fn took(&mut self, rows: u32, drafts: u32, seconds: f64) {
        let cost = &mut self.by_rows[place(rows)];
        let follow = |average: &mut Option<f64>, value: f64| {
            *average = Some(average.map_or(value, |average| average + WEIGHT * (value - average)));
        };
        if drafts == 0 {
            follow(&mut cost.row, seconds / f64::from(rows));
            cost.since_plain = 0;
        } else if let Some(row) = cost.row {
            let more = (seconds - row * f64::from(rows)).max(0.0);
            follow(&mut cost.draft, more / f64::from(drafts));
            cost.since_plain += 1;
        }
    }

    /// How probable it has to be that a draft is accepted.
    fn threshold(&self, rows: u32) -> f32 {
        let Cost { row, draft, since_plain } = self.by_rows[place(rows)];
        match row {
            Some(row) if row > 0.0 && since_plain < PLAIN_EVERY => {
                MARGIN * draft.map_or(DRAFT_COST, |draft| draft / row) as f32
            }
            // Nothing takes any time, as in a simulation: everything is worth it.
            Some(row) if row <= 0.0 => 0.0,
            _ => f32::INFINITY,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn costs_are_kept_apart_by_the_number_of_sequences() {
        let places: Vec<usize> = (1..2000).map(place).collect();
        assert!(places.is_sorted() && places[..16].iter().copied().eq(0..16) && places[16] == 16);
        assert_eq!((place(32), place(64), place(u32::MAX)), (20, 24, PLACES - 1));
    }

    #[test]
    fn a_draft_is_worth_it_where_it_saves_more_than_it_costs() {
        let mut costs = Drafting::default().costs;
        assert_eq!(costs.threshold(4), f32::INFINITY, "nothing is known");
        costs.took(4, 0, 0.040);
        assert!((costs.threshold(4) - MARGIN * DRAFT_COST as f32).abs() < 1e-6);
        // Each of the six drafts costs half of what a sequence does.
        costs.took(4, 6, 0.070);
        assert!((costs.threshold(4) - MARGIN * 0.5).abs() < 1e-6);
        assert_eq!(costs.threshold(5), f32::INFINITY);
        for _ in 0..PLAIN_EVERY {
            costs.took(4, 6, 0.070);
        }
        assert_eq!(costs.threshold(4), f32::INFINITY, "one without is due");
        costs.took(4, 0, 0.040);
        assert!(costs.threshold(4) < 1.0);
    }
}
