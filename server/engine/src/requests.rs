//! The requests in the scheduler: their sampling state, and the channels to their clients.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use server_scheduler::{BlockHash, FinishReason, NewRequest, Scheduler, SequenceId, StopCriteria, TokenId};
use tokio::sync::mpsc;

use crate::aborts::Aborts;
use crate::command::{Submission, WaitingPermit};
use crate::guide::CommitLock;
use crate::guides::slot::{GuideSlot, GuideTime};
use crate::images::RequestImages;
use crate::logprobs::{ScoredToken, TokenLogprobs};
use crate::request::{DraftCounts, Event, Failure, Sampling};
use crate::sampler::History;
use crate::search::Search;

#[derive(Default)]
pub(crate) struct Requests {
    /// The requests by their numbers, which are assigned in the order in which requests arrive.
    pub(crate) active: BTreeMap<u64, ActiveRequest>,
    /// The numbers of requests with suspended sequences. Some of these requests may have ended already.
    pub(crate) suspended: BTreeSet<u64>,
    /// Number of submissions so far.
    pub(crate) submissions: u64,
    /// Whether any request ever had a guide.
    pub(crate) have_guides: bool,
}

/// A request that was submitted to the scheduler.
pub(crate) struct ActiveRequest {
    pub(crate) sampling: Arc<Sampling>,
    pub(crate) stop: Arc<StopCriteria>,
    pub(crate) images: Option<Arc<RequestImages>>,
    /// The history of each sequence.
    pub(crate) histories: Vec<History>,
    /// The scores of the prompt, until they are sent.
    pub(crate) scores: Option<PromptScores>,
    /// The guide of each sequence. Empty if the request has no guide.
    pub(crate) guides: Vec<GuideSlot>,
    pub(crate) guide_time: GuideTime,
    /// The logits of suspended sequences, which are sampled when their guides are ready. A beam search that is
    /// suspended only because another thread uses shared guide state has no entries here, because it already has the
    /// candidates of its beams.
    pub(crate) suspended_logits: BTreeMap<u32, Arc<[f32]>>,
    pub(crate) search: Option<Box<Search>>,
    /// Whether each sequence has ended.
    pub(crate) ended: Vec<bool>,
    /// Number of sequences that have not ended.
    pub(crate) open: usize,
    pub(crate) prompt_tokens: u32,
    pub(crate) submitted: Duration,
    events: mpsc::Sender<Event>,
    aborts: Arc<Aborts>,
    /// The permit that is released when the request starts.
    permit: Option<WaitingPermit>,
}

/// The log probabilities of a prompt that is being computed.
pub(crate) struct PromptScores {
    pub(crate) prompt: Vec<TokenId>,
    /// The scores of the tokens that have been computed so far. The first token has no score.
    pub(crate) tokens: Vec<ScoredToken>,
}

impl Requests {
    /// Submits a request to the scheduler, unless its client has disconnected. Returns its number.
    pub(crate) fn submit(&mut self, submission: Submission, scheduler: &mut Scheduler) -> Option<u64> {
        // Count dropped submissions as well: callers compare this number with [`EngineHandle::submissions`], which
        // includes them.
        let number = self.submissions;
        self.submissions += 1;
        let Submission { prompt, images, sampling, stop, histories, events, .. } = submission;
        if events.is_closed() {
            return None;
        }
        let prompt_tokens = prompt.len() as u32;
        let num_sequences = histories.len() as u32;
        let scores =
            sampling.prompt_logprobs.map(|_| PromptScores { prompt: prompt.clone(), tokens: Vec::new() });
        let beam_search = submission.beam_search;
        // The search decides when its beams end.
        let stop_token_ids = if beam_search.is_some() { Vec::new() } else { stop.stop_token_ids.clone() };
        let request = NewRequest {
            id: number,
            num_sequences,
            prompt,
            images: images.as_ref().map(|images| images.prompt.clone()).unwrap_or_default(),
            stop: StopCriteria { stop_token_ids, ..stop },
            lockstep: beam_search.is_some(),
            scores_prompt: scores.is_some(),
            prefix_seed: BlockHash(submission.cache_salt),
            adapter: submission.adapter,
            tenant: submission.tenant,
        };
        if let Err(rejection) = scheduler.submit(request) {
            // Unreachable: the handle checks the same limits.
            let message = format!("the scheduler rejected the request: {rejection:?}");
            send(&events, Event::Failed(Failure::Step(message)));
            return None;
        }
        self.have_guides |= submission.guide.is_some();
        let search = beam_search.map(|search| Box::new(Search::new(search, num_sequences, stop.clone())));
        let has_beam = |index| search.as_ref().is_none_or(|search| search.has_beam(index));
        let slots = |guide| {
            let slot = |index| if has_beam(index) { GuideSlot::new(&guide) } else { GuideSlot::Released };
            (0..num_sequences).map(slot).collect()
        };
        let active = ActiveRequest {
            sampling: Arc::new(sampling),
            stop: Arc::new(stop),
            images,
            scores,
            guides: submission.guide.map_or(Vec::new(), slots),
            guide_time: GuideTime::default(),
            suspended_logits: BTreeMap::new(),
            search,
            ended: vec![false; histories.len()],
            open: histories.len(),
            histories,
            prompt_tokens,
            submitted: submission.submitted,
            events,
            aborts: submission.aborts,
            permit: Some(submission.permit),
        };
        self.active.insert(number, active);
        Some(number)
    }

