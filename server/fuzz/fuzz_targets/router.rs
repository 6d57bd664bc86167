//! Runs the checks of `router` on arbitrary bytes from a client.

#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../../router/tests/fuzzing/connection.rs"]
mod connection;

fuzz_target!(|input: &[u8]| connection::check(input));
