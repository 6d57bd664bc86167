//! Supervises the connection of one client, so that an inactive client cannot use resources forever.
//!
//! A connection without a request is closed after `--read-timeout`, or within seconds while other connections wait to
//! be accepted. The time until the client has shown which protocol it speaks counts as well. An answer that the client
//! does not read is aborted after `--write-timeout`; this frees all resources of the request in the router and at the
//! replica. A connection that is being closed remains open for up to `--write-timeout` after its last answer, because
//! the end of the answer may still be in its buffer.

use std::io;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use hyper::body::{Frame, SizeHint};
use hyper_util::server::graceful::GracefulConnection;
use process::listen::IDLE_UNDER_PRESSURE;
use tokio::sync::Notify;
use tokio::time::{Instant, MissedTickBehavior};
use tokio_util::sync::CancellationToken;

use crate::app::App;
use crate::proxy::Body;

/// The time for a graceful shutdown of a connection that has sent all answers.
const GRACE: Duration = Duration::from_secs(5);
/// The shortest interval between checks of a connection. Between the two bounds, the interval is a quarter of the
/// shorter timeout.
const CHECK_MIN: Duration = Duration::from_millis(10);
/// The longest interval between checks of a connection.
const CHECK_MAX: Duration = Duration::from_secs(10);

/// The timeouts for an inactive client.
#[derive(Clone, Copy, Debug)]
pub(super) struct ConnectionLimits {
    /// The longest time without a request.
    pub(super) read_timeout: Duration,
    /// The longest time for which the client may leave an available answer unread.
    pub(super) write_timeout: Duration,
}

impl ConnectionLimits {
    pub(super) fn of(app: &App) -> Self {
        let settings = app.settings();
        Self { read_timeout: settings.read_timeout, write_timeout: settings.write_timeout }
    }

    fn check_interval(self) -> Duration {
        (self.read_timeout.min(self.write_timeout) / 4).clamp(CHECK_MIN, CHECK_MAX)
    }
}

/// The signals that end connections.
#[derive(Clone, Debug)]
pub(super) struct ShutdownSignals {
    /// The router is stopping: requests in flight are finished, and no new ones are accepted.
    pub(super) stop: CancellationToken,
    /// Other connections wait to be accepted.
    pub(super) pressure: Arc<Notify>,
}

/// Tracks the requests of a connection.
#[derive(Debug, Default)]
pub(super) struct Activity {
    /// The number of requests since the connection was opened.
    total: AtomicUsize,
    active: AtomicUsize,
    answers: Mutex<Vec<WatchedAnswer>>,
}

/// An answer, and the time since which it is known to be unread.
#[derive(Debug)]
struct WatchedAnswer {
    answer: Weak<Answer>,
    unread_since: Option<Instant>,
}

impl Activity {
    pub(super) fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Records that a request has arrived.
    pub(super) fn begin(self: &Arc<Self>) -> ActiveRequest {
        self.total.fetch_add(1, Ordering::Relaxed);
        self.active.fetch_add(1, Ordering::Relaxed);
        ActiveRequest(Arc::clone(self))
    }

    fn answers(&self) -> MutexGuard<'_, Vec<WatchedAnswer>> {
        self.answers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_idle(&self) -> bool {
        self.active.load(Ordering::Relaxed) == 0
    }

    /// Aborts the answers that have not been read for `timeout`. Returns whether there were any.
    fn abort_unread(&self, timeout: Duration, now: Instant) -> bool {
        let mut unread = Vec::new();
        self.answers().retain_mut(|watched| {
            let Some(answer) = watched.answer.upgrade() else { return false };
            if !answer.is_still_unread() {
                watched.unread_since = None;
            } else if now.saturating_duration_since(*watched.unread_since.get_or_insert(now)) >= timeout {
                unread.push(answer);
                return false;
            }
            true
        });
        for answer in &unread {
            tracing::debug!("aborted an answer that the client did not read");
            // Drop the resources outside of the lock.
            let resources = answer.lock().take();
            drop(resources);
        }
        !unread.is_empty()
    }
}

/// An active request. It ends when this value, or the answer created from it, is dropped.
pub(super) struct ActiveRequest(Arc<Activity>);

