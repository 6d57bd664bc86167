//! Tests structured output over HTTP, with a model that has pseudorandom logits.

use axum::http::StatusCode;
use serde_json::{Value, json};

use crate::harness::{Server, Setup, chat, completion, faulty, merged};

const CHAT: &str = "/v3/chat/completions";

fn random() -> Server {
    Setup::new(faulty(Vec::new())).start()
}

fn schema() -> Value {
    json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "size": {"type": "integer", "minimum": 0, "maximum": 99},
            "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
        },
        "required": ["name", "size", "tags"],
        "additionalProperties": false,
    })
}

fn json_schema() -> Value {
    json!({"type": "json_schema", "json_schema": {"name": "thing", "strict": true, "schema": schema()}})
}

fn check(text: &str) {
    let value: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"));
    let error =
        jsonschema::validator_for(&schema()).unwrap().validate(&value).err().map(|error| error.to_string());
    assert_eq!(error, None, "{text}");
}

fn asking(parameters: Value) -> Value {
    merged(json!({"max_tokens": 400, "temperature": 1.0}), parameters)
}

#[tokio::test]
async fn chat_completions_and_responses_follow_a_schema_streamed_or_not() {
    let server = random();
    for seed in 0..6 {
        let parameters = asking(json!({"seed": seed, "response_format": json_schema()}));
        let whole = server.post(CHAT, chat(parameters.clone())).await;
        assert_eq!(whole.status, 200, "{}", whole.body);
        assert_eq!(whole.json()["choices"][0]["finish_reason"], "stop", "{}", whole.body);
        check(&whole.text());
        let mut streamed = parameters.clone();
        streamed["stream"] = json!(true);
        assert_eq!(server.post(CHAT, chat(streamed)).await.text(), whole.text());

        let plain = server.post("/v3/completions", completion(parameters)).await.json();
        assert_eq!(plain["choices"][0]["finish_reason"], "stop", "{plain}");
        check(plain["choices"][0]["text"].as_str().unwrap());

        let format = json!({"type": "json_schema", "name": "thing", "schema": schema()});
        let body = json!({"model": "test-model", "input": "Hi", "max_output_tokens": 400, "text": {"format": format}});
        let response = server.post("/v3/responses", body.to_string()).await.json();
        assert_eq!(response["status"], "completed", "{response}");
        let message = response["output"].as_array().unwrap().last().unwrap();
        check(message["content"][0]["text"].as_str().unwrap());
    }
    server.idle().await;
}

