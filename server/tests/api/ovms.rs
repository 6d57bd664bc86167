//! Tests the changes that `--ovms-compat` makes in addition to the format of errors, and the behavior that it does not
//! change.

use serde_json::{Value, json};
use server::{ApiRules, Model, built_in_text};

use crate::harness::{RepeatingRunner, Server, Setup, chat, completion, merged};

const TEXT: &str = "the quick brown fox ";

fn runner() -> RepeatingRunner {
    RepeatingRunner::new(TEXT.bytes().map(u32::from))
}

/// A server with these API rules.
fn server(rules: ApiRules) -> Server {
    let names = vec!["test-model".to_owned(), "group/test-model".to_owned()];
    let model = Model::new(names, built_in_text().unwrap(), "test").with_api_rules(rules);
    let server = Setup { model: Some(model), ..Setup::new(runner()) }.start();
    match rules {
        ApiRules::OpenAi => server,
        ApiRules::Ovms => Server { router: server::ovms_api(server.router, server.app.clone()), ..server },
    }
}

async fn completion_tokens(rules: ApiRules, parameters: Value) -> u64 {
    let answer = server(rules).post("/v3/completions", completion(parameters)).await;
    answer.json()["usage"]["completion_tokens"].as_u64().unwrap_or_else(|| panic!("{}", answer.body))
}

#[tokio::test]
async fn completions_fill_the_context_with_ovms_rules() {
    let open = || json!({"max_tokens": null, "ignore_eos": true});
    assert_eq!(completion_tokens(ApiRules::OpenAi, open()).await, 16);
    // The prompt takes two of the 512 tokens of the context length.
    assert_eq!(completion_tokens(ApiRules::Ovms, open()).await, 510);
    assert_eq!(completion_tokens(ApiRules::Ovms, json!({"max_tokens": 3, "ignore_eos": true})).await, 3);
}

#[tokio::test]
async fn best_of_enables_beam_search_with_ovms_rules() {
    let parameters = |more: Value| {
        let all = json!({"best_of": 4, "n": 2, "temperature": 1, "max_tokens": 4, "ignore_eos": true});
        merged(all, more)
    };
    let texts = async |rules: ApiRules, parameters: Value| {
        let answer = server(rules).post("/v3/completions", completion(parameters)).await;
        assert_eq!(answer.status, 200, "{}", answer.body);
        let choices = answer.json()["choices"].as_array().unwrap().clone();
        choices.iter().map(|choice| choice["text"].clone()).collect::<Vec<_>>()
    };
    let searched = texts(ApiRules::OpenAi, parameters(json!({"use_beam_search": true}))).await;
    assert_eq!(texts(ApiRules::Ovms, parameters(json!({}))).await, searched);
    assert_ne!(searched[0], searched[1], "beams differ");
    // An explicit `false` disables beam search.
    let sampled = json!({"use_beam_search": false, "seed": 1, "best_of": 2});
    let answers = [
        texts(ApiRules::Ovms, parameters(sampled.clone())).await,
        texts(ApiRules::OpenAi, parameters(sampled)).await,
    ];
    assert_eq!(answers[0], answers[1]);
    let streamed = server(ApiRules::Ovms)
        .post("/v3/completions", completion(json!({"best_of": 2, "n": 2, "stream": true})))
        .await;
    assert_eq!(streamed.status, 400, "{}", streamed.body);
}

#[tokio::test]
async fn a_message_without_content_is_empty_with_ovms_rules() {
    let body = || chat(json!({"messages": [{"role": "system"}, {"role": "user"}]}));
    let refused = server(ApiRules::OpenAi).post("/v3/chat/completions", body()).await;
    assert_eq!(refused.json()["error"]["param"], "messages[0].content");
    let answered = server(ApiRules::Ovms).post("/v3/chat/completions", body()).await;
    assert_eq!(answered.status, 200, "{}", answered.body);
    let empty = json!({"messages": [{"role": "system", "content": ""}, {"role": "user", "content": ""}]});
    let empty = server(ApiRules::OpenAi).post("/v3/chat/completions", chat(empty)).await.json();
    assert_eq!(answered.json()["usage"]["prompt_tokens"], empty["usage"]["prompt_tokens"]);
}

#[tokio::test]
async fn alternative_spellings_of_paths_work_with_ovms_rules() {
    let (strict, lenient) = (server(ApiRules::OpenAi), server(ApiRules::Ovms));
    for path in [
        "/v3/v1/models",
        "/v3/models/",
        "/v1/models/",
        "/v3/v1/models/test-model",
        "/v3/v1/models/group/test-model/",
    ] {
        assert_eq!(strict.get(path).await.status, 404, "{path}");
        let answer = lenient.get(path).await;
        assert_eq!(answer.status, 200, "{path}: {}", answer.body);
    }
    for path in ["/v3/v1/completions", "/v3/completions/", "/v1/completions/"] {
        assert_eq!(strict.post(path, completion(json!({}))).await.status, 404, "{path}");
        assert_eq!(lenient.post(path, completion(json!({}))).await.status, 200, "{path}");
    }
    assert_eq!(
        lenient.get("/v3/v1/nowhere").await.json(),
        json!({"error": "the path /v3/nowhere does not exist"})
    );
}

#[tokio::test]
async fn the_state_of_models_is_reported_with_ovms_rules() {
    let server = server(ApiRules::Ovms);
    for name in ["test-model", "group/test-model", "group%2Ftest-model"] {
        for path in [format!("/v2/models/{name}/ready"), format!("/v2/models/{name}/versions/1/ready")] {
            assert_eq!(server.get(&path).await.status, 200, "{path}");
        }
    }
    for path in ["/v2/models/other/ready", "/v2/models/test-model", "/v2/models/test-model/versions/x/ready"]
    {
        let answer = server.get(path).await;
        assert_eq!(answer.status, 404, "{path}");
        assert!(answer.json()["error"].is_string(), "{path}: {}", answer.body);
    }
    assert_eq!(server.post("/v2/models/test-model/ready", "").await.status, 405);
    let available = json!({"model_version_status": [
        {"version": "1", "state": "AVAILABLE", "status": {"error_code": "OK", "error_message": "OK"}},
    ]});
    let expected = json!({"test-model": available, "group/test-model": available});
    assert_eq!(server.get("/v1/config").await.json(), expected);
}
