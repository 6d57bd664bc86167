//! The router: each request goes to the replica judged to answer soonest.
//!
//! ```text
//! report ─► ledger ─► view ─┐
//! prompt ─► prefix ─────────┼─► Candidate ─► policy::pick ─► Booking (RAII) ─► the request is sent
//! outcomes ─► health ───────┘
//! ```
//!
//! `policy`, `ledger`, `prefix`, `queue`, `health`, `limits` and `estimate` are pure: they read no clock and
//! draw no random number of their own, both are parameters.

pub mod estimate;
pub mod health;
pub mod ledger;
pub mod limits;
pub mod policy;
pub mod prefix;
pub mod queue;

mod sync;
