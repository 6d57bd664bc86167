//! What the policies decide about: the demand of a request, and the replicas that are candidates for it.

use proto::v1alpha1::State;

use crate::ledger::{Cost, View};

/// What a request asks of a replica, as far as the router can know.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Demand {
    /// Tokens of the prompt, estimated from its bytes where it is text.
    pub prompt_tokens: u32,
    /// Tokens of output that are to be expected of a sequence.
    pub output_tokens: u32,
    /// Most tokens of output that the client asked for, if it said.
    pub output_tokens_max: Option<u32>,
    /// Sequences: the choices asked for, at least 1.
    pub sequences: u32,
    /// A hash of the session it belongs to, if it names one.
    pub session: Option<u64>,
}

/// One replica, as known for one request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Candidate {
    /// A hash of what stays the same when the replica restarts, e.g. its address.
    pub identity: u64,
    /// Its last report and what this router sent since.
    pub view: View,
    /// Tokens at the beginning of this prompt that are believed to be in its cache.
    pub cached_tokens: u32,
    /// The share of work it is to have, 0 to 1: 0 for none, less than 1 while it is on probation.
    pub weight: f32,
    /// Whether its room is reserved for another request, which has waited too long.
    pub is_reserved: bool,
    /// When it was picked last, counted in picks: 0 for never.
    pub last_pick: u64,
}

/// Whether a replica has room for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Capacity {
    /// It can start on it, as far as is known.
    Now,
    /// It would wait there for sequences to end, or be refused: better to wait in the router, which sees
    /// whichever replica has room first.
    Later,
    /// It fits under no circumstances, or the replica takes nothing at all.
    Never,
}

/// What a candidate was judged by; seconds unless said otherwise. Zero where the policy does not look.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Terms {
    /// What was compared: the least wins. Infinite for a candidate that was not considered.
    pub score: f64,
    /// Time for the prompt tokens that are ahead,
    pub ahead: f64,
    /// and for those of this request that are not cached.
    pub own: f64,
    /// Time that the steps in which these are computed are longer for the sequences that generate beside them.
    pub company: f64,
    /// Time until a sequence can begin, where all places are taken.
    pub place: f64,
    /// Time until blocks are free, where all are held.
    pub blocks: f64,
    /// The weight of a cache that fills up.
    pub pressure: f64,
    /// Requests in flight, which is what was compared where a report was missing.
    pub in_flight: u32,
    /// Tokens believed to be cached.
    pub cached_tokens: u32,
}

/// The best that any candidate has to offer: [`Capacity::Later`] means that the request had better wait in the
/// router's queue. `Never` without candidates.
#[must_use]
pub fn capacity(demand: &Demand, candidates: &[Candidate]) -> Capacity {
    candidates.iter().map(|candidate| candidate.capacity(demand)).min().unwrap_or(Capacity::Never)
}

impl Candidate {
    /// Whether there is room for the request. Without a report the answer is [`Capacity::Now`]: a fleet whose
    /// reports are late goes on serving, and a replica that is full says so itself. A reserved replica has room
    /// later at best.
    #[must_use]
    pub fn capacity(&self, demand: &Demand) -> Capacity {
        if !self.takes_requests() {
            return Capacity::Never;
        }
        let now = if self.is_reserved { Capacity::Later } else { Capacity::Now };
        let Some(reported) = &self.view.reported else { return now };
        let sequences = demand.sequences.max(1);
        if (reported.sequences_max > 0 && sequences > reported.sequences_max)
            || (reported.blocks_total > 0 && self.blocks_least(demand) > u64::from(reported.blocks_total))
        {
            return Capacity::Never;
        }
        let booked = &self.view.booked;
        let present = u64::from(reported.running) + u64::from(reported.waiting) + booked.sequences_unreported;
        let is_beyond = |limit: u32| limit > 0 && present + u64::from(sequences) > u64::from(limit);
        let held = u64::from(reported.blocks_active) + self.blocks_claimed();
        let blocks = u64::from(self.cost(demand).blocks.saturating_sub(self.output_blocks(demand)));
        let is_out_of_blocks =
            reported.blocks_total > 0 && present > 0 && held + blocks > u64::from(reported.blocks_total);
        if is_beyond(reported.sequences_max) || is_beyond(reported.requests_max) || is_out_of_blocks {
            Capacity::Later
        } else {
            now
        }
    }

    /// What the request would cost this replica, to be booked.
    #[must_use]
    pub fn cost(&self, demand: &Demand) -> Cost {
        let uncached_tokens = demand.prompt_tokens.saturating_sub(self.cached_tokens).max(1);
        let blocks = uncached_tokens.div_ceil(self.block_tokens()).saturating_add(self.output_blocks(demand));
        Cost { uncached_tokens, blocks, sequences: demand.sequences.max(1) }
    }

    /// Whether a request would have to wake it. One that is on its way there does that already.
    pub(super) fn is_asleep(&self) -> bool {
        self.view.booked.in_flight == 0 && self.view.reported.is_some_and(|reported| reported.is_asleep)
    }

    /// Whether the replica is to have anything at all.
    pub(super) fn takes_requests(&self) -> bool {
        self.weight > 0.0 && self.view.state.is_none_or(|state| state == State::Serving)
    }

    /// Blocks that the output is expected to take.
    fn output_blocks(&self, demand: &Demand) -> u32 {
        let tokens = demand.output_tokens.min(demand.output_tokens_max.unwrap_or(u32::MAX));
        tokens.div_ceil(self.block_tokens()).saturating_mul(demand.sequences.max(1))
    }

    /// Blocks that a sequence of the request holds at its end if it is as long as the client asked; its prompt
    /// alone if it did not say.
    fn blocks_least(&self, demand: &Demand) -> u64 {
        let tokens = u64::from(demand.prompt_tokens) + u64::from(demand.output_tokens_max.unwrap_or(1));
        tokens.div_ceil(u64::from(self.block_tokens()))
    }

    /// Blocks that are as good as taken: by what waits there, and by what was sent since the report.
    pub(super) fn blocks_claimed(&self) -> u64 {
        let Some(reported) = &self.view.reported else { return 0 };
        let waiting = if reported.waiting > 0 {
            reported.uncomputed_tokens / u64::from(self.block_tokens())
        } else {
            0
        };
        waiting + self.view.booked.blocks_unreported
    }

    fn block_tokens(&self) -> u32 {
        /// Where the replica has not said.
        const DEFAULT: u32 = 16;
        match &self.view.reported {
            Some(reported) if reported.block_tokens > 0 => reported.block_tokens,
            _ => DEFAULT,
        }
    }
}
