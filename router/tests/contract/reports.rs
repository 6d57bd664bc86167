//! Tests that malformed load reports, including invalid bytes, do not affect answers.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::{BufMut as _, Bytes, BytesMut};
use futures_util::{Stream, stream};
use http::{Request, Response};
use http_body_util::{BodyExt as _, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use prost::Message as _;
use proto::v1alpha1::{DispatchRange, Dispatches, Load, WatchLoadRequest};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use tokio::task::JoinSet;

use crate::fuzz::idle;
use crate::harness::*;

const SEED: u64 = 21;
/// Number of replicas with malformed reports.
const BABBLING: usize = 6;
/// Number of streams of reports that these replicas must have begun before the test ends.
const STREAMS: usize = 3 * BABBLING;
/// Number of reports that these replicas must have sent before the test ends.
const REPORTS: usize = 1000;
/// The smallest number of requests that the test sends in the meantime.
const REQUESTS: usize = 300;

/// Counts the streams that were begun and the reports that were sent.
#[derive(Debug, Default)]
struct SentReports {
    streams: AtomicUsize,
    reports: AtomicUsize,
}

/// Returns a random number that is small, large or arbitrary.
fn figure(rng: &mut StdRng) -> u32 {
    match rng.random_range(0..4) {
        0 => 0,
        1 => rng.random_range(0..100),
        2 => u32::MAX - rng.random_range(0..2),
        _ => rng.random(),
    }
}

fn report(rng: &mut StdRng, router: u64, number: u64) -> Load {
    let models = [&["m"][..], &["m"], &["m", "n"], &[], &["\0", "", "m"]][rng.random_range(0..5)];
    let speed = |rng: &mut StdRng| {
        [f32::NAN, f32::INFINITY, f32::MIN, -1.0, 0.0, f32::MIN_POSITIVE, 500.0][rng.random_range(0..7)]
    };
    let ranges = (0..rng.random_range(0..4)).map(|_| {
        let first = if rng.random() { rng.random_range(0..400) } else { rng.random() };
        DispatchRange { first, last: first.wrapping_add(u64::from(figure(rng))) }
    });
    let ranges = ranges.collect();
    Load {
        dispatches: Some(Dispatches { router: router ^ u64::from(rng.random_bool(0.1)), ranges }),
        epoch: rng.random_range(1..3),
        report: if rng.random_bool(0.9) { number } else { rng.random() },
        state: rng.random_range(-1..6),
        models: models.iter().map(|&model| model.to_owned()).collect(),
        blocks_total: figure(rng),
        blocks_active: figure(rng),
        blocks_evictable: figure(rng),
        blocks_free: figure(rng),
        block_tokens: figure(rng),
        running: figure(rng),
        waiting: figure(rng),
        uncomputed_tokens: u64::from(figure(rng)) << rng.random_range(0..33),
        sequences_max: figure(rng),
        requests_max: figure(rng),
        prefill_tokens_per_second: speed(rng),
        decode_tokens_per_second: speed(rng),
        store_id: rng.random_range(0..2),
        sleeping: rng.random(),
        ..Load::default()
    }
}

/// The bytes of a report, possibly malformed.
fn framed(rng: &mut StdRng, report: &Load) -> Bytes {
    let mut bytes = report.encode_to_vec();
    if rng.random_bool(0.03) {
        for _ in 0..rng.random_range(1..4) {
            let at = rng.random_range(0..=bytes.len());
            match rng.random_range(0..3) {
                0 => bytes.truncate(at),
                1 => bytes.insert(at, rng.random()),
                _ => bytes[at.saturating_sub(1)..].iter_mut().take(1).for_each(|byte| *byte = rng.random()),
            }
        }
    }
    let mut length = u32::try_from(bytes.len()).unwrap();
    let mut is_compressed = 0;
    match rng.random_range(0..300) {
        0 => length = length.wrapping_sub(1),
        1 => length = figure(rng),
        2 => is_compressed = rng.random(),
        _ => {}
    }
    let mut frame = BytesMut::new();
    frame.put_u8(is_compressed);
    frame.put_u32(length);
    frame.extend_from_slice(&bytes);
    frame.freeze()
}

type Reports = StreamBody<std::pin::Pin<Box<dyn Stream<Item = Result<Frame<Bytes>, Infallible>> + Send>>>;

/// Answers a call with a stream of random reports, which ends without a gRPC status.
async fn answer(
    request: Request<Incoming>,
    seed: u64,
    sent: Arc<SentReports>,
) -> Result<Response<Reports>, Infallible> {
    sent.streams.fetch_add(1, Ordering::Relaxed);
    let body = request.into_body().collect().await.map(|body| body.to_bytes()).unwrap_or_default();
    let watch_request = WatchLoadRequest::decode(body.get(5..).unwrap_or_default()).unwrap_or_default();
    let mut rng = StdRng::seed_from_u64(seed);
    let count = rng.random_range(1..400_u64);
    let reports = stream::unfold((rng, 1), move |(mut rng, number)| {
        let sent = Arc::clone(&sent);
        async move {
            if number > count {
                return None;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
            sent.reports.fetch_add(1, Ordering::Relaxed);
            let report = report(&mut rng, watch_request.router, number);
            Some((Ok(Frame::data(framed(&mut rng, &report))), (rng, number + 1)))
        }
    });
    let response = Response::builder().header("content-type", "application/grpc");
    Ok(response.body(StreamBody::new(Box::pin(reports) as _)).unwrap())
}

/// Serves random reports in a separate thread until the process exits.
fn babble(seed: u64, sent: &Arc<SentReports>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let address = listener.local_addr().unwrap();
    let sent = Arc::clone(sent);
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async move {
            let listener = tokio::net::TcpListener::from_std(listener).unwrap();
            let mut connections = JoinSet::new();
            for number in 0.. {
                let (stream, _) = listener.accept().await.unwrap();
                let (seed, sent) = (seed + number, Arc::clone(&sent));
                connections.spawn(async move {
                    let service = service_fn(move |request| answer(request, seed, Arc::clone(&sent)));
                    let builder = auto::Builder::new(TokioExecutor::new()).http2_only();
                    // This fails if the router closes the connection, for example after an invalid report.
                    let _ = builder.serve_connection(TokioIo::new(stream), service).await;
                });
            }
        });
    });
    address
}

