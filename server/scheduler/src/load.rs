//! The load that the scheduler reports.

/// A snapshot of the queues and the cache. The free, evictable and active blocks always add up to `blocks_total`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Number of blocks in the cache.
    pub blocks_total: u32,
    /// Number of blocks that running sequences and restores hold, including those allocated for tokens that are still
    /// to be computed.
    pub blocks_active: u32,
    /// Number of blocks that neither a sequence nor a restore holds and whose content is cached for later requests with
    /// the same prefix.
    pub blocks_evictable: u32,
    /// Number of blocks that neither a sequence nor a restore holds and that have no content.
    pub blocks_free: u32,
    /// Number of running sequences. All sequences of a request count, even while its prompt is being computed.
    pub running: u32,
    /// Number of waiting sequences, including preempted ones.
    pub waiting: u32,
    /// Number of tokens that the waiting and running sequences still have to compute before each of them can sample a
    /// token. All tokens of a waiting sequence count, because the number of cached ones is known only when the sequence
    /// is admitted.
    pub uncomputed_tokens: u64,
    /// Number of tokens of the images that are being encoded, and of the unencoded images that waiting sequences need.
    /// An image that several sequences need counts once. All images of a waiting sequence count until it reserves those
    /// whose tokens are not cached, because the latter are known only when the scheduler tries to admit the sequence.
    pub unencoded_image_tokens: u64,
    /// Number of tokens of the images whose encoder outputs are stored.
    pub encoded_image_tokens: u64,
    /// Number of images since the start that were already encoded, requested or reserved when a sequence reserved them.
    /// Only the first reservation of each sequence counts. Images whose tokens are in the prefix cache are not
    /// reserved.
    pub image_cache_hits_total: u64,
    /// Number of the other images that sequences have reserved, counted in the same way.
    pub image_cache_misses_total: u64,
    /// Number of preemptions since the start. A preemption returns a running sequence to the queue because no block can
    /// be allocated.
    pub preemptions_total: u64,
}
