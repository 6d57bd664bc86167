//! Tests sleep mode with the real model: the server frees memory, and its responses are the same after it wakes
//! up.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::Path;

use serde_json::{Value, json};
use tests::http::{self, metric};
use tests::process::await_condition;
use tests::server::{EXACT, STOP_LIMIT, Server, command_for, probe};

/// Bytes per token in the KV cache: keys and values of 30 layers with 3 heads of size 64, in f32 (see [`EXACT`]).
const TOKEN_BYTES: u64 = 2 * 30 * 3 * 64 * 4;
/// The number of prompts that together occupy about half of the cache, and the number of words of each.
const PROMPTS: usize = 4;
const WORDS: usize = 1400;
/// The minimum size of the weights, which have at least 8 bits each.
const WEIGHT_BYTES: u64 = 130_000_000;

/// The resident anonymous memory of the process in bytes.
fn resident(server: &Server) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", server.process().id())).unwrap();
    let line =
        status.lines().find_map(|line| line.strip_prefix("RssAnon:")).expect("the kernel reports RssAnon");
    line.trim().trim_end_matches("kB").trim().parse::<u64>().unwrap() * 1024
}

async fn ask(server: &Server, prompt: &str, tokens: u32) -> Value {
    let body = json!({"model": "asleep", "prompt": prompt, "temperature": 0, "max_tokens": tokens});
    let answer = http::post(&server.url("/v1/completions"), &body).await.unwrap();
    assert_eq!(answer.status, 200, "{}", answer.body);
    answer.body
}

async fn text(server: &Server) -> String {
    let answer = ask(server, "The three largest cities of France are", 24).await;
    answer["choices"][0]["text"].as_str().unwrap().to_owned()
}

async fn value(server: &Server, name: &str) -> f64 {
    let text = http::get(&server.url("/metrics")).await.unwrap().body;
    metric(text.as_str().unwrap(), &format!("ovfleet_server_{name}")).unwrap()
}

async fn sleep(server: &Server, level: u8) {
    let answer = http::post_text(&server.url(&format!("/sleep?level={level}")), String::new()).await.unwrap();
    assert_eq!(answer.status, 200, "{}", answer.body);
    assert_eq!(value(server, "sleeping").await, 1.0);
    assert_eq!(probe(server.address(), "/v2/health/ready").unwrap(), 200);
}

async fn fill(server: &Server) {
    let asked = (0..PROMPTS)
        .map(|number| async move { ask(server, &format!("{number} {}", "river ".repeat(WORDS)), 1).await });
    drop(http::join_all(asked).await);
}

fn start(model: &Path, cache: &Path) -> Server {
    let cache = format!("--cache-dir={}", cache.display());
    let own = ["--model-name", "asleep", "--enable-sleep-mode", &cache];
    Server::from_command(&mut command_for(model, &[&EXACT[..], &own].concat()).unwrap()).unwrap()
}

#[tokio::test]
async fn sleeping_frees_memory_and_responses_are_the_same_afterwards() {
    let directory = tempfile::tempdir().unwrap();
    let model = directory.path().join("model.gguf");
    // Use a copy of the model, because the test later moves the file.
    std::fs::copy(tests::sample_model(), &model).unwrap();
    let server = start(&model, directory.path());
    let before = text(&server).await;

    fill(&server).await;
    let touched = (PROMPTS * WORDS) as u64 * TOKEN_BYTES;
    let full = resident(&server);
    sleep(&server, 1).await;
    let empty = resident(&server);
    assert!(
        full - empty > touched / 10 * 9,
        "{touched} bytes were used; anonymous memory: {full} before, {empty} after"
    );

    let answer = ask(&server, &format!("0 {}", "river ".repeat(WORDS)), 1).await;
    assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 0, "{answer}");
    assert_eq!(text(&server).await, before);

    sleep(&server, 1).await;
    let with_model = resident(&server);
    sleep(&server, 2).await;
    let without = resident(&server);
    assert!(
        with_model - without > WEIGHT_BYTES / 10 * 9,
        "anonymous memory: {with_model} with the model, {without} without it"
    );

    // Without the model, the server cannot wake up.
    let moved = directory.path().join("moved.gguf");
    std::fs::rename(&model, &moved).unwrap();
    let body = json!({"model": "asleep", "prompt": "x", "max_tokens": 1});
    let failed = http::post(&server.url("/v1/completions"), &body).await.unwrap();
    assert_eq!((failed.status, &failed.body["error"]["code"]), (503, &json!("wake_failed")));
    assert!(failed.body.to_string().contains("model.gguf"), "{}", failed.body);
    assert_eq!(value(&server, "sleeping").await, 1.0);
    std::fs::rename(&moved, &model).unwrap();

    let wakings = value(&server, "wake_time_seconds_count").await;
    for text in http::join_all((0..8).map(|_| text(&server))).await {
        assert_eq!(text, before);
    }
    assert_eq!(value(&server, "wake_time_seconds_count").await, wakings + 1.0);
    assert!(!server.process().output().contains("panicked"), "{}", server.process().output());

    sleep(&server, 2).await;
    server.process().signal("TERM").unwrap();
    let ended = server.wait().unwrap();
    assert!(ended.status.success(), "{}", ended.output);
}

#[tokio::test]
async fn an_idle_server_sleeps_and_the_next_request_wakes_it() {
    let own = ["--backend", "sim", "--model-name", "asleep", "--sleep-after", "10ms", "--sleep-level", "2"];
    let server = Server::start(&own).unwrap();
    let slept = || server.process().output().matches("the engine is asleep").count();
    for times in 0..3 {
        await_condition("the server to sleep", STOP_LIMIT, || (slept() > times).then_some(())).unwrap();
        ask(&server, "Hello", 3).await;
    }
    assert!(value(&server, "wake_time_seconds_count").await >= 3.0);
    let asked = http::get(&server.url("/is_sleeping")).await.unwrap();
    assert_eq!(asked.status, 404, "the endpoint is enabled without a flag");
}
