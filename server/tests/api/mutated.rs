//! Runs the fuzz test of bodies for some seconds with a fixed seed; `make fuzz` runs it for longer.

use crate::bodies::{check, server};
use crate::harness::completion;
use crate::mutations::{Random, mutated, seeds, words};

const CASES: u64 = 4_000;

#[tokio::test]
async fn a_mutated_body_is_answered_or_rejected() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/fuzz/seeds/request");
    let seeds = seeds(folder);
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
        "it goes on"
    );
}
