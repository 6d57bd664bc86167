//! Any bytes in the files of the store's directory: what the tests of `server` check for some. The modules that read them are
//! compiled here by themselves, so that what they allocate can be measured.

#![no_main]
#![allow(dead_code, unused_imports)]

use libfuzzer_sys::fuzz_target;

#[path = "../allocations.rs"]
mod allocations;
#[path = "../../src/store/fuzzing.rs"]
mod fuzzing;
#[path = "../../src/store.rs"]
mod store;
#[path = "../../src/tenant.rs"]
mod tenant;

/// As in `server`.
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
