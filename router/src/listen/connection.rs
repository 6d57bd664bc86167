//! One client's connection: what it may hold, and for how long.
//!
//! Whatever a client does not do ends here: a connection without a request is closed after `--read-timeout` (this
//! includes the time in which a client has not shown which protocol it speaks), or within seconds while others wait
//! for its place; an answer that is not read is given up after `--write-timeout`, which frees all that the request
//! holds in the router and at its replica.

use std::io;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use hyper::body::{Frame, SizeHint};
use hyper_util::server::graceful::GracefulConnection;
use tokio::sync::Notify;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use crate::app::App;
use crate::proxy::Body;

/// A connection without a request is closed after this time while others wait for its place.
const IDLE_UNDER_PRESSURE: Duration = Duration::from_secs(1);
/// The time that a connection has to say goodbye.
const GRACE: Duration = Duration::from_secs(5);
/// How often a connection is looked at: between these bounds, a quarter of the shorter limit.
const CHECK_MIN: Duration = Duration::from_millis(10);
const CHECK_MAX: Duration = Duration::from_secs(10);

/// How long a client may do nothing.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Without a request.
    pub(super) idle: Duration,
    /// Without reading an answer that is there.
    pub(super) unread: Duration,
}

impl Limits {
    pub(super) fn of(app: &App) -> Self {
        let settings = app.settings();
        Self { idle: settings.read_timeout, unread: settings.write_timeout }
    }

    fn check_interval(self) -> Duration {
        (self.idle.min(self.unread) / 4).clamp(CHECK_MIN, CHECK_MAX)
    }
}

/// What ends connections from outside.
#[derive(Clone, Debug)]
pub(super) struct Ending {
    /// Requests under way are finished, and no more are taken.
    pub(super) stop: CancellationToken,
    /// Others wait for a place.
    pub(super) pressure: Arc<Notify>,
}

/// The requests of a connection.
#[derive(Debug, Default)]
pub(super) struct Activity {
    /// Requests since the connection was opened.
    begun: AtomicUsize,
    under_way: AtomicUsize,
    answers: Mutex<Vec<Watched>>,
}

/// An answer that may not be read, and when that was first seen.
#[derive(Debug)]
struct Watched {
    answer: Weak<Answer>,
    unread_since: Option<Instant>,
}

impl Activity {
    pub(super) fn new() -> Arc<Self> {
        Arc::default()
    }

    /// A request has arrived.
    pub(super) fn begin(self: &Arc<Self>) -> UnderWay {
        self.begun.fetch_add(1, Ordering::Relaxed);
        self.under_way.fetch_add(1, Ordering::Relaxed);
        UnderWay(Arc::clone(self))
    }

    fn answers(&self) -> MutexGuard<'_, Vec<Watched>> {
        self.answers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_idle(&self) -> bool {
        self.under_way.load(Ordering::Relaxed) == 0
    }

    /// Gives up the answers that have not been read for `limit`.
    fn give_up_unread(&self, limit: Duration, now: Instant) {
        let mut unread = Vec::new();
        self.answers().retain_mut(|watched| {
            let Some(answer) = watched.answer.upgrade() else { return false };
            if !answer.is_still_unread() {
                watched.unread_since = None;
            } else if now.saturating_duration_since(*watched.unread_since.get_or_insert(now)) >= limit {
                unread.push(answer);
                return false;
            }
            true
        });
        for answer in unread {
            tracing::debug!("an answer was given up: its client did not read it");
            // Outside of the lock: what the request holds is freed with it.
            let held = answer.lock().take();
            drop(held);
        }
    }
}

/// A request under way. It ends when this, or the answer made of it, is dropped.
pub(super) struct UnderWay(Arc<Activity>);

