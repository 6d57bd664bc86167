//! Eviction order, content check and misuse of the pool.

use super::*;

const ROOT: After = After::Root(BlockHash::ROOT, 0);

fn content(hash: u64, parent: Serial, tokens: &[TokenId]) -> Content<'_> {
    Content { hash: BlockHash(hash), parent, tokens }
}

/// Allocates a block and caches `tokens` in it, under a hash of the caller's choice.
fn cached(pool: &mut BlockPool, hash: u64, parent: Serial, tokens: &[TokenId]) -> (BlockId, Serial) {
    let block = pool.allocate().unwrap();
    assert_eq!(pool.register(block, ROOT, content(hash, parent, tokens)), Registered::New);
    (block, pool.serial(block).unwrap())
}

#[test]
fn blocks_are_given_out_once_and_come_back() {
    let mut pool = BlockPool::new(3, 2);
    let blocks = [0; 3].map(|_| pool.allocate().unwrap());
    assert_eq!(blocks, [BlockId(0), BlockId(1), BlockId(2)]);
    assert_eq!(pool.allocate(), None);
    pool.share(blocks[1]);
    assert!(pool.is_shared(blocks[1]));
    pool.release(blocks[1]);
    assert_eq!(pool.allocate(), None, "the other holder still has it");
    pool.release(blocks[1]);
    assert_eq!(pool.allocate(), Some(blocks[1]));
    pool.check_invariants(blocks.into_iter());
}

#[test]
fn free_blocks_go_before_evictable_ones_and_the_least_recently_used_of_those_first() {
    let mut pool = BlockPool::new(4, 1);
    let (a, _) = cached(&mut pool, 1, Serial::root(0), &[1]);
    let (b, _) = cached(&mut pool, 2, Serial::root(0), &[2]);
    let (c, _) = cached(&mut pool, 3, Serial::root(0), &[3]);
    for block in [a, b, c] {
        pool.release(block);
    }
    // `a` is used again, and is now the newest.
    pool.share(a);
    pool.release(a);
    assert_eq!((pool.blocks_free(), pool.blocks_evictable(), pool.blocks_available()), (1, 3, 4));
    let given: Vec<_> = std::iter::from_fn(|| pool.allocate()).collect();
    assert_eq!(given, [BlockId(3), b, c, a]);
    pool.check_invariants(given.into_iter());
    assert!(!pool.may_have(BlockHash(1)));
}

#[test]
fn a_block_is_taken_out_of_the_middle_of_the_evictable_ones() {
    let mut pool = BlockPool::new(3, 1);
    let blocks = [1, 2, 3].map(|token| cached(&mut pool, u64::from(token), Serial::root(0), &[token]).0);
    for block in blocks {
        pool.release(block);
    }
    pool.share(blocks[1]);
    pool.check_invariants([blocks[1]].into_iter());
    assert!(pool.may_hold(BlockHash(2)) && !pool.may_hold(BlockHash(3)));
    assert_eq!([pool.allocate(), pool.allocate(), pool.allocate()], [Some(blocks[0]), Some(blocks[2]), None]);
}

#[test]
fn equal_hashes_with_other_tokens_or_another_parent_are_no_hit() {
    let mut pool = BlockPool::new(3, 2);
    let (a, serial) = cached(&mut pool, 9, Serial::root(0), &[1, 2]);
    assert_eq!(pool.find(content(9, Serial::root(0), &[1, 2])), Some(a));
    assert_eq!(pool.find(content(9, Serial::root(0), &[1, 3])), None);
    assert_eq!(pool.find(content(9, serial, &[1, 2])), None);

    let other = pool.allocate().unwrap();
    assert_eq!(pool.register(other, ROOT, content(9, Serial::root(0), &[1, 3])), Registered::Collision);
    assert_eq!(pool.register(other, ROOT, content(9, Serial::root(0), &[1, 2])), Registered::Duplicate(a));
    pool.check_invariants([a, other].into_iter());
}

#[test]
fn content_that_is_computed_again_has_another_serial() {
    let mut pool = BlockPool::new(1, 1);
    let (block, first) = cached(&mut pool, 1, Serial::root(0), &[1]);
    pool.release(block);
    assert_eq!(pool.allocate(), Some(block));
    assert_eq!(pool.register(block, ROOT, content(1, Serial::root(0), &[1])), Registered::New);
    assert_ne!(pool.serial(block), Some(first));
}

