//! Tests the wire format of answers of `/responses`, both whole and as events.

use expect_test::expect;
use serde_json::{Value, json};

use crate::harness::{Answer, GatedRunner, Server, Setup, merged};

pub(crate) const PATH: &str = "/v3/responses";
pub(crate) const TEXT: &str = "the quick brown fox jumps over the lazy dog ";

/// A template that renders tools, calls and reasoning, like Qwen's.
pub(crate) const QWEN: &str = "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}\
    {% for message in messages %}<|im_start|>{{ message.role }}\n\
    {% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}\
    {% for call in message.tool_calls or [] %}<tool_call>\n{\"name\": \"{{ call.function.name }}\", \"arguments\": {{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}\
    {% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}";
const THOUGHT: &str = "<think>\nA city.\n</think>\n\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Paris\"}}\n</tool_call>";

/// Returns a request with these parameters. By default, sampling is greedy.
pub(crate) fn request(parameters: Value) -> String {
    let request = json!({"model": "test-model", "temperature": 0, "max_output_tokens": 8, "input": "Hi"});
    merged(request, parameters).to_string()
}

pub(crate) fn weather() -> Value {
    json!({"type": "function", "name": "weather", "description": "The weather of a city", "strict": false,
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}})
}

/// Returns the events, and checks that their names are their types, that their sequence numbers have no gaps, and that
/// the stream ends with `[DONE]`.
pub(crate) fn events(answer: &Answer) -> Vec<Value> {
    assert_eq!(answer.status, 200, "{}", answer.body);
    let all = answer.body.strip_suffix("\n\ndata: [DONE]\n\n").unwrap_or_else(|| panic!("{}", answer.body));
    let read = |(number, event): (usize, &str)| {
        let (name, data) = event.split_once('\n').unwrap();
        let event: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(name.strip_prefix("event: "), event["type"].as_str());
        assert_eq!(event["sequence_number"], number);
        event
    };
    all.split("\n\n").enumerate().map(read).collect()
}

/// Combines the events into the output of a response, as the official clients do.
fn folded(events: &[Value]) -> Value {
    let mut output: Vec<Value> = Vec::new();
    for event in events {
        let at = event["output_index"].as_u64().unwrap_or_default() as usize;
        let text = |name: &str| event[name].as_str().unwrap().to_owned();
        match event["type"].as_str().unwrap() {
            "response.output_item.added" => {
                assert_eq!(at, output.len());
                output.push(event["item"].clone());
            }
            "response.content_part.added" => {
                output[at]["content"].as_array_mut().unwrap().push(event["part"].clone());
            }
            "response.output_text.delta" => add(&mut output[at]["content"][0]["text"], &text("delta")),
            "response.output_text.done" => assert_eq!(output[at]["content"][0]["text"], text("text")),
            "response.reasoning_summary_part.added" => {
                output[at]["summary"].as_array_mut().unwrap().push(event["part"].clone());
            }
            "response.reasoning_summary_text.delta" => {
                add(&mut output[at]["summary"][0]["text"], &text("delta"))
            }
            "response.reasoning_summary_text.done" => {
                assert_eq!(output[at]["summary"][0]["text"], text("text"));
            }
            "response.function_call_arguments.delta" => add(&mut output[at]["arguments"], &text("delta")),
            "response.function_call_arguments.done" => {
                assert_eq!(output[at]["arguments"], text("arguments"));
                assert_eq!(
                    (&output[at]["name"], &output[at]["call_id"]),
                    (&event["name"], &event["call_id"])
                );
            }
            "response.output_item.done" => {
                let mut done = event["item"].clone();
                let mut added = output[at].take();
                added["status"] = done["status"].clone();
                for part in [&mut done, &mut added].map(|item| item.pointer_mut("/content/0/logprobs")) {
                    part.map(Value::take);
                }
                assert_eq!(added, done, "the deltas of an item add up to the item");
                output[at] = event["item"].clone();
            }
            _ => {}
        }
        if let Some(id) = event.get("item_id") {
            assert_eq!(*id, output[at]["id"], "{event}");
        }
    }
    json!(output)
}

