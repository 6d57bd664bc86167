//! Tests of the policy. Each expectation lists commands and the batches that they produce. A new test needs only the
//! commands (the lines that begin with `> `): `UPDATE_EXPECT=1` adds or updates the batches.

mod adapters;
mod admission;
mod chunks;
mod drafts;
mod images;
mod limits;
mod lockstep;
mod prefix;
mod script;
mod siblings;
mod suspended;
mod tenants;
