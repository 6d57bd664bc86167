//! Fuzzes connections with a fixed seed. `make fuzz` runs for longer and with other seeds.

mod connection;
#[path = "../../../server/fuzz/mutations.rs"]
mod mutations;

use mutations::{check_mutations, seeds};

const CASES: u64 = 2_000;

#[test]
fn the_router_frees_everything_and_serves_the_next_client_after_any_input() {
    let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/../server/fuzz/seeds/router");
    check_mutations(
        CASES,
        &seeds(directory),
        include_str!("../../../server/fuzz/dictionaries/router.dict"),
        connection::check,
    );
}
