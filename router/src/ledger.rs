//! What this router has sent to one replica and what the replica has said: one consistent picture of both.
//!
//! A dispatch is booked when its replica is picked, before anything is sent, so that the next pick sees it. A
//! report takes it over as soon as the report's own figures include it (the replica names the numbers), so
//! that nothing counts twice and nothing is forgotten between two reports. The booking is an RAII guard: on
//! whatever way a request ends, its booking ends with it.
//!
//! Reports and bookings are under one lock, which is held for the few instructions of each call: a report is
//! never seen without what it acknowledges. No clock is read here; time comes as a parameter.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use proto::v1alpha1::{Dispatches, Load, State};

use crate::sync::{Mutex, MutexGuard};

/// A replica that does not tell what its reports include: a report that comes this long after a dispatch is
/// taken to include it.
const INCLUDED_AFTER: Duration = Duration::from_millis(100);

/// The backstop: a dispatch that no report took over for this long is taken to have been lost on its way. It
/// stays in flight until its booking ends, but is not load any more.
pub const UNREPORTED_MAX: Duration = Duration::from_secs(30);

/// What a dispatch costs the replica, as estimated when it is picked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Tokens of the prompt that are not expected in the replica's cache.
    pub uncached_tokens: u32,
    /// Blocks of the cache that it will take: for what of the prompt is not cached there, and for the output
    /// that is expected.
    pub blocks: u32,
    /// Sequences: the choices asked for.
    pub sequences: u32,
}

/// Sums over the dispatches of this router to a replica.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BookedLoad {
    /// Requests whose booking has not ended.
    pub in_flight: u32,
    /// Blocks that those without a first token were expected to take: they may not have them yet even where a report
    /// includes them.
    pub blocks_without_token: u64,
    /// Prompt tokens not cached, of those in flight without a first token: the work ahead as far as this
    /// router knows by itself.
    pub uncached_in_flight: u64,
    /// Requests that no report includes yet,
    pub unreported: u32,
    /// their sequences,
    pub sequences_unreported: u64,
    /// their prompt tokens that are not cached, as long as they have no first token,
    pub uncached_unreported: u64,
    /// and their blocks.
    pub blocks_unreported: u64,
}

/// The figures of a report that picking goes by. The meaning of each is in `replica.proto`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ReportedLoad {
    /// Blocks of the cache in all,
    pub blocks_total: u32,
    /// those that sequences hold,
    pub blocks_active: u32,
    /// and those that nobody holds and whose content is kept.
    pub blocks_evictable: u32,
    /// Tokens of a block.
    pub block_tokens: u32,
    /// Sequences that run.
    pub running: u32,
    /// Sequences that wait.
    pub waiting: u32,
    /// Tokens to compute before each of these has its next.
    pub uncomputed_tokens: u64,
    /// Most sequences that run at once; 0 if it is not told.
    pub sequences_max: u32,
    /// Most requests that are taken at once; 0 if it is not told.
    pub requests_max: u32,
    /// Tokens of prompts computed a second; 0 while not known.
    pub prefill_tokens_per_second: f32,
    /// Tokens generated a second; 0 while not known.
    pub decode_tokens_per_second: f32,
    /// Whether the next request has to wake it.
    pub is_asleep: bool,
}

/// A replica at one moment: its last report, and what that does not include.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct View {
    /// The last report; `None` if there is none, or it is too old to go by.
    pub reported: Option<ReportedLoad>,
    /// The age of the last report, however old.
    pub report_age: Option<Duration>,
    /// The time since the reported speeds changed: the replica has computed nothing since.
    pub speed_age: Option<Duration>,
    /// The state in the last report that is not too old; `None` without one.
    pub state: Option<State>,
    /// What this router has sent.
    pub booked: BookedLoad,
    /// Rises with every booking: for [`Ledger::book_if`].
    pub version: u64,
}

/// What [`Ledger::observe`] made of a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReportOutcome {
    /// It replaces the former one.
    Accepted,
    /// It is the first of a new process: what was concluded from the former one's is void.
    NewEpoch,
    /// A later one is known already: it is ignored.
    Outdated,
}

/// One replica's bookings and its last report. All calls are quick; they may come from any thread.
#[derive(Debug)]
pub struct Ledger {
    router: u64,
    state: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    /// The number of the next dispatch.
    next: u64,
    version: u64,
    entries: BTreeMap<u64, Entry>,
    booked: BookedLoad,
    last: Option<LastReport>,
}

#[derive(Debug)]
struct LastReport {
    epoch: u64,
    number: u64,
    at: Instant,
    state: State,
    figures: ReportedLoad,
    /// When the speeds in the figures were first reported.
    speeds_at: Instant,
    /// What of the figures' uncomputed tokens is of this router's dispatches.
    own_uncached: u64,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    cost: Cost,
    at: Instant,
    /// No report includes it.
    unreported: bool,
    /// Its prompt is not known to have been computed.
    without_token: bool,
}

