//! Tests existing and unknown paths, and the answers while the server starts or stops.

use axum::body::Body;
use axum::http::Request;
use expect_test::expect;
use serde_json::json;
use server::{App, HttpLimits, Metrics, Phase, router};
use std::time::Duration;
use tower::ServiceExt as _;

use crate::harness::{Answer, Server, chat, completion};

#[tokio::test]
async fn models_are_listed_and_found_by_names_with_slashes() {
    let server = Server::repeating("x");
    for version in ["/v1", "/v3"] {
        let list = server.get(&format!("{version}/models")).await.json();
        let ids: Vec<_> = list["data"].as_array().unwrap().iter().map(|model| model["id"].as_str()).collect();
        assert_eq!(ids, [Some("test-model"), Some("group/test-model")]);
        for path in ["group/test-model", "group%2Ftest-model"] {
            let model = server.get(&format!("{version}/models/{path}")).await;
            assert_eq!(model.json()["id"], "group/test-model");
        }
    }
    let mut model = server.get("/v3/models/test-model").await.json();
    model["created"] = json!(0);
    expect![[r#"{"id":"test-model","object":"model","created":0,"owned_by":"ovfleet","max_model_len":512}"#]]
        .assert_eq(&model.to_string());
    expect![[r#"
        404
        {
          "error": {
            "message": "this server does not serve the model \"other\"",
            "type": "invalid_request_error",
            "param": "model",
            "code": "model_not_found"
          }
        }
    "#]]
    .assert_eq(&server.get("/v3/models/other").await.shown());
}

#[tokio::test]
async fn v3_is_v1_and_answers_have_the_name_that_the_request_has() {
    let server = Server::repeating("the quick brown fox ");
    for (path, request) in [
        ("chat/completions", chat(json!({"model": "group/test-model"}))),
        ("completions", completion(json!({"model": "group/test-model"}))),
    ] {
        let first = server.post(&format!("/v1/{path}"), request.clone()).await.json();
        let third = server.post(&format!("/v3/{path}"), request).await.json();
        assert_eq!(first["choices"], third["choices"]);
        assert_eq!(
            (&first["model"], &third["model"]),
            (&json!("group/test-model"), &json!("group/test-model"))
        );
    }
}

#[tokio::test]
async fn unknown_paths_and_methods_are_errors_in_the_same_form() {
    let server = Server::repeating("x");
    expect![[r#"
        404
        {
          "error": {
            "message": "the path /v3/nothing does not exist",
            "type": "invalid_request_error",
            "param": null,
            "code": "unknown_url"
          }
        }
    "#]]
    .assert_eq(&server.get("/v3/nothing").await.shown());
    expect![[r#"
        405
        {
          "error": {
            "message": "/v3/chat/completions does not support GET",
            "type": "invalid_request_error",
            "param": null,
            "code": "method_not_supported"
          }
        }
    "#]]
    .assert_eq(&server.get("/v3/chat/completions").await.shown());
    for path in ["/", "/v1", "/v1/", "/v1/embeddings", "/v2/health", "/v4/models", "/v1/chat/completions/"] {
        assert_eq!(server.get(path).await.json()["error"]["code"], "unknown_url", "{path}");
    }
    let answer = server.post("/v1/models", "{}").await;
    assert_eq!(
        (answer.status.as_u16(), &answer.json()["error"]["code"]),
        (405, &json!("method_not_supported"))
    );
    assert!(answer.headers.contains_key("allow"), "the answer lists the allowed methods");
}

#[tokio::test]
async fn only_the_liveness_probe_succeeds_until_the_model_is_loaded() {
    let limits = HttpLimits {
        max_body_bytes: 1024,
        max_concurrent_requests: 1,
        max_connections: 1,
        read_timeout: Duration::from_secs(60),
        ..HttpLimits::default()
    };
    let app = App::new(limits, Metrics::new("m", "test"));
    let ask = async |request: Request<Body>| {
        Answer::read(router(app.clone()).oneshot(request).await.unwrap()).await
    };
    let get = |path: &str| Request::get(path).body(Body::empty()).unwrap();
    assert_eq!(ask(get("/v2/health/live")).await.status, 200);
    assert_eq!(ask(get("/v2/health/ready")).await.status, 503);
    assert_eq!(ask(get("/metrics")).await.status, 200);
    let answer = ask(Request::post("/v3/chat/completions").body(chat(json!({})).into()).unwrap()).await;
    assert_eq!(answer.headers["retry-after"], "1");
    expect![[r#"
        503
        {
          "error": {
            "message": "the model is being loaded",
            "type": "server_error",
            "param": null,
            "code": "starting"
          }
        }
    "#]]
    .assert_eq(&answer.shown());
}

#[tokio::test]
async fn a_draining_server_accepts_requests_and_a_stopping_one_rejects_them() {
    let server = Server::repeating("x");
    server.app.lifecycle().advance(Phase::Draining);
    assert_eq!(server.get("/v2/health/ready").await.status, 503);
    assert_eq!(server.post("/v3/chat/completions", chat(json!({}))).await.status, 200);
    server.app.lifecycle().advance(Phase::Stopping);
    let answer = server.post("/v3/chat/completions", chat(json!({}))).await;
    assert_eq!((answer.status.as_u16(), &answer.json()["error"]["code"]), (503, &json!("stopping")));
}
