//! Runs the checks of `server` on arbitrary request bodies for chat completions, completions, responses and
//! `/v3/tokenize`.

#![no_main]
#![allow(dead_code)]

use std::cell::OnceCell;

use libfuzzer_sys::fuzz_target;
use tokio::runtime::{Builder, Runtime};

#[path = "../../tests/api/bodies.rs"]
mod bodies;
#[path = "../../tests/api/harness.rs"]
mod harness;

thread_local! {
    static RUNNING: OnceCell<(Runtime, harness::Server)> = const { OnceCell::new() };
}

fuzz_target!(init: drop(std::panic::take_hook()), |input: &[u8]| RUNNING.with(|running| {
    let (runtime, server) = running.get_or_init(|| {
        let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
        let server = runtime.block_on(async { bodies::server() });
        (runtime, server)
    });
    runtime.block_on(bodies::check(server, input));
}));
