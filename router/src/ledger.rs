//! Combines this router's dispatches to one replica and the load reports of that replica into one consistent snapshot.
//!
//! A dispatch is booked when its replica is picked, before anything is sent, so that the next pick sees it. Once the
//! figures of a load report include the dispatch (a report lists the numbers of the dispatches that it includes), the
//! booking stops counting as load. Therefore, no dispatch is counted twice, and none is missing between two reports.
//! The booking is an RAII guard: however a request ends, its booking ends with it.
//!
//! Reports and bookings share one lock, which each call holds only briefly. A snapshot therefore never counts a
//! dispatch as unreported if the report in the same snapshot includes it. The module reads no clock; time is a
//! parameter.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use proto::v1alpha1::{Dispatches, Load, State};

use crate::sync::{Mutex, MutexGuard};

/// The time after which a report is assumed to include a dispatch, if the replica does not list the dispatches that its
/// reports include.
const ASSUMED_INCLUDED_AFTER: Duration = Duration::from_millis(100);

/// The time after which a dispatch that no report has included is assumed to have been lost on the network. The
/// dispatch remains in flight until its booking ends, but no longer counts as load.
pub const UNREPORTED_MAX: Duration = Duration::from_secs(30);

/// The load that a dispatch puts on the replica, as estimated when the replica is picked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// The number of prompt tokens that are not expected to be in the replica's cache.
    pub uncached_tokens: u32,
    /// The number of these tokens that belong to images, which must be encoded.
    pub image_tokens: u32,
    /// The number of cache blocks that the request needs, for the prompt tokens that are not cached and for the
    /// expected output.
    pub blocks: u32,
    /// The number of sequences, which is the number of requested choices.
    pub sequences: u32,
    /// A digest of the tenant that sent the request.
    pub tenant: u64,
}

/// The load that the current dispatches of one tenant put on a replica, as estimated when the replica was picked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TenantLoad {
    /// The number of sequences.
    pub sequences: u64,
    /// The number of cache blocks.
    pub blocks: u64,
}

/// The load that the dispatches of this router put on a replica.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BookedLoad {
    /// The number of requests whose booking has not ended.
    pub in_flight: u32,
    /// The number of blocks that the requests without a first token need. They may not have these blocks yet, even if a
    /// report includes the requests.
    pub blocks_without_token: u64,
    /// The number of uncached prompt tokens of the requests in flight that have no first token yet.
    pub uncached_in_flight: u64,
    /// The number of requests that no report includes yet.
    pub unreported: u32,
    /// The number of sequences of the requests that no report includes yet.
    pub sequences_unreported: u64,
    /// The number of uncached prompt tokens of the requests that no report includes yet and that have no first token
    /// yet.
    pub uncached_unreported: u64,
    /// The number of these tokens that belong to images. An image that is part of several requests counts once for each
    /// of them.
    pub image_tokens_unreported: u64,
    /// The number of blocks that are needed by the requests that no report includes yet.
    pub blocks_unreported: u64,
}

/// The figures of a load report that the policies use. `replica.proto` defines them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ReportedLoad {
    /// The number of blocks of the KV cache.
    pub blocks_total: u32,
    /// The number of blocks that sequences use.
    pub blocks_active: u32,
    /// The number of blocks in the prefix cache that no sequence uses.
    pub blocks_evictable: u32,
    /// The number of tokens per block, or 0 if it was not reported.
    pub block_tokens: u32,
    /// The number of running sequences.
    pub running: u32,
    /// The number of waiting sequences.
    pub waiting: u32,
    /// The number of tokens to compute before each running and waiting sequence has its next token.
    pub uncomputed_tokens: u64,
    /// The largest number of sequences that can run at the same time, or 0 if it was not reported.
    pub sequences_max: u32,
    /// The largest number of requests that the replica accepts at the same time, or 0 if it was not reported.
    pub requests_max: u32,
    /// The measured prefill speed, or 0 while it is unknown.
    pub prefill_tokens_per_second: f32,
    /// The measured decode speed, or 0 while it is unknown.
    pub decode_tokens_per_second: f32,
    /// The number of tokens of the images that are not encoded yet.
    pub unencoded_image_tokens: u64,
    /// The measured speed of the image encoder, or 0 while it is unknown.
    pub image_tokens_per_second: f32,
    /// Whether the next request must wake the replica.
    pub is_sleeping: bool,
}

