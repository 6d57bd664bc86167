//! Which guesses of what comes next are worth computing beside the token that is known, and where they come from: from what
//! was there before, or from a draft model.
//!
//! A guess that is right saves its sequence a step, and costs what one more token costs in a step; that of the draft model
//! costs a run of it besides. So what is worth it is decided from what is measured all the time: how often guesses are
//! right, and what tokens, steps and runs cost with as many sequences as there are. Nothing is computed that would cost
//! more than it is likely to save, and where guesses lose more than a small part of the time after all, there are none for
//! a while.
//!
//! Guesses change nothing but the time: each token is sampled as it would be without them.

use server_scheduler::{Batch, ScheduledSequence, Scheduler, SequenceId, TokenId};

use super::{Live, Requests};
use crate::clock::Clock;
use crate::lookup::INDEXED_TOKENS_MAX;
use crate::report::StepReport;
use crate::runner::DraftRunner;
use crate::sleep::SleepLevel;
use costs::{Costs, Prices, Took};
pub(crate) use drafter::Drafters;
use drafter::{Drafter, Learned, Source};
use model::DraftModel;

mod costs;
mod drafter;
mod model;
mod text;

/// All that is known of guesses.
#[derive(Default)]
pub(super) struct Drafting {
    costs: Costs,
    learned: Learned,
    model: Option<DraftModel>,
    // Kept from step to step for their memory.
    plan: Vec<Asked>,
}

/// A sequence for which the draft model might guess.
struct Asked {
    sequence: SequenceId,
    /// How probably each guess is right if those before it are.
    hit: f32,
    most: usize,
    /// Whether it is asked to learn how good it is by now.
    is_probe: bool,
    /// Guesses that are worth it so far, and the probability that all are right.
    count: usize,
    probability: f32,
    /// Guesses by lookup that are worth it instead.
    looked: usize,
}

/// After so many steps of a sequence without the draft model it is asked again, if that costs little.
const PROBE_EVERY: u32 = 64;
const PROBE_GUESSES: usize = 2;
/// Most that reading a text may cost, as part of what guesses are likely to save until the answer has all its tokens: it may
/// end before.
const READING_MAX: f64 = 0.5;
/// The same of asking to learn, as part of what the rest of the answer takes.
const PROBE_MAX: f64 = 0.02;

impl Drafting {
    /// With a draft model for a target of this `vocabulary`, or without. It reads so many tokens in a step at most.
    pub(super) fn new(model: Option<DraftRunner>, vocabulary: u32, read_max: u32) -> Self {
        let model = model.map(|runner| DraftModel::new(runner, vocabulary, read_max));
        Self { model, ..Self::default() }
    }

    /// Lets the draft model sleep, as the model does.
    pub(super) fn sleep(&mut self, level: SleepLevel) {
        if let Some(model) = &mut self.model {
            model.sleep(level);
        }
    }

    /// Wakes the draft model; it is done without if that fails.
    pub(super) fn wake(&mut self) {
        if let Some(model) = &mut self.model {
            model.wake();
        }
    }