    /// Aborts the requests whose clients have disconnected, and the sequences that clients have aborted. Single beams
    /// cannot be aborted.
    pub(crate) fn remove_aborted(&mut self, scheduler: &mut Scheduler) {
        self.active.retain(|&number, active| {
            let is_disconnected = active.events.is_closed();
            if is_disconnected {
                abort_all(number, active, scheduler);
            } else if active.search.is_none() {
                let aborts = Arc::clone(&active.aborts);
                for index in aborts.drain().into_iter().flatten().filter(|index| active.end(*index)) {
                    scheduler.abort(SequenceId::new(number, index));
                }
            }
            !is_disconnected && active.open > 0
        });
    }

    /// Ends a request with a failure. Returns false if it has already ended.
    pub(crate) fn fail(&mut self, number: u64, failure: Failure, scheduler: &mut Scheduler) -> bool {
        let Some(active) = self.active.remove(&number) else { return false };
        abort_all(number, &active, scheduler);
        send(&active.events, Event::Failed(failure));
        true
    }

    /// Reports the start of a request to its client.
    pub(crate) fn start(&mut self, sequence: SequenceId, cached_tokens: u32) {
        if let Some(active) = self.active.get_mut(&sequence.request) {
            active.permit = None;
            send(&active.events, Event::Started { cached_tokens });
        }
    }

    /// Sends the scores of a prompt when they are complete.
    pub(crate) fn send_scores(&mut self, sequence: SequenceId) {
        let Some(active) = self.active.get_mut(&sequence.request) else { return };
        let is_complete = |scores: &mut PromptScores| scores.tokens.len() + 1 == scores.prompt.len();
        if let Some(PromptScores { tokens, .. }) = active.scores.take_if(is_complete) {
            send(&active.events, Event::Scored { tokens });
        }
    }

    /// Sends a token. Returns false if the request has already ended.
    pub(crate) fn send_token(
        &mut self,
        sequence: SequenceId,
        token: TokenId,
        logprobs: Option<Box<TokenLogprobs>>,
        drafts: DraftCounts,
    ) -> bool {
        let Some(active) = self.active.get_mut(&sequence.request) else { return false };
        send(&active.events, Event::Token { index: sequence.index, token, logprobs, drafts });
        true
    }

    /// Sends the results of a search and ends its request, unless the request has failed.
    pub(crate) fn finish_search(&mut self, number: u64) {
        let Some(ActiveRequest { search: Some(search), events, .. }) = self.active.remove(&number) else {
            return;
        };
        let results = search.results();
        let drafts = DraftCounts::default();
        // If the search has fewer results than requested, the remaining ones are empty.
        for index in results.len() as u32..search.num_results() {
            send(&events, Event::Finished { index, reason: FinishReason::Stop, drafts });
        }
        for (index, result) in (0..).zip(results) {
            for (token, logprobs) in result.tokens {
                send(&events, Event::Token { index, token, logprobs, drafts });
            }
            send(&events, Event::Finished { index, reason: result.reason, drafts });
        }
    }

    /// Reports the end of a sequence to its client, unless the request has already ended or uses beam search.
    pub(crate) fn finish(&mut self, sequence: SequenceId, reason: FinishReason, drafts: DraftCounts) {
        let SequenceId { request, index } = sequence;
        if let Some(active) = self.active.get_mut(&request).filter(|active| active.search.is_none()) {
            send(&active.events, Event::Finished { index, reason, drafts });
            active.end(index);
            if active.open == 0 {
                self.active.remove(&request);
            }
        }
    }
}

impl ActiveRequest {
    /// Marks a sequence as ended. Returns false if it had already ended.
    fn end(&mut self, index: u32) -> bool {
        let ends = !std::mem::replace(&mut self.ended[index as usize], true);
        self.open -= usize::from(ends);
        ends
    }

    /// Locks the shared state of a sequence's guide for a commit. `None` if the guide is not ready or another thread
    /// uses the state.
    pub(crate) fn try_lock_commit(&self, index: u32) -> Option<CommitLock> {
        let unlocked = || Some(Box::new(()) as CommitLock);
        self.guides.get(index as usize).map_or_else(unlocked, GuideSlot::try_lock_commit)
    }

    /// Calls [`Self::try_lock_commit`] for all sequences. `None` if any of the calls returns `None`.
    pub(crate) fn try_lock_all(&self) -> Option<Vec<CommitLock>> {
        self.guides.iter().map(GuideSlot::try_lock_commit).collect()
    }
}

fn abort_all(number: u64, active: &ActiveRequest, scheduler: &mut Scheduler) {
    for index in 0..active.histories.len() as u32 {
        scheduler.abort(SequenceId::new(number, index));
    }
}

/// Sends an event. The channel has room for all events of a request. Disconnected clients are detected before the next
/// step.
fn send(events: &mpsc::Sender<Event>, event: Event) {
    if let Err(mpsc::error::TrySendError::Full(event)) = events.try_send(event) {
        debug_assert!(false, "invariant: a stream has room for all its events, including {event:?}");
    }
}
