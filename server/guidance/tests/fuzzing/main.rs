//! Checks randomly mutated forms. The seeds are fixed, so each run takes seconds and checks the same forms; `make fuzz`
//! runs for a configurable time.

mod form;
#[path = "../../../fuzz/mutations.rs"]
mod mutations;

use mutations::{Random, mutated, words};

const CASES: u64 = 15_000;

#[test]
fn any_form_can_be_followed_or_is_rejected_with_a_path() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz/seeds/form");
    let mut paths: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    let seeds: Vec<Vec<u8>> = paths.iter().map(|path| std::fs::read(path).unwrap()).collect();
    assert!(!seeds.is_empty(), "there are seeds");
    let words = words(include_str!("../../../fuzz/dictionaries/form.dict"));
    for seed in 0..CASES {
        let input = mutated(&mut Random(seed), &seeds, &words);
        let outcome = std::panic::catch_unwind(|| form::check(&input));
        assert!(outcome.is_ok(), "seed {seed}: {:?}", String::from_utf8_lossy(&input));
    }
}
