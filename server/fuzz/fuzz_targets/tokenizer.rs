//! Runs the checks of `server-text` on arbitrary `tokenizer.json` files, GGUF vocabularies and texts.

#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../text/tests/fuzzing/tokenizer.rs"]
mod tokenizer;

// The library's own panics are caught; those of this process still end it.
fuzz_target!(init: drop(std::panic::take_hook()), |input: &[u8]| tokenizer::check(input));
