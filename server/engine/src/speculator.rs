//! Speculative decoding: decides which draft tokens are computed together with the latest token of a sequence, and
//! whether they come from prompt lookup or from a draft model.
//!
//! A correct draft saves its sequence a step. Each draft adds a token to a step, and a draft of the draft model also
//! costs its share of a run of that model. The speculator continuously measures how often drafts are accepted and, for
//! each number of sequences in a step, what sequences, drafts and runs of the draft model cost. Except for occasional
//! probes of the draft model, it proposes no draft that is likely to cost more than it saves, and it stops proposing
//! drafts for a while if they lose more than a small fraction of the time.
//!
//! Drafts affect only the speed: each token is sampled as it would be without them.

use std::collections::BTreeMap;
use std::time::Duration;

use server_scheduler::{Batch, ScheduledSequence, Scheduler, SequenceId, TokenId};

use crate::clock::Clock;
use crate::lookup::INDEXED_TOKENS_MAX;
use crate::report::StepReport;
use crate::request::DraftCounts;
use crate::requests::Requests;
use crate::runner::DraftRunner;
use crate::sleep::SleepLevel;
use costs::{CostModel, MarginalCosts, StepMeasurement};
use draft_model::DraftModel;
pub(crate) use drafter::RequestDrafter;
use drafter::{AcceptanceRates, DraftSource, ModelProposer, SequenceDrafter};

mod costs;
mod draft_model;
mod drafter;
mod text;

/// Proposes drafts for all sequences, and records which of them are accepted.
#[derive(Default)]
pub(crate) struct Speculator {
    costs: CostModel,
    rates: AcceptanceRates,
    model: Option<DraftModel>,
    /// The drafters by request number, including those of requests that have ended since the last step.
    requests: BTreeMap<u64, RequestDrafter>,
    /// Whether any request ever had a drafter.
    is_used: bool,
    /// The sequences for which the draft model may propose drafts. This buffer is reused in every step.
    plan: Vec<ModelDraft>,
}

/// A sequence for which the draft model may propose drafts.
struct ModelDraft {
    sequence: SequenceId,
    /// The probability that a draft is accepted if all drafts before it are accepted.
    acceptance: f32,
    max_drafts: usize,
    /// Whether the drafts are proposed to measure the draft model's acceptance rate.
    is_probe: bool,
    /// Number of drafts found to be worth their cost so far.
    num_drafts: usize,
    /// The probability that these `num_drafts` drafts and the next one are all accepted.
    probability: f32,
    /// Number of lookup drafts that are worth their cost if the draft model proposes none.
    num_lookup_drafts: usize,
}

/// Number of consecutive steps in which a sequence does not use the draft model before the model is probed again for
/// this sequence, if the probe is cheap.
const PROBE_INTERVAL: u32 = 64;
const PROBE_DRAFTS: usize = 2;
/// The highest cost of reading a text, as a fraction of the time that drafts are expected to save until the sequence
/// has the maximum number of tokens. The fraction is less than 1, because the sequence may end earlier.
const READING_COST_MAX: f64 = 0.5;
/// The highest cost of a probe, as a fraction of the time that the remaining tokens of the sequence take without
/// drafts.
const PROBE_COST_MAX: f64 = 0.02;

impl Speculator {
    /// Creates a speculator for a target model with a vocabulary of `vocabulary` tokens. In a step, the optional draft
    /// model reads at most `max_read_tokens` tokens of texts.
    pub(crate) fn new(model: Option<DraftRunner>, vocabulary: u32, max_read_tokens: u32) -> Self {
        let model = model.map(|runner| DraftModel::new(runner, vocabulary, max_read_tokens));
        Self { model, ..Self::default() }
    }

    /// Puts the draft model to sleep.
    pub(crate) fn sleep(&mut self, level: SleepLevel) {
        if let Some(model) = &mut self.model {
            model.sleep(level);
        }
    }

    /// Wakes the draft model. If that fails, the draft model is disabled.
    pub(crate) fn wake(&mut self) {
        if let Some(model) = &mut self.model {
            model.wake();
        }
    }

