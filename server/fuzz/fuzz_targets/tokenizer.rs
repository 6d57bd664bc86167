//! Runs the checks of `server-text` on arbitrary `tokenizer.json` files, GGUF vocabularies and texts.

#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../text/tests/fuzzing/tokenizer.rs"]
mod tokenizer;

// The panic hook of libfuzzer-sys ends the process even if `server-text` catches a panic of the tokenizer library.
// Without the hook, only uncaught panics end the process.
fuzz_target!(init: drop(std::panic::take_hook()), |input: &[u8]| tokenizer::check(input));