#[tokio::test]
async fn each_choice_follows_a_schema_and_log_probabilities_are_those_of_the_model() {
    let server = random();
    let parameters =
        json!({"n": 3, "seed": 5, "logprobs": true, "top_logprobs": 2, "response_format": json_schema()});
    let answer = server.post(CHAT, chat(asking(parameters))).await.json();
    let choices = answer["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 3);
    for choice in choices {
        let text = choice["message"]["content"].as_str().unwrap();
        check(text);
        let tokens = choice["logprobs"]["content"].as_array().unwrap();
        let bytes = tokens.iter().flat_map(|token| token["bytes"].as_array().unwrap());
        let bytes: Vec<u8> = bytes.map(|byte| byte.as_u64().unwrap() as u8).collect();
        assert_eq!(String::from_utf8(bytes).unwrap(), text);
        // The first token can only be a brace, to which the model assigns a low probability.
        assert_eq!(tokens[0]["token"], "{");
        assert!(tokens[0]["logprob"].as_f64().unwrap() < 0.0);
        assert_ne!(tokens[0]["top_logprobs"][0]["token"], "{");
    }
    let texts: Vec<&Value> = choices.iter().map(|choice| &choice["message"]["content"]).collect();
    assert!(texts[0] != texts[1] || texts[1] != texts[2], "{texts:?}");
}

#[tokio::test]
async fn every_parameter_with_a_form_is_followed() {
    let server = random();
    for (parameters, fits) in [
        (json!({"structured_outputs": {"choice": ["yes", "no"]}}), "^(yes|no)$"),
        (json!({"guided_choice": ["one"]}), "^one$"),
        (json!({"guided_regex": "[a-c]{3}\\d"}), "^[a-c]{3}\\d$"),
        (json!({"guided_grammar": "root ::= \"x\" [0-9]{2} | \"y\""}), "^(x[0-9]{2}|y)$"),
        (json!({"structured_outputs": {"grammar": "start: \"x\" N\nN: /[0-9]{2}/"}}), "^x[0-9]{2}$"),
        (json!({"response_format": {"type": "const_string", "value": "Hello World!"}}), "^Hello World!$"),
        (json!({"guided_json": {"type": "integer", "minimum": 100, "maximum": 999}}), "^[0-9]{3}$"),
        (json!({"guided_json": {"enum": [true]}, "min_tokens": 50, "ignore_eos": true}), "^true$"),
    ] {
        for (path, body) in [
            (CHAT, chat(asking(parameters.clone()))),
            ("/v3/completions", completion(asking(parameters.clone()))),
        ] {
            let answer = server.post(path, body).await;
            assert_eq!(answer.status, 200, "{}", answer.body);
            let choice = answer.json()["choices"][0].clone();
            let text = choice["message"]["content"].as_str().or(choice["text"].as_str()).unwrap();
            let pattern = json!({"type": "string", "pattern": fits});
            assert!(jsonschema::is_valid(&pattern, &json!(text)), "{text:?} of {parameters} at {path}");
            assert_eq!(choice["finish_reason"], "stop", "{answer:?}");
        }
    }
}

#[tokio::test]
async fn json_object_is_followed_and_plain_text_is_unconstrained() {
    let server = random();
    let parameters = json!({"response_format": {"type": "json_object"}, "max_tokens": 30});
    let answer = server.post(CHAT, chat(asking(parameters))).await;
    assert!(answer.text().starts_with('{'), "{}", answer.body);
    let plain = server.post(CHAT, chat(json!({}))).await.text();
    let parameters = json!({"response_format": {"type": "text"}});
    assert_eq!(server.post(CHAT, chat(parameters)).await.text(), plain);
}

#[tokio::test]
async fn required_calls_are_made() {
    const TOOLS: &str = "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}\
        {% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}<tool_call>";
    let text = server::built_in_text_with(TOOLS, &[]).unwrap();
    let model = server::Model::new(vec!["test-model".to_owned()], text, "test");
    let server = Setup { model: Some(model), max_model_len: 1000, ..Setup::new(faulty(Vec::new())) }.start();
    let tool = json!({"type": "function", "function": {"name": "set", "parameters": schema()}});
    let parameters =
        json!({"tools": [tool], "tool_choice": "required", "parallel_tool_calls": false, "max_tokens": 300});
    for seed in 0..4 {
        let mut parameters = asking(parameters.clone());
        parameters["seed"] = json!(seed);
        let answer = server.post(CHAT, chat(parameters)).await;
        assert_eq!(answer.status, 200, "{}", answer.body);
        let choice = &answer.json()["choices"][0];
        assert_eq!(choice["finish_reason"], "tool_calls", "{}", answer.body);
        let calls = choice["message"]["tool_calls"].as_array().unwrap();
        assert_eq!((calls.len(), &calls[0]["function"]["name"]), (1, &json!("set")));
        check(calls[0]["function"]["arguments"].as_str().unwrap());
    }
}

#[tokio::test]
async fn unsupported_forms_are_rejected_with_their_path() {
    let server = random();
    let nested =
        |schema: Value| json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}});
    for (parameters, param) in [
        (json!({"response_format": {"type": "yaml"}}), "response_format.type"),
        (
            json!({"response_format": nested(json!({"type": "strin"}))}),
            "response_format.json_schema.schema.type",
        ),
        (
            json!({"response_format": nested(json!({"properties": {"a": {"type": "array", "uniqueItems": true}}}))}),
            "response_format.json_schema.schema.properties.a",
        ),
        (json!({"guided_regex": "("}), "guided_regex"),
        (json!({"guided_grammar": "root ::= x"}), "guided_grammar"),
        (json!({"structured_outputs": {"regex": "a", "choice": ["a"]}}), "structured_outputs.choice"),
        (json!({"structured_outputs": {"unheard": 1}}), "structured_outputs.unheard"),
        (
            json!({"response_format": {"type": "structural_tag", "format": {"type": "regex", "pattern": "["}}}),
            "response_format.format.pattern",
        ),
    ] {
        for stream in [false, true] {
            let mut parameters = asking(parameters.clone());
            parameters["stream"] = json!(stream);
            let answer = server.post(CHAT, chat(parameters.clone())).await;
            assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{parameters}: {}", answer.body);
            assert_eq!(answer.json()["error"]["param"], param, "{parameters}: {}", answer.body);
        }
    }
    let format = json!({"type": "json_schema", "name": "x", "schema": {"type": "strin"}});
    let body = json!({"model": "test-model", "input": "Hi", "text": {"format": format}});
    let answer = server.post("/v3/responses", body.to_string()).await;
    assert_eq!(
        (answer.status, &answer.json()["error"]["param"]),
        (StatusCode::BAD_REQUEST, &json!("text.format.schema.type"))
    );
}

#[tokio::test]
async fn an_answer_that_is_cut_off_is_the_beginning_of_a_valid_one() {
    let server = random();
    let parameters = json!({"max_tokens": 9, "response_format": json_schema()});
    let answer = server.post(CHAT, chat(asking(parameters))).await;
    assert_eq!(answer.json()["choices"][0]["finish_reason"], "length", "{}", answer.body);
    assert!(
        "{\"name\": \"".starts_with(&answer.text().replace([' ', '\n', '\t', '\r'], "")[..1]),
        "{}",
        answer.body
    );
}

#[tokio::test]
async fn a_form_and_excluded_tokens_that_leave_no_token_are_a_client_error() {
    let server = random();
    let parameters = json!({"structured_outputs": {"choice": ["ab", "ac"]}, "bad_words": ["b", "c"]});
    let answer = server.post(CHAT, chat(asking(parameters.clone()))).await;
    assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{}", answer.body);
    let error = &answer.json()["error"];
    assert_eq!((&error["type"], &error["code"]), (&json!("invalid_request_error"), &json!("no_token_left")));
    let mut streamed = asking(parameters);
    streamed["stream"] = json!(true);
    let answer = server.post(CHAT, chat(streamed)).await;
    assert!(answer.body.contains("no_token_left"), "{}", answer.body);
    server.idle().await;
}

#[tokio::test]
async fn a_choice_with_as_many_parts_as_allowed_is_followed_and_one_more_is_rejected() {
    let server = random();
    let words: Vec<String> = (0..8193).map(|index| format!("w{index}")).collect();
    for count in [2001, 8192] {
        let parameters = asking(json!({"structured_outputs": {"choice": words[..count]}, "seed": count}));
        let answer = server.post(CHAT, chat(parameters)).await;
        assert_eq!(answer.status, 200, "{}", answer.body);
        assert!(words[..count].contains(&answer.text()), "{}", answer.body);
    }
    let parameters = asking(json!({"structured_outputs": {"choice": words}}));
    assert_eq!(server.post(CHAT, chat(parameters)).await.status, 400);
    server.idle().await;
}
