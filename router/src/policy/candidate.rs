//! Defines the input of the policies: the demand of a request, and the replicas that are candidates for it.

use proto::v1alpha1::State;

use crate::ledger::{Cost, LoadSnapshot, ReportedLoad, TenantLoad};
use crate::queue::NO_TENANT;

/// The demand that a request places on a replica, as far as the router can know it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Demand {
    /// The number of tokens of the prompt, estimated from its bytes if the prompt is text.
    pub prompt_tokens: u32,
    /// The number of these tokens that belong to images.
    pub image_tokens: u32,
    /// The number of tokens of the prompt before the first image.
    pub images_start: u32,
    /// The number of tokens of the prompt up to the end of the last image.
    pub images_end: u32,
    /// The expected number of output tokens of each sequence.
    pub output_tokens: u32,
    /// The largest number of output tokens per sequence that the client accepts, if the client has set a limit.
    pub output_tokens_max: Option<u32>,
    /// The number of sequences, which is the number of choices that the client requests.
    pub sequences: u32,
    /// A hash of the session of the request, if the client names one.
    pub session: Option<u64>,
    /// A digest of the tenant that sent the request, or [`NO_TENANT`].
    pub tenant: u64,
}

/// The reciprocal of the fraction of a replica that is available to a tenant even if others have filled the replica.
/// While several tenants use a replica, its scheduler reserves this fraction of the batch and the cache for tenants
/// other than the one that uses the most.
const TENANT_RESERVE: u32 = 8;

/// The state of one replica, as far as the router knows it, at the time when a replica is picked for a request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Candidate {
    /// A number that does not change when the replica restarts, such as a hash of its address.
    pub identity: u64,
    /// The last report of the replica, and the load of the dispatches of this router.
    pub snapshot: LoadSnapshot,
    /// The number of leading tokens of the prompt that are expected to be in the cache of the replica.
    pub cached_tokens: u32,
    /// The load of the current dispatches of the request's tenant to the replica.
    pub tenant_load: TenantLoad,
    /// The fraction of its usual load that should be sent to the replica: 0 if it should receive no requests (for
    /// example, while it is ejected), and less than 1 while it is probed.
    pub weight: f32,
    /// Whether the replica is reserved for another request, which has waited for too long.
    pub is_reserved: bool,
    /// The sequence number of the last pick that chose this replica, or 0 if none has.
    pub last_pick: u64,
}

/// Whether a replica has room for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Capacity {
    /// The replica can start the request, as far as the router knows.
    Now,
    /// The replica would queue or reject the request until other requests end, or it is reserved for another request.
    /// The request should wait in the router, which can use whichever replica has room first.
    Later,
    /// The request can never fit the replica, or the replica accepts no requests.
    Never,
}

/// The terms of a candidate's score, in seconds unless stated otherwise. A term that the policy does not use is zero.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Terms {
    /// The score: the candidate with the lowest score is picked. The policy determines the unit. The score is infinite
    /// for a candidate that was not considered.
    pub score: f64,
    /// Whether the score is the estimated time to the first token, in seconds.
    pub is_score_time: bool,
    /// The time to compute the prompt tokens that are ahead of the request.
    pub queued_prefill: f64,
    /// The time to compute the prompt tokens of the request that are not cached.
    pub prefill: f64,
    /// The time to encode the images of the requests ahead, and the images of the request that are not cached.
    pub image_encoding: f64,
    /// The time by which decoding sequences prolong the steps that compute the prompt of the request and the prompts
    /// ahead of it.
    pub decode_interference: f64,
    /// The time until the sequences of the request can start, if the replica already runs as many sequences as it can.
    pub sequence_wait: f64,
    /// The time until enough blocks are free.
    pub block_wait: f64,
    /// A penalty that grows with the used fraction of the cache, steeply when the cache is nearly full, because
    /// sequences that outgrow the cache are preempted and recomputed.
    pub cache_pressure: f64,
    /// The number of requests in flight that this router has sent to the replica.
    pub in_flight: u32,
    /// The number of prompt tokens that are expected to be cached.
    pub cached_tokens: u32,
}

/// The best capacity of all candidates; [`Capacity::Never`] without candidates. With [`Capacity::Later`], the request
/// should wait in the queue of the router.
#[must_use]
pub fn capacity(demand: &Demand, candidates: &[Candidate]) -> Capacity {
    candidates.iter().map(|candidate| candidate.capacity(demand)).min().unwrap_or(Capacity::Never)
}

