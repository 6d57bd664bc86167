//! Runs the checks of `server-text` on arbitrary chat templates and conversations.

#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../text/tests/fuzzing/template.rs"]
mod template;

// The panic hook of libfuzzer-sys ends the process even if `server-text` catches a panic of the template engine.
// Without the hook, only uncaught panics end the process.
fuzz_target!(init: drop(std::panic::take_hook()), |input: &[u8]| template::check(input));
