//! Tests the public interface of the engine with the simulated runner: the output equals that of a model without a
//! cache and does not depend on other requests. No test sleeps for a fixed time.

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
mod images;
#[cfg(test)]
mod mutated_spill;
#[cfg(test)]
#[path = "../../../fuzz/mutations.rs"]
#[expect(dead_code, reason = "the seed is not in a directory")]
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
mod threads;
#[cfg(test)]
mod timing;
