//! Tests the limits of stored objects: the size of a request's stored items, the size of a conversation, the size of a
//! page, and the number of concurrent requests.

use axum::body::Body;
use axum::http::Request;
use axum::response::Response;
use serde_json::{Value, json};

use crate::harness::{Answer, Server, Setup};
use crate::responses::{PATH, QWEN, events, request};

const CONVERSATIONS: &str = "/v3/conversations";

fn start() -> Server {
    let mut setup = Setup::scripted(QWEN, &[], &["One."]);
    setup.limits.max_body_bytes = 8 << 20;
    setup.store.max_stored_bytes = 1 << 30;
    setup.start()
}

fn said(text: &str) -> Value {
    json!({"role": "user", "content": text})
}

/// Creates a conversation with these items. Returns its path and the IDs of the items on its first page.
async fn conversation(server: &Server, items: &[Value]) -> (String, Vec<String>) {
    let created = server.post(CONVERSATIONS, json!({"items": items}).to_string()).await;
    assert_eq!(created.status, 200, "{}", created.body);
    let path = format!("{CONVERSATIONS}/{}", created.json()["id"].as_str().unwrap());
    let listed = server.get(&format!("{path}/items?order=asc")).await.json();
    let ids = listed["data"].as_array().unwrap().iter().map(|item| item["id"].as_str().unwrap().to_owned());
    (path, ids.collect())
}

fn references(id: &str, count: usize) -> Vec<Value> {
    vec![json!({"type": "item_reference", "id": id}); count]
}

fn refusal(answer: &Answer) -> (u16, Value, Value) {
    let error = &answer.json()["error"];
    (answer.status.as_u16(), error["code"].clone(), error["param"].clone())
}

/// Requests as many answers as the server sends at the same time, and one more. Returns the answers, which have not
/// been read, and the refusal.
async fn fill<F: Future<Output = Response>>(get: impl Fn() -> F) -> (Vec<Response>, Answer) {
    let mut unread = Vec::new();
    for _ in 0..64 {
        let answer = get().await;
        assert_eq!(answer.status(), 200);
        unread.push(answer);
    }
    let over = Answer::read(get().await).await;
    assert_eq!(over.status, 429, "{}", over.body);
    (unread, over)
}

#[tokio::test]
async fn the_items_that_a_request_refers_to_are_limited_together() {
    let server = start();
    let large = said(&"x".repeat(6 << 20));
    let (path, mut ids) = conversation(&server, std::slice::from_ref(&large)).await;
    for _ in 0..2 {
        let added = server.post(&format!("{path}/items"), json!({"items": [large]}).to_string()).await;
        ids.push(added.json()["first_id"].as_str().unwrap().to_owned());
    }
    let references: Vec<Value> = ids.iter().flat_map(|id| references(id, 1)).collect();
    let many = server.post(PATH, request(json!({"input": references}))).await;
    assert_eq!(refusal(&many), (400, json!("context_length_exceeded"), json!("input[2].id")));
    assert!(many.body.contains("the stored items to which the request refers"), "{}", many.body);
    // The limit also applies to the items of a new conversation.
    let many = server.post(CONVERSATIONS, json!({"items": references}).to_string()).await;
    assert_eq!(refusal(&many), (400, json!("context_length_exceeded"), json!("items[2].id")));
}

#[tokio::test]
async fn an_item_can_be_referred_to_only_once() {
    let server = start();
    let (path, ids) = conversation(&server, &[said("a"), said("b")]).await;
    let duplicate = |param: &str| (400, json!("invalid_value"), json!(param));
    let input = |input: Vec<Value>| request(json!({"input": input}));
    let both = [references(&ids[1], 1), references(&ids[0], 1)].concat();
    let referring = server.post(&format!("{PATH}/input_tokens"), input(both)).await;
    let written = server.post(&format!("{PATH}/input_tokens"), input(vec![said("b"), said("a")])).await;
    assert_eq!(referring.json(), written.json(), "{}", referring.body);
    assert_eq!(refusal(&server.post(PATH, input(references(&ids[0], 2))).await), duplicate("input"));
    let items_path = format!("{path}/items");
    for (path, count) in [(CONVERSATIONS, 2), (items_path.as_str(), 1)] {
        let items = json!({"items": references(&ids[0], count)}).to_string();
        assert_eq!(refusal(&server.post(path, items).await), duplicate("items"), "{path}");
    }
    let conversation = path.rsplit('/').next().unwrap();
    for (count, code) in [(1, "invalid_value"), (1025, "array_above_max_length")] {
        let body = json!({"input": references(&ids[0], count), "conversation": conversation});
        let refused = server.post(PATH, request(body)).await;
        assert_eq!(refusal(&refused), (400, json!(code), json!("input")));
    }
}

