//! Runs the checks of `server-gguf` on arbitrary bytes that are read as a GGUF file.

#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../gguf/tests/fuzzing/file.rs"]
mod file;

fuzz_target!(|input: &[u8]| file::check(input));
