//! What the processes of ovfleet have in common besides their work: how they log and trace, how sizes and times are written
//! on their command lines, which signals end them, how they print errors, accept connections and count requests, and how
//! their reference is generated.

pub mod error;
pub mod listen;
pub mod logs;
pub mod metrics;
pub mod reference;
pub mod signals;
#[cfg(feature = "trace")]
pub mod trace;
pub mod units;