impl ActiveRequest {
    /// Creates the answer to the request. The request remains active until the answer is dropped or aborted.
    pub(super) fn answer(self, body: Body) -> WatchedBody {
        let activity = Arc::clone(&self.0);
        let resources = AnswerResources { body, _request: self };
        let answer =
            Arc::new(Answer { resources: Mutex::new(Some(resources)), state: AtomicU8::new(UNREAD) });
        let mut answers = activity.answers();
        if answers.len() == answers.capacity() {
            answers.retain(|watched| watched.answer.strong_count() > 0);
        }
        answers.push(WatchedAnswer { answer: Arc::downgrade(&answer), unread_since: None });
        drop(answers);
        WatchedBody(answer)
    }
}

impl Drop for ActiveRequest {
    fn drop(&mut self) {
        self.0.active.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The connection waits for the next part of the answer.
const WAITING: u8 = 0;
/// The answer has begun, or a part of it was returned, and the connection has not polled for the next part.
const UNREAD: u8 = 1;
/// The same as [`UNREAD`], but the answer was already unread at the last check.
const STILL_UNREAD: u8 = 2;

struct Answer {
    /// `None` after the answer was aborted.
    resources: Mutex<Option<AnswerResources>>,
    state: AtomicU8,
}

/// The resources of an answer: its body, which includes the placement at a replica and the permits of the request.
struct AnswerResources {
    body: Body,
    _request: ActiveRequest,
}

impl Answer {
    fn lock(&self) -> MutexGuard<'_, Option<AnswerResources>> {
        self.resources.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the connection has not polled since the last call, although a part of the answer was available then.
    fn is_still_unread(&self) -> bool {
        let previous =
            self.state.compare_exchange(UNREAD, STILL_UNREAD, Ordering::Relaxed, Ordering::Relaxed);
        previous == Err(STILL_UNREAD)
    }
}

impl std::fmt::Debug for Answer {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Answer").field("state", &self.state).finish_non_exhaustive()
    }
}

/// The body of an answer, which [`Activity`] can abort.
#[derive(Debug)]
pub(super) struct WatchedBody(Arc<Answer>);

impl hyper::body::Body for WatchedBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        let mut resources = self.0.lock();
        let Some(resources) = &mut *resources else {
            let message = "the client did not read the answer in time";
            return Poll::Ready(Some(Err(io::Error::new(io::ErrorKind::TimedOut, message))));
        };
        let frame = Pin::new(&mut resources.body).poll_frame(context);
        let state = if matches!(frame, Poll::Ready(Some(Ok(_)))) { UNREAD } else { WAITING };
        self.0.state.store(state, Ordering::Relaxed);
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.0.lock().as_ref().is_some_and(|resources| resources.body.is_end_stream())
    }

    fn size_hint(&self) -> SizeHint {
        self.0.lock().as_ref().map_or_else(SizeHint::default, |resources| resources.body.size_hint())
    }
}

