//! Tests of the eviction order, of the content check and of misuse of the pool.

use super::*;

const START: BlockParent = BlockParent::Start { prefix_seed: BlockHash::NONE, adapter: 0 };

fn content(hash: u64, parent: BlockParent, tokens: &[TokenId]) -> BlockContent<'_> {
    BlockContent { hash: BlockHash(hash), parent, tokens, images: &[] }
}

/// Allocates a block and caches `tokens` in it, under a hash of the caller's choice.
fn cached(pool: &mut BlockPool, hash: u64, parent: BlockParent, tokens: &[TokenId]) -> BlockId {
    let block = pool.allocate().unwrap();
    assert_eq!(pool.register(block, content(hash, parent, tokens)), RegisterResult::Cached);
    block
}

#[test]
fn a_block_is_allocated_again_after_its_last_release() {
    let mut pool = BlockPool::new(3, 2);
    let blocks = [0; 3].map(|_| pool.allocate().unwrap());
    assert_eq!(blocks, [BlockId(0), BlockId(1), BlockId(2)]);
    assert_eq!(pool.allocate(), None);
    pool.acquire(blocks[1]);
    assert!(pool.is_shared(blocks[1]));
    pool.release(blocks[1]);
    assert_eq!(pool.allocate(), None, "a reference remains");
    pool.release(blocks[1]);
    assert_eq!(pool.allocate(), Some(blocks[1]));
    pool.check_invariants(blocks.into_iter());
}

#[test]
fn allocates_free_blocks_first_and_then_evicts_the_least_recently_used() {
    let mut pool = BlockPool::new(4, 1);
    let a = cached(&mut pool, 1, START, &[1]);
    let b = cached(&mut pool, 2, START, &[2]);
    let c = cached(&mut pool, 3, START, &[3]);
    for block in [a, b, c] {
        pool.release(block);
    }
    // `a` is used again, which makes it the most recently used block.
    pool.acquire(a);
    pool.release(a);
    assert_eq!((pool.blocks_free(), pool.blocks_evictable(), pool.blocks_available()), (1, 3, 4));
    let allocated: Vec<_> = std::iter::from_fn(|| pool.allocate()).collect();
    assert_eq!(allocated, [BlockId(3), b, c, a]);
    pool.check_invariants(allocated.into_iter());
    assert!(!pool.contains_hash(BlockHash(1)));
}

#[test]
fn a_block_in_the_middle_of_the_eviction_queue_can_be_acquired() {
    let mut pool = BlockPool::new(3, 1);
    let blocks = [1, 2, 3].map(|token| cached(&mut pool, u64::from(token), START, &[token]));
    for block in blocks {
        pool.release(block);
    }
    pool.acquire(blocks[1]);
    pool.check_invariants([blocks[1]].into_iter());
    assert!(pool.is_hash_active(BlockHash(2)) && !pool.is_hash_active(BlockHash(3)));
    assert_eq!([pool.allocate(), pool.allocate(), pool.allocate()], [Some(blocks[0]), Some(blocks[2]), None]);
}

#[test]
fn equal_hashes_with_other_tokens_or_another_parent_are_not_a_hit() {
    let mut pool = BlockPool::new(3, 2);
    let a = cached(&mut pool, 9, START, &[1, 2]);
    assert_eq!(pool.find(content(9, START, &[1, 2])), Some(a));
    assert_eq!(pool.find(content(9, START, &[1, 3])), None);
    assert_eq!(pool.find(content(9, BlockParent::Block(a), &[1, 2])), None);
    let other_seed = BlockParent::Start { prefix_seed: BlockHash(1), adapter: 0 };
    let other_adapter = BlockParent::Start { prefix_seed: BlockHash::NONE, adapter: 1 };
    for start in [other_seed, other_adapter] {
        assert_eq!(pool.find(content(9, start, &[1, 2])), None);
    }

    let other = pool.allocate().unwrap();
    assert_eq!(pool.register(other, content(9, START, &[1, 3])), RegisterResult::Collision);
    assert_eq!(pool.register(other, content(9, START, &[1, 2])), RegisterResult::Duplicate(a));
    pool.check_invariants([a, other].into_iter());
}

