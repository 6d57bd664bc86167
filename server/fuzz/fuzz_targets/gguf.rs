//! Any bytes as a GGUF file: what the tests of `server-gguf` check for some.

#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../gguf/tests/fuzzing/file.rs"]
mod file;

fuzz_target!(|input: &[u8]| file::check(input));
