//! Tests API keys and rate limits.

use std::io::Write as _;

use crate::harness::*;

fn upstream() -> Upstream {
    let answer = r#"{"usage":{"prompt_tokens":10,"completion_tokens":20,"total_tokens":30}}"#;
    Upstream::start("m", move |_, stream| send(stream, &whole(answer)))
}

pub(crate) fn file(text: &str) -> (tempfile::TempDir, String) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("keys");
    std::fs::write(&path, text).unwrap();
    let argument = format!("--api-keys={}", path.display());
    (directory, argument)
}

fn ask(router: &Router, key: &str) -> Answer {
    router.request("POST", CHAT, &format!("authorization: Bearer {key}\r\n"), &chat("m", false))
}

/// Like [`Router::start`], for a router that requires a key.
fn start(upstream: &Upstream, arguments: &[&str]) -> Router {
    let replica = upstream.argument();
    let all: Vec<&str> = [replica.as_str()].into_iter().chain(arguments.iter().copied()).collect();
    let router = Router::unready(&all);
    router.await_log("ready");
    router
}

#[test]
fn only_requests_with_a_key_are_served_and_the_key_is_not_passed_on() {
    let upstream = upstream();
    let (_directory, keys) = file("alpha alice\nbeta\n");
    let router = start(&upstream, &[&keys, "--access-log"]);
    assert_eq!(ask(&router, "alpha").status, 200);
    assert_eq!(upstream.seen()[0].header("authorization"), None);
    for wrong in ["gamma", "", "alpha beta"] {
        let answer = ask(&router, wrong);
        assert_eq!((answer.status, answer.header("www-authenticate")), (401, Some("Bearer")));
        assert!(answer.body.contains("invalid_api_key"), "{answer:?}");
    }
    for path in [CHAT, "/v3/models", "/debug/replicas", "/debug/picks"] {
        assert_eq!(router.get(path).status, 401, "{path}");
    }
    for path in ["/v2/health/live", "/v2/health/ready", "/metrics", "/console"] {
        assert_eq!(router.get(path).status, 200, "{path}");
    }
    router.await_log("client=\"alice\"");
    let log = router.log();
    assert!(!log.contains("alpha") && !log.contains("Hello"), "{log}");
}

#[test]
fn the_file_of_keys_is_reloaded_and_an_invalid_one_changes_nothing() {
    let upstream = upstream();
    let (directory, keys) = file("alpha\n");
    let router = start(&upstream, &[&keys]);
    let path = directory.path().join("keys");
    std::fs::write(&path, "beta\n").unwrap();
    await_condition("the new key to be known", || (ask(&router, "beta").status == 200).then_some(()));
    assert_eq!(ask(&router, "alpha").status, 401);
    std::fs::write(&path, "too many words here\n").unwrap();
    router.await_log("failed to reload the API keys");
    assert_eq!(ask(&router, "beta").status, 200);
    std::fs::write(&path, "# nobody any more\n").unwrap();
    await_condition("the last key to be revoked", || (ask(&router, "beta").status == 401).then_some(()));
}

#[test]
fn replicas_learn_the_tenant_from_the_router_and_not_from_the_client() {
    let upstream = upstream();
    let (_directory, keys) = file("alpha alice\nbeta alice\ngamma\n");
    let forged = "x-ovfleet-tenant: 00000000000000000000000000000001\r\nconnection: x-ovfleet-tenant\r\n";
    let tenants = |router: &Router, keys: &[&str]| -> Vec<Option<String>> {
        let before = upstream.seen().len();
        for key in keys {
            let headers = format!("authorization: Bearer {key}\r\n{forged}");
            assert_eq!(router.request("POST", CHAT, &headers, &chat("m", false)).status, 200);
        }
        let seen = upstream.seen();
        seen[before..].iter().map(|request| request.header("x-ovfleet-tenant").map(str::to_owned)).collect()
    };
    let by_key = tenants(&start(&upstream, &[&keys]), &["alpha", "beta", "gamma", "alpha"]);
    let tenant = by_key[0].as_deref().unwrap();
    assert!(tenant.len() == 32 && !tenant.contains("alpha") && tenant != "00000000000000000000000000000001");
    assert_eq!(by_key[3], by_key[0]);
    assert!(by_key[1] != by_key[0] && by_key[2] != by_key[0] && by_key[1] != by_key[2]);
    let again = tenants(&start(&upstream, &[&keys]), &["alpha"]);
    assert_eq!(again[0], by_key[0], "all routers agree");
    let by_name = tenants(&start(&upstream, &[&keys, "--key-isolation=name"]), &["alpha", "beta", "gamma"]);
    assert!(by_name[0].is_some() && by_name[0] == by_name[1] && by_name[0] != by_name[2]);
    let shared = tenants(&start(&upstream, &[&keys, "--key-isolation=none"]), &["alpha"]);
    assert_eq!(shared, [None]);
    let without_keys = Router::start(&[&upstream], &[]);
    assert_eq!(tenants(&without_keys, &["alpha"]), [None]);
}

#[test]
fn requests_of_a_key_are_limited() {
    let upstream = upstream();
    let (_directory, keys) = file("alpha\nbeta\n");
    let router = start(&upstream, &[&keys, "--requests-per-minute=2"]);
    assert_eq!((ask(&router, "alpha").status, ask(&router, "alpha").status), (200, 200));
    let over = ask(&router, "alpha");
    assert_eq!(over.status, 429);
    let seconds: u64 = over.header("retry-after").unwrap().parse().unwrap();
    assert!((1..=60).contains(&seconds) && over.body.contains("rate_limit_exceeded"), "{over:?}");
    assert_eq!(ask(&router, "beta").status, 200, "each key has its own limit");
    assert_eq!(upstream.seen().len(), 3);
}

#[test]
fn the_tokens_of_a_key_are_limited_by_its_real_usage() {
    let upstream = upstream();
    let (_directory, keys) = file("alpha\n");
    let router = start(&upstream, &[&keys, "--tokens-per-minute=400"]);
    // Each request is charged for about 130 tokens on arrival. When the request ends, the charge is corrected to 30
    // tokens, so more than three requests are served.
    for _ in 0..6 {
        assert_eq!(ask(&router, "alpha").status, 200);
    }
    let statuses: Vec<u16> = (0..20).map(|_| ask(&router, "alpha").status).collect();
    assert!(statuses.contains(&429), "{statuses:?}");
}

#[test]
fn concurrent_requests_are_limited() {
    let upstream = Upstream::start("m", |_, stream| {
        use std::io::Read as _;
        let _ = stream.read(&mut [0; 1]);
        false
    });
    let router = Router::start(&[&upstream], &["--max-concurrent-requests=2"]);
    let mut open: Vec<_> = (0..2)
        .map(|_| {
            let mut stream = router.connect();
            stream.write_all(raw("POST", CHAT, "", &chat("m", false)).as_bytes()).unwrap();
            stream
        })
        .collect();
    await_condition("two requests to be in flight", || (upstream.seen().len() == 2).then_some(()));
    let over = router.post(CHAT, &chat("m", false));
    assert!(over.status == 429 && over.body.contains("too_many_requests"), "{over:?}");
    open.clear();
    await_condition("the requests to end", || {
        let metrics = router.get("/metrics").body;
        (metric(&metrics, "ovfleet_router_requests_in_flight") == 0.0).then_some(())
    });
}