/// Drives a connection until the client closes it or it is closed by a timeout or by `shutdown`.
pub(super) async fn supervise(
    connection: impl GracefulConnection,
    activity: &Activity,
    limits: ConnectionLimits,
    shutdown: &ShutdownSignals,
) {
    let mut connection = pin!(connection);
    let mut checks = tokio::time::interval(limits.check_interval());
    checks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (mut idle_since, mut total) = (Instant::now(), 0);
    // Whether the end of an answer may still be in the buffer of the connection.
    let mut may_have_unsent = false;
    let mut closing_since: Option<Instant> = None;
    loop {
        let timeout = tokio::select! {
            biased;
            // Connection errors are not logged: they are caused by the client, by the network, or by a broken answer,
            // which has already been recorded.
            _ = connection.as_mut() => return,
            _ = checks.tick() => limits.read_timeout,
            () = shutdown.pressure.notified() => limits.read_timeout.min(IDLE_UNDER_PRESSURE),
            () = shutdown.stop.cancelled(), if closing_since.is_none() => {
                closing_since = Some(Instant::now());
                connection.as_mut().graceful_shutdown();
                continue;
            }
        };
        let now = Instant::now();
        may_have_unsent &= !activity.abort_unread(limits.write_timeout, now);
        let new_total = activity.total.load(Ordering::Relaxed);
        // A request can be active even after the shutdown has begun, because a request that arrived just before the
        // shutdown is still answered.
        if !activity.is_idle() || new_total != total {
            (idle_since, total, may_have_unsent) = (now, new_total, true);
            continue;
        }
        let idle = now.saturating_duration_since(idle_since);
        may_have_unsent &= idle < limits.write_timeout;
        match closing_since {
            None if idle >= timeout => {
                closing_since = Some(now);
                connection.as_mut().graceful_shutdown();
            }
            Some(since) if !may_have_unsent && now.saturating_duration_since(since) >= GRACE => return,
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use hyper::body::{Body as _, Incoming};
    use hyper::server::conn::http1;
    use hyper::service::service_fn;
    use hyper::{Request, Response};
    use hyper_util::rt::TokioIo;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    const LIMIT: Duration = Duration::from_secs(60);

    fn poll(body: &mut WatchedBody) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        Pin::new(body).poll_frame(&mut Context::from_waker(std::task::Waker::noop()))
    }

    #[test]
    fn an_answer_that_is_not_read_is_aborted_and_frees_its_resources() {
        let (activity, now) = (Activity::new(), Instant::now());
        let mut body = activity.begin().answer(Body::whole(Bytes::from_static(b"answer")));
        for seconds in [0, 10, 69] {
            activity.abort_unread(LIMIT, now + Duration::from_secs(seconds));
            assert!(!activity.is_idle(), "after {seconds} s");
        }
        activity.abort_unread(LIMIT, now + Duration::from_secs(70));
        // The connection still owns the answer, but counts as idle, so that it can be closed.
        assert!(activity.is_idle());
        assert!(
            matches!(poll(&mut body), Poll::Ready(Some(Err(error))) if error.kind() == io::ErrorKind::TimedOut)
        );
    }

    #[test]
    fn an_answer_that_the_client_waits_for_is_never_aborted() {
        let (activity, now) = (Activity::new(), Instant::now());
        let pending = axum::body::Body::from_stream(futures_util::stream::pending::<io::Result<Bytes>>());
        let mut body = activity.begin().answer(Body::page(pending));
        assert!(poll(&mut body).is_pending());
        for minutes in 0..10 {
            activity.abort_unread(LIMIT, now + Duration::from_secs(60 * minutes));
        }
        assert!(poll(&mut body).is_pending() && !activity.is_idle());
        drop(body);
        assert!(activity.is_idle());
    }

    /// Number of bytes that a client reads at once.
    const BLOCK_BYTES: usize = 64 << 10;

    /// The number of bytes that a client receives of an answer of `blocks` blocks, including its head, if the client
    /// pauses before it reads each block.
    async fn received(blocks: usize, pause: Duration) -> usize {
        let limits = ConnectionLimits { read_timeout: Duration::from_secs(1), write_timeout: LIMIT };
        let shutdown = ShutdownSignals { stop: CancellationToken::new(), pressure: Arc::default() };
        let (mut client, server) = tokio::io::duplex(1024);
        let activity = Activity::new();
        let service = service_fn(|_: Request<Incoming>| {
            let body = Body::whole(vec![b'x'; blocks * BLOCK_BYTES].into());
            let answer = activity.begin().answer(body);
            async move { Ok::<_, Infallible>(Response::new(answer)) }
        });
        let connection =
            http1::Builder::new().max_buf_size(8192).serve_connection(TokioIo::new(server), service);
        let read = async {
            client.write_all(b"GET / HTTP/1.1\r\nhost: router\r\n\r\n").await.unwrap();
            let mut bytes = Vec::new();
            loop {
                tokio::time::sleep(pause).await;
                let block = (&mut client).take(BLOCK_BYTES as u64).read_to_end(&mut bytes).await.unwrap();
                if block == 0 {
                    return bytes.len();
                }
            }
        };
        tokio::join!(supervise(connection, &activity, limits, &shutdown), read).1
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_client_receives_its_whole_answer_and_one_that_does_not_read_is_disconnected() {
        // The connection buffers an answer of one block completely.
        for blocks in [1, 16] {
            assert!(received(blocks, LIMIT / 2).await > blocks * BLOCK_BYTES, "{blocks} blocks");
            assert!(received(blocks, LIMIT * 3).await < BLOCK_BYTES, "{blocks} blocks");
        }
    }
}