/// A dispatch in flight; dropping it ends it, on whatever path.
#[derive(Debug)]
#[must_use = "a booking that is dropped is over"]
pub struct BookingGuard {
    ledger: Arc<Ledger>,
    number: u64,
}

impl Ledger {
    /// An empty ledger of the router that goes by this number (see [`Dispatches`]).
    #[must_use]
    pub fn new(router: u64) -> Arc<Self> {
        Arc::new(Self { router, state: Mutex::new(Inner { next: 1, ..Inner::default() }) })
    }

    /// Books a dispatch.
    pub fn book(self: &Arc<Self>, cost: Cost, now: Instant) -> BookingGuard {
        let number = self.lock().book(cost, now);
        BookingGuard { ledger: Arc::clone(self), number }
    }

    /// Books a dispatch unless another one was booked since the view of this `version`: two that pick at once
    /// do not both take the same idle replica without the second knowing of the first.
    pub fn book_if(self: &Arc<Self>, version: u64, cost: Cost, now: Instant) -> Option<BookingGuard> {
        let mut inner = self.lock();
        if inner.version != version {
            return None;
        }
        let number = inner.book(cost, now);
        drop(inner);
        Some(BookingGuard { ledger: Arc::clone(self), number })
    }

    /// Takes a report in, which arrived at `now`.
    pub fn observe(&self, load: &Load, now: Instant) -> ReportOutcome {
        self.lock().observe(self.router, load, now)
    }

    /// The replica as it is known at `now`. A report older than `ttl` does not exist. Prompts that a report says are to
    /// be computed, and of which the first token has come since, are not among its uncomputed tokens any more.
    #[must_use]
    pub fn view(&self, now: Instant, ttl: Duration) -> View {
        let inner = self.lock();
        let report_age = inner.last.as_ref().map(|last| now.saturating_duration_since(last.at));
        let last = inner.last.as_ref().filter(|_| report_age.is_some_and(|age| age <= ttl));
        View {
            reported: last.map(|last| inner.figures_since(last)),
            state: last.map(|last| last.state),
            report_age,
            speed_age: inner.last.as_ref().map(|last| now.saturating_duration_since(last.speeds_at)),
            booked: inner.booked,
            version: inner.version,
        }
    }

    /// Takes for lost what no report has included for [`UNREPORTED_MAX`], and returns how many requests these
    /// are. To be called now and then.
    pub fn expire(&self, now: Instant) -> u32 {
        let mut inner = self.lock();
        let Inner { entries, booked, .. } = &mut *inner;
        let mut expired = 0;
        for entry in entries.values_mut() {
            if entry.unreported && now.saturating_duration_since(entry.at) >= UNREPORTED_MAX {
                booked.include(entry);
                expired += 1;
            }
        }
        expired
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.state.lock().expect("invariant: nothing panics while it holds the lock")
    }
}

impl BookingGuard {
    /// The dispatch's number with this replica, for the header (see [`Dispatches`]).
    #[must_use]
    pub fn number(&self) -> u64 {
        self.number
    }

    /// The value of the header `x-ovfleet-dispatch`.
    #[must_use]
    pub fn header(&self) -> String {
        format!("{:016x}/{}", self.ledger.router, self.number)
    }

    /// The replica has answered with the first token: its prompt is computed. Idempotent.
    pub fn record_first_token(&self) {
        let mut inner = self.ledger.lock();
        let Inner { entries, booked, .. } = &mut *inner;
        if let Some(entry) = entries.get_mut(&self.number) {
            booked.record_first_token(entry);
        }
    }
}

impl Drop for BookingGuard {
    fn drop(&mut self) {
        let mut inner = self.ledger.lock();
        if let Some(mut entry) = inner.entries.remove(&self.number) {
            inner.booked.remove(&mut entry);
        }
    }
}

impl Inner {
    fn book(&mut self, cost: Cost, now: Instant) -> u64 {
        let number = self.next;
        self.next += 1;
        self.version += 1;
        let entry = Entry { cost, at: now, unreported: true, without_token: true };
        self.booked.add(&entry);
        self.entries.insert(number, entry);
        number
    }

