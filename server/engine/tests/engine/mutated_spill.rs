//! Checks randomly mutated files of evicted blocks. The seeds are fixed, and the test takes a few seconds; `make fuzz`
//! runs the same check for a configurable time.

use crate::damaged_spill::{check, intact};
use crate::mutations::check_mutations;

const CASES: u64 = 500;

#[test]
fn damaged_files_of_blocks_are_never_used() {
    check(&[]);
    check_mutations(CASES, &[intact()], include_str!("../../../fuzz/dictionaries/spill.dict"), check);
}
