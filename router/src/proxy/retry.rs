//! Sends a request to one replica after another until one answers or no further attempt is permitted.

use std::sync::Arc;
use std::time::Instant;

use http::Response;

use super::attempt::{Answer, attempt};
use super::body::Body;
use super::failure::Failure;
use super::outgoing::OutgoingRequest;
use super::record::{RequestRecord, TokensUsed};
use super::worker::Worker;
use crate::dispatch::Outcome;
use crate::error::Error;
use crate::queue::QueuedRequest;
use crate::replica::Replica;
use crate::served_model::ServedModel;
use crate::waiting::PlacementRequest;

/// Number of broken connections to replicas after which the router gives up on a request. The request itself may have
/// crashed these replicas, and must not crash any others.
///
/// If exceeded: 502, `replicas_failed`, with `x-should-retry: false`.
const BROKEN_MAX: u32 = 2;

/// The model that a request is for, the properties that determine its replica, and its entry in the queue.
pub(super) struct Destination {
    pub(super) served_model: Arc<ServedModel>,
    pub(super) request: PlacementRequest,
    pub(super) queued: QueuedRequest,
}

/// Sends a request to replicas until one answers.
///
/// # Errors
/// The request was not placed on any replica in time, or no replica answered it.
///
/// # Cancel safety
/// Dropping the future cancels the request at the replica and ends its placement.
pub(super) async fn send_until_answered(
    worker: &Arc<Worker>,
    destination: Destination,
    outgoing: &OutgoingRequest,
    record: &mut RequestRecord,
) -> Result<Response<Body>, Error> {
    let Destination { served_model, mut request, queued } = destination;
    let dispatcher = worker.app.dispatcher();
    dispatcher.deposit_retry();
    let mut attempts = 0;
    let mut broken_connections = 0;
    let mut first_connect_failure: Option<Instant> = None;
    loop {
        let mut placement = dispatcher.place(&served_model, request.clone(), queued).await?;
        record.placed(&placement);
        let failure = match attempt(worker, &placement, outgoing).await {
            Ok(Answer::Whole(response)) => {
                placement.set_outcome(Outcome::Answered);
                record.answered(&placement, outgoing, &response);
                return Ok(response.map(Body::whole));
            }
            Ok(Answer::Streamed(answer)) => {
                let response = answer.into_response(worker, placement, outgoing, record);
                return Ok(response.map(Body::relay));
            }
            Err(failure) => failure,
        };
        let label = failure.label();
        let request_id = outgoing.request_id.to_str().unwrap_or_default();
        let replica = &placement.replica.discovered.name;
        tracing::debug!(replica, reason = label, request_id, "an attempt failed");
        if failure.is_fault() {
            let is_late = matches!(failure, Failure::TimedOut);
            placement.set_outcome(if is_late { Outcome::TimedOut } else { Outcome::Failed });
        }
        let identity = placement.replica.identity;
        drop(placement);
        request.failed_replicas.retain(|&failed| failed != identity);
        request.failed_replicas.push(identity);
        let attempts_max = worker.app.settings().attempts;
        let is_past_deadline = queued.deadline.is_some_and(|deadline| deadline <= Instant::now());
        attempts += 1;
        // A connection that was idle counts too: the router cannot know whether the replica closed it or crashed.
        broken_connections += u32::from(matches!(failure, Failure::Broken { .. }));
        if broken_connections >= BROKEN_MAX {
            return Err(Error::BrokeReplicas(broken_connections));
        }
        let is_retried = failure.permits_retry(outgoing.retry_safety)
            && match &failure {
                // A failure to connect does not count as an attempt. The request is retried for as long as it may wait
                // for a replica.
                Failure::Connect => {
                    attempts -= 1;
                    let since = *first_connect_failure.get_or_insert_with(Instant::now);
                    !is_past_deadline && since.elapsed() < worker.app.settings().replica_wait_timeout
                }
                Failure::Busy(_) | Failure::Unauthenticated => {
                    attempts < attempts_max && has_untried(&served_model, &request)
                }
                _ => attempts < attempts_max && dispatcher.withdraw_retry(),
            };
        if !is_retried {
            if is_past_deadline && matches!(failure, Failure::Connect) {
                return Err(Error::AllTimedOut { attempts: attempts.max(1) });
            }
            let answer = failure.into_answer(attempts.max(1), outgoing.retry_safety)?;
            record.completed(answer.status(), TokensUsed::None);
            return Ok(answer.map(Body::whole));
        }
        worker.app.metrics().record_retry(label);
    }
}

fn has_untried(served_model: &ServedModel, request: &PlacementRequest) -> bool {
    let is_untried = |replica: &Arc<Replica>| !request.failed_replicas.contains(&replica.identity);
    request.required_replica.is_none() && served_model.replicas().iter().any(is_untried)
}
