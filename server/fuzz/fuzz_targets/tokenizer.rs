//! Runs the checks of `server-text` on arbitrary `tokenizer.json` files, GGUF vocabularies and texts.

#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../text/tests/fuzzing/tokenizer.rs"]
mod tokenizer;

fuzz_target!(|input: &[u8]| tokenizer::check(input));
