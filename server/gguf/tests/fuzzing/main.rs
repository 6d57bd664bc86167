//! Checks randomly mutated GGUF files. The seeds are fixed, so each run takes seconds and checks the same files;
//! `make fuzz` runs for a configurable time.

mod file;
#[path = "../../../fuzz/mutations.rs"]
mod mutations;

use mutations::{Random, mutated, words};

const CASES: u64 = 20_000;

#[test]
fn any_file_opens_or_is_rejected_with_an_error_message() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz/seeds/gguf");
    let mut paths: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    let seeds: Vec<Vec<u8>> = paths.iter().map(|path| std::fs::read(path).unwrap()).collect();
    seeds.iter().for_each(|seed| file::check(seed));
    let words = words(include_str!("../../../fuzz/dictionaries/gguf.dict"));
    for seed in 0..CASES {
        let input = mutated(&mut Random(seed), &seeds, &words);
        let outcome = std::panic::catch_unwind(|| file::check(&input));
        assert!(outcome.is_ok(), "seed {seed}: {input:?}");
    }
}
