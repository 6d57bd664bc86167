//! Attacks with structured outputs and tools.

use anyhow::ensure;
use serde_json::{Map, Value, json};

use crate::hostile::client::{Client, Statuses, Targets, chat, copies};

const CHAT: &str = "/v1/chat/completions";

/// Regular expressions with expensive token masks. All are different, so none is cached.
pub(super) async fn expensive_grammars(targets: Targets) -> anyhow::Result<String> {
    let bodies = (0..8).map(|number| {
        let pattern = format!("([a-z]{{1,8}} ){{1,{}}}(.|\\n)*{number}", 100 + number);
        let parameters = json!({"guided_regex": pattern, "max_tokens": 16});
        chat(&format!("Write something, number {number}."), parameters).to_string()
    });
    let statuses = Client::of_router(&targets).barrage(CHAT, 2, bodies.collect()).await;
    Ok(statuses.only(&[200, 400])?.to_string())
}

/// Patterns whose automata have exponentially many states.
pub(crate) async fn exponential_patterns(targets: Targets) -> anyhow::Result<String> {
    let bodies = (0..256).map(|number| {
        let parameters = json!({"guided_regex": format!("[ab]*a[ab]{{14}}c{number}"), "max_tokens": 4});
        chat("Write.", parameters).to_string()
    });
    let statuses = Client::of_router(&targets).barrage(CHAT, 4, bodies.collect()).await;
    Ok(statuses.only(&[200, 400])?.to_string())
}

/// A form whose lexer some sequences exhaust, and which must remain usable for other sequences.
pub(crate) async fn exhausted_form_again(targets: Targets) -> anyhow::Result<String> {
    let client = Client::of_router(&targets);
    let pattern = "([a-z ]*e[a-z ]{60}!|YES)";
    let (_, tokens) =
        client.post("/tokenize", &json!({"prompt": "YES", "add_special_tokens": false})).await?;
    let exhausting = chat("Tell a story.", json!({"guided_regex": pattern, "max_tokens": 160}));
    let harmless = chat(
        "Say YES.",
        json!({"guided_regex": pattern, "max_tokens": 8, "allowed_token_ids": tokens["tokens"]}),
    );
    let mut statuses = Statuses::default();
    for _ in 0..3 {
        let (status, _) = client.post(CHAT, &exhausting).await?;
        statuses.add(status);
        let (status, answer) = client.post(CHAT, &harmless).await?;
        ensure!(status == 200, "another request with the same form failed: {status} {answer:.300}");
        let text = answer.pointer("/choices/0/message/content").and_then(Value::as_str);
        ensure!(text == Some("YES"), "the answer does not follow the form: {answer:.300}");
    }
    Ok(statuses.only(&[200, 400])?.to_string())
}

/// Choices with thousands of alternatives, up to the maximum, in each notation, and with one alternative more than the
/// maximum in two of the notations.
pub(super) async fn thousands_of_alternatives(targets: Targets) -> anyhow::Result<String> {
    let client = Client::of_router(&targets);
    let alternatives =
        |count: usize| -> Vec<String> { (0..count).map(|number| format!("choice {number}")).collect() };
    let forms = |count: usize| {
        let alternatives = alternatives(count);
        let constants: Vec<Value> = alternatives.iter().map(|text| json!({"const": text})).collect();
        let literals: Vec<String> = alternatives.iter().map(|text| format!("{text:?}")).collect();
        [
            json!({"guided_choice": alternatives}),
            json!({"structured_outputs": {"choice": alternatives}}),
            json!({"guided_json": {"anyOf": constants}}),
            json!({"guided_grammar": format!("root ::= {}", literals.join(" | "))}),
        ]
    };
    let mut statuses = Statuses::default();
    for count in [2_001, 8_192] {
        let bodies = forms(count).map(|form| chat("Choose.", form).to_string()).to_vec();
        statuses.extend(client.barrage(CHAT, 2, bodies).await);
    }
    let statuses = statuses.only(&[200, 400])?.some(200)?;
    let beyond = forms(8_193)[..2].iter().map(|form| chat("Choose.", form.clone()).to_string()).collect();
    let beyond = client.barrage(CHAT, 2, beyond).await.only(&[400])?;
    Ok(format!("{statuses}; beyond the limit: {beyond}"))
}

/// The maximum number of tools, all with unsupported schemas.
pub(super) async fn broken_tool_schemas(targets: Targets) -> anyhow::Result<String> {
    let tools: Vec<Value> = (0..512)
        .map(|number| {
            let pattern = json!({"type": "string", "pattern": format!("(?={number})")});
            let parameters = json!({"type": "object", "properties": {"x": pattern}});
            json!({"type": "function", "function": {"name": format!("tool_{number}"), "parameters": parameters}})
        })
        .collect();
    let body = chat("Call.", json!({"tools": tools, "tool_choice": "required"}));
    let statuses = Client::of_router(&targets).barrage(CHAT, 8, copies(&body, 16)).await;
    Ok(statuses.only(&[200, 400, 429])?.to_string())
}

/// Small forms whose compilation would need gigabytes, and large forms whose compilation takes a long time.
pub(super) async fn costly_forms(targets: Targets) -> anyhow::Result<String> {
    let properties = |count: usize| -> Map<String, Value> {
        (0..count).map(|number| (format!("property_{number}"), json!({}))).collect()
    };
    let bodies = (0..4).flat_map(|turn| {
        let patterns: Vec<Value> = (0..64)
            .map(|number| json!({"pattern": format!("a{turn}{number}|b{number}|c{number}")}))
            .collect();
        let conjunction: Vec<String> =
            (0..64).map(|number| format!("/.*(a{turn}{number}|b{number}).*/")).collect();
        let multiples =
            json!({"allOf": [{"type": "integer", "multipleOf": 9973 + turn}, {"multipleOf": 9967}]});
        let large: Vec<Value> = (0..16)
            .map(|number| {
                let schema = json!({"type": "object", "properties": properties(4000 + turn)});
                json!({"type": "tag", "begin": format!("<{number}>"), "end": "",
                    "content": {"type": "json_schema", "json_schema": schema}})
            })
            .collect();
        [
            json!({"guided_json": {"type": "string", "allOf": patterns}}),
            json!({"guided_json": {"type": "object", "properties": properties(4000 + turn),
                "additionalProperties": false, "minProperties": 1}}),
            json!({"guided_json": multiples}),
            json!({"guided_grammar": format!("start: T\nT: {}\n", conjunction.join(" & "))}),
            json!({"response_format": {"type": "or", "elements": large}}),
        ]
    });
    let bodies = bodies.map(|form| chat("Write.", form).to_string()).collect();
    let statuses = Client::of_router(&targets).barrage(CHAT, 4, bodies).await;
    Ok(statuses.only(&[400])?.to_string())
}