/// The state of a replica at a point in time: its last report, and the load of the dispatches of this router.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LoadSnapshot {
    /// The last report, or `None` if there is no report or it is too old.
    pub reported: Option<ReportedLoad>,
    /// The age of the last report, even if it is too old.
    pub report_age: Option<Duration>,
    /// The time since the reported speeds of prefill and decode last changed. The replica has probably computed nothing
    /// since then.
    pub speed_age: Option<Duration>,
    /// The time since the reported speed of the image encoder last changed.
    pub image_speed_age: Option<Duration>,
    /// The state in the last report, or `None` if there is no report or it is too old.
    pub state: Option<State>,
    /// The load of the dispatches of this router.
    pub booked: BookedLoad,
    /// A number that increases with every booking, for [`Ledger::book_if`].
    pub version: u64,
}

/// The result of [`Ledger::observe`] for a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReportOutcome {
    /// The report replaced the previous one.
    Accepted,
    /// The report is the first of a new process. All conclusions from earlier reports are invalid.
    NewEpoch,
    /// The report was ignored because the same report or a later one has arrived already.
    Outdated,
}

/// The bookings and the last report of one replica. Calls are short and may come from any thread.
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
    /// The load of each tenant with dispatches in flight.
    tenants: BTreeMap<u64, TenantLoad>,
    last: Option<LastReport>,
}

#[derive(Debug)]
struct LastReport {
    epoch: u64,
    number: u64,
    at: Instant,
    state: State,
    figures: ReportedLoad,
    /// The time at which the speeds of prefill and decode in the figures were first reported.
    speeds_at: Instant,
    /// The time at which the speed of the image encoder in the figures was first reported.
    image_speed_at: Instant,
    /// The estimated number of the reported uncomputed tokens that belong to dispatches of this router.
    router_uncached: u64,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    cost: Cost,
    at: Instant,
    /// Whether no report includes the dispatch.
    is_unreported: bool,
    /// Whether the first token has not arrived yet.
    is_without_token: bool,
}

/// The booking of a dispatch in flight. Dropping this value ends the booking.
#[derive(Debug)]
#[must_use = "dropping a booking ends it"]
pub struct BookingGuard {
    ledger: Arc<Ledger>,
    number: u64,
}

impl Ledger {
    /// Creates an empty ledger. `router` is the ID of this router (see [`Dispatches`]).
    #[must_use]
    pub fn new(router: u64) -> Arc<Self> {
        Arc::new(Self { router, state: Mutex::new(Inner { next: 1, ..Inner::default() }) })
    }

    /// Books a dispatch unconditionally.
    pub fn book(self: &Arc<Self>, cost: Cost, now: Instant) -> BookingGuard {
        let number = self.lock().book(cost, now);
        BookingGuard { ledger: Arc::clone(self), number }
    }

    /// Books a dispatch unless another one has been booked since the snapshot with this `version`. This prevents two
    /// threads that pick at the same time from both choosing the same idle replica.
    pub fn book_if(self: &Arc<Self>, version: u64, cost: Cost, now: Instant) -> Option<BookingGuard> {
        let mut inner = self.lock();
        if inner.version != version {
            return None;
        }
        let number = inner.book(cost, now);
        drop(inner);
        Some(BookingGuard { ledger: Arc::clone(self), number })
    }

    /// Applies a report that arrived at `now`.
    pub fn observe(&self, load: &Load, now: Instant) -> ReportOutcome {
        self.lock().observe(self.router, load, now)
    }

