//! The drafters of requests and their sequences: the source of each sequence's drafts, and how often the drafts are
//! accepted.

use server_scheduler::{DRAFT_TOKENS_MAX, TokenId};

use super::text::Text;
use crate::lookup::{LookupOutput, MATCH_MAX, PromptIndex, PromptLookup};
use crate::request::{DraftCounts, DraftModelParams};

/// The drafters of a request's sequences, and the data that they share.
#[derive(Debug)]
pub(crate) struct RequestDrafter {
    lookup: Option<PromptLookup>,
    model_params: Option<DraftModelParams>,
    /// The prompt, until the first token is generated.
    prompt: Vec<TokenId>,
    /// The index of the prompt, if lookup is used and a token has been generated.
    pub(super) index: Option<PromptIndex>,
    /// The drafter of each sequence. Empty until a token is generated, so that waiting requests need little memory.
    pub(super) sequences: Vec<SequenceDrafter>,
}

/// Proposes the next tokens of a sequence.
#[derive(Clone, Debug)]
pub(super) struct SequenceDrafter {
    pub(super) ngram: Option<NgramProposer>,
    pub(super) model: Option<ModelProposer>,
    /// The source of the drafts in the next step.
    pub(super) source: Option<DraftSource>,
    pub(super) counts: DraftCounts,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DraftSource {
    /// Prompt lookup.
    Lookup,
    /// The draft model.
    Model,
}

/// Proposes drafts by prompt lookup.
#[derive(Clone, Debug)]
pub(super) struct NgramProposer {
    output: LookupOutput,
    num_draft_tokens: usize,
    /// The acceptance rate of this sequence's drafts. `None` before the first proposal.
    acceptance: Option<MatchAcceptance>,
    limit: usize,
    /// The drafts for the next step.
    drafts: Vec<TokenId>,
    /// Length of the match: the number of tokens at the end of the text that also occur earlier.
    matched: usize,
}

/// Proposes drafts of the draft model.
#[derive(Clone, Debug)]
pub(super) struct ModelProposer {
    pub(super) params: DraftModelParams,
    pub(super) text: Text,
    /// Number of leading tokens of the text that were in the model's cache at the end of the last step that used the
    /// model.
    pub(super) cached_tokens: usize,
    /// The acceptance rate of this sequence's drafts. `None` before the first proposal.
    pub(super) acceptance: Option<f32>,
    limit: usize,
    /// Number of steps since the model was last used.
    pub(super) idle_steps: u32,
    /// The drafts for the next step.
    pub(super) drafts: Vec<TokenId>,
}

/// The probability that a draft is accepted if all drafts before it are accepted, by the number of tokens that matched.
#[derive(Clone, Copy, Debug)]
pub(super) struct MatchAcceptance([f32; MATCH_MAX]);

/// Maximum number of drafts in the first step with drafts. The limit doubles when all drafts are accepted and halves
/// when none is, so that a new kind of text costs little until its acceptance rate is known.
const INITIAL_LIMIT: usize = 2;

/// The weight of a new observation in the average of a sequence.
const SEQUENCE_WEIGHT: f32 = 0.15;
/// The weight of a new observation in the average of all sequences.
const GLOBAL_WEIGHT: f32 = 0.02;

/// The acceptance rates of the drafts of all sequences.
#[derive(Debug)]
pub(super) struct AcceptanceRates {
    pub(super) lookup: MatchAcceptance,
    pub(super) model: f32,
}

impl Default for AcceptanceRates {
    fn default() -> Self {
        let initial = std::array::from_fn(|matched| [0.2, 0.4, 0.6].get(matched).copied().unwrap_or(0.7));
        Self { lookup: MatchAcceptance(initial), model: 0.7 }
    }
}

impl RequestDrafter {
    /// Creates the drafter of a request. `None` if the request uses no drafts.
    pub(crate) fn new(
        lookup: Option<PromptLookup>,
        model_params: Option<DraftModelParams>,
        prompt: &[TokenId],
    ) -> Option<Self> {
        if lookup.is_none() && model_params.is_none() {
            return None;
        }
        Some(Self { lookup, model_params, prompt: prompt.to_vec(), index: None, sequences: Vec::new() })
    }

    /// Appends a generated token to one of the request's `num_sequences` sequences.
    pub(super) fn push(&mut self, index: usize, num_sequences: usize, token: TokenId) {
        if self.sequences.is_empty() {
            let prompt = std::mem::take(&mut self.prompt);
            self.index = self.lookup.as_ref().map(|lookup| PromptIndex::new(lookup, &prompt));
            let text = self.model_params.map(|_| Text::new(&prompt));
            self.sequences = vec![SequenceDrafter::new(self, text); num_sequences];
        }
        self.sequences[index].push(self.index.as_ref(), token);
    }
}

impl SequenceDrafter {
    fn new(request: &RequestDrafter, text: Option<Text>) -> Self {
        let ngram =
            request.index.as_ref().zip(request.lookup.as_ref()).map(|(index, lookup)| NgramProposer {
                output: LookupOutput::new(index),
                // The settings in a model's directory can specify any number of draft tokens, but the scheduler never
                // schedules more than `DRAFT_TOKENS_MAX`.
                num_draft_tokens: lookup.num_draft_tokens.min(DRAFT_TOKENS_MAX) as usize,
                acceptance: None,
                limit: INITIAL_LIMIT,
                drafts: Vec::new(),
                matched: 0,
            });
        let model = request.model_params.zip(text).map(|(params, text)| ModelProposer {
            params,
            text,
            cached_tokens: 0,
            acceptance: None,
            limit: INITIAL_LIMIT,
            idle_steps: 0,
            drafts: Vec::new(),
        });
        Self { ngram, model, source: None, counts: DraftCounts::default() }
    }

