use super::*;
use crate::arena::REPLICA;
use crate::workload::{KINDS, workload};

#[test]
fn the_default_policy_reaches_its_targets() {
    let arena = Arena { replicas: 8, requests: 1000, seeds: vec![11, 12, 13] };
    let table = Table::new(&arena, Competitor::all());
    assert_eq!(table.missed(), Vec::<String>::new(), "\n{}", table.markdown());
}

#[test]
fn equal_seeds_give_equal_results() {
    let arena = Arena { replicas: 4, requests: 200, seeds: vec![5] };
    for kind in KINDS {
        let scores = || format!("{:?}", arena.scores(kind, &Competitor::all()));
        assert_eq!(scores(), scores());
    }
}

#[test]
fn every_request_fits_into_the_cache_and_has_a_hash_for_each_block() {
    for kind in KINDS {
        let requests = workload(kind, 8, REPLICA, 500, 3);
        assert!(requests.len() >= 500);
        for request in &requests {
            let prompt_tokens = request.spec.prompt_tokens;
            let output_tokens = request.spec.output_tokens();
            assert!(output_tokens > 0);
            assert_eq!(request.prefix_hashes.blocks() as u32, prompt_tokens / REPLICA.block_tokens);
            assert!(prompt_tokens.div_ceil(16) + output_tokens.div_ceil(16) < REPLICA.blocks_total);
        }
    }
}
