//! Tests that `/openapi.json` is correct: it describes exactly the paths that exist, and answers match its schemas.

use axum::body::Body;
use axum::http::Request;
use serde_json::{Value, json};

use crate::harness::{Answer, Server, Setup, chat, completion};
use crate::images::IMAGE;
use crate::tools::HERMES;

#[tokio::test]
async fn the_document_describes_exactly_the_paths_that_exist() {
    let server = Server::repeating("x");
    let router = server::router_with(server.app.clone(), server::SleepApi::Enabled);
    let server = Server { router, ..server };
    let document = server.get("/openapi.json").await.json();
    assert_eq!(document["openapi"], "3.1.0");
    let paths = document["paths"].as_object().unwrap();
    for (path, operations) in paths {
        for method in operations.as_object().unwrap().keys() {
            let path = path.replace("{id}", "test-model").replace("{item}", "msg_1");
            let request = Request::builder().method(method.to_uppercase().as_str()).uri(&path);
            let answer = Answer::read(server.send(request.body(Body::from("{}")).unwrap()).await).await;
            let code =
                serde_json::from_str::<Value>(&answer.body).ok().map(|body| body["error"]["code"].clone());
            assert!(
                answer.status != 405 && code != Some(json!("unknown_url")),
                "{method} {path}: {}",
                answer.body
            );
        }
    }
    // Compare the document with the routes in the source code.
    let source = [include_str!("../../src/routes.rs"), include_str!("../../src/routes/sleep.rs")].concat();
    let mut count = 0;
    for route in source.split(".route(").skip(1) {
        let (path, handlers) = route.trim().strip_prefix('"').unwrap().split_once('"').unwrap();
        let path = path.replace("{*id}", "{id}");
        let known = |prefix: &str| paths.get(&format!("{prefix}{path}"));
        let described = known("").or(known("/v3")).unwrap_or_else(|| panic!("{path} is not described"));
        for method in
            ["get", "post", "delete"].into_iter().filter(|method| handlers.contains(&format!("{method}(")))
        {
            assert!(described[method].is_object(), "{method} {path} is not described");
        }
        count += 1;
    }
    assert!(count > 8, "only {count} routes were found");
}

#[tokio::test]
async fn answers_match_their_schemas() {
    let server = Server::repeating("abcdefgh ");
    let document = server.get("/openapi.json").await.json();
    let all = json!({"n": 2, "return_token_ids": true, "prompt_logprobs": 2, "seed": 1});
    let mut requests = vec![
        (
            "/v3/tokenize",
            json!({"model": "test-model", "text": ["a", "b"], "return_token_strs": true}).to_string(),
        ),
        ("/v3/tokenize", json!({"model": "test-model", "prompt": "a"}).to_string()),
        (
            "/tokenize",
            json!({"model": "test-model", "messages": [{"role": "user", "content": "x"}]}).to_string(),
        ),
        ("/detokenize", json!({"model": "test-model", "tokens": [97]}).to_string()),
        ("/v3/detokenize", json!({"model": "test-model", "tokens": [9999]}).to_string()),
        ("/v3/completions", "{".to_owned()),
        ("/v3/completions", completion(json!({"model": "other"}))),
    ];
    for parameters in [json!({}), all, json!({"stop": "c", "max_tokens": 20})] {
        let with = |name: &str, value: Value| {
            let mut parameters = parameters.clone();
            parameters[name] = value;
            parameters
        };
        requests.push(("/v3/chat/completions", chat(with("logprobs", json!(true)))));
        requests.push(("/v1/chat/completions", chat(parameters.clone())));
        requests.push(("/v3/completions", completion(with("logprobs", json!(2)))));
        requests.push(("/v3/completions", completion(with("echo", json!(true)))));
        let mut streamed = with("stream", json!(true));
        streamed["stream_options"] = json!({"include_usage": true});
        streamed["prompt_logprobs"] = Value::Null;
        requests.push(("/v3/completions", completion(streamed.clone())));
        streamed["logprobs"] = json!(true);
        requests.push(("/v3/chat/completions", chat(streamed)));
    }
    for (path, body) in requests {
        let answer = server.post(path, body.clone()).await;
        let responses = &document["paths"][path]["post"]["responses"];
        let response = &responses[answer.status.as_str()];
        let kind = answer.headers["content-type"].to_str().unwrap().split(';').next().unwrap().to_owned();
        let schema = &response["content"][kind.as_str()]["schema"];
        let values: Vec<Value> = if kind == "text/event-stream" {
            let events = answer.events();
            assert_eq!(events.last(), Some(&"[DONE]"));
            events[..events.len() - 1].iter().map(|event| serde_json::from_str(event).unwrap()).collect()
        } else {
            vec![answer.json()]
        };
        for value in values {
            if let Err(problem) = fits(&document, schema, &value) {
                panic!("{path} {body}: {problem} in {value}");
            }
        }
    }
    for path in ["/v3/models", "/v3/models/test-model"] {
        let described = path.replace("test-model", "{id}");
        let schema = &document["paths"][&described]["get"]["responses"]["200"]["content"]["application/json"]
            ["schema"];
        fits(&document, schema, &server.get(path).await.json()).unwrap();
    }
}

