//! What the processes of ovfleet have in common besides their work: how they log, how sizes and times are written on their
//! command lines, which signals end them, and how they print errors.

pub mod error;
pub mod logs;
pub mod signals;
pub mod units;
