//! Attempt after attempt, until there is an answer or no further attempt is allowed.

use std::sync::Arc;
use std::time::Instant;

use http::Response;

use super::attempt::{Answer, attempt};
use super::failure::Failure;
use super::record::{Record, Spent};
use super::{Body, Outgoing, Worker};
use crate::dispatch::{Outcome, Wanted};
use crate::error::Error;
use crate::fleet::Fleet;
use crate::queue::Waiter;

/// Number of broken connections to replicas after which the router gives up a request. The request itself may be what
/// ends them, and it must not end one after the other.
///
/// Beyond it: 502, `replicas_failed`, with `x-should-retry: false`.
const BROKEN_MAX: u32 = 2;

/// Where a request may go, and how it may wait for a place.
pub(super) struct Destination {
    pub(super) fleet: Arc<Fleet>,
    pub(super) wanted: Wanted,
    pub(super) waiter: Waiter,
}

/// Sends a request to replicas until one answers.
///
/// # Errors
/// None did.
///
/// # Cancel safety
/// Dropping it ends the request at the replica and gives its place back.
pub(super) async fn until_answered(
    worker: &Arc<Worker>,
    destination: Destination,
    outgoing: &Outgoing,
    record: &mut Record,
) -> Result<Response<Body>, Error> {
    let Destination { fleet, mut wanted, waiter } = destination;
    let dispatch = worker.app.dispatch();
    dispatch.earn_retry();
    let mut attempts = 0;
    let mut broken = 0;
    // When it first found that no replica accepts connections.
    let mut unreached: Option<Instant> = None;
    loop {
        // The list of those tried outlives the attempt, as the next needs it.
        let mut placed = dispatch.place(&fleet, wanted.clone(), waiter).await?;
        record.placed(&placed);
        let failure = match attempt(worker, &placed, outgoing).await {
            Ok(Answer::Whole(response, body)) => {
                placed.end(Outcome::Answered);
                record.answered(&placed, outgoing, (response.status(), body));
                return Ok(response);
            }
            Ok(Answer::Stream(stream)) => return Ok(stream.into_response(worker, placed, outgoing, record)),
            Err(failure) => failure,
        };
        let label = failure.label();
        let request_id = outgoing.request_id.to_str().unwrap_or_default();
        tracing::debug!(replica = placed.replica.found.name, reason = label, request_id, "an attempt failed");
        if failure.is_fault() {
            let is_late = matches!(failure, Failure::TimedOut);
            placed.end(if is_late { Outcome::TimedOut } else { Outcome::Failed });
        }
        let identity = placed.replica.identity;
        drop(placed);
        wanted.tried.retain(|&tried| tried != identity);
        wanted.tried.push(identity);
        let attempts_max = worker.app.settings().attempts;
        attempts += 1;
        broken += u32::from(matches!(failure, Failure::Broken { .. }));
        if broken >= BROKEN_MAX {
            return Err(Error::BrokeReplicas(broken));
        }
        let is_repeated = failure.allows(outgoing.repeat)
            && match &failure {
                // It does not count as an attempt: as long as a request may wait for a replica at all.
                Failure::Connect => {
                    attempts -= 1;
                    let since = *unreached.get_or_insert_with(Instant::now);
                    since.elapsed() < worker.app.settings().waiting_room_timeout
                }
                Failure::Busy(_) | Failure::Unauthenticated => {
                    attempts < attempts_max && has_untried(&fleet, &wanted)
                }
                _ => attempts < attempts_max && dispatch.spend_retry(),
            };
        if !is_repeated {
            let answer = failure.last(attempts.max(1), outgoing.repeat)?;
            record.whole(answer.status(), Spent::Nothing);
            return Ok(answer);
        }
        worker.app.metrics().retried(label);
    }
}

fn has_untried(fleet: &Fleet, wanted: &Wanted) -> bool {
    wanted.only.is_none() && fleet.replicas().iter().any(|replica| !wanted.tried.contains(&replica.identity))
}
