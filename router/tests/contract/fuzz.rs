//! Sends malformed requests to the router, and malformed streams from a replica. The router must not panic, must free
//! all resources, and must send no request twice unless a replica has failed.

use std::collections::BTreeMap;
use std::io::Write as _;

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

use crate::harness::*;

const SEED: u64 = 20;
const REQUESTS: usize = 600;

fn pick<'a>(rng: &mut StdRng, from: &[&'a str]) -> &'a str {
    from[rng.random_range(0..from.len())]
}

/// A random body that is valid, nearly valid, or invalid.
fn body(rng: &mut StdRng) -> Vec<u8> {
    let values = [
        "\"m\"",
        "\"n\"",
        "1",
        "null",
        "true",
        "[[[[",
        "{\"a\":{}}",
        "\"\\ud800\"",
        "-1e999",
        "\"\\\"\"",
        "",
    ];
    let names = ["model", "messages", "prompt", "stream", "n", "max_tokens", "user", "tools", "x"];
    let members: Vec<String> = (0..rng.random_range(0..6))
        .map(|_| format!("\"{}\":{}", pick(rng, &names), pick(rng, &values)))
        .collect();
    let mut body = format!("{{\"model\":\"m\",{}}}", members.join(",")).replace(",}", "}").into_bytes();
    for _ in 0..rng.random_range(0..3) {
        let at = rng.random_range(0..body.len());
        match rng.random_range(0..3) {
            0 => body[at] = rng.random(),
            1 => body.truncate(at.max(1)),
            _ => body.insert(at, b"{}[]\",:\\"[rng.random_range(0..8)]),
        }
    }
    body
}

fn headers(rng: &mut StdRng, number: usize) -> Vec<u8> {
    let some = [
        "x-ovfleet-priority: bulk",
        "x-ovfleet-priority: \u{fc}",
        "x-ovfleet-timeout: -1",
        "x-ovfleet-timeout: 1e400",
        "x-ovfleet-dispatch: 0000000000000001/1",
        "traceparent: 00-zz-00-00",
        "connection: x-number",
        "connection: ,,;=",
        "te: trailers",
        "expect: 100-continue",
        "content-encoding: gzip",
        "content-type: text/plain",
        "authorization: \u{1F980}",
        "x-session-id: ",
    ];
    let mut headers = format!("x-number: {number}\r\n");
    for _ in 0..rng.random_range(0..3) {
        headers += pick(rng, &some);
        headers += "\r\n";
    }
    headers.into_bytes()
}

#[test]
fn each_request_reaches_at_most_one_replica_and_is_answered() {
    println!("seed {SEED}");
    let mut rng = StdRng::seed_from_u64(SEED);
    let upstream = || Upstream::start("m", |_, stream| send(stream, &whole("{}")));
    let upstreams = [upstream(), upstream()];
    let router = Router::start(&[&upstreams[0], &upstreams[1]], &["--read-timeout=50ms"]);
    let mut answered = 0;
    for number in 0..REQUESTS {
        let (headers, body) = (headers(&mut rng, number), body(&mut rng));
        let path = pick(
            &mut rng,
            &[CHAT, "/v1/completions", "/v3/responses", "/v3/embeddings", "/v3/../x", "/v3/%"],
        );
        let length = match rng.random_range(0..12) {
            0 => body.len() + 3,
            1 => body.len() / 2,
            _ => body.len(),
        };
        let mut request = format!("POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n").into_bytes();
        request.extend_from_slice(&headers);
        request.extend_from_slice(format!("content-length: {length}\r\n\r\n").as_bytes());
        request.extend_from_slice(&body);
        let mut stream = router.connect();
        // The router may have closed the connection before the whole request was sent.
        let _ = stream.write_all(&request);
        let answer = Answer::read(&mut stream);
        answered += usize::from(answer.status == 200);
        assert!(answer.status == 0 || answer.status >= 100, "{answer:?}");
        assert_ne!(answer.status / 100, 5, "{answer:?}");
    }
    let mut times: BTreeMap<String, usize> = BTreeMap::new();
    for request in upstreams.iter().flat_map(Upstream::seen) {
        // The router removes the header `x-number` if the random `Connection` header lists it.
        if let Some(number) = request.header("x-number") {
            *times.entry(number.to_owned()).or_default() += 1;
        }
        let dispatch = request.header("x-ovfleet-dispatch").unwrap();
        assert_ne!(dispatch, "0000000000000001/1", "a client's number is not passed on");
    }
    assert!(times.values().all(|&count| count == 1), "{times:?}");
    assert!(times.len() > REQUESTS / 10 && answered > REQUESTS / 10, "{} of {answered}", times.len());
    idle(&router);
    // The router can still serve requests.
    assert_eq!(router.post(CHAT, &chat("m", false)).status, 200);
}

#[test]
fn any_stream_of_a_replica_ends_properly_for_the_client() {
    println!("seed {SEED}");
    let mut rng = StdRng::seed_from_u64(SEED);
    let seeds = std::sync::Mutex::new(StdRng::seed_from_u64(rng.random()));
    let upstream = Upstream::start("m", move |_, stream| {
        let mut rng = StdRng::seed_from_u64(seeds.lock().unwrap().random());
        send(stream, STREAM);
        for _ in 0..rng.random_range(0..12) {
            let pieces = [
                "data: 1\n\n",
                "data: {\"a",
                "\"}\n",
                "\n",
                "\r\n\r\n",
                ": c\n\n",
                "event: x\n",
                "data: [DONE]\n\n",
                "\u{fffd}",
            ];
            let piece = pick(&mut rng, &pieces);
            send(stream, &format!("{:x}\r\n{piece}\r\n", piece.len()));
        }
        match rng.random_range(0..4) {
            // The stream ends properly, is cut off, or ends with an invalid chunk.
            0 | 1 => send(stream, END),
            2 => false,
            _ => send_and_close(stream, "zz\r\n"),
        }
    });
    let router = Router::start(&[&upstream], &["--attempts=16", "--retry-budget-percent=100"]);
    let (mut whole, mut broken) = (0, 0);
    for _ in 0..REQUESTS / 2 {
        let answer = router.post(CHAT, &chat("m", true));
        if answer.status != 200 {
            // In this case, the client has received no byte from any attempt.
            assert!(answer.body.contains("replicas_failed"), "{answer:?}");
            continue;
        }
        assert!(answer.is_complete, "{answer:?}");
        if answer.body.contains("replica_failed") {
            broken += 1;
            assert!(answer.body.ends_with("}\n\ndata: [DONE]\n\n"), "{answer:?}");
        } else {
            whole += 1;
        }
    }
    assert!(whole > 20 && broken > 20, "{whole} whole, {broken} broken");
    idle(&router);
}

/// Waits until no request is in flight or queued.
pub(crate) fn idle(router: &Router) {
    await_condition("all requests to end", || {
        let metrics = router.get("/metrics").body;
        let names =
            ["requests_in_flight", "requests_queued", "requests_without_replica", "replica_in_flight"];
        names.iter().all(|name| metric(&metrics, &format!("ovfleet_router_{name}")) == 0.0).then_some(())
    });
}