    fn observe(&mut self, router: u64, load: &Load, now: Instant) -> ReportOutcome {
        let former = self.last.as_ref();
        let new_epoch = former.is_some_and(|last| last.epoch != load.epoch);
        if former.is_some_and(|last| last.epoch == load.epoch && last.number >= load.report) {
            return ReportOutcome::Outdated;
        }
        let dispatches = load.dispatches.as_ref().filter(|dispatches| dispatches.router == router);
        match dispatches {
            Some(dispatches) => self.include(dispatches),
            None => self.include_before(now.checked_sub(INCLUDED_AFTER)),
        }
        let own_uncached = self.booked.uncached_reported();
        let figures = ReportedLoad::of(load);
        let speeds_at = self.last.as_ref().filter(|last| !new_epoch && last.figures.has_speeds_of(&figures));
        self.last = Some(LastReport {
            speeds_at: speeds_at.map_or(now, |last| last.speeds_at),
            own_uncached,
            epoch: load.epoch,
            number: load.report,
            at: now,
            state: load.state(),
            figures,
        });
        if new_epoch { ReportOutcome::NewEpoch } else { ReportOutcome::Accepted }
    }

    /// The figures of the last report, less what is known to have been computed since.
    fn figures_since(&self, last: &LastReport) -> ReportedLoad {
        let others = last.figures.uncomputed_tokens.saturating_sub(last.own_uncached);
        let left = others + self.booked.uncached_reported();
        ReportedLoad { uncomputed_tokens: last.figures.uncomputed_tokens.min(left), ..last.figures }
    }

    /// The report just taken includes these.
    fn include(&mut self, dispatches: &Dispatches) {
        let Self { entries, booked, .. } = self;
        for range in dispatches.ranges.iter().filter(|range| range.first <= range.last) {
            for (_, entry) in entries.range_mut(range.first..=range.last) {
                booked.include(entry);
            }
        }
    }

    fn include_before(&mut self, moment: Option<Instant>) {
        let Some(moment) = moment else { return };
        let Self { entries, booked, .. } = self;
        for entry in entries.values_mut().filter(|entry| entry.at <= moment) {
            booked.include(entry);
        }
    }
}

impl BookedLoad {
    /// Prompt tokens not cached, of those without a first token that reports include.
    fn uncached_reported(&self) -> u64 {
        self.uncached_in_flight - self.uncached_unreported
    }

    fn add(&mut self, entry: &Entry) {
        let Cost { uncached_tokens, blocks, sequences } = entry.cost;
        self.in_flight += 1;
        self.blocks_without_token += u64::from(blocks);
        self.uncached_in_flight += u64::from(uncached_tokens);
        self.unreported += 1;
        self.sequences_unreported += u64::from(sequences);
        self.uncached_unreported += u64::from(uncached_tokens);
        self.blocks_unreported += u64::from(blocks);
    }

    /// A report includes `entry` from now on. Idempotent.
    fn include(&mut self, entry: &mut Entry) {
        if !std::mem::take(&mut entry.unreported) {
            return;
        }
        self.unreported -= 1;
        self.sequences_unreported -= u64::from(entry.cost.sequences);
        self.blocks_unreported -= u64::from(entry.cost.blocks);
        if entry.without_token {
            self.uncached_unreported -= u64::from(entry.cost.uncached_tokens);
        }
    }

    /// The prompt of `entry` is computed. Idempotent.
    fn record_first_token(&mut self, entry: &mut Entry) {
        if !std::mem::take(&mut entry.without_token) {
            return;
        }
        self.uncached_in_flight -= u64::from(entry.cost.uncached_tokens);
        self.blocks_without_token -= u64::from(entry.cost.blocks);
        if entry.unreported {
            self.uncached_unreported -= u64::from(entry.cost.uncached_tokens);
        }
    }

    fn remove(&mut self, entry: &mut Entry) {
        self.record_first_token(entry);
        self.include(entry);
        self.in_flight -= 1;
    }
}

impl ReportedLoad {
    fn has_speeds_of(&self, other: &Self) -> bool {
        let speeds = |reported: &Self| {
            [reported.prefill_tokens_per_second, reported.decode_tokens_per_second].map(f32::to_bits)
        };
        speeds(self) == speeds(other)
    }

    fn of(load: &Load) -> Self {
        let speed = |value: f32| if value.is_finite() { value.max(0.0) } else { 0.0 };
        Self {
            blocks_total: load.blocks_total,
            blocks_active: load.blocks_active.min(load.blocks_total),
            blocks_evictable: load.blocks_evictable.min(load.blocks_total),
            block_tokens: load.block_tokens,
            running: load.running,
            waiting: load.waiting,
            // More is nonsense, and sums of it are to stay sums.
            uncomputed_tokens: load.uncomputed_tokens.min(u64::from(u32::MAX)),
            sequences_max: load.sequences_max,
            requests_max: load.requests_max,
            prefill_tokens_per_second: speed(load.prefill_tokens_per_second),
            decode_tokens_per_second: speed(load.decode_tokens_per_second),
            is_asleep: load.asleep,
        }
    }
}
