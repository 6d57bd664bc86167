//! Connections whose bytes were changed at random, the same every time. `make fuzz` runs as long as it is allowed to.

mod connection;
#[path = "../../../server/fuzz/mutations.rs"]
mod mutations;

use mutations::{Random, mutated, words};

const CASES: u64 = 2_000;

#[test]
fn whatever_a_client_sends_the_router_holds_nothing_afterwards_and_serves_the_next() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../server/fuzz/seeds/router");
    let mut paths: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    let seeds: Vec<Vec<u8>> = paths.iter().map(|path| std::fs::read(path).unwrap()).collect();
    seeds.iter().for_each(|seed| connection::check(seed));
    let words = words(include_str!("../../../server/fuzz/dictionaries/router.dict"));
    for seed in 0..CASES {
        let input = mutated(&mut Random::new(seed), &seeds, &words);
        let outcome = std::panic::catch_unwind(|| connection::check(&input));
        assert!(outcome.is_ok(), "seed {seed}: {:?}", String::from_utf8_lossy(&input));
    }
}
