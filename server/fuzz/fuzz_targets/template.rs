//! Runs the checks of `server-text` on arbitrary chat templates and conversations.

#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../text/tests/fuzzing/template.rs"]
mod template;

// The template engine's own panics are caught; those of this process still end it.
fuzz_target!(init: drop(std::panic::take_hook()), |input: &[u8]| template::check(input));
