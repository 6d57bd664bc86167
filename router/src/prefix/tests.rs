use std::collections::HashSet;

use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

use super::*;

#[test]
fn equal_hashes_mean_equal_prefixes() {
    let hashes_of = |text: &str| PrefixHashes::of_text(text.as_bytes(), 4, 7);
    let (a, b) = (hashes_of("aaaabbbbccccd"), hashes_of("aaaaBBBBcccc"));
    assert_eq!((a.blocks(), b.blocks()), (3, 3), "an incomplete block is not hashed");
    assert_eq!(a.hashes[0], b.hashes[0]);
    assert_ne!(a.hashes[1], b.hashes[1]);
    assert_ne!(a.hashes[2], b.hashes[2], "a hash includes all previous blocks");
    assert_ne!(a.hashes[0], PrefixHashes::of_text(b"aaaa", 4, 8).hashes[0], "another seed");
    assert_eq!(hashes_of("abc").blocks(), 0);
}

#[test]
fn prompts_with_different_contexts_share_no_blocks() {
    let context = PromptContext {
        adapter: "a",
        tenant: b"0a",
        cache_salt: b"\"a\"",
        tools: b"[{}]",
        ..PromptContext::default()
    };
    let contexts = [
        context,
        PromptContext { adapter: "b", ..context },
        PromptContext { adapter: "", ..context },
        PromptContext { tenant: b"0b", ..context },
        PromptContext { tenant: b"", ..context },
        PromptContext { cache_salt: b"\"b\"", ..context },
        PromptContext { cache_salt: b"", ..context },
        PromptContext { tools: b"", ..context },
        PromptContext { instructions: b"\"Be brief.\"", ..context },
        PromptContext { instructions: b"\"Be precise.\"", ..context },
        // These contexts contain the same bytes, divided differently among the fields.
        PromptContext { adapter: "a\"a\"", cache_salt: b"", ..context },
        PromptContext { tools: b"", functions: b"[{}]", ..context },
        PromptContext { tools: b"", documents: b"[{}]", ..context },
    ];
    let seeds: HashSet<u64> = contexts.iter().map(|context| context.seed(7)).collect();
    assert_eq!(seeds.len(), contexts.len());
    assert_eq!(context.seed(7), context.seed(7));
    assert_ne!(context.seed(7), context.seed(8));
}

#[test]
fn tokens_and_text_of_the_same_bytes_are_different_prompts() {
    let tokens = PrefixHashes::of_tokens(&[u32::from_le_bytes(*b"aaaa"), 9], 1, 7);
    assert_eq!(tokens.blocks(), 2);
    assert_ne!(tokens.hashes[0], PrefixHashes::of_text(b"aaaa", 4, 7).hashes[0]);
    assert_eq!(tokens.tokens_of(2, 4.0), 2);
    assert_eq!(PrefixHashes::of_text(&[b'x'; 64], 16, 7).tokens_of(3, 4.0), 12);
}

#[test]
fn only_the_first_blocks_of_a_prompt_are_hashed() {
    let text = vec![b'x'; 4 * (PREFIX_BLOCKS_MAX + 5)];
    assert_eq!(PrefixHashes::of_text(&text, 4, 7).blocks(), PREFIX_BLOCKS_MAX);
    assert_eq!(PrefixHashes::of_tokens(&vec![1; PREFIX_BLOCKS_MAX + 5], 1, 7).blocks(), PREFIX_BLOCKS_MAX);
}

#[test]
fn the_block_length_ignores_small_changes_of_the_ratio() {
    let mut bytes = BlockBytes::new(16, 4.0);
    assert_eq!(bytes.get(), 64);
    for ratio in [3.0, 5.0, 6.5, 2.5] {
        bytes.update(16, ratio);
        assert_eq!(bytes.get(), 64, "at {ratio}");
    }
    bytes.update(16, 1.2);
    assert_eq!(bytes.get(), 16);
    bytes.update(32, 4.0);
    assert_eq!(bytes.get(), 128);
}

