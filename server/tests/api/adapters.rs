//! Tests adapters: requests select them by name, `/models` lists them, and concurrent requests can have different
//! adapters.

use serde_json::{Value, json};
use server::{Model, NamedAdapter, built_in_text};
use server_engine::Clock;
use server_engine::sim::{SimConfig, SimCosts, SimRunner, expected_tokens_with};

use crate::harness::{Server, Setup, VOCABULARY, chat, completion, merged};

const PATH: &str = "/v3/completions";
const PROMPT: [u32; 40] = [65; 40];

/// A server whose model has the adapters `sql` and `group/tone`.
fn adapted() -> Server {
    let config = SimConfig {
        block_tokens: 16,
        blocks_total: 64,
        vocabulary: VOCABULARY,
        costs: SimCosts::default(),
        faults: Vec::new(),
    };
    let named = |(name, path): (&str, &str)| NamedAdapter { name: name.to_owned(), path: path.into() };
    let adapters = [("sql", "/adapters/sql"), ("group/tone", "/adapters/tone")].map(named);
    let model = Model::new(vec!["test-model".to_owned()], built_in_text().unwrap(), "test");
    let model = Some(model.with_adapters(adapters.to_vec()));
    Setup { model, ..Setup::new(SimRunner::new(config, Clock::simulated()).with_adapters(2)) }.start()
}

/// Returns a request whose answer has exactly 20 tokens and contains their IDs.
fn adapter_request(model: &str, more: Value) -> String {
    let parameters = json!({
        "model": model, "prompt": PROMPT.to_vec(), "max_tokens": 20, "ignore_eos": true, "return_token_ids": true,
    });
    completion(merged(parameters, more))
}

fn expected(adapter: u32) -> Value {
    json!(expected_tokens_with(adapter, &PROMPT, 20, VOCABULARY))
}

#[tokio::test]
async fn a_request_has_the_adapter_that_it_names_as_its_model() {
    let server = adapted();
    let ask = async |model: &str, more: Value| server.post(PATH, adapter_request(model, more)).await.json();
    let none = json!({});
    let all = tokio::join!(
        ask("test-model", none.clone()),
        ask("sql", none.clone()),
        ask("group/tone", none.clone()),
        ask("sql", json!({"n": 2, "max_ngram_size": 3})),
        ask("group/tone", json!({"use_beam_search": true, "n": 2})),
        ask("sql", json!({"guided_regex": "[a-c]{20}"})),
    );
    for (answer, adapter, name) in
        [(&all.0, 0, "test-model"), (&all.1, 1, "sql"), (&all.2, 2, "group/tone"), (&all.3, 1, "sql")]
    {
        assert_eq!(answer["model"], name);
        for choice in answer["choices"].as_array().unwrap() {
            assert_eq!(choice["token_ids"], expected(adapter), "{name}");
        }
    }
    assert_eq!(all.3["choices"].as_array().unwrap().len(), 2);
    assert_eq!(all.4["choices"].as_array().unwrap().len(), 2, "{}", all.4);
    let text = all.5["choices"][0]["text"].as_str().unwrap();
    assert!(text.len() == 20 && text.bytes().all(|letter| (b'a'..=b'c').contains(&letter)), "{text}");
    server.idle().await;
}

#[tokio::test]
async fn beams_and_guides_follow_the_adapter() {
    let server = adapted();
    for more in [json!({"use_beam_search": true, "n": 3}), json!({"guided_regex": "[a-z]{20}"})] {
        let mut texts = Vec::new();
        for model in ["test-model", "sql", "group/tone", "sql"] {
            let answer = server.post(PATH, adapter_request(model, more.clone())).await.json();
            texts.push(answer["choices"][0]["token_ids"].clone());
        }
        assert!(texts[0] != texts[1] && texts[1] != texts[2] && texts[0] != texts[2], "{texts:?}");
        assert_eq!(texts[1], texts[3]);
    }
}

#[tokio::test]
async fn chat_streams_and_responses_accept_adapters_too() {
    let server = adapted();
    let whole = server.post("/v1/chat/completions", chat(json!({"model": "sql"}))).await;
    let streamed = server.post("/v1/chat/completions", chat(json!({"model": "sql", "stream": true}))).await;
    let base = server.post("/v1/chat/completions", chat(json!({}))).await;
    assert_eq!(whole.text(), streamed.text());
    assert_ne!(whole.text(), base.text());
    let response = |model: &str| {
        json!({"model": model, "input": "Hi", "temperature": 0, "max_output_tokens": 8}).to_string()
    };
    let response = async |model: &str| server.post("/v1/responses", response(model)).await.json();
    let (adapted, base) = (response("sql").await, response("test-model").await);
    assert_eq!(adapted["model"], "sql");
    assert_ne!(adapted["output"][0]["content"], base["output"][0]["content"]);
}

#[tokio::test]
async fn cached_prompts_are_not_shared_between_adapters() {
    let server = adapted();
    let cached = async |model: &str| {
        let answer = server.post(PATH, adapter_request(model, json!({}))).await.json();
        answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
    };
    for model in ["test-model", "sql", "group/tone"] {
        assert_eq!((cached(model).await, cached(model).await), (0, 32), "{model}");
    }
}

#[tokio::test]
async fn adapters_are_listed_with_the_model_that_they_change() {
    let server = adapted();
    for version in ["/v1", "/v3"] {
        let list = server.get(&format!("{version}/models")).await.json();
        let models: Vec<_> = list["data"]
            .as_array()
            .unwrap()
            .iter()
            .map(|model| (model["id"].as_str().unwrap(), model.get("parent"), model.get("root")))
            .collect();
        let parent = json!("test-model");
        let (sql, tone) = (json!("/adapters/sql"), json!("/adapters/tone"));
        let adapter = |name, root| (name, Some(&parent), Some(root));
        assert_eq!(models, [("test-model", None, None), adapter("sql", &sql), adapter("group/tone", &tone)]);
        let one = server.get(&format!("{version}/models/group/tone")).await.json();
        assert_eq!((&one["id"], &one["parent"]), (&json!("group/tone"), &parent));
    }
    let unknown = server.post(PATH, adapter_request("tone", json!({}))).await;
    assert_eq!(unknown.status, 404);
    assert_eq!(unknown.json()["error"]["code"], "model_not_found");
}

#[tokio::test]
async fn requests_are_counted_by_their_adapters() {
    let server = adapted();
    for model in ["test-model", "sql", "group/tone", "sql"] {
        server.post(PATH, adapter_request(model, json!({}))).await;
    }
    server.post(PATH, adapter_request("sql", json!({"temperature": 9}))).await;
    let metrics = server.get("/metrics").await.body;
    for line in [r#"{adapter="sql"} 2"#, r#"{adapter="group/tone"} 1"#] {
        assert!(metrics.contains(&format!("ovfleet_server_adapter_requests_total{line}\n")), "{metrics}");
    }
    assert!(!metrics.contains(r#"adapter="test-model""#), "{metrics}");
}
