//! Runs the checks of `server-guidance` on arbitrary forms of structured output.

#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../guidance/tests/fuzzing/form.rs"]
mod form;

// The panic hook of libfuzzer-sys ends the process even if `server-guidance` catches a panic of llguidance. Without the
// hook, only uncaught panics end the process.
fuzz_target!(init: drop(std::panic::take_hook()), |input: &[u8]| form::check(input));
