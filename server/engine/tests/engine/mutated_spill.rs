//! Mutates the files of evicted blocks as `make fuzz` does, but for seconds and with fixed seeds.

use crate::damaged_spill::{check, intact};
use crate::mutations::{Random, mutated, words};

const CASES: u64 = 500;

#[test]
fn damaged_files_of_blocks_are_never_used() {
    let seeds = [intact()];
    check(&seeds[0]);
    check(&[]);
    let words = words(include_str!("../../../fuzz/dictionaries/spill.dict"));
    for seed in 0..CASES {
        let input = mutated(&mut Random(seed), &seeds, &words);
        let outcome = std::panic::catch_unwind(|| check(&input));
        assert!(outcome.is_ok(), "seed {seed}: {input:?}");
    }
}
