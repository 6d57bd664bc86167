//! Checks randomly mutated forms. The seeds and the number of forms are fixed, so each run checks the same forms and
//! takes seconds; `make fuzz` runs for a configurable time.

mod form;
#[path = "../../../fuzz/mutations.rs"]
mod mutations;

use mutations::{check_mutations, seeds};

const CASES: u64 = 15_000;

#[test]
fn any_form_can_be_followed_or_is_rejected_with_a_path() {
    let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz/seeds/form");
    check_mutations(
        CASES,
        &seeds(directory),
        include_str!("../../../fuzz/dictionaries/form.dict"),
        form::check,
    );
}
