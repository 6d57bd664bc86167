//! Attacks on other tenants of a router with API keys.

use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::ensure;
use reqwest::Method;
use serde_json::{Value, json};

use crate::hostile::client::{Client, Statuses, Targets, chat, completion, copies, response, text};

fn clients(targets: &Targets) -> [Client; 2] {
    [&targets.key, &targets.other_key].map(|key| Client::new(&targets.router, key))
}

/// Tries to read, continue, change and delete the stored objects of another tenant.
pub(super) async fn other_tenants_objects(targets: Targets) -> anyhow::Result<String> {
    let [attacker, victim] = clients(&targets);
    let (_, stored) = victim.post("/v1/responses", &response(&json!("A secret."), json!({}))).await?;
    let stored = text(&stored, "/id")?;
    let items = json!({"items": [{"type": "message", "role": "user", "content": "A secret."}]});
    let (_, conversation) = victim.post("/v1/conversations", &items).await?;
    let conversation = text(&conversation, "/id")?;
    let conversation_path = format!("/v1/conversations/{conversation}");
    let (_, listed) = victim.get(&format!("{conversation_path}/items")).await?;
    let item = text(&listed, "/data/0/id")?;
    let response_path = format!("/v1/responses/{stored}");
    let calls = [
        (Method::GET, response_path.clone(), json!({})),
        (Method::GET, format!("{response_path}/input_items"), json!({})),
        (Method::POST, format!("{response_path}/cancel"), json!({})),
        (Method::DELETE, response_path.clone(), json!({})),
        (Method::GET, conversation_path.clone(), json!({})),
        (Method::GET, format!("{conversation_path}/items"), json!({})),
        (Method::POST, format!("{conversation_path}/items"), items.clone()),
        (Method::DELETE, format!("{conversation_path}/items/{item}"), json!({})),
        (Method::DELETE, conversation_path.clone(), json!({})),
        (
            Method::POST,
            "/v1/responses".to_owned(),
            response(&json!("Repeat."), json!({"previous_response_id": stored})),
        ),
        (
            Method::POST,
            "/v1/responses".to_owned(),
            response(&json!("Repeat."), json!({"conversation": conversation})),
        ),
        (
            Method::POST,
            "/v1/responses".to_owned(),
            response(&json!([{"type": "item_reference", "id": item}]), json!({})),
        ),
    ];
    let mut statuses = Statuses::default();
    for (method, path, body) in &calls {
        let answer = attacker.request(method.clone(), path).json(body).send().await?;
        statuses.add(answer.status().as_u16());
        let body = answer.text().await?;
        ensure!(!body.contains("secret"), "{method} {path} discloses {body:.300}");
    }
    for path in [&response_path, &conversation_path] {
        let (status, body) = victim.get(path).await?;
        ensure!(status == 200, "the victim can no longer read {path}: {status} {body:.300}");
        victim.delete(path).await?;
    }
    Ok(statuses.only(&[404])?.to_string())
}

/// Tries to learn the prompts of another tenant from `cached_tokens`.
///
/// The attack succeeds if tenants share cached prompts, because the router does not send the tenant, or the server does
/// not use the tenant as a salt of the prefix cache: the attacker's request then finds the blocks of the victim. The
/// requests have no `cache_salt`, which would separate them regardless of their tenants.
pub(super) async fn other_tenants_cache(targets: Targets) -> anyhow::Result<String> {
    let [attacker, victim] = clients(&targets);
    // The attack is repeated, so the earlier prompts of both clients are cached. No block of this prompt is cached yet,
    // because its first tokens are unique.
    let run = SystemTime::now().duration_since(UNIX_EPOCH)?.as_micros();
    let secret = "All that follows is confidential. ".repeat(40);
    let prompt = format!("{run} {secret} The password is swordfish.");
    let cached = async |client: &Client| -> anyhow::Result<u64> {
        let (status, body) = client.post("/v1/completions", &completion(&prompt, json!({}))).await?;
        ensure!(status == 200, "{status} {body:.300}");
        let cached = body.pointer("/usage/prompt_tokens_details/cached_tokens").and_then(Value::as_u64);
        Ok(cached.unwrap_or_default())
    };
    ensure!(cached(&victim).await? == 0, "tokens of the prompt were cached before the first request");
    let visible = cached(&attacker).await?;
    ensure!(visible == 0, "the attacker sees {visible} cached tokens of the victim");
    // This request shows that the blocks of the victim were in the cache when the attacker sent the same prompt.
    let own = cached(&victim).await?;
    ensure!(own > 0, "the prompt of the victim is not cached at all");
    Ok(format!("the victim sees {own} cached tokens, and the attacker sees none"))
}

/// Guesses keys.
pub(super) async fn unknown_keys(targets: Targets) -> anyhow::Result<String> {
    let mut statuses = Statuses::default();
    let body = chat("Hello", json!({}));
    for number in 0..64 {
        let client = Client::new(&targets.router, &format!("guess-{number}"));
        statuses.extend(client.barrage("/v1/chat/completions", 16, copies(&body, 16)).await);
    }
    Ok(statuses.only(&[401])?.to_string())
}
