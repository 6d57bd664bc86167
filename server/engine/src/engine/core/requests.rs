//! The requests that the scheduler has: how each samples, where its events go, and who is told what.
//!
//! What is computed next, and what is sampled, is decided elsewhere.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use server_scheduler::{BlockHash, FinishReason, NewRequest, Scheduler, SequenceId, StopCriteria, TokenId};
use tokio::sync::mpsc as events;

use super::drafts::Drafters;
use super::guides::{GuideTime, Slot};
use crate::handle::{Submission, WaitingPermit};
use crate::request::{DraftCounts, Event, Failure, Sampling, ScoredToken, TokenLogprobs};
use crate::sampler::History;
use crate::search::Search;
use crate::stream::Aborts;

#[derive(Default)]
pub(super) struct Requests {
    /// By their numbers, so that whatever goes through all of them does so in the order they came.
    pub(super) live: BTreeMap<u64, Live>,
    /// The requests with sequences that are suspended, and some whose requests have ended since.
    pub(super) suspended: BTreeSet<u64>,
    pub(super) count: u64,
    /// Whether there ever was one with a guide.
    pub(super) have_guides: bool,
    /// Whether any had guesses.
    pub(super) have_drafters: bool,
}

/// A request the scheduler has.
pub(super) struct Live {
    pub(super) sampling: Sampling,
    pub(super) stop: StopCriteria,
    pub(super) histories: Vec<History>,
    /// Of the prompt, if they are wanted and have not been told yet.
    pub(super) scores: Option<Scores>,
    /// One for each sequence, or none at all.
    pub(super) guides: Vec<Slot>,
    pub(super) guide_time: GuideTime,
    /// The logits of sequences that wait for their guides. A sequence that is suspended because another thread uses what its
    /// guide shares has some too, but a beam does not: the search has seen its options.
    pub(super) logits: BTreeMap<u32, Arc<[f32]>>,
    /// If its tokens are guessed.
    pub(super) drafters: Option<Drafters>,
    /// What the sequences do together, if they do not draw each by itself.
    pub(super) search: Option<Box<Search>>,
    /// Whether each sequence has ended.
    pub(super) ended: Vec<bool>,
    /// Sequences that have not ended.
    pub(super) open: usize,
    pub(super) events: events::Sender<Event>,
    pub(super) aborts: Arc<Aborts>,
    /// Given back when the request starts.
    pub(super) permit: Option<WaitingPermit>,
    pub(super) submitted: Duration,
    pub(super) prompt_tokens: u32,
}

/// The log probabilities of a prompt in the making.
pub(super) struct Scores {
    pub(super) prompt: Vec<TokenId>,
    /// From the second on, as far as they are computed.
    pub(super) tokens: Vec<ScoredToken>,
}

impl Requests {
    /// Hands a request to the scheduler, unless its client has gone.
    pub(super) fn submit(&mut self, submission: Submission, scheduler: &mut Scheduler) {
        let Submission {
            prompt,
            sampling,
            beams,
            salt,
            adapter,
            tenant,
            histories,
            events,
            aborts,
            permit,
            submitted,
            ..
        } = submission;
        let (stop, guide, drafters) = (submission.stop, submission.guide, submission.drafters);
        // Counted whatever becomes of it, as the handle counts: the two are compared.
        let number = self.count;
        self.count += 1;
        if events.is_closed() {
            return;
        }
        let prompt_tokens = prompt.len() as u32;
        let scores = sampling.prompt_logprobs.map(|_| Scores { prompt: prompt.clone(), tokens: Vec::new() });
        // When its sequences end is the search's business.
        let stop_token_ids = if beams.is_some() { Vec::new() } else { stop.stop_token_ids.clone() };
        let request = NewRequest {
            id: number,
            num_sequences: histories.len() as u32,
            prompt,
            stop: StopCriteria { stop_token_ids, ..stop },
            lockstep: beams.is_some(),
            scores_prompt: scores.is_some(),
            prefix_seed: BlockHash(salt),
            adapter,
            tenant,
        };
        if let Err(rejected) = scheduler.submit(request) {
            // Not reached: the handle keeps the same limits.
            send(&events, Event::Failed(Failure::Step(format!("the scheduler refused it: {rejected:?}"))));
            return;
        }
        let open = histories.len();
        self.have_guides |= guide.is_some();
        self.have_drafters |= drafters.is_some();
        let search = beams.map(|beams| Box::new(Search::new(beams, open as u32, stop.clone())));
        let begins = |index| search.as_ref().is_none_or(|search| search.has_beam(index));
        let slots = |guide| {
            (0..open as u32).map(|index| if begins(index) { Slot::new(&guide) } else { Slot::Gone }).collect()
        };
        let live = Live {
            sampling,
            stop,
            scores,
            guides: guide.map_or(Vec::new(), slots),
            guide_time: GuideTime::default(),
            logits: BTreeMap::new(),
            drafters,
            search,
            histories,
            ended: vec![false; open],
            open,
            events,
            aborts,
            permit: Some(permit),
            submitted,
            prompt_tokens,
        };
        self.live.insert(number, live);
    }

