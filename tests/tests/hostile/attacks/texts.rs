//! Attacks with large bodies and long texts.

use serde_json::{Value, json};

use crate::hostile::client::{Client, MODEL, Statuses, Targets, chat, completion, copies, response};

/// Texts of 7 MB with as many tokens as bytes.
pub(super) async fn digits_to_tokenize(targets: Targets) -> anyhow::Result<String> {
    let body = json!({"model": MODEL, "prompt": "7".repeat(7_000_000)});
    let statuses = Client::of_router(&targets).barrage("/tokenize", 8, copies(&body, 8)).await;
    Ok(statuses.only(&[400, 429])?.some(400)?.to_string())
}

/// Prompts of 0.5 MB, and lists of 128 prompts of 60 kB. None of the prompts fits into the context.
pub(super) async fn long_prompts(targets: Targets) -> anyhow::Result<String> {
    let client = Client::of_router(&targets);
    let prompt = "1 2 3 ".repeat(80_000);
    let mut statuses =
        client.barrage("/v1/completions", 64, copies(&completion(&prompt, json!({})), 64)).await;
    let list = json!({"model": MODEL, "max_tokens": 1, "prompt": vec!["4 5 6 ".repeat(10_000); 128]});
    statuses.extend(client.barrage("/v1/completions", 8, copies(&list, 8)).await);
    let chats = copies(&chat(&prompt, json!({})), 16);
    statuses.extend(client.barrage("/v1/chat/completions", 16, chats).await);
    Ok(statuses.only(&[400, 429])?.some(400)?.to_string())
}

/// Conversations that the server must truncate, for which it renders the chat template several times.
pub(super) async fn truncated_conversations(targets: Targets) -> anyhow::Result<String> {
    let input: Vec<Value> = (0..2_000)
        .map(|number| json!({"role": "user", "content": format!("{number} ").repeat(60)}))
        .collect();
    let body = response(&json!(input), json!({"truncation": "auto", "store": false}));
    let statuses = Client::of_router(&targets).barrage("/v1/responses", 8, copies(&body, 4)).await;
    Ok(statuses.only(&[200, 400, 429])?.to_string())
}

/// Valid requests whose bodies are mostly whitespace. Half of them request a stream, during which the body must not
/// stay in memory. Some further bodies exceed the size limit.
pub(super) async fn padded_bodies(targets: Targets) -> anyhow::Result<String> {
    let client = Client::of_router(&targets);
    let mut statuses = Statuses::default();
    for stream in [false, true] {
        let body = chat("Hello", json!({"stream": stream})).to_string();
        let padded = format!("{}{}", " ".repeat(30 << 20), body);
        statuses.extend(client.barrage("/v1/chat/completions", 8, vec![padded; 8]).await);
    }
    let excessive = vec![" ".repeat(33 << 20); 4];
    // The router responds without reading the rest of the body, so a client that sends the whole body may miss the
    // response.
    let excessive = client.barrage("/v1/chat/completions", 8, excessive).await.only(&[0, 413])?.some(413)?;
    Ok(format!("{}; too large: {excessive}", statuses.only(&[200, 429])?.some(200)?))
}

/// JSON whose nesting would overflow the stack of a recursive parser.
pub(super) async fn deep_nesting(targets: Targets) -> anyhow::Result<String> {
    let client = Client::of_router(&targets);
    let arrays = "[".repeat(2 << 20);
    let objects = r#"{"a":"#.repeat(1 << 19);
    let schema = format!(
        r#"{{"model": "{MODEL}", "messages": [{{"role": "user", "content": "x"}}], "guided_json": {objects}1{}}}"#,
        "}".repeat(1 << 19)
    );
    let mut statuses = Statuses::default();
    for path in ["/v1/chat/completions", "/v1/responses", "/v1/conversations", "/tokenize"] {
        let bodies = [&arrays, &objects, &schema].map(String::clone).to_vec();
        statuses.extend(client.barrage(path, 3, bodies).await);
    }
    Ok(statuses.only(&[400])?.to_string())
}

/// JSON with many more values than the server accepts, and with almost as many as it accepts.
pub(super) async fn wide_json(targets: Targets) -> anyhow::Result<String> {
    let client = Client::of_router(&targets);
    let wide = |count: usize| {
        let objects = "{\"\":0},".repeat(count);
        let (tools, variables) = (format!("[{objects}{{}}]"), format!(r#"{{"a": [{objects}{{}}]}}"#));
        let model = format!(r#"{{"model": "{MODEL}""#);
        [
            ("/v1/responses", format!(r#"{model}, "input": "x", "tools": {tools}}}"#)),
            ("/v1/conversations", format!(r#"{{"items": {tools}}}"#)),
            ("/tokenize", format!(r#"{model}, "prompt": "x", "tools": {tools}}}"#)),
            (
                "/v1/chat/completions",
                format!(
                    r#"{model}, "messages": [{{"role": "user", "content": "x"}}], "max_tokens": 1,
                    "chat_template_kwargs": {variables}}}"#
                ),
            ),
        ]
    };
    let mut statuses = Statuses::default();
    for (path, body) in wide(500_000).into_iter().chain(wide(90_000)) {
        statuses.extend(client.barrage(path, 16, vec![body; 16]).await);
    }
    Ok(statuses.only(&[200, 400, 429])?.some(400)?.to_string())
}
