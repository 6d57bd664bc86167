//! Attempt after attempt, until there is an answer or there may be no more.

use std::sync::Arc;
use std::time::Instant;

use http::Response;

use super::attempt::{Answer, attempt};
use super::failure::Failure;
use super::record::Record;
use super::{Body, Outgoing, Worker};
use crate::dispatch::{Outcome, Wanted};
use crate::error::Error;
use crate::fleet::Fleet;
use crate::queue::Waiter;

/// Sends a request to replicas until one answers.
///
/// # Errors
/// None did.
///
/// # Cancel safety
/// Dropping it ends the request at the replica and gives its place back.
pub(super) async fn until_answered(
    worker: &Arc<Worker>,
    (fleet, mut wanted, waiter): (&Arc<Fleet>, Wanted, Waiter),
    outgoing: &Outgoing,
    record: &mut Record,
) -> Result<Response<Body>, Error> {
    let dispatch = worker.app.dispatch();
    dispatch.earn_retry();
    let mut attempts = 0;
    // When it first found nobody listening.
    let mut unreached: Option<Instant> = None;
    loop {
        // The list of those tried outlives the attempt, as the next needs it.
        let mut placed = dispatch.place(fleet, wanted.clone(), waiter).await?;
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
        tracing::debug!(replica = placed.replica.found.name, reason = label, "an attempt failed");
        if failure.is_fault() {
            placed.end(Outcome::Failed);
        }
        let identity = placed.replica.identity;
        drop(placed);
        wanted.tried.retain(|&tried| tried != identity);
        wanted.tried.push(identity);
        attempts += 1;
        let may = match &failure {
            // Nothing was sent, so nothing is sent twice: as long as a request may wait for a replica at all.
            Failure::Connect => {
                attempts -= 1;
                let since = *unreached.get_or_insert_with(Instant::now);
                since.elapsed() < worker.app.settings().waiting_room_timeout
            }
            Failure::Busy(_) => attempts < worker.app.settings().attempts && has_untried(fleet, &wanted),
            _ => attempts < worker.app.settings().attempts && dispatch.spend_retry(),
        };
        if !may {
            let answer = failure.last(attempts.max(1))?;
            record.whole(false, None);
            return Ok(answer);
        }
        worker.app.metrics().retried(label);
    }
}

fn has_untried(fleet: &Fleet, wanted: &Wanted) -> bool {
    wanted.only.is_none() && fleet.replicas().iter().any(|replica| !wanted.tried.contains(&replica.identity))
}
