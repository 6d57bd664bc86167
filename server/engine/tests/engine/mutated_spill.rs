//! Mutates the files of evicted blocks like `make fuzz`, but only for a few seconds and with fixed seeds.

use crate::damaged_spill::{check, intact};
use crate::mutations::check_mutations;

const CASES: u64 = 500;

#[test]
fn damaged_files_of_blocks_are_never_used() {
    check(&[]);
    check_mutations(CASES, &[intact()], include_str!("../../../fuzz/dictionaries/spill.dict"), check);
}
