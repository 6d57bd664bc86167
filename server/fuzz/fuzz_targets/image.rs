//! Runs the checks of `server-images` on arbitrary bytes that are read as an image file.

#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../images/tests/fuzzing/file.rs"]
mod file;

fuzz_target!(|input: &[u8]| file::check(input));