impl Candidate {
    /// Whether the replica has room for the request. Without a report, the result is [`Capacity::Now`], so that a fleet
    /// whose reports are late continues to serve; a full replica rejects the request itself. For a reserved replica,
    /// the result is [`Capacity::Later`] at best. A replica that other tenants have filled has room for a tenant that
    /// uses little of it, because the replica serves its tenants in turn.
    #[must_use]
    pub fn capacity(&self, demand: &Demand) -> Capacity {
        if !self.accepts_requests() {
            return Capacity::Never;
        }
        let now = if self.is_reserved { Capacity::Later } else { Capacity::Now };
        let Some(reported) = &self.snapshot.reported else { return now };
        let sequences = demand.sequences.max(1);
        if (reported.sequences_max > 0 && sequences > reported.sequences_max)
            || (reported.blocks_total > 0 && self.sequence_blocks(demand) > u64::from(reported.blocks_total))
        {
            return Capacity::Never;
        }
        let booked = &self.snapshot.booked;
        let present = u64::from(reported.running) + u64::from(reported.waiting) + booked.sequences_unreported;
        let exceeds = |limit: u32| limit > 0 && present + u64::from(sequences) > u64::from(limit);
        let held = u64::from(reported.blocks_active) + self.blocks_claimed();
        let blocks = u64::from(self.cost(demand).blocks.saturating_sub(self.output_blocks(demand)));
        let is_out_of_blocks =
            reported.blocks_total > 0 && present > 0 && held + blocks > u64::from(reported.blocks_total);
        let is_full = exceeds(reported.sequences_max) || is_out_of_blocks;
        if exceeds(reported.requests_max) || is_full && !self.is_within_tenant_reserve(demand, reported) {
            Capacity::Later
        } else {
            now
        }
    }

    /// Whether the load of the tenant, including this request, would stay within the fraction of the replica that is
    /// available to the tenant even if others have filled the replica.
    fn is_within_tenant_reserve(&self, demand: &Demand, reported: &ReportedLoad) -> bool {
        let cost = self.cost(demand);
        let fits =
            |used: u64, added: u32, total: u32| used + u64::from(added) <= u64::from(total / TENANT_RESERVE);
        demand.tenant != NO_TENANT
            && fits(self.tenant_load.sequences, cost.sequences, reported.sequences_max)
            && fits(self.tenant_load.blocks, cost.blocks, reported.blocks_total)
    }

    /// The load that the request would put on this replica.
    #[must_use]
    pub fn cost(&self, demand: &Demand) -> Cost {
        let uncached_tokens = demand.prompt_tokens.saturating_sub(self.cached_tokens).max(1);
        let blocks = uncached_tokens.div_ceil(self.block_tokens()).saturating_add(self.output_blocks(demand));
        Cost {
            uncached_tokens,
            image_tokens: self.uncached_image_tokens(demand).min(uncached_tokens),
            blocks,
            sequences: demand.sequences.max(1),
            tenant: demand.tenant,
        }
    }

    /// The number of tokens of the request's images that are not expected to be cached, assuming that the image tokens
    /// are spread evenly from the start of the first image to the end of the last.
    fn uncached_image_tokens(&self, demand: &Demand) -> u32 {
        let length = demand.images_end.saturating_sub(demand.images_start);
        let cached = self.cached_tokens.saturating_sub(demand.images_start).min(length);
        let uncached = u64::from(demand.image_tokens) * u64::from(length - cached);
        // The result is at most the number of image tokens, so it fits into a `u32`.
        uncached.div_ceil(u64::from(length.max(1))) as u32
    }

    /// Whether a request would have to wake the replica. If a request is in flight, it is already waking the replica.
    pub(super) fn is_sleeping(&self) -> bool {
        self.snapshot.booked.in_flight == 0
            && self.snapshot.reported.is_some_and(|reported| reported.is_sleeping)
    }

    /// Whether the replica may receive requests at all.
    pub(super) fn accepts_requests(&self) -> bool {
        self.weight > 0.0 && self.snapshot.state.is_none_or(|state| state == State::Serving)
    }

    /// The number of blocks that the output is expected to need.
    fn output_blocks(&self, demand: &Demand) -> u32 {
        let tokens = demand.output_tokens.min(demand.output_tokens_max.unwrap_or(u32::MAX));
        tokens.div_ceil(self.block_tokens()).saturating_mul(demand.sequences.max(1))
    }

    /// The number of blocks that a sequence needs if it is as long as the client permits, or that its prompt and one
    /// output token need if the client has set no limit.
    fn sequence_blocks(&self, demand: &Demand) -> u64 {
        let tokens = u64::from(demand.prompt_tokens) + u64::from(demand.output_tokens_max.unwrap_or(1));
        tokens.div_ceil(u64::from(self.block_tokens()))
    }

    /// The estimated number of free blocks that will be needed by the requests that wait at the replica and by those
    /// that the report does not include.
    pub(super) fn blocks_claimed(&self) -> u64 {
        let Some(reported) = &self.snapshot.reported else { return 0 };
        let waiting = if reported.waiting > 0 {
            reported.uncomputed_tokens / u64::from(self.block_tokens())
        } else {
            0
        };
        waiting + self.snapshot.booked.blocks_unreported
    }

    fn block_tokens(&self) -> u32 {
        /// The number of tokens per block that is assumed for a replica that has not reported one.
        const DEFAULT: u32 = 16;
        match &self.snapshot.reported {
            Some(reported) if reported.block_tokens > 0 => reported.block_tokens,
            _ => DEFAULT,
        }
    }
}
