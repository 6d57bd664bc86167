//! Tests that objects and cached prompts of one tenant are invisible to every other tenant.

use axum::body::Body;
use axum::http::Request;
use serde_json::{Value, json};

use crate::harness::{Answer, GatedRunner, Server, Setup, chat, completion};
use crate::responses::{PATH, QWEN, TEXT, request};

const CONVERSATIONS: &str = "/v3/conversations";
const ALICE: &str = "0000000000000000000000000000a11c";
const BOB: &str = "00000000000000000000000000000b0b";

impl Server {
    /// Sends a request on behalf of this tenant, or without a tenant.
    async fn ask(&self, tenant: Option<&str>, method: &str, path: &str, body: String) -> Answer {
        let mut request =
            Request::builder().method(method).uri(path).header("content-type", "application/json");
        if let Some(tenant) = tenant {
            request = request.header("x-ovfleet-tenant", tenant);
        }
        Answer::read(self.send(request.body(Body::from(body)).unwrap()).await).await
    }
}

fn id(value: &Value) -> String {
    value["id"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn responses_and_conversations_belong_to_the_tenant_that_created_them() {
    let server = Setup::scripted(QWEN, &[], &["One.", "Two."]).start();
    let create = |tenant| server.ask(tenant, "POST", PATH, request(json!({"max_output_tokens": 200})));
    let response = create(Some(ALICE)).await.json();
    let items = json!({"items": [{"role": "user", "content": "a"}]}).to_string();
    let conversation = server.ask(Some(ALICE), "POST", CONVERSATIONS, items).await.json();
    let path = format!("{CONVERSATIONS}/{}", id(&conversation));
    let listed = server.ask(Some(ALICE), "GET", &format!("{path}/items"), String::new()).await.json();
    let item = id(&listed["data"][0]);
    let output = response["output"][0]["id"].clone();

    let calls = [
        ("GET", format!("{PATH}/{}", id(&response)), String::new()),
        ("GET", format!("{PATH}/{}/input_items", id(&response)), String::new()),
        ("POST", format!("{PATH}/{}/cancel", id(&response)), String::new()),
        ("POST", PATH.to_owned(), request(json!({"previous_response_id": response["id"]}))),
        ("POST", PATH.to_owned(), request(json!({"conversation": conversation["id"]}))),
        ("POST", PATH.to_owned(), request(json!({"input": [{"type": "item_reference", "id": output}]}))),
        ("POST", PATH.to_owned(), request(json!({"input": [{"type": "item_reference", "id": item}]}))),
        ("POST", format!("{PATH}/input_tokens"), request(json!({"previous_response_id": response["id"]}))),
        ("POST", CONVERSATIONS.to_owned(), json!({"items": [{"id": output}]}).to_string()),
        ("GET", path.clone(), String::new()),
        ("POST", path.clone(), json!({"metadata": {"a": "b"}}).to_string()),
        ("GET", format!("{path}/items"), String::new()),
        ("POST", format!("{path}/items"), json!({"items": [{"role": "user", "content": "b"}]}).to_string()),
        ("GET", format!("{path}/items/{item}"), String::new()),
        ("DELETE", format!("{path}/items/{item}"), String::new()),
        ("DELETE", path, String::new()),
        ("DELETE", format!("{PATH}/{}", id(&response)), String::new()),
    ];
    for other in [Some(BOB), None] {
        for (method, path, body) in &calls {
            let answer = server.ask(other, method, path, body.clone()).await;
            assert_eq!(answer.status, 404, "{method} {path} {body}: {}", answer.body);
            let code = answer.json()["error"]["code"].as_str().unwrap().to_owned();
            assert!(code.ends_with("_not_found"), "{code}");
        }
    }
    for (method, path, body) in &calls {
        let answer = server.ask(Some(ALICE), method, path, body.clone()).await;
        let is_refused = path.ends_with("/cancel");
        assert_eq!(
            answer.status,
            if is_refused { 400 } else { 200 },
            "{method} {path} {body}: {}",
            answer.body
        );
    }
}

#[tokio::test]
async fn a_background_response_belongs_to_its_tenant_while_it_is_generated() {
    let (runner, permits) = GatedRunner::new("the quick brown fox ");
    let server = Setup::new(runner).start();
    let body = request(json!({"background": true, "stream": true}));
    let post =
        Request::post(PATH).header("content-type", "application/json").header("x-ovfleet-tenant", ALICE);
    let response = server.send(post.body(Body::from(body)).unwrap()).await;
    let path = format!("{PATH}/{}", response.headers()["x-request-id"].to_str().unwrap());
    for other in [Some(BOB), None] {
        for (method, path) in [
            ("GET", path.clone()),
            ("GET", format!("{path}?stream=true")),
            ("POST", format!("{path}/cancel")),
            ("DELETE", path.clone()),
            ("GET", format!("{path}/input_items")),
        ] {
            let answer = server.ask(other, method, &path, String::new()).await;
            assert_eq!(answer.status, 404, "{method} {path}: {}", answer.body);
        }
    }
    let live = server.ask(Some(ALICE), "GET", &path, String::new()).await;
    assert_eq!(live.json()["status"], "queued");
    drop(permits);
    drop(response);
    let cancelled = server.ask(Some(ALICE), "POST", &format!("{path}/cancel"), String::new()).await;
    assert_eq!(cancelled.status, 200, "{}", cancelled.body);
}

#[tokio::test]
async fn cached_tokens_reveal_nothing_about_the_prompts_of_others() {
    let server = Server::repeating(TEXT);
    let long = "a long prompt that many begin with ".repeat(4);
    let said = json!([{"role": "user", "content": long}]);
    let bodies = [
        ("/v3/chat/completions", chat(json!({"messages": said}))),
        ("/v3/completions", completion(json!({"prompt": long.clone() + "!"}))),
        (PATH, request(json!({"input": format!("? {long}")}))),
    ];
    for (path, body) in bodies {
        let mut cached = Vec::new();
        for tenant in [Some(ALICE), Some(ALICE), Some(BOB), None, Some(BOB), None] {
            let answer = server.ask(tenant, "POST", path, body.clone()).await.json();
            let usage = &answer["usage"];
            let details = usage.get("prompt_tokens_details").unwrap_or(&usage["input_tokens_details"]);
            cached.push(details["cached_tokens"].as_u64().unwrap() > 0);
        }
        assert_eq!(cached, [false, true, false, false, true, true], "{path}");
    }
    // With a new salt, even a request of the same tenant does not hit the prefix cache.
    let salted = chat(json!({"messages": said, "cache_salt": "s"}));
    let answer = server.ask(Some(ALICE), "POST", "/v3/chat/completions", salted).await.json();
    assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
}

#[tokio::test]
async fn a_malformed_tenant_is_rejected_everywhere() {
    let server = Server::repeating(TEXT);
    for (method, path, body) in [
        ("POST", "/v3/chat/completions", chat(json!({}))),
        ("POST", PATH, request(json!({}))),
        ("GET", "/v3/responses/resp_1", String::new()),
        ("POST", CONVERSATIONS, "{}".to_owned()),
    ] {
        let answer = server.ask(Some("alice"), method, path, body).await;
        assert_eq!(
            (answer.status.as_u16(), &answer.json()["error"]["param"]),
            (400, &json!("x-ovfleet-tenant"))
        );
    }
}
