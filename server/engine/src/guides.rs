//! The guides of the sequences: threads compute the allowed next tokens while the model runs.
//!
//! The state of a guide is either in its slot or in a job of a thread. The first request with a guide starts the
//! threads. After the model has run, the engine waits only a few milliseconds for guides. A sequence whose guide is not
//! ready is suspended with its logits, and sampled when the guide is ready. A slow guide therefore delays mainly its
//! own request, and changes no token.

use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use server_scheduler::{Batch, SequenceId, TokenId};

use crate::clock::Clock;
use crate::guide::TokenSet;
use crate::requests::Requests;
use crate::waker::Waker;
use slot::{GuideSlot, GuideTime};
use threads::{GuideJob, GuideResult, GuideThreads, GuideWork};

pub(crate) mod slot;
mod threads;

/// The longest time that a step waits for guides after the model has run. A step waits only for guides that usually
/// need no more time than that.
const WAIT_MAX: Duration = Duration::from_millis(5);

/// Time that a request may spend computing the allowed next tokens of a structured output before its first token.
///
/// If exceeded: 400, `form_too_complex`; a stream ends with this error.
const REQUEST_TIME_MAX: Duration = Duration::from_secs(30);
/// Additional time that a request may spend computing the allowed next tokens, for each generated token.
///
/// If exceeded: 400, `form_too_complex`; a stream ends with this error.
const TOKEN_TIME_MAX: Duration = Duration::from_millis(20);

/// Sends guides to the threads, and receives the results.
#[derive(Debug)]
pub(crate) struct GuideDispatcher {
    vocabulary: u32,
    threads: GuideThreads,
    results: mpsc::Receiver<GuideResult>,
    /// Number of jobs whose results have not been received.
    pending: usize,
    /// Number of pending jobs for which the current step waits.
    awaited: usize,
    step: u64,
}

impl GuideDispatcher {
    pub(crate) fn new(vocabulary: u32, clock: Clock, waker: Waker) -> Self {
        let (threads, results) = GuideThreads::new(clock, waker);
        Self { vocabulary, threads, results, pending: 0, awaited: 0, step: 0 }
    }

    /// Whether the results of some jobs are still pending.
    pub(crate) fn has_pending(&self) -> bool {
        self.pending > 0
    }

    /// Starts jobs that compute the allowed next tokens of the sequences with guides that `batch` samples. Returns the
    /// number of these jobs.
    pub(crate) fn dispatch(&mut self, batch: &Batch, requests: &mut Requests) -> u32 {
        self.step += 1;
        self.awaited = 0;
        if !requests.have_guides {
            return 0;
        }
        let mut count = 0;
        for scheduled in &batch.sequences {
            for &sequence in batch.samples_of(scheduled) {
                count +=
                    self.dispatch_sequence(sequence, &batch.tokens[batch.drafts_of(scheduled)], requests);
            }
        }
        count
    }

    fn dispatch_sequence(
        &mut self,
        sequence: SequenceId,
        drafts: &[TokenId],
        requests: &mut Requests,
    ) -> u32 {
        let Some(active) = requests.active.get_mut(&sequence.request) else { return 0 };
        let Some(slot) = active.guides.get_mut(sequence.index as usize) else { return 0 };
        let work = match std::mem::replace(slot, GuideSlot::Pending) {
            GuideSlot::New(guide) => GuideWork::Start(guide, TokenSet::new(self.vocabulary)),
            GuideSlot::Idle(run) => GuideWork::Continue(run),
            other => {
                *slot = other;
                return 0;
            }
        };
        // A stop token is not part of the form, so the guide does not check the first stop token or the drafts after
        // it.
        let is_text = |token: &TokenId| !active.stop.stop_token_ids.contains(token);
        let drafts = drafts.iter().copied().take_while(is_text).collect();
        let GuideTime { spent, average } = &active.guide_time;
        let is_awaited = *average <= WAIT_MAX;
        let generated: u32 = active.histories.iter().map(|history| history.generated()).sum();
        self.pending += 1;
        self.awaited += usize::from(is_awaited);
        self.threads.submit(GuideJob {
            sequence,
            work,
            drafts,
            spent: Arc::downgrade(spent),
            time_max: REQUEST_TIME_MAX + TOKEN_TIME_MAX * generated,
            expected_time: *average,
            awaited_by: is_awaited.then_some(self.step),
        });
        1
    }

    /// Receives the available results. Returns whether any results were available.
    pub(crate) fn collect(&mut self, requests: &mut Requests) -> bool {
        let before = self.pending;
        while let Ok(result) = self.results.try_recv() {
            self.apply(result, requests);
        }
        self.pending < before
    }

    /// Receives the available results, and waits up to [`WAIT_MAX`] for the results of this step's jobs that are
    /// usually quick.
    pub(crate) fn collect_awaited(&mut self, requests: &mut Requests) {
        self.collect(requests);
        let deadline = Instant::now() + WAIT_MAX;
        while self.awaited > 0 {
            let remaining = deadline.saturating_duration_since(Instant::now());
            let Ok(result) = self.results.recv_timeout(remaining) else { return };
            self.apply(result, requests);
        }
    }

    fn apply(&mut self, result: GuideResult, requests: &mut Requests) {
        let GuideResult { sequence, outcome, time, awaited_by } = result;
        self.pending -= 1;
        self.awaited -= usize::from(awaited_by == Some(self.step));
        // The request may have ended in the meantime.
        let Some(active) = requests.active.get_mut(&sequence.request) else { return };
        active.guide_time.average = (active.guide_time.average + time) / 2;
        let Some(slot) = active.guides.get_mut(sequence.index as usize) else { return };
        *slot = match outcome {
            Ok(ready) => GuideSlot::Ready(ready),
            Err(error) => GuideSlot::Failed(error),
        };
    }
}