    /// Adds the drafter of a request that was submitted to the scheduler.
    pub(crate) fn add_request(&mut self, number: u64, drafter: RequestDrafter) {
        self.is_used = true;
        self.requests.insert(number, drafter);
    }

    /// Appends a generated token to the text of a sequence, which is one of the `num_sequences` sequences of its
    /// request.
    pub(crate) fn push(&mut self, sequence: SequenceId, num_sequences: usize, token: TokenId) {
        if let Some(drafter) = self.requests.get_mut(&sequence.request) {
            drafter.push(sequence.index as usize, num_sequences, token);
        }
    }

    /// The numbers of accepted and rejected drafts of a sequence.
    pub(crate) fn counts(&self, sequence: SequenceId) -> DraftCounts {
        let request = self.requests.get(&sequence.request);
        let drafter = request.and_then(|request| request.sequences.get(sequence.index as usize));
        drafter.map_or(DraftCounts::default(), |drafter| drafter.counts)
    }

    /// Decides how many drafts are worth their cost for each generating sequence, and requests room for them from the
    /// scheduler.
    pub(crate) fn propose(&mut self, requests: &Requests, scheduler: &mut Scheduler) {
        self.requests.retain(|number, _| requests.active.contains_key(number));
        if self.requests.is_empty() {
            return;
        }
        let Self { costs, rates, model, requests: drafters, plan, .. } = self;
        let marginal_costs = costs.marginal_costs(scheduler.load().running);
        let threshold = marginal_costs.map_or(f32::INFINITY, |marginal_costs| marginal_costs.threshold(0.0));
        plan.clear();
        let mut index_budget = INDEXED_TOKENS_MAX;
        for (&number, request) in drafters {
            let active = &requests.active[&number];
            if let Some(index) = &mut request.index {
                index_budget -= index.extend(index_budget);
            }
            for (index, drafter) in request.sequences.iter_mut().enumerate() {
                let generated = active.histories[index].generated();
                drafter.begin_step();
                let is_suspended = active.suspended_logits.contains_key(&(index as u32));
                if active.ended[index] || generated == 0 || is_suspended {
                    continue;
                }
                let lookup = drafter.ngram.as_mut().zip(request.index.as_ref());
                let (num_lookup_drafts, acceptance) = match lookup {
                    Some((ngram, index)) => ngram.propose(index, &rates.lookup, threshold),
                    None => (0, 0.0),
                };
                let sequence = SequenceId::new(number, index as u32);
                let remaining = active.stop.max_tokens.saturating_sub(generated);
                let draft = match (marginal_costs, &*model, &mut drafter.model) {
                    (Some(marginal_costs), Some(model), Some(proposer))
                        if model.can_read(&proposer.text, proposer.max_drafts()) =>
                    {
                        proposer.acceptance.get_or_insert(rates.model);
                        plan_model_draft(
                            sequence,
                            proposer,
                            plan.len() as u32,
                            remaining,
                            marginal_costs,
                            costs,
                        )
                    }
                    _ => None,
                };
                match draft {
                    Some(draft) if num_lookup_drafts == 0 || draft.acceptance > acceptance => {
                        plan.push(ModelDraft { num_lookup_drafts, ..draft });
                    }
                    _ => use_lookup(sequence, num_lookup_drafts, drafter, scheduler),
                }
            }
        }
        if let Some(marginal_costs) = marginal_costs {
            extend_drafts(plan, marginal_costs, costs);
        }
        for ModelDraft { sequence, num_drafts, num_lookup_drafts, .. } in plan.drain(..) {
            let Some(drafter) = sequence_drafter(&mut self.requests, sequence) else { continue };
            let Some(model) = drafter.model.as_mut().filter(|_| num_drafts > 0) else {
                use_lookup(sequence, num_lookup_drafts, drafter, scheduler);
                continue;
            };
            model.idle_steps = 0;
            drafter.source = Some(DraftSource::Model);
            scheduler.set_num_draft_tokens(sequence, num_drafts as u32);
        }
    }

