//! What steps cost, with guesses and without, and what guesses have saved so far: all measured, all the time.
//!
//! What a guess that is right saves is what a sequence costs in a step that computes one token of each. It costs what it
//! adds to a step, and the draft model's time if that model made it.

/// What was measured, by the number of sequences in a step: see [`place`].
#[derive(Debug)]
pub(super) struct Costs {
    by_rows: [Cost; PLACES],
    /// Seconds for a sequence in a run of the draft model that computes one token of each, by their number.
    runs: [Estimate; PLACES],
    /// Seconds for a token that the draft model only reads.
    reading: Estimate,
    ledger: Ledger,
}

#[derive(Clone, Copy, Debug, Default)]
struct Cost {
    /// Seconds for a sequence.
    row: Estimate,
    /// Seconds for a draft.
    draft: Estimate,
    /// Steps with drafts since the last one without.
    since_plain: u32,
}

/// What things cost in a step of so many sequences.
#[derive(Clone, Copy, Debug)]
pub(super) struct Prices {
    /// Seconds for a sequence. 0 in a simulation in which nothing takes any time: then everything is worth it.
    pub(super) row: f64,
    /// Seconds for a draft.
    pub(super) draft: f64,
}

/// What a step did, and how long it took.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Took {
    pub(super) rows: u32,
    pub(super) drafts: u32,
    pub(super) accepted: u32,
    /// Whether all its rows were of one token and drafts.
    pub(super) only_decodes: bool,
    /// Seconds of the whole step, the draft model's time included.
    pub(super) step: f64,
    /// Seconds of the draft model.
    pub(super) model: f64,
}

/// After so many steps with drafts one without tells what they save.
const PLAIN_EVERY: u32 = 64;
/// Steps without drafts before the first with any: one alone may have been slow for reasons of its own.
const PLAIN_FIRST: usize = 2;
/// A draft has to be so many times as probable as one that just pays: what is measured is not exact.
const MARGIN: f64 = 1.15;
/// What a draft is thought to cost before that is measured, as part of what a sequence costs.
const DRAFT_COST: f64 = 0.4;
/// How fast the averages follow.
const WEIGHT: f64 = 0.2;

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

/// An average of medians: one step that was slow for reasons of its own does not move it.
#[derive(Clone, Copy, Debug, Default)]
struct Estimate {
    recent: [f64; 3],
    seen: usize,
    average: f64,
}

impl Estimate {
    fn add(&mut self, value: f64) {
        self.recent[self.seen % self.recent.len()] = value;
        self.seen += 1;
        let mut sorted = self.recent;
        let sorted = &mut sorted[..self.seen.min(self.recent.len())];
        sorted.sort_unstable_by(f64::total_cmp);
        // Of two the lesser: what goes wrong takes longer.
        let typical = sorted[(sorted.len() - 1) / 2];
        if self.seen <= self.recent.len() {
            self.average = typical;
        } else {
            self.average += WEIGHT * (typical - self.average);
        }
    }

    fn get(&self) -> Option<f64> {
        (self.seen > 0).then_some(self.average)
    }
}

/// What guesses have saved, less what they cost, beside the time of all steps. Both fade.
#[derive(Debug, Default)]
struct Ledger {
    saved: f64,
    time: f64,
}

/// Most that guesses may have lost, as part of the time.
const LOSS_MAX: f64 = 0.03;
/// So many steps are remembered, more or less.
const WINDOW: f64 = 1024.0;
/// At the start guesses may lose as if so many steps had been.
const CREDIT: f64 = 100.0;

impl Ledger {
    fn add(&mut self, time: f64, saved: f64) {
        if self.time == 0.0 {
            self.time = CREDIT * time;
        }
        self.time += time - self.time / WINDOW;
        self.saved += saved - self.saved / WINDOW;
    }

    fn is_open(&self) -> bool {
        self.saved >= -LOSS_MAX * self.time
    }
}

impl Default for Costs {
    fn default() -> Self {
        Self {
            by_rows: [Cost::default(); PLACES],
            runs: [Estimate::default(); PLACES],
            reading: Estimate::default(),
            ledger: Ledger::default(),
        }
    }
}

impl Costs {
    /// Takes in a step.
    pub(super) fn took(&mut self, took: Took) {
        let Took { rows, drafts, accepted, only_decodes, step, model } = took;
        let cost = &mut self.by_rows[place(rows)];
        let (row, draft) = (cost.row.get(), cost.draft.get());
        let mut more = None;
        if only_decodes {
            let time = step - model;
            if drafts == 0 {
                cost.row.add(time / f64::from(rows));
                cost.since_plain = 0;
            } else if let Some(row) = row {
                more = Some(time - row * f64::from(rows));
                cost.draft.add(more.unwrap_or(0.0).max(0.0) / f64::from(drafts));
                cost.since_plain += 1;
            }
        }
        let row = row.unwrap_or(0.0);
        let saved = match (drafts, more) {
            (0, _) => -model,
            (_, Some(more)) => row * f64::from(accepted) - more - model,
            // Of a step with prompts in it it is not known what it would have taken.
            (_, None) => {
                let draft = draft.unwrap_or(DRAFT_COST * row);
                row * f64::from(accepted) - draft * f64::from(drafts) - model
            }
        };
        self.ledger.add(step, saved);
    }

    /// Takes in a run of the draft model with so many rows of `tokens` together.
    pub(super) fn ran(&mut self, rows: u32, tokens: u32, seconds: f64) {
        let run = &mut self.runs[place(rows)];
        // What was guessed last and the token after it, where all was right, are not read but belong to guessing.
        if tokens <= 3 * rows {
            run.add(seconds / f64::from(rows));
        } else {
            let known = run.get().unwrap_or(0.0) * f64::from(rows);
            self.reading.add((seconds - known).max(0.0) / f64::from(tokens - rows));
        }
    }

