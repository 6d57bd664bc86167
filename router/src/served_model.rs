//! The replicas of one model, with the state that belongs to the model itself: the typical sizes of its requests, and
//! the requests that wait for it. `dispatch` decides which replica a request is sent to.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use arc_swap::ArcSwap;

use crate::estimate::Estimates;
use crate::prefix::BlockBytes;
use crate::replica::{ListedModel, Replica};
use crate::waiting::WaitingList;

/// The number of tokens per block that is assumed until a replica has reported one.
const BLOCK_TOKENS_DEFAULT: u32 = 16;

/// The replicas of one model.
#[derive(Debug)]
pub struct ServedModel {
    /// The name of the model, as clients use it.
    pub name: String,
    replicas: ArcSwap<Vec<Arc<Replica>>>,
    expectations: Mutex<Expectations>,
    waiting: Mutex<WaitingList>,
    /// The number of waiting requests, which can be read without the lock.
    waiters: AtomicUsize,
}

/// The router's expectations of the requests for a model.
#[derive(Clone, Copy, Debug)]
pub struct Expectations {
    /// The averages of bytes per token, tokens per generated sequence and tokens per event.
    pub estimates: Estimates,
    /// The number of bytes of text in a block.
    pub block_bytes: BlockBytes,
}

impl ServedModel {
    /// Creates a model without replicas.
    pub(crate) fn new(name: String) -> Self {
        let estimates = Estimates::default();
        let block_bytes = BlockBytes::new(BLOCK_TOKENS_DEFAULT, estimates.bytes_per_token());
        Self {
            name,
            replicas: ArcSwap::default(),
            expectations: Mutex::new(Expectations { estimates, block_bytes }),
            waiting: Mutex::new(WaitingList::new()),
            waiters: AtomicUsize::new(0),
        }
    }

    /// The replicas that serve the model.
    pub fn replicas(&self) -> arc_swap::Guard<Arc<Vec<Arc<Replica>>>> {
        self.replicas.load()
    }

    /// Whether `replica` serves the model.
    pub(crate) fn contains(&self, replica: &Arc<Replica>) -> bool {
        self.replicas().iter().any(|other| Arc::ptr_eq(other, replica))
    }

    /// The properties of the model, or `None` if no replica has listed them. Requests with at most `max_model_len`
    /// tokens fit every replica that reports this limit; the other properties are those at the first replica.
    pub(crate) fn listed(&self) -> Option<ListedModel> {
        let replicas = self.replicas();
        let listed = |replica: &Arc<Replica>| replica.status().listed_models.get(&self.name).cloned();
        replicas.iter().filter_map(listed).reduce(|first, other| {
            let max_model_len = first.max_model_len.into_iter().chain(other.max_model_len).min();
            ListedModel { max_model_len, ..first }
        })
    }

    /// Whether the name is one of a base model, and not that of an adapter. `false` until a replica has listed it.
    pub(crate) fn is_base_model(&self) -> bool {
        let is_base = |replica: &Arc<Replica>| {
            replica.status().listed_models.get(&self.name).map(|listed| listed.parent.is_none())
        };
        self.replicas().iter().find_map(is_base).unwrap_or(false)
    }

    pub(crate) fn set_replicas(&self, replicas: Vec<Arc<Replica>>) {
        self.replicas.store(Arc::new(replicas));
    }

    /// The router's expectations of the next request.
    pub fn expectations(&self) -> Expectations {
        *self.expectations.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Updates the expectations with a prompt of `bytes` bytes that had `tokens` tokens.
    pub(crate) fn observe_prompt(&self, bytes: usize, tokens: u32) {
        let block_tokens = self.replicas.load().iter().find_map(|replica| {
            let tokens = replica.status().load.block_tokens;
            (tokens > 0).then_some(tokens)
        });
        self.with_expectations(|Expectations { estimates, block_bytes }| {
            estimates.observe_prompt(bytes, tokens);
            block_bytes.update(block_tokens.unwrap_or(BLOCK_TOKENS_DEFAULT), estimates.bytes_per_token());
        });
    }

    /// Updates the expectations with a generated sequence of `tokens` tokens.
    pub(crate) fn observe_output(&self, tokens: u32) {
        self.with_expectations(|expectations| expectations.estimates.observe_output(tokens));
    }

    /// Updates the expectations with a stream whose `events` events had `tokens` tokens.
    pub(crate) fn observe_events(&self, events: u32, tokens: u32) {
        self.with_expectations(|expectations| expectations.estimates.observe_events(events, tokens));
    }

    fn with_expectations(&self, update: impl FnOnce(&mut Expectations)) {
        update(&mut self.expectations.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// The number of requests that wait for a replica of the model.
    pub fn waiters(&self) -> usize {
        self.waiters.load(Ordering::Acquire)
    }

    /// Runs `change` on the list of waiting requests, under its lock.
    pub(crate) fn with_waiting<T>(&self, change: impl FnOnce(&mut WaitingList) -> T) -> T {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let result = change(&mut waiting);
        self.waiters.store(waiting.queue.len(), Ordering::Release);
        result
    }
}
