//! Attacks on stored conversations and responses.

use anyhow::ensure;
use serde_json::{Value, json};

use crate::hostile::client::{Client, Statuses, Targets, copies, response, text};

const CONVERSATIONS: &str = "/v1/conversations";
const RESPONSES: &str = "/v1/responses";

fn message(content: &str) -> Value {
    json!({"type": "message", "role": "user", "content": content})
}

/// Creates a conversation and returns its path.
async fn conversation(client: &Client, items: &[Value]) -> anyhow::Result<String> {
    let (status, body) = client.post(CONVERSATIONS, &json!({"items": items})).await?;
    ensure!(status == 200, "failed to create a conversation: {status} {body:.300}");
    Ok(format!("{CONVERSATIONS}/{}", text(&body, "/id")?))
}

/// A small request that multiplies a stored item of 2 MiB, by repeating its ID.
pub(super) async fn references_to_one_item(targets: Targets) -> anyhow::Result<String> {
    let client = Client::of_router(&targets);
    let path = conversation(&client, &[message(&"x".repeat(2 << 20))]).await?;
    let (_, items) = client.get(&format!("{path}/items")).await?;
    let reference = json!({"type": "item_reference", "id": text(&items, "/data/0/id")?});
    let id = path.rsplit('/').next().unwrap_or_default();
    let mut bodies = Vec::new();
    for count in [2, 9, 1000, 2500] {
        let input = json!(vec![reference.clone(); count]);
        bodies.extend(copies(&response(&input, json!({"conversation": id})), 4));
    }
    let statuses = client.barrage(RESPONSES, 8, bodies).await.only(&[400, 429])?.some(400)?;
    client.delete(&path).await?;
    Ok(statuses.to_string())
}

/// Appends to one conversation until it is full, while other requests read its pages.
pub(super) async fn huge_conversations(targets: Targets) -> anyhow::Result<String> {
    const PAGE_BYTES_MAX: usize = 3 << 20;
    let client = Client::of_router(&targets);
    let path = conversation(&client, &[message("start")]).await?;
    let items = format!("{path}/items");
    let bodies = copies(&json!({"items": [message(&"y".repeat(1 << 20))]}), 128);
    let pages_path = format!("{items}?limit=100");
    let pages = async {
        let mut statuses = Statuses::default();
        for _ in 0..8 {
            let pages = tests::http::join_all((0..16).map(|_| client.get(&pages_path))).await;
            for page in pages {
                let (status, body) = page?;
                let bytes = body.to_string().len();
                ensure!(
                    bytes < PAGE_BYTES_MAX,
                    "a page has {bytes} bytes, but must have fewer than {PAGE_BYTES_MAX}"
                );
                statuses.add(status);
            }
        }
        statuses.only(&[200, 429])
    };
    let (appends, pages) = tokio::join!(client.barrage(&items, 16, bodies), pages);
    let appends = appends.only(&[200, 400, 429])?.some(400)?;
    let pages = pages?.some(200)?;
    client.delete(&path).await?;
    Ok(format!("appends: {appends}; pages: {pages}"))
}

/// A long chain of responses, and many requests that continue its last response.
pub(super) async fn long_chain_of_responses(targets: Targets) -> anyhow::Result<String> {
    const LINKS: usize = 256;
    let client = Client::of_router(&targets);
    let mut ids = Vec::new();
    let mut previous = Value::Null;
    for _ in 0..LINKS {
        let body = response(&json!("a"), json!({"previous_response_id": previous}));
        let (status, body) = client.post(RESPONSES, &body).await?;
        ensure!(status == 200, "failed to create response {} of the chain: {status} {body:.300}", ids.len());
        let id = text(&body, "/id")?;
        previous = json!(id);
        ids.push(id);
    }
    let last = ids.last().cloned().unwrap_or_default();
    let follow = response(&json!("b"), json!({"previous_response_id": last, "store": false}));
    let followers = client.barrage(RESPONSES, 8, copies(&follow, 64)).await.only(&[200, 429])?.some(200)?;
    let count = response(&json!("b"), json!({"previous_response_id": last}));
    let count_path = format!("{RESPONSES}/input_tokens");
    let counted = client.barrage(&count_path, 32, copies(&count, 128)).await.only(&[200, 429])?;
    for id in &ids {
        client.delete(&format!("{RESPONSES}/{id}")).await?;
    }
    Ok(format!("chain of {LINKS} responses; continuations: {followers}; token counts: {counted}"))
}

/// Background responses that are started, canceled immediately, and deleted.
pub(super) async fn background_responses(targets: Targets) -> anyhow::Result<String> {
    const GROUPS: usize = 25;
    const GROUP: usize = 8;
    let client = Client::of_router(&targets);
    let body = response(
        &json!("Tell a story."),
        json!({"background": true, "stream": false, "max_output_tokens": 4000}),
    );
    let (mut created, mut cancelled) = (Statuses::default(), Statuses::default());
    for _ in 0..GROUPS {
        let answers = tests::http::join_all((0..GROUP).map(|_| client.post(RESPONSES, &body))).await;
        for answer in answers {
            let (status, body) = answer?;
            created.add(status);
            if status != 200 {
                continue;
            }
            let path = format!("{RESPONSES}/{}", text(&body, "/id")?);
            cancelled.add(client.post(&format!("{path}/cancel"), &json!({})).await?.0);
            client.delete(&path).await?;
        }
    }
    let created = created.only(&[200, 429])?.some(200)?;
    let cancelled = cancelled.only(&[200])?;
    Ok(format!("created: {created}; canceled: {cancelled}"))
}
