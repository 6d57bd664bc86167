//! Checks randomly mutated GGUF files. Each run takes seconds and checks the same files; `make fuzz` runs the check for
//! a configurable time.

mod file;
#[path = "../../../fuzz/mutations.rs"]
mod mutations;

use mutations::{check_mutations, seeds};

const CASES: u64 = 20_000;

#[test]
fn any_file_opens_or_is_rejected_with_an_error_message() {
    let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz/seeds/gguf");
    check_mutations(
        CASES,
        &seeds(directory),
        include_str!("../../../fuzz/dictionaries/gguf.dict"),
        file::check,
    );
}

#[test]
#[should_panic(expected = "seed 1: bad")]
fn a_seed_that_fails_the_check_is_named() {
    let seeds = [b"good".to_vec(), b"bad".to_vec()];
    check_mutations(0, &seeds, "", |input| assert_ne!(input, b"bad"));
}
