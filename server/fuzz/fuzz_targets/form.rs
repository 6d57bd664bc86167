//! Runs the checks of `server-guidance` on arbitrary forms of structured output.

#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../guidance/tests/fuzzing/form.rs"]
mod form;

// llguidance's own panics are caught; those of this process still end it.
fuzz_target!(init: drop(std::panic::take_hook()), |input: &[u8]| form::check(input));
