//! Any `tokenizer.json` or GGUF vocabulary with any text: what the tests of `server-text` check for some.

#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../text/tests/fuzzing/tokenizer.rs"]
mod tokenizer;

fuzz_target!(|input: &[u8]| tokenizer::check(input));
