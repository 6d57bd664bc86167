//! The engine as its users see it, over the simulated runner: what comes out equals what a model without a
//! cache would say, whatever else happens at the same time. No test waits for time to pass.

#[cfg(test)]
mod adapters;
#[cfg(test)]
mod beams;
#[cfg(test)]
mod damaged_spill;
#[cfg(test)]
mod draft_model;
mod drafts;
mod eviction;
mod faults;
#[cfg(test)]
mod guides;
#[cfg(test)]
mod mutated_spill;
#[cfg(test)]
#[path = "../../../fuzz/mutations.rs"]
mod mutations;
#[cfg(test)]
mod scores;
#[cfg(test)]
mod sleep;
#[cfg(test)]
mod slow_guides;
#[cfg(test)]
mod spill;
mod streams;
#[cfg(test)]
mod support;
#[cfg(test)]
mod timing;