fn add(text: &mut Value, more: &str) {
    *text = json!(text.as_str().unwrap().to_owned() + more);
}

/// Returns a response without values that differ between runs: each ID becomes its kind and the order of its first
/// occurrence, and times become 0.
pub(crate) fn shown(response: &Value) -> Value {
    let mut shown = response.clone();
    let mut names: Vec<String> = Vec::new();
    rename(&mut shown, &mut names);
    for time in ["created_at", "completed_at"] {
        if let Some(time) = shown.get_mut(time) {
            assert!(time.as_u64().unwrap() > 1_700_000_000, "{time}");
            *time = json!(0);
        }
    }
    shown
}

fn rename(value: &mut Value, names: &mut Vec<String>) {
    match value {
        Value::String(text) => {
            if let Some((kind, rest)) = text.split_once('_')
                && ["resp", "msg", "rs", "fc", "fco", "call", "conv"].contains(&kind)
                && (rest.len() == 48 || rest.len() == 24)
            {
                let at = names.iter().position(|name| name == text).unwrap_or_else(|| {
                    names.push(text.clone());
                    names.len() - 1
                });
                *text = format!("{kind}_{at}");
            }
        }
        Value::Array(values) => values.iter_mut().for_each(|value| rename(value, names)),
        Value::Object(members) => members.values_mut().for_each(|value| rename(value, names)),
        _ => {}
    }
}

/// Returns the types of events, without successive duplicates.
fn order(events: &[Value]) -> Vec<&str> {
    let mut order: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    order.dedup();
    order
}

#[tokio::test]
async fn a_whole_response_has_the_format_of_openai() {
    let server = Server::repeating(TEXT);
    let answer = server.post(PATH, request(json!({}))).await;
    let response = answer.json();
    assert_eq!(answer.headers["x-request-id"].to_str().unwrap(), response["id"]);
    expect![[r#"
        {
          "id": "resp_0",
          "object": "response",
          "created_at": 0,
          "status": "incomplete",
          "background": false,
          "error": null,
          "incomplete_details": {
            "reason": "max_output_tokens"
          },
          "instructions": null,
          "max_output_tokens": 8,
          "max_tool_calls": null,
          "model": "test-model",
          "output": [
            {
              "type": "message",
              "id": "msg_1",
              "status": "incomplete",
              "content": [
                {
                  "type": "output_text",
                  "annotations": [],
                  "logprobs": [],
                  "text": "umps ove"
                }
              ],
              "role": "assistant"
            }
          ],
          "parallel_tool_calls": true,
          "previous_response_id": null,
          "prompt_cache_key": null,
          "reasoning": {
            "effort": null,
            "summary": null
          },
          "safety_identifier": null,
          "service_tier": "default",
          "store": true,
          "temperature": 0.0,
          "text": {
            "format": {
              "type": "text"
            },
            "verbosity": "medium"
          },
          "tool_choice": "auto",
          "tools": [],
          "top_logprobs": 0,
          "top_p": 1.0,
          "truncation": "disabled",
          "usage": {
            "input_tokens": 21,
            "input_tokens_details": {
              "cached_tokens": 0,
              "cache_write_tokens": 0
            },
            "output_tokens": 8,
            "output_tokens_details": {
              "reasoning_tokens": 0
            },
            "total_tokens": 29
          },
          "user": null,
          "metadata": {}
        }"#]]
    .assert_eq(&serde_json::to_string_pretty(&shown(&response)).unwrap());
}

#[tokio::test]
async fn a_response_repeats_its_request() {
    let server = Server::repeating(TEXT);
    let settings = json!({
        "instructions": "Be brief.", "metadata": {"a": "b"}, "temperature": 0.5, "top_p": 0.25, "user": "u",
        "safety_identifier": "s", "prompt_cache_key": "k", "truncation": "auto", "max_output_tokens": 3,
        "max_tool_calls": 2, "parallel_tool_calls": false, "top_logprobs": 1, "store": false,
        "tools": [weather()], "tool_choice": "none",
    });
    let response = server.post(PATH, request(settings.clone())).await.json();
    for (name, value) in settings.as_object().unwrap() {
        assert_eq!(response[name], *value, "{name}");
    }
    let more = json!({
        "reasoning": {"effort": "low", "summary": "auto"}, "text": {"verbosity": "low"}, "service_tier": "flex",
        "tools": [{"type": "function", "function": {"name": "now"}}],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "now"}]},
    });
    let response = server.post(PATH, request(more.clone())).await.json();
    assert_eq!(response["reasoning"], more["reasoning"]);
    assert_eq!(response["text"], json!({"format": {"type": "text"}, "verbosity": "low"}));
    assert_eq!(response["service_tier"], "default");
    assert_eq!(response["tool_choice"], more["tool_choice"]);
    let flat = json!([{"type": "function", "name": "now", "description": null, "parameters": null, "strict": false}]);
    assert_eq!(response["tools"], flat);
}

