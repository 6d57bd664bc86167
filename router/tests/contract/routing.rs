//! Tests routing by model and replica, and requests that are rejected before any replica receives them.

use std::collections::BTreeSet;
use std::io::Write as _;

use serde_json::Value;

use crate::harness::*;

fn named(model: &'static str) -> Upstream {
    Upstream::start(model, move |_, stream| send(stream, &whole(&format!("\"{model}\""))))
}

#[test]
fn requests_go_to_the_model_that_they_name() {
    let (a, b) = (named("a"), named("org/b"));
    let router = Router::start(&[&a, &b], &[]);
    for model in ["a", "org/b", "a"] {
        assert_eq!(router.post(CHAT, &chat(model, false)).body, format!("\"{model}\""));
    }
    // JSON permits escape sequences in strings.
    assert_eq!(router.post(CHAT, r#"{"model":"org\/\u0062"}"#).body, "\"org/b\"");
    let unknown = router.post(CHAT, &chat("c", false));
    assert_eq!(unknown.status, 404);
    assert!(unknown.body.contains("\"code\":\"model_not_found\""), "{unknown:?}");
    let none = router.post(CHAT, r#"{"messages":[]}"#);
    assert_eq!(none.status, 400);
    assert!(none.body.contains("\"param\":\"model\""), "{none:?}");
    assert_eq!(a.seen().len() + b.seen().len(), 4);
}

#[test]
fn the_models_are_those_of_all_replicas() {
    let (a, b, again) = (named("a"), named("org/b"), named("a"));
    let router = Router::start(&[&a, &b, &again], &[]);
    // The last two are spellings that OVMS accepts.
    for path in ["/v1/models", "/v3/models", "/v3/models/", "/v3/v1/models"] {
        let list: Value = serde_json::from_str(&router.get(path).body).unwrap();
        let ids: Vec<&str> =
            list["data"].as_array().unwrap().iter().map(|m| m["id"].as_str().unwrap()).collect();
        assert_eq!(ids, ["a", "org/b"], "{path}");
    }
    for version in ["/v1", "/v3"] {
        for path in ["/models/org/b", "/models/org%2Fb"] {
            let one: Value = serde_json::from_str(&router.get(&format!("{version}{path}")).body).unwrap();
            assert_eq!((&one["id"], &one["object"]), (&"org/b".into(), &"model".into()));
        }
        assert_eq!(router.get(&format!("{version}/models/c")).status, 404);
    }
}

#[test]
fn the_smallest_max_model_len_of_the_replicas_of_a_model_is_reported() {
    // The simulated replica inserts the name of its model into JSON without escaping it, so this name adds members to
    // the JSON object of the model.
    let replica = |more: &str| Upstream::start(&format!("m\",{more},\"object\":\"model"), |_, _| false);
    let (long, short, silent) =
        (replica("\"max_model_len\":4096"), replica("\"max_model_len\":2048"), replica("\"x\":1"));
    let router = Router::start(&[&long, &short, &silent], &[]);
    let list: Value = serde_json::from_str(&router.get("/v3/models").body).unwrap();
    assert_eq!(list["data"][0]["max_model_len"], 2048);
    let router = Router::start(&[&silent], &[]);
    let list: Value = serde_json::from_str(&router.get("/v3/models").body).unwrap();
    assert_eq!(list["data"][0].get("max_model_len"), None);
}

#[test]
fn the_directory_and_the_base_model_of_an_adapter_are_listed() {
    // The simulated replica inserts the name of its model between quotation marks, so this name adds a model to the
    // list.
    let replica = Upstream::start(
        r#"base"},{"id":"adapter","root":"/adapters/a","parent":"base","object":"model"#,
        |_, _| false,
    );
    let router = Router::start(&[&replica], &[]);
    let list: Value = serde_json::from_str(&router.get("/v3/models").body).unwrap();
    let (adapter, base) = (&list["data"][0], &list["data"][1]);
    assert_eq!((&adapter["id"], &base["id"]), (&"adapter".into(), &"base".into()));
    assert_eq!((&adapter["root"], &adapter["parent"]), (&"/adapters/a".into(), &"base".into()));
    assert_eq!((base.get("root"), base.get("parent")), (None, None));
    let one: Value = serde_json::from_str(&router.get("/v3/models/adapter").body).unwrap();
    assert_eq!(&one, adapter);
}

#[test]
fn a_request_without_a_model_uses_the_only_model() {
    let a = named("a");
    let router = Router::start(&[&a], &[]);
    assert_eq!(router.post(CHAT, r#"{"messages":[]}"#).status, 200);
}

#[test]
fn a_session_stays_at_its_replica_and_sessions_are_distributed() {
    let upstreams: Vec<Upstream> = (0..4).map(|_| named("m")).collect();
    let all: Vec<&Upstream> = upstreams.iter().collect();
    let router = Router::start(&all, &["--policy=session"]);
    let replica = |headers: &str, body: &str| {
        let answer = router.request("POST", CHAT, headers, body);
        answer.header("x-ovfleet-replica").unwrap().to_owned()
    };
    let mut used = BTreeSet::new();
    for session in 0..16 {
        let header = format!("x-session-id: s{session}\r\n");
        let user = format!(r#"{{"model":"m","user":"u{session}"}}"#);
        let places: BTreeSet<String> = (0..4).map(|_| replica(&header, &chat("m", false))).collect();
        assert_eq!(places.len(), 1);
        used.extend(places);
        let places: BTreeSet<String> = (0..4).map(|_| replica("", &user)).collect();
        assert_eq!(places.len(), 1);
    }
    assert!(used.len() > 1, "{used:?}");
}

#[test]
fn invalid_requests_get_the_errors_of_openai() {
    let upstream = named("m");
    let router = Router::start(
        &[&upstream],
        &["--max-body-bytes=1KiB", "--max-header-bytes=8KiB", "--read-timeout=200ms"],
    );
    let refused = |answer: Answer, status: u16, code: &str| {
        let error: Value = serde_json::from_str(&answer.body).unwrap_or_else(|_| panic!("{answer:?}"));
        assert_eq!((answer.status, error["error"]["code"].as_str()), (status, Some(code)), "{answer:?}");
        assert!(error["error"]["message"].is_string() && error["error"]["type"].is_string());
    };
    for body in ["{", "[]", "{\"model\":\"m\"", "nonsense"] {
        refused(router.post(CHAT, body), 400, "malformed");
    }
    refused(router.post(CHAT, &format!("{{\"model\":\"{}\"}}", "m".repeat(2000))), 413, "request_too_large");
    refused(router.get("/v4/nothing"), 404, "unknown_url");
    refused(router.request("POST", "/metrics", "", ""), 405, "method_not_supported");
    refused(
        router.request("POST", CHAT, "x-ovfleet-priority: high\r\n", &chat("m", false)),
        400,
        "invalid_header",
    );
    refused(
        router.request("POST", CHAT, "x-ovfleet-timeout: soon\r\n", &chat("m", false)),
        400,
        "invalid_header",
    );
    let mut slow = router.connect();
    slow.write_all(b"POST /v3/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n{").unwrap();
    refused(Answer::read(&mut slow), 408, "request_incomplete");
    let mut chunks = router.connect();
    let chunk = format!("200\r\n{}\r\n", "x".repeat(512));
    let head = "POST /v3/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n";
    chunks.write_all(format!("{head}{}", chunk.repeat(3)).as_bytes()).unwrap();
    refused(Answer::read(&mut chunks), 413, "request_too_large");
    assert_eq!(
        router.request("GET", "/v3/models", &format!("x-a: {}\r\n", "a".repeat(9000)), "").status,
        431
    );
    assert_eq!(upstream.seen().len(), 0, "no replica received a request");
    assert_eq!(router.post(CHAT, &chat("m", false)).status, 200);
}

#[test]
fn a_client_that_is_still_sending_gets_the_reason_for_the_rejection() {
    let upstream = named("m");
    let router = Router::start(&[&upstream], &["--max-body-bytes=5MiB"]);
    for (size, headers, status) in [(6 << 20, "", 413), (4 << 20, "x-ovfleet-priority: high\r\n", 400)] {
        let mut client = router.connect();
        client.write_all(raw("POST", CHAT, headers, &"x".repeat(size)).as_bytes()).unwrap();
        assert_eq!(Answer::read(&mut client).status, status);
    }
    let mut waiting = router.connect();
    let head = "host: x\r\ncontent-length: 6000000\r\nexpect: 100-continue\r\n\r\n";
    waiting.write_all(format!("POST {CHAT} HTTP/1.1\r\n{head}").as_bytes()).unwrap();
    assert_eq!(Answer::read(&mut waiting).status, 413, "without the body");
}

#[test]
fn headers_set_the_priority_and_the_timeout() {
    let upstream = named("m");
    let router = Router::start(&[&upstream], &[]);
    for class in ["interactive", "standard", "bulk"] {
        let headers = format!("x-ovfleet-priority: {class}\r\nx-ovfleet-timeout: 2.5\r\n");
        assert_eq!(router.request("POST", CHAT, &headers, &chat("m", false)).status, 200);
    }
}

#[test]
fn the_last_picks_and_the_replicas_are_explained() {
    let upstreams = [named("m"), named("m")];
    let router = Router::start(&[&upstreams[0], &upstreams[1]], &["--policy=least-requests"]);
    router.post(CHAT, &chat("m", false));
    let picks: Value = serde_json::from_str(&router.get("/debug/picks").body).unwrap();
    assert_eq!(picks["policy"], "least-requests");
    let pick = &picks["picks"][0];
    assert_eq!((&pick["model"], &pick["candidates"]), (&"m".into(), &2.into()));
    assert_eq!(pick["picked"]["is_score_time"], false, "the score is a number of requests");
    assert!(pick["picked"]["replica"].is_string() && pick["others"].as_array().unwrap().len() == 1);
    let known: Value = serde_json::from_str(&router.get("/debug/replicas").body).unwrap();
    assert_eq!(known["replicas"].as_array().unwrap().len(), 2);
    assert!(!picks.to_string().contains("Hello"), "no prompts");
    let console = router.get("/console");
    assert!(console.status == 200 && console.body.ends_with("</html>\n"), "{console:?}");
    assert!(!console.body.contains("http://") && !console.body.contains("https://"), "no external resources");
    assert!(console.header("content-security-policy").is_some());
}
