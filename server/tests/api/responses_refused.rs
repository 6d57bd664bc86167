//! Tests the errors of `/responses`, and conversations that are too long.

use serde_json::{Value, json};
use server_engine::sim::{SimFault, SimFaultKind};

use crate::harness::{Server, Setup, faulty};
use crate::responses::{PATH, TEXT, events, request};

#[tokio::test]
async fn a_failure_before_the_first_token_has_a_status_and_a_later_one_is_an_event() {
    let fault = |step| SimFault { step, kind: SimFaultKind::Step };
    let server = Setup::new(faulty(vec![fault(0)])).start();
    for stream in [false, true] {
        let server = Setup::new(faulty(vec![fault(0)])).start();
        let answer = server.post(PATH, request(json!({"stream": stream}))).await;
        assert_eq!(answer.status, 500, "{}", answer.body);
        assert_eq!(answer.json()["error"]["code"], "step_failed");
    }
    drop(server);
    let server = Setup::new(faulty(vec![fault(3)])).start();
    let answer = server.post(PATH, request(json!({"stream": true, "ignore_eos": true}))).await;
    let events = events(&answer);
    let [.., error, failed] = events.as_slice() else { panic!("{}", answer.body) };
    assert_eq!((&error["type"], &error["code"]), (&json!("error"), &json!("step_failed")));
    assert!(error.get("error").is_none(), "clients would end the stream at a member `error`: {error}");
    assert_eq!(failed["type"], "response.failed");
    assert_eq!(failed["response"]["status"], "failed");
    assert_eq!(failed["response"]["error"]["code"], "server_error");
    let id = failed["response"]["id"].as_str().unwrap();
    assert_eq!(server.get(&format!("{PATH}/{id}")).await.status, 404, "failed responses are not stored");
}