    /// The snapshot of the replica at `now`. A report older than `ttl` is ignored. The number of uncomputed tokens
    /// excludes the tokens of this router's prompts whose first output token has arrived since the report.
    #[must_use]
    pub fn snapshot(&self, now: Instant, ttl: Duration) -> LoadSnapshot {
        let inner = self.lock();
        let since = |at: fn(&LastReport) -> Instant| {
            inner.last.as_ref().map(|last| now.saturating_duration_since(at(last)))
        };
        let report_age = since(|last| last.at);
        let last = inner.last.as_ref().filter(|_| report_age.is_some_and(|age| age <= ttl));
        LoadSnapshot {
            reported: last.map(|last| inner.figures_since(last)),
            state: last.map(|last| last.state),
            report_age,
            speed_age: since(|last| last.speeds_at),
            image_speed_age: since(|last| last.image_speed_at),
            booked: inner.booked,
            version: inner.version,
        }
    }

    /// The load that the current dispatches of a tenant put on the replica.
    #[must_use]
    pub fn tenant_load(&self, tenant: u64) -> TenantLoad {
        self.lock().tenants.get(&tenant).copied().unwrap_or_default()
    }

    /// Excludes the dispatches that no report has included within [`UNREPORTED_MAX`] from the load, and returns their
    /// number. The caller must call this method periodically.
    pub fn expire(&self, now: Instant) -> u32 {
        let mut inner = self.lock();
        let Inner { entries, booked, .. } = &mut *inner;
        let mut expired = 0;
        for entry in entries.values_mut() {
            if entry.is_unreported && now.saturating_duration_since(entry.at) >= UNREPORTED_MAX {
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
    /// The number of the dispatch at this replica (see [`Dispatches`]).
    #[must_use]
    pub fn number(&self) -> u64 {
        self.number
    }

    /// The value of the header `x-ovfleet-dispatch`.
    #[must_use]
    pub fn header(&self) -> String {
        format!("{:016x}/{}", self.ledger.router, self.number)
    }

    /// Records that the first token has arrived, which shows that the replica has computed the prompt. Repeated calls
    /// have no effect.
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
            inner.remove_from_tenant(entry.cost);
        }
    }
}

impl Inner {
    fn book(&mut self, cost: Cost, now: Instant) -> u64 {
        let number = self.next;
        self.next += 1;
        self.version += 1;
        let entry = Entry { cost, at: now, is_unreported: true, is_without_token: true };
        self.booked.add(&entry);
        let tenant = self.tenants.entry(cost.tenant).or_default();
        tenant.sequences += u64::from(cost.sequences);
        tenant.blocks += u64::from(cost.blocks);
        self.entries.insert(number, entry);
        number
    }

    fn remove_from_tenant(&mut self, cost: Cost) {
        if let Some(load) = self.tenants.get_mut(&cost.tenant) {
            load.sequences -= u64::from(cost.sequences);
            load.blocks -= u64::from(cost.blocks);
            if *load == TenantLoad::default() {
                self.tenants.remove(&cost.tenant);
            }
        }
    }

    fn observe(&mut self, router: u64, load: &Load, now: Instant) -> ReportOutcome {
        let previous = self.last.as_ref();
        let is_new_epoch = previous.is_some_and(|last| last.epoch != load.epoch);
        if previous.is_some_and(|last| last.epoch == load.epoch && last.number >= load.report) {
            return ReportOutcome::Outdated;
        }
        let dispatches = load.dispatches.as_ref().filter(|dispatches| dispatches.router == router);
        match dispatches {
            Some(dispatches) => self.include(dispatches),
            None => self.include_before(now.checked_sub(ASSUMED_INCLUDED_AFTER)),
        }
        let router_uncached = self.booked.uncached_reported();
        let figures = ReportedLoad::of(load);
        let same_process = self.last.as_ref().filter(|_| !is_new_epoch);
        let same_speeds = same_process.filter(|last| last.figures.has_speeds_of(&figures));
        let same_image_speed = same_process.filter(|last| last.figures.has_image_speed_of(&figures));
        self.last = Some(LastReport {
            speeds_at: same_speeds.map_or(now, |last| last.speeds_at),
            image_speed_at: same_image_speed.map_or(now, |last| last.image_speed_at),
            router_uncached,
            epoch: load.epoch,
            number: load.report,
            at: now,
            state: load.state(),
            figures,
        });
        if is_new_epoch { ReportOutcome::NewEpoch } else { ReportOutcome::Accepted }
    }

