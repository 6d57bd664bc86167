//! Tests the metrics after some requests.

use serde_json::json;

use crate::harness::{Server, chat, completion};

fn value(metrics: &str, name: &str) -> f64 {
    let line = metrics.lines().find(|line| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(' ')));
    line.unwrap_or_else(|| panic!("no {name} in {metrics}")).rsplit(' ').next().unwrap().parse().unwrap()
}

#[tokio::test]
async fn requests_tokens_and_times_are_counted() {
    let server = Server::repeating("x");
    for _ in 0..2 {
        let messages = json!([{"role": "user", "content": "z".repeat(40)}]);
        server.post("/v3/chat/completions", chat(json!({"messages": messages}))).await;
    }
    server.post("/v1/completions", completion(json!({"temperature": 9}))).await;
    server.get("/v1/nothing").await;
    server.idle().await;
    let answer = server.get("/metrics").await;
    assert!(answer.headers["content-type"].to_str().unwrap().starts_with("application/openmetrics-text"));
    let metrics = answer.body;
    let named = |name: &str| value(&metrics, &format!("ovfleet_server_{name}"));
    assert_eq!(named(r#"requests_total{endpoint="chat_completions",outcome="ok",status="2xx"}"#), 2.0);
    assert_eq!(named(r#"requests_total{endpoint="completions",outcome="invalid",status="4xx"}"#), 1.0);
    assert_eq!(named(r#"requests_total{endpoint="other",outcome="unrouted",status="4xx"}"#), 1.0);
    assert_eq!(named("generated_tokens_total"), 16.0);
    assert_eq!(named("prompt_tokens_total"), 118.0);
    assert_eq!(named("cached_prompt_tokens_total"), 48.0);
    assert_eq!(named("time_to_first_token_seconds_count"), 2.0);
    assert_eq!(named("inter_token_latency_seconds_count"), 14.0);
    assert_eq!(named("request_duration_seconds_count"), 2.0);
    assert_eq!(named("queue_time_seconds_count"), 2.0);
    assert_eq!(named("batch_sequences_sum"), named("step_time_seconds_count"));
    assert_eq!(named("batch_tokens_sum"), 118.0 - 48.0 + 14.0);
    assert_eq!(named("requests_in_flight"), 0.0);
    assert_eq!(named("sequences_running"), 0.0);
    assert_eq!(named("blocks_total"), 64.0);
    assert_eq!(named("blocks_active"), 0.0);
    assert!(named("blocks_evictable") > 0.0);
    assert_eq!(named("ready"), 1.0);
    assert!(metrics.contains("ovfleet_server_build_info{version="), "{metrics}");
}