    /// Aborts the requests whose clients have gone, and the sequences that nobody wants any more.
    pub(super) fn drop_abandoned(&mut self, scheduler: &mut Scheduler) {
        self.live.retain(|&number, live| {
            let abandoned = live.events.is_closed();
            if abandoned {
                sequences_of(number, live.histories.len()).for_each(|sequence| scheduler.abort(sequence));
            } else if live.search.is_none() {
                let aborts = Arc::clone(&live.aborts);
                for index in aborts.take().into_iter().flatten().filter(|index| live.end(*index)) {
                    scheduler.abort(SequenceId::new(number, index));
                }
            }
            !abandoned && live.open > 0
        });
    }

    /// Ends a request with a failure. False if it has ended already.
    pub(super) fn fail(&mut self, number: u64, failure: Failure, scheduler: &mut Scheduler) -> bool {
        let Some(live) = self.live.remove(&number) else { return false };
        sequences_of(number, live.histories.len()).for_each(|sequence| scheduler.abort(sequence));
        send(&live.events, Event::Failed(failure));
        true
    }

    pub(super) fn started(&mut self, sequence: SequenceId, cached_tokens: u32) {
        if let Some(live) = self.live.get_mut(&sequence.request) {
            live.permit = None;
            send(&live.events, Event::Started { cached_tokens });
        }
    }

    /// Tells the scores of a prompt once they are complete.
    pub(super) fn scored(&mut self, sequence: SequenceId) {
        let Some(live) = self.live.get_mut(&sequence.request) else { return };
        let complete = |scores: &mut Scores| scores.tokens.len() + 1 == scores.prompt.len();
        if let Some(Scores { tokens, .. }) = live.scores.take_if(complete) {
            send(&live.events, Event::Scored { tokens });
        }
    }

    /// False if the request has failed.
    pub(super) fn token(
        &mut self,
        sequence: SequenceId,
        token: TokenId,
        logprobs: Option<Box<TokenLogprobs>>,
    ) -> bool {
        let Some(live) = self.live.get_mut(&sequence.request) else { return false };
        let index = sequence.index;
        send(&live.events, Event::Token { index, token, logprobs });
        true
    }

    /// Tells what a search has found, and ends it. Nothing happens if its request has failed.
    pub(super) fn conclude(&mut self, number: u64) {
        let Some(Live { search: Some(search), events, .. }) = self.live.remove(&number) else { return };
        let all = search.found();
        // Where there are fewer texts than were asked for, the last ones are empty.
        let drafts = DraftCounts::default();
        let (found, results) = (all.len() as u32, search.results());
        (found..results)
            .for_each(|index| send(&events, Event::Finished { index, reason: FinishReason::Stop, drafts }));
        for (index, found) in (0..).zip(all) {
            for (token, logprobs) in found.tokens {
                send(&events, Event::Token { index, token, logprobs });
            }
            send(&events, Event::Finished { index, reason: found.reason, drafts });
        }
    }

    /// Nothing happens if it was aborted, its request has failed, or it is a beam.
    pub(super) fn finished(&mut self, sequence: SequenceId, reason: FinishReason) {
        let number = sequence.request;
        if let Some(live) = self.live.get_mut(&number).filter(|live| live.search.is_none()) {
            let index = sequence.index;
            let drafts = live.drafter(index).map_or(DraftCounts::default(), |drafter| drafter.counts);
            send(&live.events, Event::Finished { index, reason, drafts });
            live.end(index);
            if live.open == 0 {
                self.live.remove(&number);
            }
        }
    }
}

impl Live {
    /// False if the sequence had ended already.
    pub(super) fn end(&mut self, index: u32) -> bool {
        let ends = !std::mem::replace(&mut self.ended[index as usize], true);
        self.open -= usize::from(ends);
        ends
    }
}

/// There is room for every event; a client that has gone is noticed before the next step.
fn send(events: &events::Sender<Event>, event: Event) {
    if let Err(events::error::TrySendError::Full(event)) = events.try_send(event) {
        debug_assert!(false, "invariant: a stream has room for all its events, {event:?} too");
    }
}

fn sequences_of(number: u64, count: usize) -> impl Iterator<Item = SequenceId> {
    (0..count as u32).map(move |index| SequenceId::new(number, index))
}