#[tokio::test]
async fn a_streamed_response_has_the_events_of_openai() {
    let server = Server::repeating(TEXT);
    let answer = server.post(PATH, request(json!({"stream": true, "max_output_tokens": 1}))).await;
    let mut lines = String::new();
    let mut names = Vec::new();
    for mut event in events(&answer) {
        if let Some(response) = event.get_mut("response") {
            *response = json!({"id": response["id"], "status": response["status"], "output": response["output"],
                "usage": response["usage"]});
        }
        rename(&mut event, &mut names);
        lines += &format!("{event}\n");
    }
    expect![[r#"
        {"type":"response.created","response":{"id":"resp_0","status":"in_progress","output":[],"usage":null},"sequence_number":0}
        {"type":"response.in_progress","response":{"id":"resp_0","status":"in_progress","output":[],"usage":null},"sequence_number":1}
        {"type":"response.output_item.added","output_index":0,"item":{"type":"message","id":"msg_1","status":"in_progress","content":[],"role":"assistant"},"sequence_number":2}
        {"type":"response.content_part.added","item_id":"msg_1","output_index":0,"content_index":0,"part":{"type":"output_text","annotations":[],"logprobs":[],"text":""},"sequence_number":3}
        {"type":"response.output_text.delta","item_id":"msg_1","output_index":0,"content_index":0,"delta":"u","logprobs":[],"sequence_number":4}
        {"type":"response.output_text.done","item_id":"msg_1","output_index":0,"content_index":0,"text":"u","logprobs":[],"sequence_number":5}
        {"type":"response.content_part.done","item_id":"msg_1","output_index":0,"content_index":0,"part":{"type":"output_text","annotations":[],"logprobs":[],"text":"u"},"sequence_number":6}
        {"type":"response.output_item.done","output_index":0,"item":{"type":"message","id":"msg_1","status":"incomplete","content":[{"type":"output_text","annotations":[],"logprobs":[],"text":"u"}],"role":"assistant"},"sequence_number":7}
        {"type":"response.incomplete","response":{"id":"resp_0","status":"incomplete","output":[{"type":"message","id":"msg_1","status":"incomplete","content":[{"type":"output_text","annotations":[],"logprobs":[],"text":"u"}],"role":"assistant"}],"usage":{"input_tokens":21,"input_tokens_details":{"cached_tokens":0,"cache_write_tokens":0},"output_tokens":1,"output_tokens_details":{"reasoning_tokens":0},"total_tokens":22}},"sequence_number":8}
    "#]].assert_eq(&lines);
}

#[tokio::test]
async fn streamed_or_not_a_response_is_the_same() {
    let long = json!({"max_output_tokens": 200, "tools": [weather()]});
    let server = Setup::scripted(QWEN, &[], &[THOUGHT]).start();
    let whole = server.post(PATH, request(long.clone())).await.json();
    let mut streaming = long;
    streaming["stream"] = json!(true);
    let streamed = server.post(PATH, request(streaming)).await;
    let events = events(&streamed);
    assert_eq!(
        order(&events),
        [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.reasoning_summary_part.added",
            "response.reasoning_summary_text.delta",
            "response.reasoning_summary_text.done",
            "response.reasoning_summary_part.done",
            "response.output_item.done",
            "response.output_item.added",
            "response.function_call_arguments.delta",
            "response.function_call_arguments.done",
            "response.output_item.done",
            "response.completed",
        ]
    );
    let last = events.last().unwrap()["response"].clone();
    assert_eq!(folded(&events), last["output"]);
    let (mut whole, mut last) = (shown(&whole), shown(&last));
    for response in [&mut whole, &mut last] {
        response["usage"]["input_tokens_details"].take();
    }
    assert_eq!(whole, last);
    expect![[r#"[{"type":"reasoning","id":"rs_1","summary":[{"type":"summary_text","text":"A city.\n"}],"status":"completed"},{"type":"function_call","id":"fc_2","status":"completed","arguments":"{\"city\": \"Paris\"}","call_id":"call_3","name":"weather"}]"#]].assert_eq(&whole["output"].to_string());
    assert!(whole["usage"]["output_tokens_details"]["reasoning_tokens"].as_u64().unwrap() > 8, "{whole}");
}

#[tokio::test]
async fn a_response_that_is_cut_off_is_incomplete() {
    let server = Server::repeating(TEXT);
    let whole = server.post(PATH, request(json!({"max_output_tokens": 2}))).await.json();
    assert_eq!((&whole["status"], whole.get("completed_at")), (&json!("incomplete"), None));
    assert_eq!(whole["incomplete_details"], json!({"reason": "max_output_tokens"}));
    assert_eq!(whole["output"][0]["status"], "incomplete");
    let streamed = server.post(PATH, request(json!({"max_output_tokens": 2, "stream": true}))).await;
    let events = events(&streamed);
    assert_eq!(events.last().unwrap()["type"], "response.incomplete");
    assert_eq!(folded(&events), events.last().unwrap()["response"]["output"]);
    // A response that ends at a stop string is complete.
    let ended = server.post(PATH, request(json!({"stop": ["fox"], "max_output_tokens": 60}))).await.json();
    assert_eq!(ended["status"], "completed");
    assert!(ended["completed_at"].as_u64().unwrap() >= ended["created_at"].as_u64().unwrap());
    assert!(!ended["output"][0]["content"][0]["text"].as_str().unwrap().contains("fox"), "{ended}");
}

#[tokio::test]
async fn a_call_that_is_cut_off_retains_its_arguments() {
    let server = Setup::scripted(QWEN, &[], &[THOUGHT]).start();
    let cut = THOUGHT.find("Paris").unwrap();
    let parameters = json!({"max_output_tokens": cut, "tools": [weather()], "stream": true});
    let events = events(&server.post(PATH, request(parameters)).await);
    let call = &events.last().unwrap()["response"]["output"][1];
    assert_eq!((&call["status"], &call["arguments"]), (&json!("incomplete"), &json!("{\"city\": \"")));
    assert_eq!(folded(&events)[1], *call);
}

#[tokio::test]
async fn several_choices_are_several_messages_streamed_or_not() {
    let server = Server::repeating(TEXT);
    let parameters = json!({"n": 3, "temperature": 2, "seed": 5, "max_output_tokens": 6});
    let whole = server.post(PATH, request(parameters.clone())).await.json();
    let texts = |output: &Value| {
        let items = output.as_array().unwrap().iter();
        let mut texts: Vec<String> =
            items.map(|item| item["content"][0]["text"].as_str().unwrap().to_owned()).collect();
        texts.sort();
        texts
    };
    assert_eq!(texts(&whole["output"]).len(), 3);
    let mut streaming = parameters;
    streaming["stream"] = json!(true);
    let events = events(&server.post(PATH, request(streaming)).await);
    assert_eq!(texts(&folded(&events)), texts(&whole["output"]));
    assert_eq!(events.last().unwrap()["response"]["usage"]["output_tokens"], 18);
    let best = request(json!({"n": 1, "best_of": 4, "temperature": 2, "seed": 5}));
    assert_eq!(server.post(PATH, best).await.json()["output"].as_array().unwrap().len(), 1);
}

#[tokio::test]
async fn log_probabilities_are_returned_if_included() {
    let server = Server::repeating(TEXT);
    let without = server.post(PATH, request(json!({}))).await.json();
    assert_eq!(without["output"][0]["content"][0]["logprobs"], json!([]));
    for parameters in [
        json!({"include": ["message.output_text.logprobs"], "top_logprobs": 2}),
        json!({"top_logprobs": 2}),
        json!({"logprobs": true, "top_logprobs": 2}),
    ] {
        let whole = server.post(PATH, request(parameters.clone())).await.json();
        let logprobs = whole["output"][0]["content"][0]["logprobs"].clone();
        assert_eq!(logprobs.as_array().unwrap().len(), 8, "{parameters}");
        assert_eq!(logprobs[0]["top_logprobs"].as_array().unwrap().len(), 2);
        let mut streaming = parameters;
        streaming["stream"] = json!(true);
        let events = events(&server.post(PATH, request(streaming)).await);
        let deltas = events.iter().filter(|event| event["type"] == "response.output_text.delta");
        let joined: Vec<Value> =
            deltas.flat_map(|event| event["logprobs"].as_array().unwrap().clone()).collect();
        assert_eq!(json!(joined), logprobs);
    }
}

/// Log probabilities that have accumulated, and the events at the end of a message, are encoded on another thread.
#[tokio::test]
async fn many_log_probabilities_are_streamed_and_stored() {
    for background in [false, true] {
        let (runner, permits) = GatedRunner::new(TEXT);
        let server = Setup::new(runner).start();
        let parameters = json!({
            "max_output_tokens": 200, "top_logprobs": 2, "stream": true, "background": background,
        });
        permits.send(()).unwrap();
        // When the engine has generated all tokens, the server has read at most the first one.
        let unread = server.open(PATH, request(parameters)).await;
        drop(permits);
        server.block_until_computed(1);
        let events = events(&Answer::read(unread).await);
        let response = &events.last().unwrap()["response"];
        let logprobs = &response["output"][0]["content"][0]["logprobs"];
        assert_eq!(logprobs.as_array().unwrap().len(), 200);
        let deltas = events.iter().filter(|event| event["type"] == "response.output_text.delta");
        let deltas: Vec<Vec<Value>> =
            deltas.map(|event| event["logprobs"].as_array().unwrap().clone()).collect();
        // Tokio makes a task yield after 128 events, so the 199 events that have accumulated are sent in parts.
        let largest = deltas.iter().map(Vec::len).max();
        assert!(largest > Some(100), "background: {background}: {largest:?}");
        assert_eq!(&json!(deltas.concat()), logprobs);
        let stored = server.get(&format!("{PATH}/{}", response["id"].as_str().unwrap())).await.json();
        assert_eq!(stored["output"], response["output"]);
    }
}

#[tokio::test]
async fn the_length_of_a_prompt_can_be_counted_without_an_answer() {
    let server = Server::repeating(TEXT);
    let counted = server.post(&format!("{PATH}/input_tokens"), request(json!({}))).await.json();
    let whole = server.post(PATH, request(json!({}))).await.json();
    assert_eq!(
        counted,
        json!({"object": "response.input_tokens", "input_tokens": whole["usage"]["input_tokens"]})
    );
}

#[tokio::test]
async fn the_effort_reaches_the_template_and_system_texts_reach_the_prompt() {
    let server = Setup::scripted(QWEN, &[], &["<think>\nHm.\n</think>\n\nYes."]).start();
    let long = |parameters: Value| request(merged(json!({"max_output_tokens": 100}), parameters));
    let plain = server.post(PATH, long(json!({}))).await.json();
    assert_eq!(plain["output"][0]["type"], "reasoning");
    let tokens = |response: &Value| response["usage"]["input_tokens"].as_u64().unwrap();
    let none = server.post(PATH, long(json!({"reasoning": {"effort": "none"}}))).await.json();
    assert!(tokens(&none) > tokens(&plain), "the template has closed the reasoning: {none}");
    let with_instructions = server.post(PATH, long(json!({"instructions": "Be brief."}))).await.json();
    assert!(tokens(&with_instructions) > tokens(&plain));
}
