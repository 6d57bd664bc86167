//! Tests requests with images: which are fetched, which are refused, and who shares the encoded ones.

use std::path::Path;

use axum::body::Body;
use axum::http::Request;
use serde_json::{Value, json};

use crate::harness::{Answer, Setup, chat, completion};
use crate::responses::{PATH, request};

const CHAT: &str = "/v3/chat/completions";

/// An image of one pixel.
pub(crate) const IMAGE: &str = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5\
                     ErkJggg==";

/// A BMP file with one pixel in a shade of gray, which is followed by `padding` bytes.
fn bitmap(shade: u8, padding: usize) -> Vec<u8> {
    let mut file = b"BM".to_vec();
    for field in [58u32, 0, 54, 40, 1, 1, 1 | 24 << 16, 0, 4, 0, 0, 0, 0] {
        file.extend(field.to_le_bytes());
    }
    file.extend([shade, shade, shade, 0]);
    file.resize(file.len() + padding, 0);
    file
}

/// Returns a setup of a server that may read images in `folder`.
fn reading_files(folder: &Path) -> Setup {
    let mut setup = Setup::reading_images();
    setup.media.allowed_local_media_path = Some(folder.to_owned());
    setup
}

/// Writes an image to `folder` that differs from those with other numbers, and returns its path.
fn image_file(folder: &Path, number: u8, padding: usize) -> String {
    let path = folder.join(format!("{number}.bmp"));
    std::fs::write(&path, bitmap(number, padding)).unwrap();
    path.display().to_string()
}

fn image(url: &str) -> Value {
    json!({"type": "image_url", "image_url": {"url": url}})
}

#[tokio::test]
async fn a_truncated_conversation_has_as_many_fetched_images_as_fit() {
    let folder = tempfile::tempdir().unwrap();
    // The memory has room for 27 images, and a conversation that fits has 17. The attempts to truncate it must not add up.
    let server = reading_files(folder.path()).start();
    let turn = |number| {
        let image = json!({"type": "input_image", "image_url": image_file(folder.path(), number, 0)});
        json!({"role": "user", "content": [image, {"type": "input_text", "text": "x".repeat(20)}]})
    };
    let body = |turns: &[Value]| request(json!({"input": turns, "truncation": "auto"}));
    let turns: Vec<Value> = (0..40).map(turn).collect();
    let count = async |turns: &[Value]| {
        let answer = server.post("/v3/responses/input_tokens", body(turns)).await;
        assert_eq!(answer.status, 200, "{}", answer.body);
        answer.json()["input_tokens"].as_u64().unwrap()
    };
    let tokens_of_turn = count(&turns[..2]).await - count(&turns[..1]).await;
    // The answer takes 8 tokens of the context length of 1,024.
    let tokens = count(&turns).await;
    assert!(tokens <= 1016 && tokens + tokens_of_turn > 1016, "{tokens} tokens, {tokens_of_turn} for a turn");
}

#[tokio::test]
async fn fetched_images_that_can_never_fit_into_the_buffer_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let mut setup = reading_files(folder.path());
    // An eighth is reserved for small bodies.
    setup.limits.max_buffered_body_bytes = 256 << 10;
    let server = setup.start();
    let files: Vec<String> = (0..2).map(|number| image_file(folder.path(), number, 120_000)).collect();
    let body = |files: &[String]| {
        let parts: Vec<Value> = files.iter().map(|file| image(file)).collect();
        chat(json!({"messages": [{"role": "user", "content": parts}]}))
    };
    assert_eq!(server.post(CHAT, body(&files[..1])).await.status, 200);
    let refused = server.post(CHAT, body(&files)).await;
    let error = &refused.json()["error"];
    assert_eq!((refused.status.as_u16(), &error["code"]), (400, &json!("array_above_max_length")), "{error}");
    assert!(error["param"].as_str().unwrap().starts_with("messages[0].content["), "{error}");
}

#[tokio::test]
async fn texts_do_not_stand_for_images_however_many_prompts_there_are() {
    let server = Setup::reading_images().start();
    for prompt in [json!("a <image>"), json!(["a <image>", "b"]), json!(["a", "b <image>"])] {
        let refused = server.post("/v3/completions", completion(json!({"prompt": prompt}))).await;
        assert_eq!(
            (refused.status.as_u16(), &refused.json()["error"]["param"]),
            (400, &json!("prompt")),
            "{prompt}"
        );
    }
    let answer = server.post("/v3/completions", completion(json!({"prompt": ["a", "b"]}))).await;
    assert_eq!(answer.status, 200, "{}", answer.body);
}

#[tokio::test]
async fn conversations_store_only_images_that_a_response_can_have() {
    let server = Setup::reading_images().start();
    let image = json!({"type": "input_image", "image_url": IMAGE});
    let mut huge = image.clone();
    huge["detail"] = json!("huge");
    let item = |role: &str, image: &Value| json!({"items": [{"role": role, "content": [image]}]}).to_string();
    for (body, param) in [
        (item("user", &huge), "items[0].content[0].detail"),
        (item("system", &image), "items[0].content[0].type"),
        (item("assistant", &image), "items[0].content[0].type"),
    ] {
        let refused = server.post("/v3/conversations", body).await;
        assert_eq!((refused.status.as_u16(), &refused.json()["error"]["param"]), (400, &json!(param)));
    }
    let stored = server.post("/v3/conversations", item("user", &image)).await.json();
    let response = server.post(PATH, request(json!({"conversation": stored["id"]}))).await;
    assert_eq!(response.status, 200, "{}", response.body);
}

#[tokio::test]
async fn tenants_and_salts_do_not_share_encoded_images() {
    let server = Setup::reading_images().start();
    let encoded = async || {
        let metrics = server.get("/metrics").await.body;
        let line = metrics.lines().find(|line| line.starts_with("ovfleet_server_encoded_images_total "));
        line.unwrap().rsplit(' ').next().unwrap().parse::<f64>().unwrap()
    };
    let alice = "0000000000000000000000000000a11c";
    let bob = "00000000000000000000000000000b0b";
    let cases = [
        (Some(alice), None, 1.0),
        (Some(alice), None, 1.0),
        (Some(bob), None, 2.0),
        (Some(alice), Some("s"), 3.0),
        (None, None, 4.0),
        (None, Some("s"), 5.0),
        (None, Some("s"), 5.0),
        (Some(bob), None, 5.0),
    ];
    for (number, (tenant, salt, expected)) in cases.into_iter().enumerate() {
        // The prompts begin with different texts, so the prefix cache does not have the image.
        let text = json!({"type": "text", "text": format!("{number}{}", "x".repeat(20))});
        let messages = json!([{"role": "user", "content": [text, image(IMAGE)]}]);
        let mut sent = Request::post(CHAT).header("content-type", "application/json");
        if let Some(tenant) = tenant {
            sent = sent.header("x-ovfleet-tenant", tenant);
        }
        let body = chat(json!({"messages": messages, "cache_salt": salt}));
        let answer = Answer::read(server.send(sent.body(Body::from(body)).unwrap()).await).await;
        assert_eq!(answer.status, 200, "{}", answer.body);
        assert_eq!(encoded().await, expected, "request {number}");
    }
    let metrics = server.get("/metrics").await.body;
    for lookups in [r#"{result="hit"} 3"#, r#"{result="miss"} 5"#] {
        let line = format!("ovfleet_server_image_cache_lookups_total{lookups}");
        assert!(metrics.lines().any(|other| other == line), "{line}");
    }
    assert!(!metrics.lines().any(|line| line == "ovfleet_server_image_cache_bytes 0"), "outputs are stored");
}