/// Caches a chain of tokens, hashed as themselves; nobody holds it afterwards.
fn chain(pool: &mut BlockPool, tokens: &[TokenId]) -> Vec<BlockId> {
    let (mut blocks, mut parent) = (Vec::new(), Serial::root(0));
    for token in tokens {
        let content = content(u64::from(*token), parent, std::slice::from_ref(token));
        let block = pool.find(content).inspect(|&block| pool.share(block)).unwrap_or_else(|| {
            let block = pool.allocate().unwrap();
            pool.register(block, blocks.last().map_or(ROOT, |&last| After::Block(last)), content);
            block
        });
        parent = pool.serial(block).unwrap();
        blocks.push(block);
    }
    blocks.iter().rev().for_each(|&block| pool.release(block));
    blocks
}

/// A request that finds these blocks and goes on from the last.
fn find(pool: &mut BlockPool, blocks: &[BlockId]) {
    blocks.iter().for_each(|&block| pool.share(block));
    pool.found(blocks.iter().copied());
    blocks.iter().rev().for_each(|&block| pool.release(block));
}

/// So many one-off prompts of a block, from this token on. True if the hash is still cached afterwards.
fn outlasts(pool: &mut BlockPool, hash: u64, tokens: std::ops::Range<TokenId>) -> bool {
    for token in tokens {
        chain(pool, &[token]);
    }
    pool.check_invariants(std::iter::empty());
    pool.may_have(BlockHash(hash))
}

/// A pool of 8 blocks, full, with a prompt of two that was in the cache for half of it to be given up.
fn full() -> (BlockPool, Vec<BlockId>) {
    let mut pool = BlockPool::new(8, 1);
    chain(&mut pool, &[1, 2]);
    outlasts(&mut pool, 1, 100..106);
    let prompt = chain(&mut pool, &[1, 2]);
    assert!(outlasts(&mut pool, 1, 106..111));
    (pool, prompt)
}

#[test]
fn a_block_from_which_several_went_on_outlasts_those_that_were_used_since() {
    let (mut pool, prompt) = full();
    find(&mut pool, &prompt[..1]);
    assert!(outlasts(&mut pool, 1, 200..214));
    assert!(!outlasts(&mut pool, 1, 214..224), "its time is over in the end");
}

#[test]
fn a_block_from_which_nobody_goes_on_elsewhere_is_as_any_other() {
    let (mut pool, prompt) = full();
    // A conversation and its next turn.
    find(&mut pool, &prompt);
    assert!(!outlasts(&mut pool, 1, 200..208));
}

#[test]
fn a_block_from_which_two_went_on_shortly_is_as_one_with_a_child() {
    let (mut pool, prompt) = full();
    find(&mut pool, &prompt);
    find(&mut pool, &prompt);
    assert!(outlasts(&mut pool, 2, 200..208));
}

#[test]
fn uses_in_a_row_count_as_one() {
    let (mut pool, prompt) = full();
    for _ in 0..9 {
        find(&mut pool, &prompt[..1]);
    }
    assert!(!outlasts(&mut pool, 1, 200..220), "twice it would be there");

    let (mut pool, prompt) = full();
    find(&mut pool, &prompt[..1]);
    assert!(outlasts(&mut pool, 1, 200..206));
    find(&mut pool, &prompt[..1]);
    assert!(outlasts(&mut pool, 1, 206..226));
}

#[test]
#[should_panic(expected = "released by its holders only")]
fn a_double_release_is_caught() {
    let mut pool = BlockPool::new(1, 1);
    let block = pool.allocate().unwrap();
    pool.release(block);
    pool.release(block);
}

#[test]
#[should_panic(expected = "nothing to share")]
fn sharing_a_free_block_is_caught() {
    BlockPool::new(1, 1).share(BlockId(0));
}

#[test]
fn what_nobody_holds_is_forgotten_and_what_is_held_is_not() {
    let mut pool = BlockPool::new(4, 1);
    let (held, serial) = cached(&mut pool, 1, Serial::root(0), &[1]);
    let (left, _) = cached(&mut pool, 2, serial, &[2]);
    let (alone, _) = cached(&mut pool, 3, Serial::root(0), &[3]);
    pool.release(left);
    pool.release(alone);
    pool.forget_evictable();
    assert_eq!((pool.blocks_free(), pool.blocks_evictable()), (3, 0));
    assert_eq!(pool.find(content(1, Serial::root(0), &[1])), Some(held));
    assert!(!pool.may_have(BlockHash(2)) && !pool.may_have(BlockHash(3)));
    pool.check_invariants([held].into_iter());
}