#[tokio::test]
async fn exactly_the_required_parameters_are_required() {
    let server = Server::repeating("abc");
    let document = server.get("/openapi.json").await.json();
    for (path, whole) in [
        ("/v3/chat/completions", chat(json!({}))),
        ("/v3/completions", completion(json!({}))),
        ("/v3/responses", json!({"model": "test-model", "input": "Hi", "max_output_tokens": 2}).to_string()),
        ("/tokenize", json!({"model": "test-model", "text": "a"}).to_string()),
        ("/detokenize", json!({"model": "test-model", "tokens": [97]}).to_string()),
        ("/v3/conversations", json!({"metadata": {}}).to_string()),
    ] {
        let operation = &document["paths"][path]["post"];
        let body = operation["requestBody"].clone();
        let name = body["content"]["application/json"]["schema"]["$ref"].as_str().unwrap();
        let required = document.pointer(&format!("{}/required", name.trim_start_matches('#'))).cloned();
        let required = required.and_then(|list| list.as_array().cloned()).unwrap_or_default();
        let whole: Value = serde_json::from_str(&whole).unwrap();
        assert_eq!(server.post(path, whole.to_string()).await.status, 200, "{path}");
        for member in whole.as_object().unwrap().keys() {
            let mut without = whole.clone();
            without.as_object_mut().unwrap().remove(member);
            let answer = server.post(path, without.to_string()).await;
            let is_required = required.contains(&json!(member));
            // These endpoints require one of several members, which the document states only in a description.
            let is_one_of =
                path == "/tokenize" && member == "text" || path == "/v3/responses" && member == "input";
            assert_eq!(
                answer.status == 400,
                is_required || is_one_of,
                "{path} without {member}: {}",
                answer.body
            );
        }
        let empty = server.post(path, "").await;
        assert_eq!(empty.status == 400, body["required"] == true, "{path} without a body: {}", empty.body);
    }
}

