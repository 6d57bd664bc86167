//! Runs the fuzz test of bodies for a few seconds with fixed seeds; `make fuzz` runs it for longer.

use crate::bodies::{check, post, server};
use crate::harness::completion;
use crate::mutations::{Random, mutated, seeds, words};

const CASES: u64 = 4_000;

fn request_seeds() -> Vec<Vec<u8>> {
    seeds(concat!(env!("CARGO_MANIFEST_DIR"), "/fuzz/seeds/request"))
}

#[tokio::test]
async fn each_seed_is_answered() {
    let server = server();
    let mut rejected = Vec::new();
    for seed in request_seeds() {
        let answer = post(&server, seed[0], &seed[1..]).await;
        if answer.status != 200 {
            rejected.push(format!("{}: {}", String::from_utf8_lossy(&seed), answer.body));
        }
    }
    assert!(rejected.is_empty(), "{}", rejected.join("\n"));
}

#[tokio::test]
async fn a_mutated_body_is_answered_or_rejected() {
    let seeds = request_seeds();
    let words = words(include_str!("../../fuzz/dictionaries/request.dict"));
    let server = server();
    for seed in 0..CASES {
        println!("seed {seed}");
        check(&server, &mutated(&mut Random(seed), &seeds, &words)).await;
    }
    server.idle().await;
    assert_eq!(
        server.post("/v3/completions", completion(serde_json::json!({}))).await.status,
        200,
        "the server continues to serve"
    );
}
