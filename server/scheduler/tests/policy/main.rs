//! Tests of the policy, as scripts and the batches that they produce. `UPDATE_EXPECT=1` updates the batches.

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