#[tokio::test]
async fn described_elements_are_accepted() {
    let server = Setup::scripted(HERMES, &[], &["Hello."]).start();
    let document = server.get("/openapi.json").await.json();
    let schema = |name: &str| json!({"$ref": format!("#/components/schemas/{name}")});
    let tools = [
        ("ResponsesTool", json!({"type": "function", "name": "f"})),
        (
            "ResponsesTool",
            json!({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": null}}),
        ),
        (
            "ResponsesTool",
            json!({"type": "custom", "name": "f", "format": {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}}),
        ),
        (
            "ResponsesTool",
            json!({"type": "namespace", "name": "n", "tools": [{"type": "custom", "name": "f"}]}),
        ),
        ("ResponsesTool", json!({"type": "web_search"})),
        ("ChatTool", json!({"type": "function", "function": {"name": "f"}})),
        ("ChatTool", json!({"type": "function", "name": "f"})),
    ];
    for (name, tool) in tools {
        fits(&document, &schema(name), &tool).unwrap();
        let (path, body) = if name == "ChatTool" {
            ("/v3/chat/completions", chat(json!({"tools": [tool]})))
        } else {
            (
                "/v3/responses",
                json!({"model": "test-model", "input": "Hi", "max_output_tokens": 2, "tools": [tool]})
                    .to_string(),
            )
        };
        let answer = server.post(path, body.clone()).await;
        assert_eq!(answer.status, 200, "{body}: {}", answer.body);
    }
    let items = [
        json!({"role": "user", "content": "a", "status": null}),
        json!({"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}, {"type": "refusal", "refusal": "b"}]}),
        json!({"type": "reasoning", "summary": [{"type": "summary_text", "text": "a"}], "content": null}),
        json!({"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "namespace": "n"}),
        json!({"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "a"}]}),
        json!({"type": "custom_tool_call", "call_id": "c", "name": "f", "input": "a"}),
        json!({"type": "custom_tool_call_output", "call_id": "c", "output": "a"}),
    ];
    for item in &items {
        fits(&document, &schema("InputItem"), item).unwrap();
    }
    let body = json!({"model": "test-model", "input": items, "max_output_tokens": 2}).to_string();
    let answer = server.post("/v3/responses", body).await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    let messages = [
        json!({"role": "system", "content": [{"type": "text", "text": "a"}]}),
        json!({"role": "user", "content": "a", "name": "n"}),
        json!({"role": "assistant", "content": null, "reasoning_content": "b", "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}},
        ]}),
        json!({"role": "tool", "content": "a", "tool_call_id": "c"}),
        json!({"role": "assistant", "content": null, "function_call": {"name": "f", "arguments": "{}"}}),
        json!({"role": "function", "content": "a", "name": "f"}),
    ];
    for message in &messages {
        fits(&document, &schema("ChatMessage"), message).unwrap();
    }
    let answer = server.post("/v3/chat/completions", chat(json!({"messages": messages}))).await;
    assert_eq!(answer.status, 200, "{}", answer.body);
}

#[tokio::test]
async fn described_images_are_accepted() {
    let server = Setup::reading_images().start();
    let document = server.get("/openapi.json").await.json();
    let schema = |name: &str| json!({"$ref": format!("#/components/schemas/{name}")});
    let message = |part: Value| json!({"role": "user", "content": [part]});
    for detail in [json!("auto"), json!("low"), json!("high"), Value::Null] {
        let image = message(json!({"type": "image_url", "image_url": {"url": IMAGE, "detail": detail}}));
        fits(&document, &schema("ChatMessage"), &image).unwrap();
        let answer = server.post("/v3/chat/completions", chat(json!({"messages": [image]}))).await;
        assert_eq!(answer.status, 200, "{}", answer.body);
        fits(&document, &schema("Usage"), &answer.json()["usage"]).unwrap();
        let image = message(json!({"type": "input_image", "image_url": IMAGE, "detail": detail}));
        fits(&document, &schema("InputItem"), &image).unwrap();
        let body = json!({"model": "test-model", "input": [image], "max_output_tokens": 2}).to_string();
        let answer = server.post("/v3/responses", body).await;
        assert_eq!(answer.status, 200, "{}", answer.body);
    }
    let huge = message(json!({"type": "image_url", "image_url": {"url": IMAGE, "detail": "huge"}}));
    fits(&document, &schema("ChatMessage"), &huge).unwrap_err();
}

#[test]
fn the_check_finds_mismatches() {
    let document = json!({"components": {"schemas": {"Text": {"type": "string"}}}});
    let schema = json!({
        "type": "object", "required": ["a"], "additionalProperties": false,
        "properties": {"a": {"$ref": "#/components/schemas/Text"}, "b": {"type": "array", "items": {"type": ["integer", "null"]}}},
    });
    for good in [json!({"a": "x"}), json!({"a": "x", "b": [1, null]})] {
        assert_eq!(fits(&document, &schema, &good), Ok(()));
    }
    for bad in
        [json!({}), json!({"a": 1}), json!({"a": "x", "c": 1}), json!({"a": "x", "b": ["y"]}), json!([])]
    {
        assert!(fits(&document, &schema, &bad).is_err(), "{bad}");
    }
}

/// Checks that a value has the types, the members and the enumerated values that a schema allows. Limits, such as
/// `minimum` and `maxItems`, are not checked.
fn fits(document: &Value, schema: &Value, value: &Value) -> Result<(), String> {
    if let Some(reference) = schema["$ref"].as_str() {
        let target = document
            .pointer(reference.trim_start_matches('#'))
            .ok_or(format!("{reference} does not exist"))?;
        return fits(document, target, value);
    }
    if let Some(kinds) = schema["anyOf"].as_array() {
        let fitting = kinds.iter().any(|kind| fits(document, kind, value).is_ok());
        return if fitting { Ok(()) } else { Err(format!("{value} matches no alternative of {schema}")) };
    }
    if let Some(words) = schema["enum"].as_array() {
        return if words.contains(value) {
            Ok(())
        } else {
            Err(format!("{value} is not one of the values that {schema} allows"))
        };
    }
    let types = match &schema["type"] {
        Value::Array(types) => types.clone(),
        Value::Null => return Err(format!("{schema} has no type")),
        one => vec![one.clone()],
    };
    let has = |kind: &Value| match kind.as_str() {
        Some("null") => value.is_null(),
        Some("boolean") => value.is_boolean(),
        Some("integer") => value.is_i64() || value.is_u64(),
        Some("number") => value.is_number(),
        Some("string") => value.is_string(),
        Some("array") => value.is_array(),
        Some("object") => value.is_object(),
        _ => false,
    };
    if !types.iter().any(has) {
        return Err(format!("{value} does not have a type that {schema} allows"));
    }
    if let Some(values) = value.as_array() {
        values.iter().try_for_each(|value| fits(document, &schema["items"], value))?;
    }
    if let Some(members) = value.as_object() {
        for name in schema["required"].as_array().into_iter().flatten() {
            if !members.contains_key(name.as_str().unwrap_or_default()) {
                return Err(format!("{name} is missing"));
            }
        }
        for (name, value) in members {
            match (schema["properties"].get(name), &schema["additionalProperties"]) {
                (Some(schema), _) | (None, schema @ Value::Object(_)) => fits(document, schema, value)?,
                (None, Value::Bool(false)) => {
                    return Err(format!("{schema} does not describe the member {name}"));
                }
                (None, _) => {}
            }
        }
    }
    Ok(())
}
