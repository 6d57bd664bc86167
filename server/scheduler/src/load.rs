//! How busy the scheduler is.

/// A snapshot of the work and the cache. `blocks_free + blocks_evictable + blocks_active == blocks_total`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Blocks in the cache.
    pub blocks_total: u32,
    /// Blocks that running sequences hold, those taken for what is still to be computed included.
    pub blocks_active: u32,
    /// Blocks nobody holds whose content is kept for a later request with the same prefix.
    pub blocks_evictable: u32,
    /// Blocks nobody holds, without content.
    pub blocks_free: u32,
    /// Sequences that run. Those that share a prompt count before it is computed.
    pub running: u32,
    /// Sequences that wait, preempted ones included.
    pub waiting: u32,
    /// Tokens that waiting and running sequences have still to compute before each can sample. Those of a
    /// waiting one all count: what the prefix cache has of them is known when it is admitted.
    pub uncomputed_tokens: u64,
    /// Times a running sequence was sent back to wait because blocks ran out, since the start.
    pub preemptions_total: u64,
}
