//! The policy, told as scripts and the batches that come of them. `UPDATE_EXPECT=1` rewrites the latter.

mod adapters;
mod admission;
mod chunks;
mod drafts;
mod in_step;
mod limits;
mod prefix;
mod script;
mod siblings;
mod suspended;