    /// The figures of the last report, without the tokens of prompts that are known to have been computed since then.
    fn figures_since(&self, last: &LastReport) -> ReportedLoad {
        let others = last.figures.uncomputed_tokens.saturating_sub(last.router_uncached);
        let remaining = others + self.booked.uncached_reported();
        ReportedLoad { uncomputed_tokens: last.figures.uncomputed_tokens.min(remaining), ..last.figures }
    }

    /// Marks the dispatches that a report includes.
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
    /// The number of uncached prompt tokens of the requests that reports include and that have no first token yet.
    fn uncached_reported(&self) -> u64 {
        self.uncached_in_flight - self.uncached_unreported
    }

    fn add(&mut self, entry: &Entry) {
        let Cost { uncached_tokens, image_tokens, blocks, sequences, tenant: _ } = entry.cost;
        self.in_flight += 1;
        self.blocks_without_token += u64::from(blocks);
        self.uncached_in_flight += u64::from(uncached_tokens);
        self.unreported += 1;
        self.sequences_unreported += u64::from(sequences);
        self.uncached_unreported += u64::from(uncached_tokens);
        self.image_tokens_unreported += u64::from(image_tokens);
        self.blocks_unreported += u64::from(blocks);
    }

    /// Marks `entry` as included in a report. Repeated calls have no effect.
    fn include(&mut self, entry: &mut Entry) {
        if !std::mem::take(&mut entry.is_unreported) {
            return;
        }
        self.unreported -= 1;
        self.sequences_unreported -= u64::from(entry.cost.sequences);
        self.blocks_unreported -= u64::from(entry.cost.blocks);
        if entry.is_without_token {
            self.uncached_unreported -= u64::from(entry.cost.uncached_tokens);
            self.image_tokens_unreported -= u64::from(entry.cost.image_tokens);
        }
    }

    /// Marks the prompt of `entry` as computed. Repeated calls have no effect.
    fn record_first_token(&mut self, entry: &mut Entry) {
        if !std::mem::take(&mut entry.is_without_token) {
            return;
        }
        self.uncached_in_flight -= u64::from(entry.cost.uncached_tokens);
        self.blocks_without_token -= u64::from(entry.cost.blocks);
        if entry.is_unreported {
            self.uncached_unreported -= u64::from(entry.cost.uncached_tokens);
            self.image_tokens_unreported -= u64::from(entry.cost.image_tokens);
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

    fn has_image_speed_of(&self, other: &Self) -> bool {
        self.image_tokens_per_second.to_bits() == other.image_tokens_per_second.to_bits()
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
            // A larger number is not plausible, and sums of such numbers must not overflow.
            uncomputed_tokens: load.uncomputed_tokens.min(u64::from(u32::MAX)),
            sequences_max: load.sequences_max,
            requests_max: load.requests_max,
            prefill_tokens_per_second: speed(load.prefill_tokens_per_second),
            decode_tokens_per_second: speed(load.decode_tokens_per_second),
            unencoded_image_tokens: load.unencoded_image_tokens.min(u64::from(u32::MAX)),
            image_tokens_per_second: speed(load.image_tokens_per_second),
            is_sleeping: load.sleeping,
        }
    }
}
