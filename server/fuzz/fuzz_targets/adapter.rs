//! Any folder of a PEFT adapter: what the tests of `server-openvino` check for some. The modules that read it are compiled here
//! by themselves, so that OpenVINO is not needed.

#![no_main]
#![allow(dead_code)]

use libfuzzer_sys::fuzz_target;

#[path = "../../openvino/src/adapters"]
mod adapters {
    pub(crate) mod file;
    pub(crate) mod fuzzing;
    mod names;
    mod peft_config;
    mod source;
}

/// As in `server-openvino`.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("cannot use the adapter {name:?}: {why}")]
    Adapter { name: String, why: String },
}

fuzz_target!(|input: &[u8]| adapters::fuzzing::check(input));
