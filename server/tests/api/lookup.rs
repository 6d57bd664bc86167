//! Tests speculative decoding over HTTP: its parameters, and the draft tokens in the usage.

use serde_json::{Value, json};

use server_engine::TokenId;

use crate::harness::{RepeatingRunner, Server, Setup, chat, completion, merged};

const PATH: &str = "/v3/completions";

fn details(answer: &Value) -> (u64, u64) {
    let details = &answer["usage"]["completion_tokens_details"];
    let count = |name: &str| details[name].as_u64().unwrap_or_else(|| panic!("{name}: {answer}"));
    (count("accepted_prediction_tokens"), count("rejected_prediction_tokens"))
}

#[tokio::test]
async fn prompt_lookup_changes_only_the_usage() {
    let server = Server::repeating("abcdefgh");
    for more in [json!({"n": 3}), json!({"temperature": 0.7, "seed": 5, "logprobs": 2}), json!({"stop": "b"})]
    {
        let body_with =
            |lookup: Value| completion(merged(merged(json!({"max_tokens": 60}), more.clone()), lookup));
        let plain = server.post(PATH, body_with(json!({}))).await.json();
        assert!(plain["usage"].get("completion_tokens_details").is_none(), "{plain}");
        let guessed = server.post(PATH, body_with(json!({"max_ngram_size": 3}))).await.json();
        assert_eq!(guessed["choices"], plain["choices"]);
        if more.get("stop").is_none() {
            assert!(details(&guessed).0 > 20, "{guessed}");
        }
    }
    server.idle().await;
}

#[tokio::test]
async fn a_prediction_provides_draft_tokens() {
    let server = Server::repeating("abcdefgh");
    // The prompt contains no part of the answer, and the answer ends before it repeats itself, so prompt lookup
    // proposes nothing.
    let body_with =
        |prediction: Value| chat(json!({"max_tokens": 8, "prediction": prediction, "stream_options": null}));
    let plain = server.post("/v3/chat/completions", chat(json!({"max_tokens": 8}))).await;
    let text = plain.text();
    for content in [json!(text), json!([{"type": "text", "text": text}])] {
        let body = body_with(json!({"type": "content", "content": content}));
        let guessed = server.post("/v3/chat/completions", body).await;
        assert_eq!(guessed.text(), text);
        assert!(details(&guessed.json()).0 > 0, "{}", guessed.body);
    }
    let wrong = server
        .post("/v3/chat/completions", body_with(json!({"type": "content", "content": "zyxwvut"})))
        .await;
    assert_eq!(wrong.text(), text);
}

#[tokio::test]
async fn a_choice_that_ends_with_a_stop_string_reports_its_draft_tokens() {
    let server = Server::repeating("abcdefghijklmnopqrstuvwxyz");
    let path = "/v3/chat/completions";
    let text = server.post(path, chat(json!({"max_tokens": 20}))).await.text();
    let prediction = json!({"type": "content", "content": text});
    let body =
        |n: u32| chat(json!({"max_tokens": 20, "prediction": prediction, "stop": text[12..14], "n": n}));
    let stopped = server.post(path, body(1)).await;
    assert_eq!(stopped.text(), text[..12]);
    let (accepted, rejected) = details(&stopped.json());
    assert!(accepted > 0 && accepted + rejected <= 20, "{}", stopped.body);
    let several = server.post(path, body(3)).await.json();
    assert_eq!(details(&several), (3 * accepted, 3 * rejected), "{several}");
    server.idle().await;
}

#[tokio::test]
async fn streams_report_draft_tokens_at_their_end_and_metrics_count_them() {
    let server = Server::repeating("abcdefgh");
    let body = completion(json!({
        "max_tokens": 60, "max_ngram_size": 3, "num_assistant_tokens": 7,
        "stream": true, "stream_options": {"include_usage": true},
    }));
    let streamed = server.post(PATH, body).await;
    let events = streamed.events();
    let last: Value = serde_json::from_str(events[events.len() - 2]).unwrap();
    let (accepted, rejected) = details(&last);
    assert!(accepted > 20, "{last}");
    let metrics = server.get("/metrics").await.body;
    assert!(metrics.contains(&format!("ovfleet_server_accepted_tokens_total {accepted}\n")), "{metrics}");
    assert!(
        metrics.contains(&format!("ovfleet_server_drafted_tokens_total {}\n", accepted + rejected)),
        "{metrics}"
    );
}

/// A server with a model that repeats `text`, and a draft model that repeats `draft`.
fn drafted(text: &str, draft: &str) -> Server {
    let runner = |text: &str| RepeatingRunner::new(text.bytes().map(TokenId::from));
    Setup { draft: Some(Box::new(runner(draft))), ..Setup::new(runner(text)) }.start()
}

#[tokio::test]
async fn a_draft_model_serves_all_requests_and_changes_only_the_usage() {
    let plain = Server::repeating("abcdefgh");
    let (right, wrong) = (drafted("abcdefgh", "abcdefgh"), drafted("abcdefgh", "abcdXfgh"));
    for more in [json!({}), json!({"n": 3}), json!({"temperature": 0.7, "seed": 5, "logprobs": 2})] {
        let body = || completion(merged(json!({"max_tokens": 60}), more.clone()));
        let expected = plain.post(PATH, body()).await.json();
        let [all, some] = [right.post(PATH, body()).await.json(), wrong.post(PATH, body()).await.json()];
        assert_eq!((&all["choices"], &some["choices"]), (&expected["choices"], &expected["choices"]));
        assert!(details(&all).0 > 20 && details(&all).1 == 0, "{all}");
        assert!(details(&some).0 > 10 && details(&some).1 > 0, "{some}");
    }
    let metrics = right.get("/metrics").await.body;
    assert!(metrics.contains("ovfleet_server_draft_time_seconds_count"), "{metrics}");
    right.idle().await;
}

#[tokio::test]
async fn a_request_sets_the_number_or_the_confidence_of_draft_tokens() {
    let server = drafted("abcdefgh", "abcdefgh");
    // The tokens of the draft model have a probability of about 0.92.
    let guessed = async |more: Value| {
        let body = merged(json!({"max_tokens": 40}), more);
        let answer = server.post(PATH, completion(body)).await.json();
        answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"].as_u64().unwrap_or(0)
    };
    let one = guessed(json!({"num_assistant_tokens": 1})).await;
    let five = guessed(json!({"num_assistant_tokens": 5})).await;
    let confident = guessed(json!({"assistant_confidence_threshold": 0.5})).await;
    let none = guessed(json!({"assistant_confidence_threshold": 0.99})).await;
    assert!(
        none == 0 && 0 < one && one <= 20 && one < five && five < confident,
        "{none} {one} {five} {confident}"
    );
}
