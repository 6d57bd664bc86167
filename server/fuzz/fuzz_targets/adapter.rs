//! Runs the checks of `server-openvino` on arbitrary directories of PEFT adapters. The modules that read adapters are
//! compiled into this target, so that it does not need OpenVINO.

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

/// The error type of `server-openvino`, reduced to the variant that these modules use.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("cannot use the adapter {name:?}: {why}")]
    Adapter { name: String, why: String },
}

fuzz_target!(|input: &[u8]| adapters::fuzzing::check(input));