    fn push(&mut self, index: Option<&PromptIndex>, token: TokenId) {
        if let Some((ngram, index)) = self.ngram.as_mut().zip(index) {
            ngram.output.push(index, token);
        }
        if let Some(model) = &mut self.model {
            model.text.push(token);
        }
    }

    /// Discards the drafts of the previous step.
    pub(super) fn begin_step(&mut self) {
        self.source = None;
        if let Some(ngram) = &mut self.ngram {
            ngram.drafts.clear();
        }
        if let Some(model) = &mut self.model {
            model.drafts.clear();
            model.idle_steps = model.idle_steps.saturating_add(1);
        }
    }

    /// The proposer of the draft model, if the model proposes in this step.
    pub(super) fn active_model(&mut self) -> Option<&mut ModelProposer> {
        self.model.as_mut().filter(|_| self.source == Some(DraftSource::Model))
    }

    /// The drafts for the next step.
    pub(super) fn drafts(&self) -> &[TokenId] {
        let drafts = match self.source {
            Some(DraftSource::Lookup) => self.ngram.as_ref().map(|ngram| &ngram.drafts),
            Some(DraftSource::Model) => self.model.as_ref().map(|model| &model.drafts),
            None => None,
        };
        drafts.map_or(&[], Vec::as_slice)
    }

    /// Records that the first `accepted` of the `computed` drafts were accepted, and that `token` was sampled after
    /// them.
    pub(super) fn record_sampled(
        &mut self,
        computed: u32,
        accepted: u32,
        token: TokenId,
        rates: &mut AcceptanceRates,
    ) {
        self.counts.accepted += accepted;
        self.counts.rejected += computed - accepted;
        let source = self.source.filter(|_| computed > 0);
        let first = self.drafts().first().copied().filter(|_| accepted > 0).unwrap_or(token);
        if let Some(ngram) = &mut self.ngram {
            let matched = ngram.matched.max(1) - 1;
            let mut own = ngram.acceptance.as_mut().map(|acceptance| &mut acceptance.0[matched]);
            let global = &mut rates.lookup.0[matched];
            if source == Some(DraftSource::Lookup) {
                ngram.limit = next_limit(ngram.limit, ngram.num_draft_tokens, accepted, computed);
                record_drafts(own, global, accepted, computed);
            } else if let Some(&draft) = ngram.drafts.first() {
                // This draft was not part of the step, but the sampled token shows whether it was correct.
                record(&mut own, global, draft == first);
            }
        }
        if let Some(model) = self.model.as_mut().filter(|_| source == Some(DraftSource::Model)) {
            model.limit = next_limit(model.limit, model.params.num_draft_tokens as usize, accepted, computed);
            record_drafts(model.acceptance.as_mut(), &mut rates.model, accepted, computed);
        }
    }
}

impl NgramProposer {
    /// Proposes drafts. Returns how many of them are worth their cost, and the probability that a draft is accepted if
    /// all drafts before it are accepted.
    pub(super) fn propose(
        &mut self,
        index: &PromptIndex,
        global: &MatchAcceptance,
        threshold: f32,
    ) -> (usize, f32) {
        self.matched = self.output.propose(index, self.num_draft_tokens, &mut self.drafts);
        let acceptance = self.acceptance.get_or_insert(*global).0[self.matched.max(1) - 1];
        let max_drafts = self.drafts.len().min(self.limit);
        let mut probability = acceptance;
        let mut count = 0;
        while count < max_drafts && probability >= threshold {
            count += 1;
            probability *= acceptance;
        }
        (count, acceptance)
    }
}

impl ModelProposer {
    /// The largest number of drafts in the next step.
    pub(super) fn max_drafts(&self) -> usize {
        self.limit.min(self.params.num_draft_tokens as usize)
    }

    /// Number of tokens of the text that are not among the [`Self::cached_tokens`], and that the model may have to read
    /// before it can propose.
    pub(super) fn unread_tokens(&self) -> usize {
        self.text.len() - self.cached_tokens.min(self.text.len())
    }
}

/// Returns the limit on the number of drafts in the next step, at most `max_drafts`.
fn next_limit(limit: usize, max_drafts: usize, accepted: u32, computed: u32) -> usize {
    match accepted {
        0 => (limit / 2).max(1),
        all if all == computed => (limit * 2).min(max_drafts.max(1)),
        _ => limit,
    }
}

/// Records the accepted drafts and the first rejected one.
fn record_drafts(mut own: Option<&mut f32>, global: &mut f32, accepted: u32, computed: u32) {
    (0..accepted).for_each(|_| record(&mut own, global, true));
    if accepted < computed {
        record(&mut own, global, false);
    }
}

fn record(own: &mut Option<&mut f32>, global: &mut f32, is_accepted: bool) {
    let accepted = f32::from(u8::from(is_accepted));
    if let Some(own) = own {
        **own += SEQUENCE_WEIGHT * (accepted - **own);
    }
    *global += GLOBAL_WEIGHT * (accepted - *global);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_drafts_is_limited() {
        let config = PromptLookup { max_ngram_size: 3, num_draft_tokens: 1 << 20, prediction: Vec::new() };
        let mut request = RequestDrafter::new(Some(config), None, &[1, 2, 3, 1, 2]).unwrap();
        request.push(0, 1, 3);
        let index = request.index.as_mut().unwrap();
        index.extend(usize::MAX);
        let ngram = request.sequences[0].ngram.as_mut().unwrap();
        ngram.propose(index, &AcceptanceRates::default().lookup, 0.0);
        assert_eq!(ngram.drafts.len(), DRAFT_TOKENS_MAX as usize);
    }
}
