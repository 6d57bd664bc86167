//! `/openapi.json` is true: what it names is there, what is there is in it, and answers are as it says.

use axum::body::Body;
use axum::http::Request;
use serde_json::{Value, json};

use crate::harness::{Answer, Server, chat, completion};

#[tokio::test]
async fn what_it_names_is_there_and_what_is_there_is_in_it() {
    let server = Server::parrot("x");
    let document = server.get("/openapi.json").await.json();
    assert_eq!(document["openapi"], "3.1.0");
    let paths = document["paths"].as_object().unwrap();
    for (path, operations) in paths {
        for method in operations.as_object().unwrap().keys() {
            let path = path.replace("{id}", "parrot").replace("{item}", "msg_1");
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
    // The routes as they are written down.
    let source = include_str!("../../src/routes.rs");
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
    assert!(count > 8, "{count} routes were found");
}

#[tokio::test]
async fn answers_are_as_it_says() {
    let server = Server::parrot("abcdefgh ");
    let document = server.get("/openapi.json").await.json();
    let all = json!({"n": 2, "return_token_ids": true, "prompt_logprobs": 2, "seed": 1});
    let mut requests = vec![
        (
            "/v3/tokenize",
            json!({"model": "parrot", "text": ["a", "b"], "return_token_strs": true}).to_string(),
        ),
        ("/v3/tokenize", json!({"model": "parrot", "prompt": "a"}).to_string()),
        ("/tokenize", json!({"model": "parrot", "messages": [{"role": "user", "content": "x"}]}).to_string()),
        ("/detokenize", json!({"model": "parrot", "tokens": [97]}).to_string()),
        ("/v3/detokenize", json!({"model": "parrot", "tokens": [9999]}).to_string()),
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
        let response = if answer.status == 200 { &responses["200"] } else { &responses["default"] };
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
    for path in ["/v3/models", "/v3/models/parrot"] {
        let described = path.replace("parrot", "{id}");
        let schema = &document["paths"][&described]["get"]["responses"]["200"]["content"]["application/json"]
            ["schema"];
        fits(&document, schema, &server.get(path).await.json()).unwrap();
    }
}

#[test]
fn the_check_finds_what_does_not_fit() {
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

/// Whether a value is as a schema says: the words that ours are written in.
fn fits(document: &Value, schema: &Value, value: &Value) -> Result<(), String> {
    if let Some(reference) = schema["$ref"].as_str() {
        let target =
            document.pointer(reference.trim_start_matches('#')).ok_or(format!("{reference} is nowhere"))?;
        return fits(document, target, value);
    }
    if let Some(kinds) = schema["anyOf"].as_array() {
        let fitting = kinds.iter().any(|kind| fits(document, kind, value).is_ok());
        return if fitting { Ok(()) } else { Err(format!("{value} is none of {schema}")) };
    }
    if let Some(words) = schema["enum"].as_array() {
        return if words.contains(value) { Ok(()) } else { Err(format!("{value} is none of {schema}")) };
    }
    let types = match &schema["type"] {
        Value::Array(types) => types.clone(),
        Value::Null => return Err(format!("{schema} says nothing")),
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
        return Err(format!("{value} is no {schema}"));
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
                (None, Value::Bool(false)) => return Err(format!("{name} is not described")),
                (None, _) => {}
            }
        }
    }
    Ok(())
}
