//! Runs the checks of `server-engine` on arbitrary bytes in the files of evicted blocks.

#![no_main]
#![allow(dead_code)]

use libfuzzer_sys::fuzz_target;

#[path = "../../engine/tests/engine/damaged_spill.rs"]
mod damaged_spill;
#[path = "../../engine/tests/engine/support.rs"]
mod support;

fuzz_target!(|input: &[u8]| damaged_spill::check(input));
