//! Attacks on the engine: requests with many choices, beams, draft tokens and log probabilities, and with extreme
//! parameters.

use anyhow::ensure;
use serde_json::{Value, json};

use crate::hostile::client::{Client, MODEL, Targets, completion, copies};

const COMPLETIONS: &str = "/v1/completions";

/// The maximum number of choices, each with an n-gram index of a long prompt.
pub(super) async fn many_choices_with_lookup(targets: Targets) -> anyhow::Result<String> {
    let parameters = json!({"n": 128, "max_tokens": 2, "max_ngram_size": 8, "num_assistant_tokens": 4});
    let body = completion(&"one two three four ".repeat(800), parameters);
    let client = Client::of_router(&targets);
    Ok(client.barrage(COMPLETIONS, 2, copies(&body, 2)).await.only(&[200])?.to_string())
}

/// A thousand draft tokens for each of several sequences; each draft token needs a row of logits.
pub(super) async fn long_drafts(targets: Targets) -> anyhow::Result<String> {
    let parameters = json!({
        "n": 32, "max_tokens": 8, "max_ngram_size": 1, "num_assistant_tokens": 1024, "ignore_eos": true, "top_k": 1,
    });
    let body = completion(&"again and ".repeat(600), parameters);
    let client = Client::of_router(&targets);
    Ok(client.barrage(COMPLETIONS, 2, copies(&body, 4)).await.only(&[200])?.to_string())
}

/// Beam searches with the maximum width.
pub(super) async fn wide_beams(targets: Targets) -> anyhow::Result<String> {
    let parameters = json!({
        "use_beam_search": true, "best_of": 128, "n": 1, "max_tokens": 4, "logprobs": 5, "early_stopping": "never",
    });
    let body = completion("Once upon a time", parameters);
    let client = Client::of_router(&targets);
    Ok(client.barrage(COMPLETIONS, 2, copies(&body, 2)).await.only(&[200])?.to_string())
}

/// Log probabilities of all tokens of long prompts; each token needs a row of logits.
pub(super) async fn prompt_log_probabilities(targets: Targets) -> anyhow::Result<String> {
    let mut bodies = Vec::new();
    for number in 0..4 {
        let prompt = format!("{number} ").repeat(500);
        let parameters = json!({"prompt_logprobs": 20, "logprobs": 20, "echo": true, "max_tokens": 1});
        bodies.push(completion(&prompt, parameters).to_string());
    }
    Ok(Client::of_router(&targets).barrage(COMPLETIONS, 4, bodies).await.only(&[200])?.to_string())
}

/// Numbers that a narrower type cannot represent, and numbers beyond the limits.
pub(super) async fn numbers_at_the_edge(targets: Targets) -> anyhow::Result<String> {
    const EDGES: [&str; 12] = [
        "1e-50",
        "3.5e38",
        "-3.5e38",
        "-0.0",
        "1e308",
        "1e999",
        "9223372036854775808",
        "18446744073709551616",
        "4294967296",
        "-1",
        "0",
        "1e-400",
    ];
    const NAMES: [&str; 20] = [
        "repetition_penalty",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "max_tokens",
        "min_tokens",
        "seed",
        "n",
        "best_of",
        "logprobs",
        "prompt_logprobs",
        "length_penalty",
        "diversity_penalty",
        "max_ngram_size",
        "num_assistant_tokens",
        "assistant_confidence_threshold",
        "truncate_prompt_tokens",
    ];
    let mut bodies = Vec::new();
    for name in NAMES {
        for edge in EDGES {
            // Keep the responses short, except where `max_tokens` itself is tested.
            let most = if name == "max_tokens" { "" } else { r#""max_tokens": 2, "# };
            let stop = r#""stop_token_ids": [0, 1, 2]"#;
            bodies.push(format!(r#"{{"model": "{MODEL}", "prompt": "x", {most}{stop}, "{name}": {edge}}}"#));
        }
    }
    let client = Client::of_router(&targets);
    let statuses = client.barrage(COMPLETIONS, 4, bodies).await.only(&[200, 400])?.some(200)?.some(400)?;
    // A tiny repetition penalty must not make log probabilities overflow to infinity.
    let body = completion("x", json!({"repetition_penalty": 1e-30, "top_logprobs": null, "logprobs": 5}));
    let (status, answer) = client.post(COMPLETIONS, &body).await?;
    ensure!(status == 200 || status == 400, "{status} {answer:.300}");
    let logprobs = answer.pointer("/choices/0/logprobs/token_logprobs").and_then(Value::as_array);
    let is_finite = |value: &Value| value.as_f64().is_some_and(f64::is_finite);
    ensure!(
        logprobs.is_none_or(|values| values.iter().all(is_finite)),
        "a log probability is not finite: {answer:.300}"
    );
    Ok(statuses.to_string())
}