#[test]
fn the_common_prefix_with_earlier_prompts_is_cached() {
    let mut index = PrefixIndex::default();
    let hashes_of = |text: &str| PrefixHashes::of_text(text.as_bytes(), 4, 7);
    assert_eq!(index.cached_blocks(&hashes_of("aaaabbbb")), 0);
    index.record(&hashes_of("aaaabbbbcccc"), 2);
    assert_eq!(index.blocks(), 5);
    assert_eq!(index.cached_blocks(&hashes_of("aaaabbbbcccc")), 3);
    assert_eq!(index.cached_blocks(&hashes_of("aaaabbbbdddd")), 2);
    assert_eq!(index.cached_blocks(&hashes_of("bbbb")), 0);
    index.reset();
    assert_eq!((index.blocks(), index.cached_blocks(&hashes_of("aaaa"))), (0, 0));
}

#[test]
fn the_least_recently_used_block_is_evicted_first_and_the_end_of_a_prompt_before_its_beginning() {
    let mut index = PrefixIndex::default();
    let hashes_of = |text: &str| PrefixHashes::of_text(text.as_bytes(), 4, 7);
    index.record(&hashes_of("aaaabbbbcccc"), 0);
    index.record(&hashes_of("xxxxyyyy"), 0);
    index.trim(4);
    assert_eq!(index.cached_blocks(&hashes_of("aaaabbbbcccc")), 2);
    assert_eq!(index.cached_blocks(&hashes_of("xxxxyyyy")), 2);
    // The first prompt is used again, so the end of the other one is evicted.
    index.record(&hashes_of("aaaabbbb"), 0);
    index.trim(3);
    assert_eq!(index.cached_blocks(&hashes_of("aaaabbbb")), 2);
    assert_eq!(index.cached_blocks(&hashes_of("xxxxyyyy")), 1);
    index.trim(0);
    assert_eq!(index.blocks(), 0);
}

#[test]
fn prompts_that_follow_a_report_of_an_empty_cache_are_expected_in_it() {
    let mut index = PrefixIndex::default();
    let hashes_of = |text: &str| PrefixHashes::of_text(text.as_bytes(), 4, 7);
    index.set_capacity(3);
    index.trim(0);
    index.record(&hashes_of("aaaabbbb"), 0);
    assert_eq!(index.cached_blocks(&hashes_of("aaaabbbb")), 2);
    // The cache has three blocks, so the prompt evicts the end of the previous one.
    index.record(&hashes_of("xxxxyyyy"), 0);
    assert_eq!((index.blocks(), index.cached_blocks(&hashes_of("aaaabbbb"))), (3, 1));
    index.reset();
    index.record(&hashes_of("aaaabbbbccccdddd"), 0);
    assert_eq!(index.blocks(), 4, "the cache of the new process may be larger");
}

/// Compares the index with a list that is searched linearly.
#[test]
fn the_index_is_a_list_in_the_order_of_use_at_random() {
    for seed in 0..50 {
        let mut rng = StdRng::seed_from_u64(seed);
        let mut below = |count: u64| rng.next_u64() % count;
        let mut index = PrefixIndex::default();
        // The most recently used block comes first; `None` is a block of output.
        let mut list: Vec<Option<u64>> = Vec::new();
        let mut capacity = INDEX_BLOCKS_MAX;
        for _ in 0..300 {
            let tokens: Vec<u32> = (0..below(12)).map(|_| below(2) as u32).collect();
            let prompt = PrefixHashes::of_tokens(&tokens, 1, 1);
            match below(8) {
                0 => {
                    capacity = below(60) as usize;
                    index.set_capacity(capacity);
                }
                1 => {
                    let blocks = below(60) as usize;
                    index.trim(blocks);
                    list.truncate(blocks);
                }
                2..6 => {
                    let output = below(4) as usize;
                    index.record(&prompt, output);
                    list.splice(0..0, std::iter::repeat_n(None, output.min(capacity)));
                    list.retain(|hash| hash.is_none_or(|hash| !prompt.hashes.contains(&hash)));
                    list.splice(0..0, prompt.hashes.iter().copied().map(Some));
                }
                _ => {
                    let known: HashSet<u64> = list.iter().copied().flatten().collect();
                    let expected = prompt.hashes.iter().take_while(|hash| known.contains(hash)).count();
                    assert_eq!(index.cached_blocks(&prompt), expected, "seed {seed}");
                }
            }
            list.truncate(capacity);
            assert_eq!(index.blocks(), list.len(), "seed {seed}");
            assert!(index.nodes.len() <= 1 + index.blocks() + index.unused.len());
        }
    }
}
