//! Any folder of a PEFT adapter: what the tests of `server-openvino` check for some. The modules that read it are compiled here
//! by themselves, so that OpenVINO is not needed.

#![no_main]
#![allow(dead_code)]

use libfuzzer_sys::fuzz_target;

#[path = "../../openvino/src/adapters"]
mod adapters {
    use std::path::PathBuf;

    mod config;
    pub(crate) mod file;
    pub(crate) mod fuzzing;
    mod names;

    pub(crate) const ADAPTER_RANK_MAX: usize = 256;

    pub(crate) struct AdapterSource {
        pub(crate) name: String,
        pub(crate) path: PathBuf,
    }
}

/// As in `server-openvino`.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("cannot use the adapter {name:?}: {why}")]
    Adapter { name: String, why: String },
}

fuzz_target!(|input: &[u8]| adapters::fuzzing::check(input));
