//! Runs the checks of `server` on arbitrary bytes in the files of the store. The modules that read these files are
//! compiled into this target, so that their allocations can be measured.

#![no_main]
#![allow(dead_code, unused_imports)]

use libfuzzer_sys::fuzz_target;

#[path = "../allocations.rs"]
mod allocations;
#[path = "../../src/store/fuzzing.rs"]
mod fuzzing;
/// The modules of `server`, at their original paths.
#[path = "../../src"]
mod source {
    pub(crate) mod blocking;
    pub(crate) mod store;
    pub(crate) mod tenant;
}

use source::{blocking, store, tenant};

/// The error type of `server`, reduced to the variant that these modules use.
mod error {
    #[derive(Debug, PartialEq)]
    pub(crate) enum Error {
        Invalid(String),
    }

    impl Error {
        pub(crate) fn invalid(param: &str, problem: String) -> Self {
            Self::Invalid(format!("{param}: {problem}"))
        }
    }
}

fuzz_target!(|input: &[u8]| allocations::bounded(input, fuzzing::check));
