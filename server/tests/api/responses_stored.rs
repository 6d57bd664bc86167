//! Tests responses that continue other responses or a conversation, and requests that retrieve, delete and cancel
//! stored responses and list their items.

use std::fs::File;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::time::Duration;

use axum::body::Body;
use axum::http::Request;
use expect_test::expect;
use http_body_util::BodyExt as _;
use serde_json::{Value, json};
use server::StoreConfig;

use crate::harness::{Answer, GatedRunner, Server, Setup, merged};
use crate::responses::{PATH, QWEN, events, request, shown, weather};

const CONVERSATIONS: &str = "/v3/conversations";
const CALL: &str = "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Paris\"}}\n</tool_call>";

/// The setup of a server whose model has one answer for each turn.
fn scripted(answers: &[&str]) -> Setup {
    Setup::scripted(QWEN, &[], answers)
}

async fn ask(server: &Server, parameters: Value) -> Value {
    let all = merged(json!({"max_output_tokens": 200}), parameters);
    let answer = server.post(PATH, request(all)).await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    answer.json()
}

fn text(response: &Value) -> &str {
    let items = response["output"].as_array().unwrap();
    let message = items.iter().find(|item| item["type"] == "message").unwrap();
    message["content"][0]["text"].as_str().unwrap()
}

fn code(answer: &Answer) -> (u16, String) {
    (answer.status.as_u16(), answer.json()["error"]["code"].as_str().unwrap_or_default().to_owned())
}