    /// Writes the drafts into the room that the batch reserves for them, and removes unused room. Returns the time that
    /// the draft model took.
    pub(crate) fn write_drafts(&mut self, batch: &mut Batch, requests: &Requests, clock: &Clock) -> Duration {
        if batch.sequences.iter().all(|scheduled| scheduled.num_draft_tokens == 0) {
            return Duration::ZERO;
        }
        let mut draft_time = Duration::ZERO;
        if let Some(model) = &mut self.model {
            let began = clock.now();
            model.propose(batch, requests, &mut self.requests, clock, &mut self.costs);
            draft_time = clock.now() - began;
            let block_tokens = model.block_tokens();
            batch.truncate_drafts(block_tokens, |scheduled| self.drafts(scheduled.id).len() as u32);
        }
        for scheduled in batch.sequences.iter().filter(|scheduled| scheduled.num_draft_tokens > 0) {
            let drafts = &self.drafts(scheduled.id)[..scheduled.num_draft_tokens as usize];
            let end = scheduled.tokens.end as usize;
            batch.tokens[end - drafts.len()..end].copy_from_slice(drafts);
        }
        draft_time
    }

    /// Records that the first `accepted` of the `num_draft_tokens` drafts of a sequence were accepted, and that `token`
    /// was sampled after them.
    pub(crate) fn record_sampled(
        &mut self,
        sequence: SequenceId,
        num_draft_tokens: u32,
        accepted: u32,
        token: TokenId,
    ) {
        if let Some(drafter) = sequence_drafter(&mut self.requests, sequence) {
            drafter.record_sampled(num_draft_tokens, accepted, token, &mut self.rates);
        }
    }

    /// Records that the drafts of a sequence were computed but not verified.
    pub(crate) fn record_unused(&mut self, scheduled: &ScheduledSequence) {
        if let Some(drafter) = sequence_drafter(&mut self.requests, scheduled.id) {
            drafter.counts.rejected += scheduled.num_draft_tokens;
        }
    }

    /// Records the time of a step.
    pub(crate) fn record_step(&mut self, report: &StepReport) {
        if self.is_used {
            self.costs.record_step(StepMeasurement {
                num_sequences: report.num_sequences,
                drafts: report.drafted_tokens,
                accepted: report.accepted_tokens,
                has_prompts: report.prefill_tokens > 0,
                step_seconds: report.step_time.as_secs_f64(),
                draft_seconds: report.draft_time.as_secs_f64(),
            });
        }
    }

    /// The drafts of a scheduled sequence.
    fn drafts(&self, sequence: SequenceId) -> &[TokenId] {
        self.requests[&sequence.request].sequences[sequence.index as usize].drafts()
    }
}

fn sequence_drafter(
    requests: &mut BTreeMap<u64, RequestDrafter>,
    sequence: SequenceId,
) -> Option<&mut SequenceDrafter> {
    requests.get_mut(&sequence.request)?.sequences.get_mut(sequence.index as usize)
}

/// Requests room for `num_drafts` lookup drafts of a sequence from the scheduler. The number may be 0.
fn use_lookup(
    sequence: SequenceId,
    num_drafts: usize,
    drafter: &mut SequenceDrafter,
    scheduler: &mut Scheduler,
) {
    if num_drafts > 0 {
        drafter.source = Some(DraftSource::Lookup);
    }
    scheduler.set_num_draft_tokens(sequence, num_drafts as u32);
}

/// Plans drafts of the draft model for a sequence that generates at most `remaining` further tokens. The model may
/// already propose drafts for `planned` other sequences. `None` if the drafts are not expected to be worth the cost of
/// reading the text, unless a cheap probe is due.
fn plan_model_draft(
    sequence: SequenceId,
    proposer: &ModelProposer,
    planned: u32,
    remaining: u32,
    marginal_costs: MarginalCosts,
    costs: &CostModel,
) -> Option<ModelDraft> {
    let acceptance = proposer.acceptance?;
    let (max_drafts, remaining) = (proposer.max_drafts(), f64::from(remaining));
    let run = costs.run(planned.max(1));
    let reading = proposer.unread_tokens() as f64 * costs.reading();
    let gain = marginal_costs.gain(acceptance, max_drafts, run);
    let is_probe = proposer.idle_steps >= PROBE_INTERVAL;
    let is_cheap_probe = is_probe && reading + run <= PROBE_COST_MAX * remaining * marginal_costs.sequence;
    let is_worth_reading = reading <= READING_COST_MAX * remaining * gain;
    (is_worth_reading || is_cheap_probe).then_some(ModelDraft {
        sequence,
        acceptance,
        max_drafts,
        is_probe,
        num_drafts: 0,
        probability: acceptance,
        num_lookup_drafts: 0,
    })
}

