//! Fuzzes connections with a fixed seed. `make fuzz` runs for longer and with other seeds.

mod connection;
#[path = "../../../server/fuzz/mutations.rs"]
mod mutations;

use mutations::{Random, mutated, words};

const CASES: u64 = 2_000;

#[test]
fn the_router_frees_everything_and_serves_the_next_client_after_any_input() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../server/fuzz/seeds/router");
    let mut paths: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    let seeds: Vec<Vec<u8>> = paths.iter().map(|path| std::fs::read(path).unwrap()).collect();
    seeds.iter().for_each(|seed| connection::check(seed));
    let words = words(include_str!("../../../server/fuzz/dictionaries/router.dict"));
    for seed in 0..CASES {
        let input = mutated(&mut Random(seed), &seeds, &words);
        let outcome = std::panic::catch_unwind(|| connection::check(&input));
        assert!(outcome.is_ok(), "seed {seed}: {:?}", String::from_utf8_lossy(&input));
    }
}
