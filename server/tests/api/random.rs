//! Sends requests with random values of random parameters. They must be answered or rejected, and the server must
//! continue to serve.

use rand::rngs::StdRng;
use rand::seq::IndexedRandom as _;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::{Map, Value, json};

use crate::harness::{Setup, completion, faulty};
use crate::parameters::{ENDPOINTS, parameters};

const REQUESTS: u32 = 3_000;

fn number(rng: &mut StdRng) -> Value {
    let integers = [-2_i64, -1, 0, 1, 2, 3, 7, 20, 129, 258, 259, 300, 1 << 31, 1 << 32, i64::MIN, i64::MAX];
    let floats = [-1e300, -0.5, 1e-30, 0.3, 0.999, 1.0, 2.5, 1e300];
    if rng.random_bool(0.6) { json!(integers.choose(rng)) } else { json!(floats.choose(rng)) }
}

fn text(rng: &mut StdRng) -> Value {
    let texts = [
        "",
        "a",
        "auto",
        "low",
        "text",
        "required",
        "json_object",
        "é\u{0}\u{fffd}",
        "<|im_end|>",
        "1",
        "(",
        "{}",
    ];
    if rng.random_bool(0.05) { json!("xy".repeat(700)) } else { json!(texts.choose(rng)) }
}

fn value(rng: &mut StdRng, depth: u32) -> Value {
    match rng.random_range(0..if depth < 3 { 8 } else { 5 }) {
        0 => Value::Null,
        1 => json!(rng.random_bool(0.5)),
        2 | 3 => number(rng),
        4 => text(rng),
        5 | 6 => {
            let length = rng.random_range(0..4);
            (0..length).map(|_| value(rng, depth + 1)).collect()
        }
        _ => {
            let names =
                ["type", "role", "content", "name", "function", "schema", "json_schema", "1", "format", "x"];
            let length = rng.random_range(0..4);
            let members =
                (0..length).map(|_| ((*names.choose(rng).unwrap()).to_owned(), value(rng, depth + 1)));
            Value::Object(members.collect::<Map<_, _>>())
        }
    }
}

#[tokio::test]
async fn any_request_is_answered_or_rejected() {
    let seed = 11;
    println!("seed {seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    let server = Setup::new(faulty(Vec::new())).start();
    let mut names = Vec::new();
    for (_, schema, _) in ENDPOINTS {
        names.push(parameters(&server, schema).await.keys().cloned().collect::<Vec<_>>());
    }
    let (mut answered, mut refused) = (0, 0);
    for _ in 0..REQUESTS {
        let which = rng.random_range(0..ENDPOINTS.len());
        let (path, _, body) = ENDPOINTS[which];
        let mut given = json!({});
        for _ in 0..rng.random_range(1..4) {
            let name = names[which].choose(&mut rng).unwrap();
            // Prefer numbers to values of any type, because other tests cover wrong types.
            let value = if rng.random_bool(0.5) { number(&mut rng) } else { value(&mut rng, 0) };
            given[name.as_str()] = value;
        }
        let body = body(given);
        let answer = server.post(path, body.clone()).await;
        match answer.status.as_u16() {
            200 => answered += 1,
            400 | 404 => {
                refused += 1;
                let error = &answer.json()["error"];
                assert!(
                    error["message"].is_string() && error["type"] == "invalid_request_error",
                    "{body}: {error}"
                );
            }
            // Background responses to earlier requests may have reached the limit of concurrent requests.
            429 => refused += 1,
            status => panic!("{status} to {path} {body}: {}", answer.body),
        }
    }
    assert!(answered > REQUESTS / 30 && refused > REQUESTS / 4, "{answered} and {refused}");
    server.idle().await;
    assert_eq!(
        server.post("/v3/completions", completion(json!({}))).await.status,
        200,
        "the server continues to serve"
    );
}