#[tokio::test]
async fn a_history_that_is_too_large_is_rejected_before_it_is_parsed() {
    let server = start();
    let large = said(&"x".repeat(7 << 20));
    let (path, _) = conversation(&server, std::slice::from_ref(&large)).await;
    let (_, others) = conversation(&server, std::slice::from_ref(&large)).await;
    let (added, body) = (format!("{path}/items"), json!({"items": [large]}).to_string());
    let add = || server.post(&added, body.clone());
    assert_eq!(add().await.status, 200);
    let name = path.rsplit('/').next().unwrap();
    // The conversation has 14 MiB, which is within the limit of a request. With one more item, it exceeds this limit.
    let body = json!({"conversation": name, "input": references(&others[0], 1)});
    let more = server.post(PATH, request(body)).await;
    assert_eq!(refusal(&more), (400, json!("context_length_exceeded"), json!("input[0].id")));
    assert_eq!(add().await.status, 200);
    let full = add().await;
    assert_eq!(refusal(&full), (400, json!("array_above_max_length"), json!("items")));
    assert!(full.body.contains("the conversation is full"), "{}", full.body);
    let over = server.post(PATH, request(json!({"conversation": name}))).await;
    assert_eq!(refusal(&over), (400, json!("invalid_value"), json!("conversation")));
}

#[tokio::test]
async fn a_page_is_limited_in_bytes_and_continues_where_it_ended() {
    let server = start();
    let items: Vec<Value> = (0..9).map(|_| said(&"x".repeat(300 << 10))).collect();
    let (path, first) = conversation(&server, &items).await;
    assert_eq!(first.len(), 3, "a page has at most 1 MiB");
    let (mut seen, mut after) = (Vec::new(), String::new());
    loop {
        let page = server.get(&format!("{path}/items?order=asc&limit=100{after}")).await;
        assert!(page.body.len() < (1 << 20) + 1024);
        let page = page.json();
        seen.extend(page["data"].as_array().unwrap().iter().map(|item| item["id"].clone()));
        after = format!("&after={}", page["last_id"].as_str().unwrap());
        if page["has_more"] == false {
            break;
        }
    }
    assert_eq!(seen.len(), 9);
}

#[tokio::test]
async fn replays_of_events_that_are_not_read_are_limited() {
    let server = start();
    // Several events contain the tool definition, so the replay is large. The prompt does not contain the definition,
    // because `tool_choice` is `none`.
    let tool =
        json!({"type": "function", "name": "f", "description": "x".repeat(30 << 10), "parameters": {}});
    let parameters = json!({"background": true, "stream": true, "tools": [tool], "tool_choice": "none"});
    let created = events(&server.post(PATH, request(parameters)).await);
    let path = format!("{PATH}/{}?stream=true", created[0]["response"]["id"].as_str().unwrap());
    let get = || server.send(Request::get(&path).body(Body::empty()).unwrap());
    let replay = Answer::read(get().await).await;
    assert!(replay.body.len() > 64 << 10, "{} bytes", replay.body.len());
    assert_eq!(replay.headers["content-type"], "text/event-stream; charset=utf-8");
    assert_eq!(events(&replay), created);
    let (mut unread, _) = fill(get).await;
    unread.pop();
    assert_eq!(get().await.status(), 200);
}

#[tokio::test]
async fn requests_for_stored_objects_have_their_own_limit() {
    let server = start();
    let (path, _) = conversation(&server, &[said(&"x".repeat(200 << 10))]).await;
    let get = || server.send(Request::get(format!("{path}/items")).body(Body::empty()).unwrap());
    let (mut unread, over) = fill(get).await;
    assert!(over.headers.contains_key("retry-after"));
    assert_eq!(server.app.requests(), 0);
    assert_eq!(server.post(PATH, request(json!({}))).await.status, 200, "other requests are still served");
    unread.pop();
    assert_eq!(get().await.status(), 200);
}