/// Decides how many drafts each sequence gets from the draft model: repeatedly adds one draft to each sequence for
/// which another draft is worth its cost, until there is no such sequence. The fewer sequences share a run of the
/// model, the more the run costs each of them.
fn extend_drafts(plan: &mut [ModelDraft], marginal_costs: MarginalCosts, costs: &CostModel) {
    for depth in 1.. {
        let mut sharing = plan.len() as u32;
        let threshold = loop {
            let threshold = marginal_costs.threshold(costs.run(sharing));
            let worthwhile = plan.iter().filter(|draft| draft.is_worth(depth, threshold)).count() as u32;
            if worthwhile == 0 {
                return;
            }
            if worthwhile >= sharing {
                break threshold;
            }
            sharing = worthwhile;
        };
        for draft in plan.iter_mut().filter(|draft| draft.is_worth(depth, threshold)) {
            draft.num_drafts = depth;
            draft.probability *= draft.acceptance;
        }
    }
}

impl ModelDraft {
    /// Whether the next draft of the sequence has this depth, is within the limit, and is worth its cost. The first
    /// [`PROBE_DRAFTS`] drafts of a probe always count as worth their cost.
    fn is_worth(&self, depth: usize, threshold: f32) -> bool {
        let is_worth_it = self.probability >= threshold || (self.is_probe && depth <= PROBE_DRAFTS);
        self.num_drafts + 1 == depth && depth <= self.max_drafts && is_worth_it
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draft(acceptance: f32, max_drafts: usize, is_probe: bool) -> ModelDraft {
        ModelDraft {
            sequence: SequenceId::new(0, 0),
            acceptance,
            max_drafts,
            is_probe,
            num_drafts: 0,
            probability: acceptance,
            num_lookup_drafts: 0,
        }
    }

    fn num_drafts(plan: &mut [ModelDraft], marginal_costs: MarginalCosts, costs: &CostModel) -> Vec<usize> {
        extend_drafts(plan, marginal_costs, costs);
        plan.iter().map(|draft| draft.num_drafts).collect()
    }

    #[test]
    fn drafts_are_as_deep_as_they_are_worth_their_cost() {
        let mut costs = CostModel::default();
        let marginal_costs = MarginalCosts { sequence: 1.0, draft: 0.1 };
        (1..=3).for_each(|sequences| (0..3).for_each(|_| costs.record_run(sequences, sequences, 0.3)));
        // For one sequence, a run of the draft model takes 0.3 s, and its draft adds 0.1 s to the step. A draft is
        // worth these 0.4 s if its probability is at least 0.46 (0.4 times the margin of 1.15).
        assert_eq!(num_drafts(&mut [draft(0.8, 9, false)], marginal_costs, &costs), [3]);
        assert_eq!(num_drafts(&mut [draft(0.8, 2, false)], marginal_costs, &costs), [2]);
        assert_eq!(num_drafts(&mut [draft(0.4, 9, false)], marginal_costs, &costs), [0]);
        assert_eq!(num_drafts(&mut [draft(0.4, 9, true)], marginal_costs, &costs), [PROBE_DRAFTS]);
        // Three sequences share the cost of the first run.
        let mut three = [draft(0.4, 9, false), draft(0.8, 9, false), draft(0.8, 9, false)];
        assert_eq!(num_drafts(&mut three, marginal_costs, &costs), [1, 5, 5]);
        assert!(num_drafts(&mut [], marginal_costs, &costs).is_empty());
    }

    #[test]
    fn all_drafts_are_worth_it_in_a_simulation_without_time() {
        let marginal_costs = MarginalCosts { sequence: 0.0, draft: 0.0 };
        assert_eq!(num_drafts(&mut [draft(0.01, 7, false)], marginal_costs, &CostModel::default()), [7]);
    }
}
