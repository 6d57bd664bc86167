//! Checks randomly mutated images. The seeds are fixed, so each run takes seconds and checks the same files; `make
//! fuzz` runs for a configurable time.

mod file;
#[path = "../../../fuzz/mutations.rs"]
mod mutations;

use mutations::{check_mutations, seeds};

const CASES: u64 = 200;

#[test]
fn any_file_is_an_image_or_is_rejected_with_an_error_message() {
    let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/reference/files");
    check_mutations(
        CASES,
        &seeds(directory),
        include_str!("../../../fuzz/dictionaries/image.dict"),
        file::check,
    );
}