    /// What things cost with so many sequences; none if nothing is to be guessed now: because a step without guesses is due,
    /// or because they have cost too much of late.
    pub(super) fn prices(&self, rows: u32) -> Option<Prices> {
        let Cost { row: measured, draft, since_plain } = self.by_rows[place(rows)];
        let row = measured.get().filter(|_| measured.seen >= PLAIN_FIRST)?;
        let is_due = since_plain >= PLAIN_EVERY && row > 0.0;
        let draft = draft.get().unwrap_or(DRAFT_COST * row);
        (!is_due && self.ledger.is_open()).then_some(Prices { row, draft })
    }

    /// Seconds for a sequence in a run of the draft model with so many; 0 if it is not known, so that it is found out.
    pub(super) fn run(&self, rows: u32) -> f64 {
        self.runs[place(rows)].get().unwrap_or(0.0)
    }

    /// Whether it is known what reading costs.
    pub(super) fn knows_reading(&self) -> bool {
        self.reading.get().is_some()
    }

    /// Seconds for a token that the draft model only reads; 0 if it is not known.
    pub(super) fn reading(&self) -> f64 {
        self.reading.get().unwrap_or(0.0)
    }
}

impl Prices {
    /// How probable it has to be that a guess is right that took so many seconds to make.
    pub(super) fn threshold(&self, making: f64) -> f32 {
        if self.row > 0.0 { (MARGIN * (self.draft + making) / self.row) as f32 } else { 0.0 }
    }

    /// Seconds that each token of a sequence takes less if up to `most` guesses are made, each right with the
    /// probability `hit` and made in so many seconds.
    pub(super) fn gain(&self, hit: f32, most: usize, making: f64) -> f64 {
        let (mut tokens, mut time, mut probability) = (1.0, self.row, 1.0);
        let mut best: f64 = 0.0;
        for _ in 0..most {
            probability *= f64::from(hit);
            tokens += probability;
            time += self.draft + making;
            best = best.max(self.row - time / tokens);
        }
        best
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn took(rows: u32, drafts: u32, step: f64) -> Took {
        Took { rows, drafts, accepted: drafts, only_decodes: true, step, model: 0.0 }
    }

    fn threshold(costs: &Costs, rows: u32) -> Option<f32> {
        costs.prices(rows).map(|prices| prices.threshold(0.0))
    }

    #[test]
    fn costs_are_kept_apart_by_the_number_of_sequences() {
        let places: Vec<usize> = (1..2000).map(place).collect();
        assert!(places.is_sorted() && places[..16].iter().copied().eq(0..16) && places[16] == 16);
        assert_eq!((place(32), place(64), place(u32::MAX)), (20, 24, PLACES - 1));
    }

    #[test]
    fn a_draft_is_worth_it_where_it_saves_more_than_it_costs() {
        let close = |threshold: Option<f32>, cost: f64| {
            assert!((f64::from(threshold.unwrap()) - MARGIN * cost).abs() < 1e-6, "{threshold:?}");
        };
        let mut costs = Costs::default();
        for _ in 0..PLAIN_FIRST {
            assert_eq!(threshold(&costs, 4), None, "too little is known");
            costs.took(took(4, 0, 0.040));
        }
        close(threshold(&costs, 4), DRAFT_COST);
        // Each of the six drafts costs half of what a sequence does.
        costs.took(took(4, 6, 0.070));
        close(threshold(&costs, 4), 0.5);
        close(costs.prices(4).map(|prices| prices.threshold(0.002)), 0.7);
        assert_eq!(threshold(&costs, 5), None);
        for _ in 0..PLAIN_EVERY {
            costs.took(took(4, 6, 0.070));
        }
        assert_eq!(threshold(&costs, 4), None, "one without is due");
        costs.took(took(4, 0, 0.040));
        assert!(threshold(&costs, 4).unwrap() < 1.0);
    }

    #[test]
    fn one_slow_step_says_nothing() {
        let mut costs = Costs::default();
        for step in [0.9, 0.010, 0.010, 0.010, 0.5, 0.010] {
            costs.took(took(1, 0, step));
        }
        assert!((costs.prices(1).unwrap().row - 0.010).abs() < 1e-9);
    }

    #[test]
    fn guesses_that_lose_are_stopped_until_there_was_time_enough_to_make_up_for_it() {
        let mut costs = Costs::default();
        (0..PLAIN_FIRST).for_each(|_| costs.took(took(1, 0, 0.010)));
        let (mut plain, mut lost) = (0, 0);
        for _ in 0..20_000 {
            if costs.prices(1).is_some() {
                // The model's run is as long as a step, and its guess is wrong.
                costs.took(Took { accepted: 0, model: 0.010, ..took(1, 1, 0.020) });
                lost += 1;
            } else {
                costs.took(took(1, 0, 0.010));
                plain += 1;
            }
        }
        assert!(lost > 100 && f64::from(lost) < 0.04 * f64::from(plain), "{lost} {plain}");
    }

    #[test]
    fn what_is_gained_is_known_before_the_prompt_is_read() {
        let prices = Prices { row: 1.0, draft: 0.1 };
        assert_eq!(prices.gain(0.0, 5, 0.1), 0.0);
        assert_eq!(prices.gain(0.9, 0, 0.1), 0.0);
        // Two tokens in 1.2 instead of 2.
        assert!((prices.gain(1.0, 1, 0.1) - 0.4).abs() < 1e-9);
        assert!(prices.gain(0.9, 5, 0.1) > prices.gain(0.9, 1, 0.1));
    }
}
