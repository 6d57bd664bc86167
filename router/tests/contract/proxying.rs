//! Tests the headers that the proxy adds: `X-Forwarded-For` with the address of the client, `Via` with the proxies that
//! the request has passed, and the request ID.

use crate::harness::*;

fn echo() -> Upstream {
    Upstream::start("m", |_, stream| {
        send(stream, &whole("{}").replacen("\r\n", "\r\nx-request-id: replica\r\n", 1))
    })
}

#[test]
fn a_request_id_is_chosen_or_generated_and_is_the_same_everywhere() {
    let upstream = echo();
    let router = Router::start(&[&upstream], &["--access-log"]);
    let given = router.request("POST", CHAT, "x-request-id: mine-1\r\n", &chat("m", false));
    assert_eq!(given.header("x-request-id"), Some("mine-1"));
    assert_eq!(upstream.seen()[0].header("x-request-id"), Some("mine-1"));
    router.await_log("request_id=\"mine-1\"");
    let long = format!("x-request-id: {}\r\n", "x".repeat(129));
    let mut made: Vec<String> = ["", "x-request-id: \r\n", "x-request-id: a b\r\n", &long]
        .into_iter()
        .enumerate()
        .map(|(number, headers)| {
            let answer = router.request("POST", CHAT, headers, &chat("m", false));
            let id = answer.header("x-request-id").unwrap().to_owned();
            assert!(id.starts_with("req_") && id.len() == 36, "{id}");
            assert_eq!(upstream.seen()[number + 1].header("x-request-id"), Some(id.as_str()));
            router.await_log(&id);
            id
        })
        .collect();
    made.sort();
    made.dedup();
    assert_eq!(made.len(), 4, "all generated IDs are different");
    // Answers to rejected requests have a request ID too.
    let refused = router.request("POST", CHAT, "x-request-id: mine-2\r\n", "nonsense");
    assert_eq!((refused.status, refused.header("x-request-id")), (400, Some("mine-2")));
}

#[test]
fn a_replica_receives_the_address_of_the_client_and_the_path_of_the_request() {
    let upstream = echo();
    let router = Router::start(&[&upstream], &[]);
    router.post(CHAT, &chat("m", false));
    let headers = "x-forwarded-for: 203.0.113.7\r\nx-forwarded-for: 198.51.100.2\r\nvia: 1.0 fred\r\n";
    router.request("POST", CHAT, headers, &chat("m", false));
    let seen = upstream.seen();
    assert_eq!(seen[0].header("x-forwarded-for"), Some("127.0.0.1"));
    let via = seen[0].header("via").unwrap();
    let id = via.strip_prefix("1.1 ovfleet-").unwrap();
    assert!(id.len() == 16 && id.bytes().all(|byte| byte.is_ascii_hexdigit()), "{via}");
    assert_eq!(seen[1].header("x-forwarded-for"), Some("203.0.113.7, 198.51.100.2, 127.0.0.1"));
    let all: Vec<&str> = seen[1].head.lines().filter_map(|line| line.strip_prefix("via: ")).collect();
    assert_eq!(all.join(", "), format!("1.0 fred, {via}"));
}

#[test]
fn a_request_that_returns_to_the_router_is_rejected() {
    let upstream = echo();
    let router = Router::start(&[&upstream], &[]);
    router.post(CHAT, &chat("m", false));
    let via = upstream.seen()[0].header("via").unwrap().to_owned();
    let answer = router.request("POST", CHAT, &format!("via: 1.1 other, {via}\r\n"), &chat("m", false));
    assert_eq!(answer.status, 508, "{answer:?}");
    assert!(answer.body.contains("\"loop_detected\""), "{answer:?}");
    assert_eq!(upstream.seen().len(), 1);
}
