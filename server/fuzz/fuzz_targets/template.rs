//! Runs the checks of `server-text` on arbitrary chat templates and conversations.

#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../text/tests/fuzzing/template.rs"]
mod template;

// The template engine's panics are caught; panics of the checks still end the process.
fuzz_target!(init: drop(std::panic::take_hook()), |input: &[u8]| template::check(input));
