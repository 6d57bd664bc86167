//! GGUF files that were changed at random. What is the same every time takes seconds here; `make fuzz` runs for as long as it is
//! told to.

mod file;
#[path = "../../../fuzz/mutations.rs"]
mod mutations;

use mutations::{Random, mutated, words};

const CASES: u64 = 20_000;

#[test]
fn any_file_is_read_whole_or_refused_with_a_reason() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz/seeds/gguf");
    let mut paths: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    let seeds: Vec<Vec<u8>> = paths.iter().map(|path| std::fs::read(path).unwrap()).collect();
    seeds.iter().for_each(|seed| file::check(seed));
    let words = words(include_str!("../../../fuzz/dictionaries/gguf.dict"));
    for seed in 0..CASES {
        let input = mutated(&mut Random::new(seed), &seeds, &words);
        let outcome = std::panic::catch_unwind(|| file::check(&input));
        assert!(outcome.is_ok(), "seed {seed}: {input:?}");
    }
}