impl UnderWay {
    /// The answer to the request.
    pub(super) fn answer(self, body: Body) -> WatchedBody {
        let activity = Arc::clone(&self.0);
        let held = Held { body, _request: self };
        let answer = Arc::new(Answer { held: Mutex::new(Some(held)), state: AtomicU8::new(UNREAD) });
        let mut answers = activity.answers();
        if answers.len() == answers.capacity() {
            answers.retain(|watched| watched.answer.strong_count() > 0);
        }
        answers.push(Watched { answer: Arc::downgrade(&answer), unread_since: None });
        drop(answers);
        WatchedBody(answer)
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.0.under_way.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Somebody waits for the next part of the answer.
const WAITED_FOR: u8 = 0;
/// The answer is there, or a part of it was handed over, and the next has not been asked for.
const UNREAD: u8 = 1;
/// The same, and it was so at the last check.
const STILL_UNREAD: u8 = 2;

struct Answer {
    /// `None` once it was given up.
    held: Mutex<Option<Held>>,
    state: AtomicU8,
}

/// What an answer holds: its body, and with it a place at a replica and a share of the router's limits.
struct Held {
    body: Body,
    _request: UnderWay,
}

impl Answer {
    fn lock(&self) -> MutexGuard<'_, Option<Held>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether nothing was asked for since the last call, although a part was handed over before it.
    fn is_still_unread(&self) -> bool {
        let seen = self.state.compare_exchange(UNREAD, STILL_UNREAD, Ordering::Relaxed, Ordering::Relaxed);
        seen == Err(STILL_UNREAD)
    }
}

impl std::fmt::Debug for Answer {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Answer").field("state", &self.state).finish_non_exhaustive()
    }
}

/// The body of an answer, which can be given up from outside.
#[derive(Debug)]
pub(super) struct WatchedBody(Arc<Answer>);

impl hyper::body::Body for WatchedBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        let mut held = self.0.lock();
        let Some(held) = &mut *held else {
            let message = "the client did not read the answer in time";
            return Poll::Ready(Some(Err(io::Error::new(io::ErrorKind::TimedOut, message))));
        };
        let frame = Pin::new(&mut held.body).poll_frame(context);
        let state = if matches!(frame, Poll::Ready(Some(Ok(_)))) { UNREAD } else { WAITED_FOR };
        self.0.state.store(state, Ordering::Relaxed);
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.0.lock().as_ref().is_some_and(|held| held.body.is_end_stream())
    }

    fn size_hint(&self) -> SizeHint {
        self.0.lock().as_ref().map_or_else(SizeHint::default, |held| held.body.size_hint())
    }
}

/// Drives a connection to its end, or to that which its limits or `ending` put to it.
pub(super) async fn supervise(
    connection: impl GracefulConnection,
    activity: &Activity,
    limits: Limits,
    ending: &Ending,
) {
    let mut connection = pin!(connection);
    let mut checks = tokio::time::interval(limits.check_interval());
    checks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (mut idle_since, mut begun) = (Instant::now(), 0);
    let mut is_stopping = false;
    loop {
        let idle_max = tokio::select! {
            biased;
            // That a client goes away or talks nonsense is its own affair.
            _ = connection.as_mut() => return,
            _ = checks.tick() => limits.idle,
            () = ending.pressure.notified() => limits.idle.min(IDLE_UNDER_PRESSURE),
            () = ending.stop.cancelled(), if !is_stopping => {
                is_stopping = true;
                connection.as_mut().graceful_shutdown();
                continue;
            }
        };
        let now = Instant::now();
        activity.give_up_unread(limits.unread, now);
        let begun_by_now = activity.begun.load(Ordering::Relaxed);
        if !activity.is_idle() || begun_by_now != begun {
            (idle_since, begun) = (now, begun_by_now);
        } else if now.saturating_duration_since(idle_since) >= idle_max {
            break;
        }
    }
    if !is_stopping {
        connection.as_mut().graceful_shutdown();
    }
    // A request may have come in the last moment; it is finished.
    while tokio::time::timeout(GRACE, connection.as_mut()).await.is_err() && !activity.is_idle() {
        activity.give_up_unread(limits.unread, Instant::now());
    }
}

#[cfg(test)]
mod tests {
    use hyper::body::Body as _;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(60);

    fn poll(body: &mut WatchedBody) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        Pin::new(body).poll_frame(&mut Context::from_waker(std::task::Waker::noop()))
    }

    #[test]
    fn an_answer_that_nobody_asks_for_is_given_up_and_holds_nothing_more() {
        let (activity, now) = (Activity::new(), Instant::now());
        let mut body = activity.begin().answer(Body::whole(Bytes::from_static(b"answer")));
        for seconds in [0, 10, 69] {
            activity.give_up_unread(LIMIT, now + Duration::from_secs(seconds));
            assert!(!activity.is_idle(), "after {seconds} s");
        }
        activity.give_up_unread(LIMIT, now + Duration::from_secs(70));
        // The connection still has the answer, which counts for nothing: the connection can be closed.
        assert!(activity.is_idle());
        assert!(
            matches!(poll(&mut body), Poll::Ready(Some(Err(error))) if error.kind() == io::ErrorKind::TimedOut)
        );
    }

    #[test]
    fn an_answer_that_is_waited_for_is_not_given_up_however_long_it_takes() {
        let (activity, now) = (Activity::new(), Instant::now());
        let pending = axum::body::Body::from_stream(futures_util::stream::pending::<io::Result<Bytes>>());
        let mut body = activity.begin().answer(Body::page(pending));
        assert!(poll(&mut body).is_pending());
        for minutes in 0..10 {
            activity.give_up_unread(LIMIT, now + Duration::from_secs(60 * minutes));
        }
        assert!(poll(&mut body).is_pending() && !activity.is_idle());
        drop(body);
        assert!(activity.is_idle());
    }
}
