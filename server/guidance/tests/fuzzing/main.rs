//! Forms that were changed at random. What is the same every time takes seconds here; `make fuzz` goes on for as long as
//! it may.

mod form;
#[path = "../../../fuzz/mutations.rs"]
mod mutations;

use mutations::{Random, mutated, words};

const CASES: u64 = 15_000;

#[test]
fn a_form_can_be_followed_or_is_told_to_be_wrong() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz/seeds/form");
    let mut paths: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    let seeds: Vec<Vec<u8>> = paths.iter().map(|path| std::fs::read(path).unwrap()).collect();
    assert!(!seeds.is_empty(), "there are seeds");
    let words = words(include_str!("../../../fuzz/dictionaries/form.dict"));
    for seed in 0..CASES {
        let input = mutated(&mut Random::new(seed), &seeds, &words);
        let told = std::panic::catch_unwind(|| form::check(&input));
        assert!(told.is_ok(), "seed {seed}: {:?}", String::from_utf8_lossy(&input));
    }
}
