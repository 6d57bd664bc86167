//! The replicas of one model, and what is known of the model itself: what its requests look like, who waits
//! for it. Picking and waking is `dispatch`'s.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use arc_swap::ArcSwap;
use tokio::sync::oneshot;

use crate::dispatch::{Placed, Wanted};
use crate::estimate::Estimates;
use crate::prefix::BlockBytes;
use crate::queue::{Queue, QueueConfig, Ticket};
use crate::replicas::{Replica, Reservation};

/// Tokens of a block where no replica has said.
const BLOCK_TOKENS_DEFAULT: u32 = 16;

/// The replicas of one model.
#[derive(Debug)]
pub struct Fleet {
    /// The model's name.
    pub model: String,
    replicas: ArcSwap<Vec<Arc<Replica>>>,
    expectations: Mutex<Expectations>,
    waiting: Mutex<Waiting>,
    /// How many wait, to be looked at without the lock.
    waiters: AtomicUsize,
}

/// What its requests are like.
#[derive(Clone, Copy, Debug)]
pub struct Expectations {
    /// Bytes a token, tokens an answer.
    pub estimates: Estimates,
    /// Bytes of a block of text.
    pub block_bytes: BlockBytes,
}

/// Who waits for a replica with room.
#[derive(Debug)]
pub(crate) struct Waiting {
    pub(crate) queue: Queue,
    pub(crate) waiters: HashMap<Ticket, Waiter>,
    /// The request that has been first for too long, and the replica that drains until the request fits.
    pub(crate) reservation: Option<(Ticket, Reservation)>,
}

/// One that waits.
#[derive(Debug)]
pub(crate) struct Waiter {
    pub(crate) wanted: Wanted,
    pub(crate) wake: oneshot::Sender<Placed>,
    /// When it entered the queue.
    pub(crate) since: Instant,
}

impl Waiting {
    /// Takes out a request that leaves without a place.
    pub(crate) fn cancel(&mut self, ticket: Ticket, now: Instant) -> Option<Waiter> {
        self.release(ticket);
        self.queue.cancel(ticket, now);
        self.waiters.remove(&ticket)
    }

    /// Takes out a request that has got a place.
    pub(crate) fn take(&mut self, ticket: Ticket, now: Instant) -> Option<Waiter> {
        self.release(ticket);
        self.queue.take(ticket, now);
        self.waiters.remove(&ticket)
    }

    /// The replica that is reserved for a request.
    pub(crate) fn reserved_for(&self, ticket: Ticket) -> Option<&Arc<Replica>> {
        let (holder, reservation) = self.reservation.as_ref()?;
        (*holder == ticket).then(|| reservation.replica())
    }

    fn release(&mut self, ticket: Ticket) {
        self.reservation.take_if(|(holder, _)| *holder == ticket);
    }
}

impl Fleet {
    /// A model without replicas.
    pub(crate) fn new(model: String) -> Self {
        let estimates = Estimates::default();
        let block_bytes = BlockBytes::new(BLOCK_TOKENS_DEFAULT, estimates.bytes_per_token());
        Self {
            model,
            replicas: ArcSwap::default(),
            expectations: Mutex::new(Expectations { estimates, block_bytes }),
            waiting: Mutex::new(Waiting {
                queue: Queue::new(QueueConfig::default()),
                waiters: HashMap::new(),
                reservation: None,
            }),
            waiters: AtomicUsize::new(0),
        }
    }

    /// The replicas that serve it.
    pub fn replicas(&self) -> arc_swap::Guard<Arc<Vec<Arc<Replica>>>> {
        self.replicas.load()
    }

    /// Most tokens of a prompt and its answer together that each replica takes, as far as they have said.
    pub(crate) fn max_model_len(&self) -> Option<u64> {
        let replicas = self.replicas();
        replicas.iter().filter_map(|replica| replica.told().lengths.get(&self.model).copied()).min()
    }

    pub(crate) fn set_replicas(&self, replicas: Vec<Arc<Replica>>) {
        self.replicas.store(Arc::new(replicas));
    }

    /// What its requests are like.
    pub fn expectations(&self) -> Expectations {
        *self.expectations.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Learns from an answer: the tokens of its prompt, if that was told, which had so many bytes; and the
    /// tokens of each of its sequences.
    pub(crate) fn learn(&self, prompt: Option<(usize, u32)>, output_tokens: Option<u32>) {
        let block_tokens = self.replicas.load().iter().find_map(|replica| {
            let tokens = replica.told().load.block_tokens;
            (tokens > 0).then_some(tokens)
        });
        let mut expectations = self.expectations.lock().unwrap_or_else(PoisonError::into_inner);
        let Expectations { estimates, block_bytes } = &mut *expectations;
        if let Some((bytes, tokens)) = prompt {
            estimates.observe_prompt(bytes, tokens);
            block_bytes.follow(block_tokens.unwrap_or(BLOCK_TOKENS_DEFAULT), estimates.bytes_per_token());
        }
        if let Some(tokens) = output_tokens {
            estimates.observe_output(tokens);
        }
    }

    /// Learns from a stream: so many events had so many tokens.
    pub(crate) fn learn_events(&self, events: u32, tokens: u32) {
        let mut expectations = self.expectations.lock().unwrap_or_else(PoisonError::into_inner);
        expectations.estimates.observe_events(events, tokens);
    }

    /// How many requests wait.
    pub fn waiters(&self) -> usize {
        self.waiters.load(Ordering::Acquire)
    }

    /// Changes who waits.
    pub(crate) fn with_waiting<T>(&self, change: impl FnOnce(&mut Waiting) -> T) -> T {
        let mut waiting: MutexGuard<'_, Waiting> =
            self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let result = change(&mut waiting);
        self.waiters.store(waiting.queue.len(), Ordering::Release);
        result
    }
}
