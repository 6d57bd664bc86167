//! Runs the checks of `server-guidance` on arbitrary forms of structured output.

#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../guidance/tests/fuzzing/form.rs"]
mod form;

// llguidance's panics are caught; panics of the checks still end the process.
fuzz_target!(init: drop(std::panic::take_hook()), |input: &[u8]| form::check(input));
