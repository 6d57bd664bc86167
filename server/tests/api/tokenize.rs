//! Tests `/tokenize` and `/detokenize` in OVMS's and vLLM's formats.

use serde_json::{Value, json};
use server_engine::TokenId;

use crate::harness::{RepeatingRunner, Server, Setup};

async fn ask(path: &str, body: Value) -> Value {
    let server = Server::repeating("x");
    let answer = server.post(path, body.to_string()).await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    answer.json()
}

async fn refused(body: Value) -> (String, String) {
    let server = Server::repeating("x");
    let answer = server.post("/v3/tokenize", body.to_string()).await;
    assert!(answer.status.is_client_error(), "{}", answer.body);
    let error = answer.json()["error"].clone();
    let text = |field: &str| error[field].as_str().unwrap_or_default().to_owned();
    (text("param"), text("message"))
}

#[tokio::test]
async fn a_text_is_tokenized_at_every_path() {
    for path in ["/v3/tokenize", "/v1/tokenize", "/tokenize"] {
        for name in ["text", "prompt"] {
            let answer = ask(path, json!({"model": "test-model", name: "Hié"})).await;
            assert_eq!(answer, json!({"tokens": [72, 105, 195, 169], "count": 4, "max_model_len": 512}));
        }
    }
}

#[tokio::test]
async fn the_lists_of_several_texts_are_truncated_and_padded() {
    let texts = json!(["Hello", "Hi", ""]);
    let plain = ask("/v3/tokenize", json!({"model": "test-model", "text": texts})).await;
    assert_eq!(
        (&plain["tokens"], &plain["count"]),
        (&json!([[72, 101, 108, 108, 111], [72, 105], []]), &json!(7))
    );
    let cut = ask("/v3/tokenize", json!({"model": "test-model", "text": texts, "max_length": 3})).await;
    assert_eq!(cut["tokens"], json!([[72, 101, 108], [72, 105], []]));
    let filled = json!({"model": "test-model", "text": texts, "max_length": 3, "pad_to_max_length": true});
    let filled = ask("/v3/tokenize", filled).await;
    assert_eq!(filled["tokens"], json!([[72, 101, 108], [72, 105, 256], [256, 256, 256]]));
    assert_eq!(filled["count"], 5);
    let left = json!({"model": "test-model", "text": "Hi", "max_length": 3, "pad_to_max_length": true, "padding_side": "left"});
    assert_eq!(ask("/v3/tokenize", left).await["tokens"], json!([256, 72, 105]));
}

#[tokio::test]
async fn a_conversation_has_the_tokens_that_the_chat_endpoint_counts() {
    let server = Server::repeating("x");
    let messages = json!([{"role": "user", "content": "Hi"}]);
    let body = json!({"model": "test-model", "messages": messages, "return_token_strs": true});
    let tokens = server.post("/tokenize", body.to_string()).await.json();
    let chat =
        json!({"model": "test-model", "messages": messages, "max_tokens": 1, "return_token_ids": true});
    let chat = server.post("/v3/chat/completions", chat.to_string()).await.json();
    assert_eq!(tokens["tokens"], chat["prompt_token_ids"]);
    assert_eq!(tokens["count"], chat["usage"]["prompt_tokens"]);
    assert_eq!((&tokens["tokens"][0], &tokens["token_strs"][0]), (&json!(257), &json!("<|im_start|>")));
    let closed = json!({"model": "test-model", "messages": messages, "add_generation_prompt": false});
    let closed = server.post("/tokenize", closed.to_string()).await.json();
    assert!(closed["count"].as_u64() < tokens["count"].as_u64());
}

#[tokio::test]
async fn tokens_have_a_text() {
    for path in ["/v3/detokenize", "/v1/detokenize", "/detokenize"] {
        let answer = ask(path, json!({"model": "test-model", "tokens": [72, 105, 258]})).await;
        assert_eq!(answer, json!({"prompt": "Hi<|im_end|>", "text": "Hi<|im_end|>"}));
    }
    let plain = json!({"model": "test-model", "tokens": [72, 105, 258], "skip_special_tokens": true});
    assert_eq!(ask("/v3/detokenize", plain).await["text"], "Hi");
}

#[tokio::test]
async fn the_text_of_tokens_is_limited() {
    let mut setup = Setup::new(RepeatingRunner::new([TokenId::from(b'x')]));
    setup.limits.max_body_bytes = 4 << 20;
    let server = setup.start();
    // The text of each of these tokens has 12 bytes.
    let detokenize = async |tokens: usize| {
        let body = json!({"model": "test-model", "tokens": vec![257; tokens]});
        server.post("/v3/detokenize", body.to_string()).await
    };
    let longest = (4 << 20) / 12;
    assert_eq!(detokenize(longest).await.json()["text"].as_str().unwrap().len(), 12 * longest);
    let refused = detokenize(longest + 1).await;
    let error = &refused.json()["error"];
    assert_eq!((refused.status.as_u16(), &error["param"]), (400, &json!("tokens")));
    let problem = "tokens: the text of the tokens has 4194312 bytes (limit: 4194304 bytes)";
    assert_eq!((&error["code"], &error["message"]), (&json!("array_above_max_length"), &json!(problem)));
}

#[tokio::test]
async fn invalid_tokenize_requests_are_rejected() {
    for (body, param, problem) in [
        (json!({"model": "test-model"}), "text", "text: one of text, prompt and messages is required"),
        (
            json!({"model": "test-model", "text": "a", "prompt": "b"}),
            "text",
            "text: only one of text, prompt and messages can be given",
        ),
        (json!({"model": "other", "text": "a"}), "model", "this server does not serve the model \"other\""),
        (
            json!({"model": "test-model", "text": "a", "max_length": 0}),
            "max_length",
            "max_length: 0 is not an integer from 1 to 4294967295",
        ),
        (
            json!({"model": "test-model", "text": "a", "pad_to_max_length": true}),
            "pad_to_max_length",
            "pad_to_max_length: requires max_length",
        ),
        (
            json!({"model": "test-model", "text": "a", "pad_to_max_length": true, "max_length": 4_000_000}),
            "max_length",
            "max_length: padding each text to 4000000 tokens exceeds the limit of 1048576 tokens in all texts (texts: 1)",
        ),
        (
            json!({"model": "test-model", "text": "a", "padding_side": "up"}),
            "padding_side",
            "padding_side: \"up\" is not \"left\" or \"right\"",
        ),
        (json!({"model": "test-model", "text": [1]}), "text[0]", "text[0]: 1 is not a string"),
    ] {
        assert_eq!(refused(body).await, (param.to_owned(), problem.to_owned()));
    }
    let server = Server::repeating("x");
    let unknown =
        server.post("/v3/detokenize", json!({"model": "test-model", "tokens": [1, 300]}).to_string()).await;
    assert_eq!(unknown.json()["error"]["param"], "tokens[1]");
}
