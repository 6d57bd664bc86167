//! Code that ovfleet's programs share: logging and tracing, parsing of sizes and durations on the command line,
//! environment variables of flags, termination signals, formatting of errors, accepting connections, counting requests,
//! and generating the reference documentation.

mod environment;
pub mod error;
pub mod listen;
pub mod logs;
pub mod metrics;
pub mod reference;
pub mod signals;
#[cfg(feature = "trace")]
pub mod trace;
pub mod units;

pub use environment::env_with_prefix;
