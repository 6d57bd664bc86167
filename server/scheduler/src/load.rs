//! The load of the scheduler, as it is reported.

/// A snapshot of the queues and the cache. `blocks_free + blocks_evictable + blocks_active == blocks_total`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Number of blocks in the cache.
    pub blocks_total: u32,
    /// Number of blocks that running sequences hold, including those allocated for tokens that are still to be computed.
    pub blocks_active: u32,
    /// Number of blocks that no sequence holds and whose content is cached for later requests with the same prefix.
    pub blocks_evictable: u32,
    /// Number of blocks that no sequence holds and that have no content.
    pub blocks_free: u32,
    /// Number of running sequences. The sequences of a request count before its prompt is computed.
    pub running: u32,
    /// Number of waiting sequences, including preempted ones.
    pub waiting: u32,
    /// Number of tokens that the waiting and running sequences have still to compute before each can sample. All tokens
    /// of a waiting sequence count, because what the prefix cache has of them is known only when it is admitted.
    pub uncomputed_tokens: u64,
    /// Number of preemptions since the start: times a running sequence had to wait again because blocks ran out.
    pub preemptions_total: u64,
}