    /// Decides for all sequences that generate how many guesses are worth it, and asks for room for them.
    pub(super) fn propose(&mut self, requests: &mut Requests, scheduler: &mut Scheduler) {
        if !requests.have_drafters {
            return;
        }
        let prices = self.costs.prices(scheduler.load().running);
        let threshold = prices.map_or(f32::INFINITY, |prices| prices.threshold(0.0));
        self.plan.clear();
        let mut unindexed = INDEXED_TOKENS_MAX;
        for (&number, live) in &mut requests.live {
            let Some(drafters) = &mut live.drafters else { continue };
            if let Some(index) = &mut drafters.index {
                unindexed -= index.extend(unindexed);
            }
            for (index, drafter) in drafters.each.iter_mut().enumerate() {
                let generated = live.histories[index].generated();
                drafter.rest();
                let is_suspended = live.logits.contains_key(&(index as u32));
                if live.ended[index] || generated == 0 || is_suspended {
                    continue;
                }
                let (looked, hit) = match drafter.looking.as_mut().zip(drafters.index.as_ref()) {
                    Some((looking, prompt)) => looking.look(prompt, &self.learned.hits, threshold),
                    None => (0, 0.0),
                };
                let sequence = SequenceId::new(number, index as u32);
                let rest = live.stop.max_tokens.saturating_sub(generated);
                let asked = prices.and_then(|prices| self.consider(sequence, drafter, (prices, rest)));
                match asked {
                    Some(asked) if looked == 0 || asked.hit > hit => {
                        self.plan.push(Asked { looked, ..asked })
                    }
                    _ => look(sequence, looked, drafter, scheduler),
                }
            }
        }
        if let Some(prices) = prices {
            deepen(&mut self.plan, prices, &self.costs);
        }
        for Asked { sequence, count, looked, .. } in self.plan.drain(..) {
            let Some(drafter) = requests.drafter(sequence) else { continue };
            let Some(asking) = drafter.asking.as_mut().filter(|_| count > 0) else {
                look(sequence, looked, drafter, scheduler);
                continue;
            };
            asking.idle = 0;
            drafter.source = Some(Source::Model);
            scheduler.set_num_draft_tokens(sequence, count as u32);
        }
    }

    /// Whether the draft model is to be asked for a sequence of which at most `rest` tokens are to come.
    fn consider(
        &self,
        sequence: SequenceId,
        drafter: &mut Drafter,
        (prices, rest): (Prices, u32),
    ) -> Option<Asked> {
        let model = self.model.as_ref()?;
        let asking = drafter.asking.as_mut().filter(|asking| model.can_read(&asking.text, asking.most()))?;
        let hit = *asking.hit.get_or_insert(self.learned.hit);
        let (most, rest) = (asking.most(), f64::from(rest));
        let making = self.costs.run(1.max(self.plan.len() as u32));
        let reading = asking.unread() as f64 * self.costs.reading();
        let gain = prices.gain(hit, most, making);
        let is_probe = asking.idle >= PROBE_EVERY;
        let is_worth_it = reading <= READING_MAX * rest * gain
            || is_probe && reading + making <= PROBE_MAX * rest * prices.row;
        let asked = Asked { sequence, hit, most, is_probe, count: 0, probability: hit, looked: 0 };
        is_worth_it.then_some(asked)
    }

    /// Writes the guesses into a batch that has room for them. What room is left over is taken back.
    pub(super) fn fill(
        &mut self,
        batch: &mut Batch,
        requests: &mut Requests,
        tools: (&Clock, &mut StepReport),
    ) {
        if batch.sequences.iter().all(|row| row.num_draft_tokens == 0) {
            return;
        }
        let (clock, report) = tools;
        if let Some(model) = &mut self.model {
            let began = clock.now();
            model.guess(batch, requests, (clock, &mut self.costs));
            report.draft_time = clock.now() - began;
            let guessed = |row: &ScheduledSequence| requests.drafter_of(row.id).guess().len() as u32;
            batch.truncate_drafts(model.block_tokens(), guessed);
        }
        let Batch { sequences, tokens, .. } = batch;
        for row in sequences.iter().filter(|row| row.num_draft_tokens > 0) {
            let guess = &requests.drafter_of(row.id).guess()[..row.num_draft_tokens as usize];
            let end = row.tokens.end as usize;
            tokens[end - guess.len()..end].copy_from_slice(guess);
        }
    }

    /// Takes in which guesses for a row were right: so many of its drafts, after which `token` was sampled.
    pub(super) fn learn(
        &mut self,
        row: &ScheduledSequence,
        drafter: &mut Drafter,
        accepted: u32,
        token: TokenId,
    ) {
        drafter.learn(row, (accepted, token), &mut self.learned);
    }

    /// Takes in what a step took.
    pub(super) fn took(&mut self, report: &StepReport) {
        self.costs.took(Took {
            rows: report.rows,
            drafts: report.drafted_tokens,
            accepted: report.accepted_tokens,
            only_decodes: report.prefill_tokens == 0,
            step: report.step_time.as_secs_f64(),
            model: report.draft_time.as_secs_f64(),
        });
    }
}

