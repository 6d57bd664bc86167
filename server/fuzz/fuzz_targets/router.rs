//! Any bytes on a client's connection to the router: what the tests of `router` check for some.

#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../../router/tests/fuzzing/connection.rs"]
mod connection;

fuzz_target!(|input: &[u8]| connection::check(input));
