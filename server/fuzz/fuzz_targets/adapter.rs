//! Runs the checks of `server-openvino` on arbitrary folders of PEFT adapters. The modules that read them are compiled into
//! this target, so that OpenVINO is not needed.

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