fn id(value: &Value) -> String {
    value["id"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn a_response_continues_another_with_its_whole_history() {
    let server = scripted(&["One.", "Two.", "Three."]).start();
    let first = ask(&server, json!({"input": "a", "instructions": "Count."})).await;
    let second = ask(&server, json!({"input": "b", "previous_response_id": first["id"]})).await;
    let third = ask(&server, json!({"input": "c", "previous_response_id": second["id"]})).await;
    assert_eq!([&first, &second, &third].map(text), ["One.", "Two.", "Three."]);
    assert_eq!(third["previous_response_id"], second["id"]);
    // Instructions apply only to the request that contains them.
    let items = json!([
        {"role": "user", "content": "a"}, {"role": "assistant", "content": "One."},
        {"role": "user", "content": "b"}, {"role": "assistant", "content": "Two."},
        {"role": "user", "content": "c"},
    ]);
    let whole = ask(&server, json!({"input": items})).await;
    assert_eq!(whole["usage"]["input_tokens"], third["usage"]["input_tokens"]);
    // Several responses can continue the same previous response.
    let other = ask(&server, json!({"input": "x", "previous_response_id": first["id"]})).await;
    assert_eq!(text(&other), "Two.");
}

#[tokio::test]
async fn tools_are_called_and_answered_over_three_turns() {
    let server = scripted(&[&format!("<think>\nA city.\n</think>\n\n{CALL}"), CALL, "It is warm."]).start();
    let first = ask(&server, json!({"input": "Weather?", "tools": [weather()]})).await;
    let mut previous = first;
    for _ in 0..2 {
        let items = previous["output"].as_array().unwrap();
        let call = items.iter().find(|item| item["type"] == "function_call").unwrap();
        assert_eq!((&call["name"], &call["arguments"]), (&json!("weather"), &json!("{\"city\": \"Paris\"}")));
        assert!(call["call_id"].as_str().unwrap().starts_with("call_") && call["call_id"] != call["id"]);
        let output =
            json!({"type": "function_call_output", "call_id": call["call_id"], "output": "20 degrees"});
        let next = json!({"input": [output], "tools": [weather()], "previous_response_id": previous["id"]});
        previous = ask(&server, next).await;
    }
    assert_eq!(text(&previous), "It is warm.");
    // Continue the same conversation without stored responses: the client sends all items again.
    let items = server.get(&format!("{PATH}/{}/input_items?order=asc", id(&previous))).await.json();
    let again = ask(&server, json!({"input": items["data"], "tools": [weather()], "store": false})).await;
    assert_eq!(again["usage"]["input_tokens"], previous["usage"]["input_tokens"]);
    assert_eq!(text(&again), "It is warm.");
}

#[tokio::test]
async fn stored_responses_are_retrieved_listed_and_deleted() {
    let server = scripted(&["One.", "Two."]).start();
    let first = ask(&server, json!({"input": "a"})).await;
    let second = ask(
        &server,
        json!({"input": [
        {"role": "user", "content": "b"}, {"role": "user", "content": "c"},
    ], "previous_response_id": first["id"]}),
    )
    .await;
    for response in [&first, &second] {
        let stored = server.get(&format!("/v1/responses/{}", id(response))).await;
        assert_eq!((stored.status.as_u16(), &stored.json()), (200, response));
    }
    let path = format!("{PATH}/{}", id(&second));
    let all = server.get(&format!("{path}/input_items?order=asc")).await.json();
    expect![[r#"
        {
          "object": "list",
          "data": [
            {
              "type": "message",
              "id": "msg_0",
              "status": "completed",
              "content": [
                {
                  "type": "input_text",
                  "text": "a"
                }
              ],
              "role": "user"
            },
            {
              "type": "message",
              "id": "msg_1",
              "status": "completed",
              "content": [
                {
                  "type": "output_text",
                  "annotations": [],
                  "logprobs": [],
                  "text": "One."
                }
              ],
              "role": "assistant"
            },
            {
              "type": "message",
              "id": "msg_2",
              "status": "completed",
              "content": [
                {
                  "type": "input_text",
                  "text": "b"
                }
              ],
              "role": "user"
            },
            {
              "type": "message",
              "id": "msg_3",
              "status": "completed",
              "content": [
                {
                  "type": "input_text",
                  "text": "c"
                }
              ],
              "role": "user"
            }
          ],
          "first_id": "msg_0",
          "last_id": "msg_3",
          "has_more": false
        }"#]]
    .assert_eq(&serde_json::to_string_pretty(&shown(&all)).unwrap());
    let latest = server.get(&format!("{path}/input_items?limit=1")).await.json();
    assert_eq!((&latest["data"][0], &latest["has_more"]), (&all["data"][3], &json!(true)));
    let after = latest["last_id"].as_str().unwrap();
    let next = server.get(&format!("{path}/input_items?limit=3&after={after}")).await.json();
    assert_eq!((&next["data"][2], &next["has_more"]), (&all["data"][0], &json!(false)));
    assert_eq!(code(&server.get(&format!("{path}/input_items?limit=0")).await).0, 400);

    let gone = server.delete(&format!("{PATH}/{}", id(&first))).await;
    assert_eq!(gone.json(), json!({"id": first["id"], "object": "response", "deleted": true}));
    for answer in [
        server.get(&format!("{PATH}/{}", id(&first))).await,
        server.delete(&format!("{PATH}/{}", id(&first))).await,
        server.get(&format!("{PATH}/{}/input_items", id(&first))).await,
        server.post(&format!("{PATH}/{}/cancel", id(&first)), "").await,
        server.get(&format!("{PATH}/resp_1")).await,
    ] {
        assert_eq!(code(&answer), (404, "response_not_found".to_owned()));
    }
    // The second response still exists, but no new response can continue it, because its history is incomplete.
    assert_eq!(server.get(&path).await.status, 200);
    for (previous, missing) in [(&first, &first), (&second, &first)] {
        let answer = server.post(PATH, request(json!({"previous_response_id": previous["id"]}))).await;
        assert_eq!(code(&answer), (404, "previous_response_not_found".to_owned()));
        assert_eq!(answer.json()["error"]["param"], "previous_response_id");
        assert!(answer.body.contains(missing["id"].as_str().unwrap()), "{}", answer.body);
    }
}

#[tokio::test]
async fn responses_without_store_are_not_stored() {
    let server = scripted(&["One."]).start();
    let response = ask(&server, json!({"store": false})).await;
    assert_eq!(response["store"], false);
    assert_eq!(server.get(&format!("{PATH}/{}", id(&response))).await.status, 404);
    let none = StoreConfig { max_stored_responses: 0, ..StoreConfig::default() };
    let server = Setup { store: none, ..scripted(&["One."]) }.start();
    let response = ask(&server, json!({})).await;
    assert_eq!(response["store"], false, "the store is disabled");
    assert_eq!(server.get(&format!("{PATH}/{}", id(&response))).await.status, 404);
    for (path, body) in [(PATH, request(json!({"background": true}))), (CONVERSATIONS, "{}".to_owned())] {
        assert_eq!(server.post(path, body).await.status, 400);
    }
}

#[tokio::test]
async fn a_streamed_response_is_stored_before_its_last_event() {
    let server = scripted(&["One.", "Two."]).start();
    let parameters = json!({"stream": true, "max_output_tokens": 200});
    let first = events(&server.post(PATH, request(parameters)).await).pop().unwrap()["response"].take();
    assert_eq!(server.get(&format!("{PATH}/{}", id(&first))).await.json(), first);
    let second = ask(&server, json!({"previous_response_id": first["id"]})).await;
    assert_eq!(text(&second), "Two.");
    // Events are stored only for responses that were created with both `background` and `stream`.
    let replay = server.get(&format!("{PATH}/{}?stream=true", id(&first))).await;
    assert_eq!((replay.status.as_u16(), &replay.json()["error"]["param"]), (400, &json!("stream")));
}

#[tokio::test]
async fn the_limits_hold_and_the_end_of_a_chain_is_evicted_first() {
    let two = StoreConfig { max_stored_responses: 2, ..StoreConfig::default() };
    let server = Setup { store: two, ..scripted(&["One.", "Two."]) }.start();
    let first = ask(&server, json!({})).await;
    let second = ask(&server, json!({"previous_response_id": first["id"]})).await;
    let other = ask(&server, json!({})).await;
    let statuses = [&first, &second, &other].map(|response| format!("{PATH}/{}", id(response)));
    let mut found = Vec::new();
    for path in statuses {
        found.push(server.get(&path).await.status.as_u16());
    }
    assert_eq!(found, [200, 404, 200]);
    let small = StoreConfig { max_stored_bytes: 100, ..StoreConfig::default() };
    let server = Setup { store: small, ..scripted(&["One."]) }.start();
    let response = ask(&server, json!({})).await;
    assert_eq!(response["store"], false, "the response is larger than the store");
}

#[tokio::test]
async fn a_directory_stores_responses_across_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let store =
        || StoreConfig { response_store_dir: Some(directory.path().to_owned()), ..StoreConfig::default() };
    let server = Setup { store: store(), ..scripted(&["One.", "Two."]) }.start();
    let first = ask(&server, json!({"input": "a"})).await;
    let conversation = server.post(CONVERSATIONS, r#"{"metadata":{"a":"b"}}"#).await.json();
    drop(server);
    let server = Setup { store: store(), ..scripted(&["One.", "Two."]) }.start();
    assert_eq!(server.get(&format!("{PATH}/{}", id(&first))).await.json(), first);
    let second = ask(&server, json!({"previous_response_id": first["id"]})).await;
    assert_eq!(text(&second), "Two.");
    assert_eq!(server.get(&format!("{CONVERSATIONS}/{}", id(&conversation))).await.json(), conversation);
    let store_id = |response: &Value| id(response)[..21].to_owned();
    assert_eq!(store_id(&first), store_id(&second), "the ID of the store is the same");
}

#[tokio::test]
async fn items_are_found_by_their_ids() {
    let server = scripted(&["One.", "Two."]).start();
    let first = ask(&server, json!({"input": "a"})).await;
    let answered = &first["output"][0]["id"];
    let given =
        server.get(&format!("{PATH}/{}/input_items", id(&first))).await.json()["data"][0]["id"].clone();
    let input =
        json!([{"type": "item_reference", "id": given}, {"id": answered}, {"role": "user", "content": "b"}]);
    let second = ask(&server, json!({"input": input})).await;
    assert_eq!(text(&second), "Two.");
    let followed = ask(&server, json!({"input": "b", "previous_response_id": first["id"]})).await;
    assert_eq!(second["usage"]["input_tokens"], followed["usage"]["input_tokens"]);
    let lost =
        server.post(PATH, request(json!({"input": [{"type": "item_reference", "id": "msg_1"}]}))).await;
    assert_eq!(code(&lost), (404, "item_not_found".to_owned()));
    assert_eq!(lost.json()["error"]["param"], "input[0].id");
}

#[tokio::test]
async fn the_limits_of_metadata_count_characters() {
    let server = scripted(&["One."]).start();
    for (name, value, status) in [(64, 512, 200), (64, 513, 400), (65, 512, 400)] {
        let metadata = json!({"metadata": {"é".repeat(name): "é".repeat(value)}});
        let answers = [
            server.post(PATH, request(metadata.clone())).await,
            server.post(CONVERSATIONS, metadata.to_string()).await,
        ];
        for answer in answers {
            assert_eq!(answer.status, status, "{name}, {value}: {}", answer.body);
            match status {
                200 => assert_eq!(answer.json()["metadata"], metadata["metadata"]),
                _ => assert_eq!(code(&answer).1, "string_above_max_length"),
            }
        }
    }
}

#[tokio::test]
async fn a_conversation_collects_the_items_of_its_responses() {
    let server = scripted(&["One.", "Two.", "Three."]).start();
    let created = json!({"metadata": {"a": "b"}, "items": [{"role": "system", "content": "Count."}]});
    let conversation = server.post(CONVERSATIONS, created.to_string()).await.json();
    assert_eq!(
        (&conversation["object"], &conversation["metadata"]),
        (&json!("conversation"), &json!({"a": "b"}))
    );
    let first = ask(&server, json!({"input": "a", "conversation": conversation["id"]})).await;
    assert_eq!(first["conversation"], json!({"id": conversation["id"]}));
    let stream = json!({"input": "b", "conversation": {"id": conversation["id"]}, "stream": true, "max_output_tokens": 200});
    let second = events(&server.post(PATH, request(stream)).await).pop().unwrap()["response"].take();
    assert_eq!([&first, &second].map(text), ["One.", "Two."]);
    let path = format!("{CONVERSATIONS}/{}", id(&conversation));
    let items = server.get(&format!("{path}/items?order=asc")).await.json();
    let said: Vec<&str> = items["data"]
        .as_array()
        .unwrap()
        .iter()
        .map(|item| item["content"][0]["text"].as_str().unwrap())
        .collect();
    assert_eq!(said, ["Count.", "a", "One.", "b", "Two."]);

    let added = json!({"items": [{"role": "user", "content": "c"}]}).to_string();
    let added = server.post(&format!("{path}/items"), added).await.json();
    let item = format!("{path}/items/{}", added["first_id"].as_str().unwrap());
    assert_eq!(server.get(&item).await.json(), added["data"][0]);
    let names: std::collections::BTreeSet<String> =
        items["data"].as_array().unwrap().iter().chain([&added["data"][0]]).map(id).collect();
    assert_eq!(names.len(), 6, "each item has its own ID");
    assert_eq!(server.delete(&item).await.json(), conversation);
    assert_eq!(code(&server.get(&item).await), (404, "item_not_found".to_owned()));

    let changed = server.post(&path, r#"{"metadata":{"c":"d"}}"#).await.json();
    assert_eq!(changed["metadata"], json!({"c": "d"}));
    assert_eq!(server.post(&path, r#"{"metadata":{"c":1}}"#).await.status, 400);
    assert_eq!(server.get(&path).await.json(), changed);
    let deleted = server.delete(&path).await.json();
    assert_eq!(deleted, json!({"id": conversation["id"], "object": "conversation.deleted", "deleted": true}));
    for answer in [
        server.get(&path).await,
        server.get(&format!("{path}/items")).await,
        server.post(&path, r#"{"metadata":{}}"#).await,
        server.post(PATH, request(json!({"conversation": conversation["id"]}))).await,
    ] {
        assert_eq!(code(&answer), (404, "conversation_not_found".to_owned()));
    }
    let many: Vec<Value> = (0..21).map(|_| json!({"role": "user", "content": "x"})).collect();
    assert_eq!(server.post(CONVERSATIONS, json!({"items": many}).to_string()).await.status, 400);
}

#[tokio::test]
async fn an_item_is_added_to_a_conversation_only_once() {
    let server = scripted(&["One.", "Two."]).start();
    let said = |id: &str| json!({"role": "user", "content": "x", "id": id});
    let conversation = server.post(CONVERSATIONS, json!({"items": [said("msg_a")]}).to_string()).await.json();
    let (name, path) = (&conversation["id"], format!("{CONVERSATIONS}/{}/items", id(&conversation)));
    let first = ask(&server, json!({"input": [said("msg_b")], "conversation": name})).await;
    let answer = &first["output"][0];
    let reference = json!({"type": "item_reference", "id": answer["id"]});
    for parameters in [
        json!({"input": [said("msg_c"), said("msg_c")]}),
        json!({"input": [said("msg_c"), answer], "conversation": name}),
        json!({"input": [reference], "conversation": name}),
        json!({"input": [said("msg_a")], "conversation": name}),
        json!({"input": [answer, said("msg_c")], "previous_response_id": first["id"]}),
    ] {
        let refused = server.post(PATH, request(parameters)).await;
        assert_eq!(code(&refused), (400, "invalid_value".to_owned()), "{}", refused.body);
        assert!(refused.body.contains("duplicate item found with id"), "{}", refused.body);
    }
    for (path, items) in [(&path, json!([said("msg_b")])), (&path, json!([said("msg_c"), said("msg_c")]))] {
        let refused = server.post(path, json!({"items": items}).to_string()).await;
        assert_eq!((refused.status.as_u16(), &refused.json()["error"]["param"]), (400, &json!("items")));
    }
    // A request without a conversation may contain items that are stored in a conversation.
    let history = json!([said("msg_a"), said("msg_b"), answer, said("msg_c")]);
    assert_eq!(text(&ask(&server, json!({"input": history})).await), "Two.");

    let (mut listed, mut after) = (Vec::new(), String::new());
    for _ in 0..3 {
        let page = server.get(&format!("{path}?order=asc&limit=1{after}")).await.json();
        assert_eq!(page["has_more"], json!(listed.len() < 2));
        after = format!("&after={}", page["last_id"].as_str().unwrap());
        listed.push(page["last_id"].clone());
    }
    assert_eq!(listed, [json!("msg_a"), json!("msg_b"), answer["id"].clone()]);
}

/// Two turns of a conversation can contain the same new item at the same time.
#[tokio::test]
async fn an_item_of_two_simultaneous_turns_is_in_the_conversation_once() {
    let (runner, permits) = GatedRunner::new("the quick brown fox ");
    let server = Setup::new(runner).start();
    let conversation = server.post(CONVERSATIONS, "{}").await.json();
    let turn = || {
        let input = json!([{"role": "user", "content": "x", "id": "msg_a"}]);
        ask(&server, json!({"input": input, "conversation": conversation["id"], "max_output_tokens": 4}))
    };
    let begin = async {
        // Let the model begin only after both turns have been prepared.
        eventually(async || (server.engine.handle().submissions() == 2).then_some(())).await;
        drop(permits);
    };
    let (first, second, ()) = tokio::join!(turn(), turn(), begin);
    let (added, lost) = if first["error"].is_null() { (first, second) } else { (second, first) };
    assert_eq!((&added["status"], &lost["status"]), (&json!("incomplete"), &json!("failed")), "{lost}");
    let message = lost["error"]["message"].as_str().unwrap();
    let reason =
        "the response could not be added to its conversation: duplicate item found with id \"msg_a\"";
    assert!(message.starts_with(reason), "{message}");
    assert_eq!(text(&lost), text(&added), "the client receives the output");
    assert_eq!(server.get(&format!("{PATH}/{}", id(&lost))).await.json()["status"], "failed");
    let items = format!("{CONVERSATIONS}/{}/items?order=asc", id(&conversation));
    let items = server.get(&items).await.json();
    assert_eq!(items["data"].as_array().unwrap().len(), 2, "{items}");
    assert_eq!(items["first_id"], "msg_a");
}

#[tokio::test]
async fn a_background_response_is_polled_until_it_is_complete() {
    let (runner, permits) = GatedRunner::new("the quick brown fox ");
    let server = Setup::new(runner).start();
    let begun = server.post(PATH, request(json!({"background": true}))).await.json();
    assert_eq!((&begun["status"], &begun["background"]), (&json!("queued"), &json!(true)));
    let path = format!("{PATH}/{}", id(&begun));
    assert_eq!(server.get(&path).await.json()["status"], "queued");
    let early = server.post(PATH, request(json!({"previous_response_id": begun["id"]}))).await;
    assert_eq!(
        (early.status.as_u16(), &early.json()["error"]["param"]),
        (400, &json!("previous_response_id"))
    );
    drop(permits);
    let done = until_final(&server, &path).await;
    assert_eq!(
        (&done["status"], done["output"][0]["content"][0]["text"].as_str().unwrap().len()),
        (&json!("incomplete"), 8)
    );
    assert_eq!(done["usage"]["output_tokens"], 8);
    // Canceling a response that has ended does not change it.
    assert_eq!(server.post(&format!("{path}/cancel"), "").await.json(), done);
    let next = server.post(PATH, request(json!({"previous_response_id": begun["id"]}))).await;
    assert_eq!(next.status, 200, "{}", next.body);
    server.idle().await;
}

#[tokio::test]
async fn a_background_response_is_canceled_and_frees_its_blocks() {
    let (runner, permits) = GatedRunner::new("the quick brown fox ");
    let server = Setup::new(runner).start();
    let begun =
        server.post(PATH, request(json!({"background": true, "max_output_tokens": 300}))).await.json();
    let path = format!("{PATH}/{}", id(&begun));
    for _ in 0..4 {
        permits.send(()).unwrap();
    }
    let cancelled = server.post(&format!("{path}/cancel"), "").await.json();
    assert_eq!(cancelled["status"], "cancelled");
    drop(permits);
    server.idle().await;
    assert_eq!(server.get(&path).await.json(), cancelled);
    assert_eq!(
        server.post(&format!("{path}/cancel"), "").await.json(),
        cancelled,
        "a second cancellation changes nothing"
    );
    assert_eq!(server.delete(&path).await.status, 200);
    assert_eq!(server.get(&path).await.status, 404);
    // Responses that are not generated in the background cannot be canceled.
    let whole = server.post(PATH, request(json!({}))).await.json();
    let refused = server.post(&format!("{PATH}/{}/cancel", id(&whole)), "").await;
    assert_eq!((refused.status.as_u16(), &refused.json()["error"]["param"]), (400, &json!("response_id")));
    assert_eq!(server.app.requests(), 0);
}

#[tokio::test]
async fn the_events_of_a_background_response_can_be_replayed_from_any_number_on() {
    let (runner, permits) = GatedRunner::new("the quick brown fox ");
    let server = Setup::new(runner).start();
    let response = server.open(PATH, request(json!({"background": true, "stream": true}))).await;
    let mut body = response.into_body();
    let first = body.frame().await.unwrap().unwrap().into_data().unwrap();
    let first = String::from_utf8(first.to_vec()).unwrap();
    assert!(
        first.starts_with("event: response.created\n") && first.contains("event: response.queued\n"),
        "{first}"
    );
    let created: Value =
        serde_json::from_str(first.lines().nth(1).unwrap().strip_prefix("data: ").unwrap()).unwrap();
    // The client disconnects; the response continues.
    drop(body);
    let path = format!("{PATH}/{}", id(&created["response"]));
    let follower = server.open_get(&format!("{path}?stream=true")).await;
    drop(permits);
    let all = events(&Answer::read(follower).await);
    assert_eq!(all.first().unwrap()["type"], "response.created");
    assert_eq!(all.last().unwrap()["type"], "response.incomplete");
    let done = until_final(&server, &path).await;
    assert_eq!(all.last().unwrap()["response"], done);
    // A client can replay all events, or only those after a sequence number.
    assert_eq!(events(&server.get(&format!("{path}?stream=true")).await), all);
    let rest = server.get(&format!("{path}?stream=true&starting_after=4")).await.body;
    let rest: Vec<&str> = rest.split("\n\n").filter(|event| event.starts_with("event: ")).collect();
    assert_eq!(rest.len(), all.len() - 5);
    assert!(rest[0].contains("\"sequence_number\":5"), "{}", rest[0]);
    assert_eq!(server.get(&format!("{path}?stream=maybe")).await.status, 400);
}

#[tokio::test]
async fn a_background_response_is_in_its_conversation_before_it_is_final() {
    let directory = tempfile::tempdir().unwrap();
    let store =
        StoreConfig { response_store_dir: Some(directory.path().to_owned()), ..StoreConfig::default() };
    let (runner, permits) = GatedRunner::new("the quick brown fox ");
    let server = Setup { store, ..Setup::new(runner) }.start();
    let begin = async || {
        let conversation = id(&server.post(CONVERSATIONS, "{}").await.json());
        let begun = json!({"background": true, "conversation": conversation});
        let begun = server.post(PATH, request(begun)).await.json();
        (conversation, format!("{PATH}/{}", id(&begun)))
    };
    let (conversation, path) = begin().await;
    let record = directory.path().join(format!("{conversation}.record"));
    replace_with_pipe(&record);
    drop(permits);
    let mut pipe = opened_pipe(&record).await;
    let status = server.get(&path).await.json()["status"].clone();
    pipe.write_all(b"\n").unwrap();
    assert_eq!(status, "in_progress", "the conversation does not have its items yet");
    // The record is a pipe, to which the server cannot add items.
    let failed = until_final(&server, &path).await;
    let message =
        "the response could not be added to its conversation: the conversation could not be written";
    assert_eq!((&failed["status"], &failed["error"]["message"]), (&json!("failed"), &json!(message)));

    let (conversation, path) = begin().await;
    let done = until_final(&server, &path).await;
    let items = server.get(&format!("{CONVERSATIONS}/{conversation}/items?order=asc")).await.json();
    assert_eq!(items["data"].as_array().unwrap().len(), 2);
    assert_eq!(items["data"][1], done["output"][0]);
}

/// Replaces the record of a conversation with a pipe. The server waits for the other end when it opens the record to
/// add items.
fn replace_with_pipe(record: &Path) {
    std::fs::remove_file(record).unwrap();
    let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
    rustix::fs::mknodat(rustix::fs::CWD, record, rustix::fs::FileType::Fifo, mode, 0).unwrap();
}

/// Waits until the server has opened the pipe, and returns its other end.
async fn opened_pipe(record: &Path) -> File {
    // With `O_NONBLOCK`, the pipe cannot be opened for writing until the server has opened it for reading.
    let flags = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
    eventually(async || File::options().write(true).custom_flags(flags).open(record).ok()).await
}

#[tokio::test]
async fn a_response_is_stored_with_its_turn_even_if_the_client_disconnects() {
    let directory = tempfile::tempdir().unwrap();
    let store =
        StoreConfig { response_store_dir: Some(directory.path().to_owned()), ..StoreConfig::default() };
    let (runner, permits) = GatedRunner::new("the quick brown fox ");
    let server = Setup { store, ..Setup::new(runner) }.start();
    let conversation = id(&server.post(CONVERSATIONS, "{}").await.json());
    let record = directory.path().join(format!("{conversation}.record"));
    let joining = async {
        // The server reads the record while it prepares the request, so replace the record after that.
        eventually(async || (server.engine.handle().submissions() != 0).then_some(())).await;
        replace_with_pipe(&record);
        drop(permits);
        opened_pipe(&record).await
    };
    let mut pipe = tokio::select! {
        _ = server.open(PATH, request(json!({"conversation": conversation}))) => {
            panic!("the response waits for its conversation")
        }
        pipe = joining => pipe,
    };
    // The client has disconnected. The record is a pipe, to which the server cannot add items, so the response fails.
    pipe.write_all(b"\n").unwrap();
    let stored = eventually(async || {
        let files = std::fs::read_dir(directory.path()).unwrap();
        let mut names = files.map(|file| file.unwrap().file_name().into_string().unwrap());
        names.find(|name| name.starts_with("resp_"))
    });
    let stored = stored.await;
    let response = server.get(&format!("{PATH}/{}", stored.trim_end_matches(".record"))).await;
    assert_eq!(response.json()["status"], "failed", "{}", response.body);
}

#[tokio::test]
async fn a_response_that_was_incomplete_when_the_process_ended_has_failed() {
    let directory = tempfile::tempdir().unwrap();
    let store =
        || StoreConfig { response_store_dir: Some(directory.path().to_owned()), ..StoreConfig::default() };
    let (runner, permits) = GatedRunner::new("x");
    let server = Setup { store: store(), ..Setup::new(runner) }.start();
    let begun = server.post(PATH, request(json!({"background": true}))).await.json();
    // To simulate a process that dies while it generates the response, copy the record as soon as it exists.
    let path = directory.path().join(format!("{}.record", id(&begun)));
    eventually(async || path.exists().then_some(())).await;
    let copy = tempfile::tempdir().unwrap();
    std::fs::copy(&path, copy.path().join(path.file_name().unwrap())).unwrap();
    drop(permits);
    let copied = StoreConfig { response_store_dir: Some(copy.path().to_owned()), ..StoreConfig::default() };
    let server = Setup { store: copied, ..scripted(&["One."]) }.start();
    let lost = server.get(&format!("{PATH}/{}", id(&begun))).await.json();
    let message = "the server stopped before the response was complete, or failed to store it";
    let error = json!({"code": "server_error", "message": message});
    assert_eq!((&lost["status"], &lost["error"]), (&json!("failed"), &error));
    let next = server.post(PATH, request(json!({"previous_response_id": id(&begun)}))).await;
    assert_eq!(next.status, 200, "the lost response counts as ended: {}", next.body);
}

#[tokio::test]
async fn a_background_response_that_cannot_be_stored_fails_with_the_reason() {
    // The response exceeds the limit, but its first record does not.
    let small = StoreConfig { max_stored_bytes: 4096, ..StoreConfig::default() };
    let server = Setup { store: small, ..scripted(&[&"x".repeat(6000)]) }.start();
    let parameters = json!({"background": true, "max_output_tokens": 7000});
    let begun = server.post(PATH, request(parameters)).await.json();
    let path = format!("{PATH}/{}", id(&begun));
    // The response is completed before the server tries to store it, so wait for the error instead of a final status.
    let failed = eventually(async || {
        let response = server.get(&path).await.json();
        (!response["error"].is_null()).then_some(response)
    });
    let failed = failed.await;
    let error = json!({"code": "server_error", "message": "the response could not be stored"});
    assert_eq!((&failed["status"], &failed["error"]), (&json!("failed"), &error), "{failed}");
    assert_eq!((&failed["output"], &failed["completed_at"]), (&json!([]), &Value::Null));
    let items = server.get(&format!("{path}/input_items")).await.json();
    assert_eq!(items["data"][0]["content"][0]["text"], "Hi");
}

/// Polls a response until it has its final status.
async fn until_final(server: &Server, path: &str) -> Value {
    let done = eventually(async || {
        let response = server.get(path).await.json();
        let running = ["queued", "in_progress"].contains(&response["status"].as_str().unwrap());
        (!running).then_some(response)
    });
    done.await
}

/// Polls until `poll` returns a value.
async fn eventually<T>(poll: impl AsyncFn() -> Option<T>) -> T {
    let polled = tokio::time::timeout(Duration::from_secs(30), async {
        loop {
            if let Some(value) = poll().await {
                return value;
            }
            tokio::task::yield_now().await;
        }
    });
    polled.await.unwrap()
}

impl Server {
    async fn open_get(&self, path: &str) -> axum::response::Response {
        self.send(Request::get(path).body(Body::empty()).unwrap()).await
    }
}