#[test]
fn each_request_is_answered_by_one_replica_whatever_replicas_report() {
    println!("seed {SEED}");
    let sent = Arc::new(SentReports::default());
    let answering = || Upstream::start("m", |_, stream| send(stream, &whole("{}")));
    // One replica does not report its load, so that at least one replica is always available.
    let silent = answering();
    let babbling: Vec<Upstream> = (0..BABBLING).map(|_| answering()).collect();
    let replicas = babbling.iter().enumerate().map(|(number, upstream)| {
        let grpc = babble(SEED + (number as u64) * 1000, &sent);
        format!("--replica={}/{}", upstream.address, grpc.port())
    });
    let replicas: Vec<String> = replicas.collect();
    let arguments: Vec<&str> = replicas.iter().map(String::as_str).collect();
    let router = Router::start(&[&silent], &arguments);
    let mut requests = 0;
    let end = std::time::Instant::now() + LIMIT;
    while requests < REQUESTS
        || sent.streams.load(Ordering::Relaxed) < STREAMS
        || sent.reports.load(Ordering::Relaxed) < REPORTS
    {
        assert!(std::time::Instant::now() < end, "{requests} requests, {sent:?}");
        let answer = router.request("POST", CHAT, &format!("x-number: {requests}\r\n"), &chat("m", false));
        assert_eq!(answer.status, 200, "{answer:?}");
        requests += 1;
    }
    let mut times: BTreeMap<String, usize> = BTreeMap::new();
    for request in babbling.iter().chain([&silent]).flat_map(Upstream::seen) {
        *times.entry(request.header("x-number").unwrap().to_owned()).or_default() += 1;
    }
    assert!(times.len() == requests && times.values().all(|&count| count == 1), "{times:?}");
    let reporting = babbling.iter().filter(|upstream| !upstream.seen().is_empty()).count();
    assert!(reporting > 1, "{reporting} of the reporting replicas received requests");
    idle(&router);
}
