//! Counts and limits the requests that wait until a replica appears, or until the replicas have reported their models
//! and stores.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::time::timeout_at;

use super::deadline::Deadline;
use super::dispatcher::Dispatcher;
use super::error::{PlacementError, WaitTarget};
use crate::queue::QueuedRequest;
use crate::replica::Replica;
use crate::replicas::Replicas;
use crate::served_model::ServedModel;

impl Dispatcher {
    /// Waits until a replica serves `model` or, if `model` is `None`, until exactly one model is served. Returns `None`
    /// if every replica has reported its models and no such model exists. Also returns `None` if only some replicas
    /// have reported within `--replica-wait-timeout`: otherwise, a single replica that cannot start would turn the 404
    /// for every unknown model into a 503.
    ///
    /// # Errors
    /// No replica has reported its models by the deadline, or no replica has reported yet and too many requests are
    /// already waiting for a replica. If the client's deadline ends the wait, an error is also returned if only some
    /// replicas have reported, because another replica may still report the model.
    pub async fn await_model(
        &self,
        model: Option<&str>,
        queued: QueuedRequest,
    ) -> Result<Option<Arc<ServedModel>>, PlacementError> {
        let find = |replicas: &Replicas| match model {
            Some(model) => replicas.served_model(model),
            None => replicas.only_served_model(),
        };
        if let Some(served_model) = find(&self.replicas) {
            return Ok(Some(served_model));
        }
        let deadline = Deadline::after(self.settings().load().replica_wait_timeout, queued);
        match self.await_known(WaitTarget::Model, deadline, find).await {
            Err(PlacementError::NoReplica)
                if !deadline.is_set_by_client && self.replicas.has_any_reported() =>
            {
                Ok(None)
            }
            result => result,
        }
    }

    /// Waits until a replica reports that it has the store with this ID. Returns `None` once every replica has reported
    /// its store and none of them has the requested one.
    ///
    /// # Errors
    /// Not every replica has reported its store in time, or too many requests wait.
    pub async fn await_store(
        &self,
        store_id: u64,
        queued: QueuedRequest,
    ) -> Result<Option<Arc<Replica>>, PlacementError> {
        let deadline = Deadline::after(self.settings().load().replica_wait_timeout, queued);
        self.await_known(WaitTarget::StoredObject, deadline, |replicas| replicas.by_store(store_id)).await
    }

    /// Waits until `find` returns a result, or every replica has reported.
    ///
    /// # Errors
    /// Not every replica has reported by the deadline, or too many requests wait.
    async fn await_known<T>(
        &self,
        target: WaitTarget,
        deadline: Deadline,
        find: impl Fn(&Replicas) -> Option<T>,
    ) -> Result<Option<T>, PlacementError> {
        let mut changes = self.replicas.changes();
        let mut room = None;
        loop {
            if let Some(result) = find(&self.replicas) {
                return Ok(Some(result));
            }
            if self.replicas.have_all_reported() {
                return Ok(None);
            }
            if room.is_none() {
                room = Some(self.begin_replica_wait()?);
            }
            if timeout_at(deadline.at.into(), changes.changed()).await.is_err() {
                return Err(deadline.no_replica(target));
            }
        }
    }

    /// Counts a request as waiting for a replica, unless too many requests wait for one.
    pub(super) fn begin_replica_wait(&self) -> Result<ReplicaWaitGuard<'_>, PlacementError> {
        let guard = ReplicaWaitGuard(&self.requests_without_replica);
        let before = self.requests_without_replica.fetch_add(1, Ordering::Relaxed);
        let limit = self.settings().load().replica_wait_requests as usize;
        if before >= limit { Err(PlacementError::NoReplica) } else { Ok(guard) }
    }
}

/// A request that waits for a replica. Dropping it lets another request wait.
pub(super) struct ReplicaWaitGuard<'a>(&'a AtomicUsize);

impl Drop for ReplicaWaitGuard<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