/// Asks for room for guesses by lookup, if any are worth it.
fn look(sequence: SequenceId, count: usize, drafter: &mut Drafter, scheduler: &mut Scheduler) {
    if count > 0 {
        drafter.source = Some(Source::Lookup);
    }
    scheduler.set_num_draft_tokens(sequence, count as u32);
}

/// Decides how many guesses each sequence is to have from the draft model: one more for all for whom it is worth it, as
/// long as there are any. The fewer these are, the more costs a run of the model for each.
fn deepen(plan: &mut [Asked], prices: Prices, costs: &Costs) {
    for depth in 1.. {
        let mut active = plan.len() as u32;
        let threshold = loop {
            let threshold = prices.threshold(costs.run(active));
            let still = plan.iter().filter(|asked| asked.goes_on(depth, threshold)).count() as u32;
            if still == 0 {
                return;
            }
            if still >= active {
                break threshold;
            }
            active = still;
        };
        for asked in plan.iter_mut().filter(|asked| asked.goes_on(depth, threshold)) {
            asked.count = depth;
            asked.probability *= asked.hit;
        }
    }
}

impl Asked {
    /// Whether it is to have a guess at this depth too.
    fn goes_on(&self, depth: usize, threshold: f32) -> bool {
        let is_worth_it = self.probability >= threshold || (self.is_probe && depth <= PROBE_GUESSES);
        self.count + 1 == depth && depth <= self.most && is_worth_it
    }
}

impl Requests {
    fn drafter(&mut self, sequence: SequenceId) -> Option<&mut Drafter> {
        self.live.get_mut(&sequence.request)?.drafter(sequence.index)
    }

    /// Of a sequence that has drafts.
    fn drafter_of(&self, sequence: SequenceId) -> &Drafter {
        let live: &Live = &self.live[&sequence.request];
        live.drafter_of(sequence.index)
    }
}

impl Live {
    /// What guesses for a sequence, if anything does and it has begun.
    pub(super) fn drafter(&mut self, index: u32) -> Option<&mut Drafter> {
        self.drafters.as_mut()?.each.get_mut(index as usize)
    }

    /// Of a sequence that has drafts.
    fn drafter_of(&self, index: u32) -> &Drafter {
        let drafters = self.drafters.as_ref().expect("invariant: what has drafts is guessed");
        &drafters.each[index as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(hit: f32, most: usize, is_probe: bool) -> Asked {
        Asked { sequence: SequenceId::new(0, 0), hit, most, is_probe, count: 0, probability: hit, looked: 0 }
    }

    fn counts(plan: &mut [Asked], prices: Prices, costs: &Costs) -> Vec<usize> {
        deepen(plan, prices, costs);
        plan.iter().map(|asked| asked.count).collect()
    }

    #[test]
    fn guesses_go_as_deep_as_they_pay() {
        let mut costs = Costs::default();
        let prices = Prices { row: 1.0, draft: 0.1 };
        (1..=3).for_each(|rows| (0..3).for_each(|_| costs.ran(rows, rows, 0.3)));
        // Alone a run costs 0.3, with the draft 0.4: worth it down to a probability of 0.46.
        assert_eq!(counts(&mut [asked(0.8, 9, false)], prices, &costs), [3]);
        assert_eq!(counts(&mut [asked(0.8, 2, false)], prices, &costs), [2]);
        assert_eq!(counts(&mut [asked(0.4, 9, false)], prices, &costs), [0]);
        assert_eq!(counts(&mut [asked(0.4, 9, true)], prices, &costs), [PROBE_GUESSES]);
        // Three share a run, and then go less deep one after the other.
        let mut three = [asked(0.4, 9, false), asked(0.8, 9, false), asked(0.8, 9, false)];
        assert_eq!(counts(&mut three, prices, &costs), [1, 5, 5]);
        assert!(counts(&mut [], prices, &costs).is_empty());
    }

    #[test]
    fn in_a_simulation_without_time_everything_is_worth_it() {
        let prices = Prices { row: 0.0, draft: 0.0 };
        assert_eq!(counts(&mut [asked(0.01, 7, false)], prices, &Costs::default()), [7]);
    }
}