#[tokio::test]
async fn invalid_values_are_rejected_with_their_names() {
    let server = Server::repeating(TEXT);
    let cases = [
        (json!({"input": null}), "input", "missing_required_parameter"),
        (json!({"input": []}), "input", "empty_array"),
        (json!({"input": 3}), "input", "invalid_type"),
        (
            json!({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:x"}]}]}),
            "input[0].content[0].image_url",
            "invalid_value",
        ),
        (json!({"max_output_tokens": 0}), "max_output_tokens", "integer_below_min_value"),
        (json!({"max_output_tokens": "x"}), "max_output_tokens", "invalid_type"),
        (json!({"max_output_tokens": 5000}), "max_output_tokens", "context_length_exceeded"),
        (json!({"max_tool_calls": 0}), "max_tool_calls", "integer_below_min_value"),
        (json!({"truncation": "some"}), "truncation", "invalid_value"),
        (json!({"include": ["everything"]}), "include[0]", "invalid_value"),
        (json!({"top_logprobs": 21}), "top_logprobs", "integer_above_max_value"),
        (json!({"reasoning": {"effort": "huge"}}), "reasoning.effort", "invalid_value"),
        (json!({"text": {"verbosity": "none"}}), "text.verbosity", "invalid_value"),
        (json!({"metadata": {"a": 1}}), "metadata.a", "invalid_type"),
        (json!({"tools": [{"name": "f"}]}), "tools[0].type", "missing_required_parameter"),
        (json!({"tool_choice": "some"}), "tool_choice", "invalid_value"),
        (json!({"tool_choice": "required"}), "tool_choice", "invalid_value"),
        (json!({"background": true, "store": false}), "background", "invalid_value"),
        (json!({"prompt": {"id": "pmpt_1"}}), "prompt", "unsupported_parameter"),
        (
            json!({"context_management": [{"type": "compaction"}]}),
            "context_management",
            "unsupported_parameter",
        ),
        (
            json!({"previous_response_id": "a", "conversation": "b"}),
            "conversation",
            "mutually_exclusive_parameters",
        ),
        (json!({"temperature": 3}), "temperature", "decimal_above_max_value"),
        (json!({"model": null}), "model", "missing_required_parameter"),
    ];
    for (parameters, param, code) in cases {
        let answer = server.post(PATH, request(parameters.clone())).await;
        let error = &answer.json()["error"];
        assert_eq!(answer.status, 400, "{parameters}: {error}");
        assert_eq!((&error["param"], &error["code"]), (&json!(param), &json!(code)), "{parameters}: {error}");
        assert!(error["message"].as_str().unwrap().starts_with(param), "{error}");
    }
    let unknown = server.post(PATH, request(json!({"model": "other"}))).await;
    assert_eq!((unknown.status.as_u16(), &unknown.json()["error"]["code"]), (404, &json!("model_not_found")));
    for parameters in [json!({"max_tokens": 1}), json!({"no_such": 1}), json!({"context_management": []})] {
        let response = server.post(PATH, request(parameters)).await.json();
        assert_eq!(response["usage"]["output_tokens"], 8, "{response}");
    }
}

#[tokio::test]
async fn large_and_small_requests_are_answered_and_rejected_alike() {
    let server = Server::repeating(TEXT);
    let first = server.post(PATH, request(json!({}))).await.json();
    for parameters in [
        json!({}),
        json!({"previous_response_id": first["id"]}),
        json!({"previous_response_id": "resp_gone"}),
        json!({"temperature": 3}),
        json!({"input": []}),
        json!({"input": 5}),
        json!({"model": "other"}),
    ] {
        let mut large = parameters.clone();
        large["pad"] = json!("x".repeat(20_000));
        let (small, large) =
            (server.post(PATH, request(parameters.clone())).await, server.post(PATH, request(large)).await);
        assert_eq!(small.status, large.status, "{parameters}");
        assert_eq!(small.json()["error"], large.json()["error"], "{parameters}");
        assert_eq!(
            small.json()["usage"]["input_tokens"],
            large.json()["usage"]["input_tokens"],
            "{parameters}"
        );
    }
}

#[tokio::test]
async fn a_long_conversation_is_truncated_at_its_beginning_if_requested() {
    let server = Server::repeating(TEXT);
    let said = |role: &str, count: usize| json!({"role": role, "content": "x".repeat(count)});
    let input = json!([
        said("system", 20),
        said("user", 300),
        said("assistant", 100),
        said("user", 60),
        said("assistant", 60),
        said("user", 60),
    ]);
    let refused = server.post(PATH, request(json!({"input": input}))).await;
    assert_eq!(refused.json()["error"]["code"], "context_length_exceeded");
    let cut = server.post(PATH, request(json!({"input": input, "truncation": "auto"}))).await.json();
    let last_four = json!([said("system", 20), said("user", 60), said("assistant", 60), said("user", 60)]);
    let whole = server.post(PATH, request(json!({"input": last_four}))).await.json();
    assert_eq!(cut["usage"]["input_tokens"], whole["usage"]["input_tokens"]);
    // Without `max_output_tokens`, a quarter of the context length is left for the answer if the last turn permits it.
    let turns: Vec<Value> = (0..20).map(|_| said("user", 24)).collect();
    let open = json!({"input": turns, "truncation": "auto", "max_output_tokens": null, "ignore_eos": true});
    let usage = server.post(PATH, request(open)).await.json()["usage"].clone();
    let count = |name: &str| usage[name].as_u64().unwrap();
    assert_eq!(count("total_tokens"), 512);
    assert!((128..200).contains(&count("output_tokens")), "{usage}");
    let last = json!([said("user", 10), said("user", 400)]);
    let open = json!({"input": last, "truncation": "auto", "max_output_tokens": null, "ignore_eos": true});
    let response = server.post(PATH, request(open)).await.json();
    assert_eq!(response["usage"]["total_tokens"], 512, "{response}");
    // The last turn is never cut.
    let input = json!([said("user", 10), said("user", 600)]);
    let refused = server.post(PATH, request(json!({"input": input, "truncation": "auto"}))).await;
    assert_eq!(refused.json()["error"]["code"], "context_length_exceeded");
}
