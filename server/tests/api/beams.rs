//! Tests beam search over HTTP, with a model that has pseudorandom logits. Most requests allow only the letters from a
//! to z.

use serde_json::{Value, json};

use crate::harness::{Server, Setup, chat, completion, faulty, merged};

const PATH: &str = "/v3/completions";

fn random() -> Server {
    Setup::new(faulty(Vec::new())).start()
}

fn search(parameters: Value) -> String {
    completion(with(json!({"use_beam_search": true}), parameters))
}

fn greedy(parameters: Value) -> String {
    completion(with(json!({}), parameters))
}

fn with(all: Value, parameters: Value) -> Value {
    let letters: Vec<u8> = (b'a'..=b'z').collect();
    let base = json!({"max_tokens": 6, "logprobs": 0, "ignore_eos": true, "allowed_token_ids": letters});
    merged(merged(all, base), parameters)
}

/// Returns the texts of an answer, or their token IDs if the answer has them, and the sums of their log probabilities.
async fn found(server: &Server, body: String) -> Vec<(String, f64)> {
    let answer = server.post(PATH, body).await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    let found = |choice: &Value| {
        let logprobs = choice["logprobs"]["token_logprobs"].as_array().unwrap();
        let sum = logprobs.iter().map(|logprob| logprob.as_f64().unwrap()).sum();
        let text =
            choice.get("token_ids").map_or(choice["text"].as_str().unwrap().to_owned(), Value::to_string);
        (text, sum)
    };
    answer.json()["choices"].as_array().unwrap().iter().map(found).collect()
}

#[tokio::test]
async fn the_best_texts_come_first_and_a_wider_search_is_no_worse() {
    let server = random();
    // Search over all tokens, because log probabilities are normalized over all tokens. Few of the tokens are valid
    // text, so compare token IDs.
    let of_all = |mut parameters: Value| {
        parameters["allowed_token_ids"] = Value::Null;
        parameters["return_token_ids"] = json!(true);
        parameters
    };
    let greedy = found(&server, greedy(of_all(json!({})))).await;
    assert_eq!(found(&server, search(of_all(json!({})))).await, greedy, "one beam");
    let four = found(&server, search(of_all(json!({"n": 4})))).await;
    assert_eq!(four.len(), 4);
    assert!(four.is_sorted_by(|a, b| a.1 >= b.1), "{four:?}");
    assert!(four.iter().all(|one| four.iter().filter(|other| other.0 == one.0).count() == 1), "{four:?}");
    assert!(four[0].1 > greedy[0].1, "{four:?} {greedy:?}");
    // Beam search ignores the parameters of random sampling.
    let hot = json!({"n": 2, "best_of": 4, "temperature": 2.0, "top_k": 3, "seed": 7});
    assert_eq!(found(&server, search(of_all(hot))).await, four[..2]);
    server.idle().await;
}

#[tokio::test]
async fn several_prompts_are_searched_independently() {
    let server = random();
    let two = found(&server, search(json!({"prompt": ["Hello", "Well"], "best_of": 3, "n": 2}))).await;
    let mut each = found(&server, search(json!({"prompt": "Hello", "best_of": 3, "n": 2}))).await;
    each.extend(found(&server, search(json!({"prompt": "Well", "best_of": 3, "n": 2}))).await);
    assert_eq!(two, each);
}

#[tokio::test]
async fn the_parameters_of_beam_search_have_their_effects() {
    let server = random();
    let plain = found(&server, search(json!({"n": 4}))).await;
    let groups = json!({"n": 4, "num_beam_groups": 4, "diversity_penalty": 100.0});
    let diverse = found(&server, search(groups)).await;
    let mut firsts: Vec<_> = diverse.iter().filter_map(|text| text.0.chars().next()).collect();
    firsts.sort_unstable();
    firsts.dedup();
    assert_eq!(firsts.len(), 4, "the groups begin with different tokens: {diverse:?}");

    // Half of the letters end a text, so the search finds short texts immediately.
    let stops: Vec<u8> = (b'a'..=b'z').step_by(2).collect();
    let ending = async |parameters: Value| {
        let all = json!({"n": 4, "stop_token_ids": stops, "max_tokens": 12});
        let found = found(&server, search(merged(all, parameters))).await;
        found.into_iter().map(|text| text.0).collect::<Vec<_>>()
    };
    let short = ending(json!({"length_penalty": -8.0})).await.concat().chars().count();
    let long =
        ending(json!({"length_penalty": 8.0, "early_stopping": "never"})).await.concat().chars().count();
    assert!(short < long, "{short} {long}");
    let early = ending(json!({"length_penalty": 8.0, "early_stopping": true})).await.concat().chars().count();
    assert!(early < long, "{early} {long}");
    assert_eq!(plain.len(), 4);
}

#[tokio::test]
async fn a_stop_string_ends_a_beam_and_is_omitted() {
    let server = random();
    let whole = &found(&server, search(json!({}))).await[0].0;
    let letter = whole.chars().nth(2).unwrap().to_string();
    let cut = server.post(PATH, search(json!({"stop": letter}))).await.json();
    let choice = &cut["choices"][0];
    assert_eq!(choice["finish_reason"], "stop", "{cut}");
    assert!(
        whole.starts_with(choice["text"].as_str().unwrap())
            && !choice["text"].as_str().unwrap().contains(&letter)
    );
}

#[tokio::test]
async fn beam_search_works_for_chat_and_responses_and_with_a_schema() {
    let server = random();
    let schema = json!({
        "type": "object",
        "properties": {"kind": {"enum": ["a", "bb", "ccc"]}, "size": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["kind", "size"],
        "additionalProperties": false,
    });
    let format =
        json!({"type": "json_schema", "json_schema": {"name": "thing", "strict": true, "schema": schema}});
    let body = chat(json!({"use_beam_search": true, "n": 3, "max_tokens": 60, "response_format": format}));
    let answer = server.post("/v3/chat/completions", body).await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    let answer = answer.json();
    let texts: Vec<&str> = answer["choices"]
        .as_array()
        .unwrap()
        .iter()
        .map(|choice| choice["message"]["content"].as_str().unwrap())
        .collect();
    let validator = jsonschema::validator_for(&schema).unwrap();
    for text in &texts {
        assert!(validator.is_valid(&serde_json::from_str(text).unwrap()), "{text}");
    }
    assert!(texts[0] != texts[1] && texts[1] != texts[2] && texts[0] != texts[2], "{texts:?}");
    let body = json!({"model": "test-model", "input": "Hello", "use_beam_search": true, "best_of": 3, "max_output_tokens": 16});
    let response = server.post("/v3/responses", body.to_string()).await;
    assert_eq!(response.status, 200, "{}", response.body);
}

#[tokio::test]
async fn beams_that_cannot_fit_the_cache_are_rejected_with_the_parameter() {
    let server = random();
    let wide = server.post(PATH, search(json!({"best_of": 100, "max_tokens": 100_000}))).await;
    assert_eq!(wide.status, 400, "{}", wide.body);
    let error = &wide.json()["error"];
    assert_eq!(error["param"], "prompt", "{error}");
    let long = server.post(PATH, search(json!({"best_of": 4, "max_tokens": 300}))).await.json();
    assert_eq!(long["error"]["param"], "max_tokens", "{long}");
    assert!(long["error"]["message"].as_str().unwrap().contains("4 beams"), "{long}");
}
