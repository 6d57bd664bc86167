//! Tests requests with images: which images are fetched or refused, how many tokens they have, and that tenants do not
//! share encoded images.

use std::path::Path;

use axum::body::Body;
use axum::http::Request;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Value, json};

use crate::harness::{Answer, Setup, chat, completion};
use crate::responses::{PATH, request};

const CHAT: &str = "/v3/chat/completions";

/// An image of one pixel.
pub(crate) const IMAGE: &str = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5\
                     ErkJggg==";

/// Returns a BMP file with one gray pixel, followed by `padding` zero bytes. `shade` is the brightness of the pixel.
fn bitmap(shade: u8, padding: usize) -> Vec<u8> {
    let mut file = b"BM".to_vec();
    for field in [58u32, 0, 54, 40, 1, 1, 1 | 24 << 16, 0, 4, 0, 0, 0, 0] {
        file.extend(field.to_le_bytes());
    }
    file.extend([shade, shade, shade, 0]);
    file.resize(file.len() + padding, 0);
    file
}

/// Returns a setup of a server that may read images in `directory`.
fn reading_files(directory: &Path) -> Setup {
    let mut setup = Setup::reading_images();
    setup.media.allowed_local_media_path = Some(directory.to_owned());
    setup
}

/// Writes to `directory` an image that differs from those with other numbers, and returns its path.
fn image_file(directory: &Path, number: u8, padding: usize) -> String {
    let path = directory.join(format!("{number}.bmp"));
    std::fs::write(&path, bitmap(number, padding)).unwrap();
    path.display().to_string()
}

fn image(url: &str) -> Value {
    json!({"type": "image_url", "image_url": {"url": url}})
}

#[tokio::test]
async fn a_truncated_conversation_has_as_many_fetched_images_as_fit() {
    let directory = tempfile::tempdir().unwrap();
    // The image memory has room for 27 images, and the part of the conversation that fits has 17. Several attempts to
    // truncate the conversation must therefore not hold memory at the same time.
    let server = reading_files(directory.path()).start();
    let turn = |number| {
        let image = json!({"type": "input_image", "image_url": image_file(directory.path(), number, 0)});
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
    // The answer may have 8 tokens, so the prompt may have 1,016 of the 1,024 tokens of the context length.
    let tokens = count(&turns).await;
    assert!(tokens <= 1016 && tokens + tokens_of_turn > 1016, "{tokens} tokens, {tokens_of_turn} for a turn");
}

#[tokio::test]
async fn a_truncated_conversation_has_as_many_pixels_as_are_allowed() {
    let server = Setup::reading_images().start();
    // This is the header of a PNG file with 49,000,000 pixels. The images of a request may have 400,000,000 pixels in
    // total.
    let mut file = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR".to_vec();
    file.extend([7000_u32.to_be_bytes(), 7000_u32.to_be_bytes()].concat());
    file.extend([8, 2, 0, 0, 0]);
    let url = format!("data:image/png;base64,{}", BASE64_STANDARD.encode(file));
    let turn = json!({"role": "user", "content": [{"type": "input_image", "image_url": url}]});
    let count = async |turns: usize, truncation: &str| {
        let body = request(json!({"input": vec![turn.clone(); turns], "truncation": truncation}));
        server.post("/v3/responses/input_tokens", body).await
    };
    let refused = count(12, "disabled").await;
    let error = &refused.json()["error"];
    assert_eq!((refused.status.as_u16(), &error["code"]), (400, &json!("array_above_max_length")), "{error}");
    assert_eq!(error["param"], "input[8].content[0].image_url", "{error}");
    let truncated = count(12, "auto").await;
    assert_eq!(truncated.status, 200, "{}", truncated.body);
    assert_eq!(truncated.json(), count(8, "disabled").await.json());
}

#[tokio::test]
async fn fetched_images_that_can_never_fit_into_the_buffer_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let mut setup = reading_files(directory.path());
    // Each of the two files fits into the buffer, but both together do not.
    (setup.limits.max_body_bytes, setup.limits.max_buffered_body_bytes) = (64 << 10, 256 << 10);
    let server = setup.start();
    let files: Vec<String> = (0..2).map(|number| image_file(directory.path(), number, 140_000)).collect();
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
async fn both_endpoints_report_the_tokens_of_images() {
    let server = Setup::reading_images().start();
    for count in 0..3 {
        let expected = (count > 0).then_some(count * 16);
        let messages = json!([{"role": "user", "content": vec![image(IMAGE); count]}]);
        if count > 0 {
            let usage = &server.post(CHAT, chat(json!({"messages": messages}))).await.json()["usage"];
            assert_eq!(usage["prompt_tokens_details"]["image_tokens"], json!(expected), "{usage}");
        }
        let mut content = vec![json!({"type": "input_text", "text": "a"})];
        content.extend(vec![json!({"type": "input_image", "image_url": IMAGE}); count]);
        let input = json!([{"role": "user", "content": content}]);
        let response = server.post(PATH, request(json!({"input": input}))).await.json();
        let details = &response["usage"]["input_tokens_details"];
        assert_eq!(details.get("image_tokens").cloned(), expected.map(|tokens| json!(tokens)), "{details}");
        // The stored response has the same usage.
        let stored = server.get(&format!("{PATH}/{}", response["id"].as_str().unwrap())).await.json();
        assert_eq!(stored["usage"], response["usage"]);
    }
}

#[tokio::test]
async fn the_tokens_of_images_are_counted_without_decoding_them() {
    let server = Setup::reading_images().start();
    // The header of the image is complete, but its pixels are missing.
    let truncated = &IMAGE[..70];
    let input = |url: &str| {
        let image = json!({"type": "input_image", "image_url": url});
        request(json!({"input": [{"role": "user", "content": [image]}]}))
    };
    let response = server.post(PATH, input(IMAGE)).await.json();
    let counted = server.post("/v3/responses/input_tokens", input(truncated)).await;
    assert_eq!(counted.status, 200, "{}", counted.body);
    assert_eq!(counted.json()["input_tokens"], response["usage"]["input_tokens"]);
    let refused = server.post(PATH, input(truncated)).await;
    let param = &refused.json()["error"]["param"];
    assert_eq!((refused.status.as_u16(), param), (400, &json!("input[0].content[0].image_url")));
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
        // The prompts begin with different texts, so the prefix cache never contains the image.
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