/// Caches a chain of blocks with one token each, which is also the hash of the block, and releases the chain.
fn chain(pool: &mut BlockPool, tokens: &[TokenId]) -> Vec<BlockId> {
    let (mut blocks, mut parent) = (Vec::new(), START);
    for token in tokens {
        let content = content(u64::from(*token), parent, std::slice::from_ref(token));
        let block = pool.find(content).inspect(|&block| pool.acquire(block)).unwrap_or_else(|| {
            let block = pool.allocate().unwrap();
            pool.register(block, content);
            block
        });
        parent = BlockParent::Block(block);
        blocks.push(block);
    }
    blocks.iter().rev().for_each(|&block| pool.release(block));
    blocks
}

/// Simulates a request that finds these blocks in the cache and continues after the last one.
fn hit(pool: &mut BlockPool, blocks: &[BlockId]) {
    blocks.iter().for_each(|&block| pool.acquire(block));
    pool.record_hit(blocks.iter().copied());
    blocks.iter().rev().for_each(|&block| pool.release(block));
}

/// Caches one prompt of one block for each token. Returns whether a block with the hash `hash` is still cached
/// afterward.
fn outlasts(pool: &mut BlockPool, hash: u64, tokens: std::ops::Range<TokenId>) -> bool {
    for token in tokens {
        chain(pool, &[token]);
    }
    pool.check_invariants(std::iter::empty());
    pool.contains_hash(BlockHash(hash))
}

/// Returns a full pool of 8 blocks, and the two blocks of a prompt in it. Since the prompt was cached, more blocks were
/// evicted than the hits of one burst may span, so the next hit counts.
fn full_pool() -> (BlockPool, Vec<BlockId>) {
    let mut pool = BlockPool::new(8, 1);
    chain(&mut pool, &[1, 2]);
    outlasts(&mut pool, 1, 100..106);
    let prompt = chain(&mut pool, &[1, 2]);
    assert!(outlasts(&mut pool, 1, 106..111));
    (pool, prompt)
}

#[test]
fn a_prefix_of_several_requests_outlasts_blocks_used_more_recently() {
    let (mut pool, prompt) = full_pool();
    hit(&mut pool, &prompt[..1]);
    assert!(outlasts(&mut pool, 1, 200..214));
    assert!(!outlasts(&mut pool, 1, 214..224), "the block is evicted eventually");
}

#[test]
fn a_prefix_of_one_conversation_is_evicted_in_lru_order() {
    let (mut pool, prompt) = full_pool();
    // The next turn of the conversation hits all blocks of the prompt.
    hit(&mut pool, &prompt);
    assert!(!outlasts(&mut pool, 1, 200..208));
}

#[test]
fn two_hits_that_end_at_the_same_block_count_as_a_shared_prefix() {
    let (mut pool, prompt) = full_pool();
    hit(&mut pool, &prompt);
    hit(&mut pool, &prompt);
    assert!(outlasts(&mut pool, 2, 200..208));
}

#[test]
fn hits_of_a_burst_count_as_one() {
    let (mut pool, prompt) = full_pool();
    for _ in 0..9 {
        hit(&mut pool, &prompt[..1]);
    }
    assert!(!outlasts(&mut pool, 1, 200..220), "two counted hits would have retained it");

    let (mut pool, prompt) = full_pool();
    hit(&mut pool, &prompt[..1]);
    assert!(outlasts(&mut pool, 1, 200..206));
    hit(&mut pool, &prompt[..1]);
    assert!(outlasts(&mut pool, 1, 206..226));
}

#[test]
#[should_panic(expected = "each reference is released once")]
fn a_double_release_panics() {
    let mut pool = BlockPool::new(1, 1);
    let block = pool.allocate().unwrap();
    pool.release(block);
    pool.release(block);
}

#[test]
#[should_panic(expected = "a free block has no content")]
fn acquiring_a_free_block_panics() {
    BlockPool::new(1, 1).acquire(BlockId(0));
}

#[test]
fn evict_all_evicts_only_blocks_without_references() {
    let mut pool = BlockPool::new(4, 1);
    let active = cached(&mut pool, 1, START, &[1]);
    let child = cached(&mut pool, 2, BlockParent::Block(active), &[2]);
    let alone = cached(&mut pool, 3, START, &[3]);
    pool.release(child);
    pool.release(alone);
    pool.evict_all();
    assert_eq!((pool.blocks_free(), pool.blocks_evictable()), (3, 0));
    assert_eq!(pool.find(content(1, START, &[1])), Some(active));
    assert!(!pool.contains_hash(BlockHash(2)) && !pool.contains_hash(BlockHash(3)));
    pool.check_invariants([active].into_iter());
}
