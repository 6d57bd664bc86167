//! Tests the parameters of the [`ENDPOINTS`], which `/openapi.json` lists: supported parameters with a valid value,
//! values of wrong types, and values beyond each end of the range. Unsupported parameters must be rejected. Members of
//! objects are tested, too. The module `rows` tests the effects of the parameters.

use serde_json::{Map, Value, json};

use crate::harness::{Answer, Server, chat, completion, merged};

/// Number of elements of the longest array that is sent to exceed a limit.
const ELEMENTS_MAX: u64 = 5_000;

/// A function that returns a body with these parameters.
type Body = fn(Value) -> String;

/// Parameters that need a special model or a stored object. Other tests cover them.
const NEED_MORE: [&str; 3] = ["suffix", "previous_response_id", "conversation"];

/// The endpoints: the path, the schema of the body, and the function that returns a body.
pub(crate) const ENDPOINTS: [(&str, &str, Body); 5] = [
    ("/v3/chat/completions", "ChatRequest", chat),
    ("/v3/completions", "CompletionRequest", completion),
    ("/v3/responses", "ResponsesRequest", response),
    ("/v3/tokenize", "TokenizeRequest", tokenize),
    ("/v3/detokenize", "DetokenizeRequest", detokenize),
];

fn response(parameters: Value) -> String {
    let request = json!({"model": "test-model", "input": "Hi", "max_output_tokens": 8, "temperature": 0});
    merged(request, parameters).to_string()
}

fn tokenize(parameters: Value) -> String {
    let mut request = json!({"model": "test-model"});
    let given = |name: &str| !parameters[name].is_null();
    if !given("prompt") && !given("messages") {
        request["text"] = json!("Hi");
    }
    merged(request, parameters).to_string()
}

fn detokenize(parameters: Value) -> String {
    merged(json!({"model": "test-model", "tokens": [72, 105]}), parameters).to_string()
}

/// Returns a valid value of the parameter, with the other parameters that it requires.
fn example(schema: &str, name: &str) -> Value {
    let function = json!({"type": "function", "function": {"name": "f"}});
    match name {
        "model" => json!({"model": "group/test-model"}),
        "messages" => json!({"messages": [{"role": "user", "content": "Hi"}]}),
        "prompt" => json!({"prompt": "Hello"}),
        "tokens" => json!({"tokens": [72, 258]}),
        "stream" => json!({"stream": true}),
        "stream_options" => json!({"stream": true, "stream_options": {"include_usage": true}}),
        "max_tokens" | "max_completion_tokens" | "max_output_tokens" | "max_tool_calls" => json!({name: 3}),
        "input" | "instructions" => json!({name: "Hello"}),
        "text" if schema == "ResponsesRequest" => {
            json!({name: {"format": {"type": "text"}, "verbosity": "low"}})
        }
        "text" => json!({"text": ["Hello", "you"]}),
        "reasoning" => json!({name: {"effort": "low", "summary": "auto"}}),
        "truncation" => json!({name: "auto"}),
        "include" => json!({name: ["message.output_text.logprobs"]}),
        "background" => json!({name: true}),
        "context_management" => json!({name: []}),
        "min_tokens" | "n" | "best_of" | "top_k" | "seed" | "num_assistant_tokens" | "max_ngram_size" => {
            json!({name: 2})
        }
        "stop" => json!({"stop": ["a", "b"]}),
        "stop_token_ids" | "allowed_token_ids" => json!({name: [1, 2]}),
        "include_stop_str_in_output"
        | "ignore_eos"
        | "skip_special_tokens"
        | "spaces_between_special_tokens"
        | "detokenize"
        | "return_token_ids"
        | "return_tokens_as_token_ids"
        | "add_special_tokens"
        | "store"
        | "echo"
        | "parallel_tool_calls"
        | "add_generation_prompt"
        | "return_token_strs"
        | "include_reasoning" => {
            json!({name: true})
        }
        "use_beam_search" => json!({name: false}),
        "truncate_prompt_tokens" => json!({name: -1}),
        "prompt_logprobs" => json!({name: 1}),
        "logprobs" if schema == "CompletionRequest" => json!({name: 2}),
        "logprobs" => json!({name: true}),
        "top_logprobs" => json!({"logprobs": true, "top_logprobs": 2}),
        "tools" if schema == "ResponsesRequest" => json!({name: [{"type": "function", "name": "f"}]}),
        "user" | "safety_identifier" | "prompt_cache_key" | "cache_salt" | "request_id" => json!({name: "x"}),
        "metadata" => json!({"metadata": {"a": "b"}}),
        "service_tier" => json!({name: "default"}),
        "prompt_cache_retention" => json!({name: "24h"}),
        "prompt_cache_options" => json!({name: {"mode": "implicit"}}),
        "access_programs" | "image" => json!({name: {}}),
        "priority" => json!({name: 0}),
        "temperature"
        | "top_p"
        | "min_p"
        | "frequency_penalty"
        | "presence_penalty"
        | "repetition_penalty"
        | "length_penalty"
        | "diversity_penalty"
        | "assistant_confidence_threshold" => json!({name: 0.5}),
        "early_stopping" => json!({name: false}),
        "num_beam_groups" => json!({name: 1}),
        "logit_bias" => json!({name: {"1": -1}}),
        "bad_words" => json!({name: ["bad"]}),
        "response_format" => json!({name: {"type": "text"}}),
        "structured_outputs" => json!({name: {"choice": ["a", "b"]}}),
        "guided_json" => json!({name: {"type": "integer"}}),
        "guided_regex" => json!({name: "[ab]+"}),
        "guided_choice" => json!({name: ["a", "b"]}),
        "guided_grammar" => json!({name: "start: \"a\""}),
        "guided_json_object" => json!({name: true}),
        "structural_tag" => json!({name: {"type": "const_string", "value": "a"}}),
        "guided_decoding_backend" => json!({name: "auto"}),
        "tools" => json!({"tools": [function]}),
        "tool_choice" => json!({"tools": [function], "tool_choice": "auto"}),
        "functions" => json!({"functions": [{"name": "f"}]}),
        "function_call" => json!({"functions": [{"name": "f"}], "function_call": "auto"}),
        "documents" => json!({name: [{"text": "x"}]}),
        "chat_template_kwargs" => json!({name: {"a": 1}}),
        "reasoning_effort" | "verbosity" => json!({name: "low"}),
        "prediction" => json!({name: {"type": "content", "content": "Hi"}}),
        "modalities" => json!({name: ["text"]}),
        "continue_final_message" => json!({name: true}),
        "max_length" => json!({name: 1}),
        "pad_to_max_length" => json!({"max_length": 9, "pad_to_max_length": true}),
        "padding_side" => json!({name: "left"}),
        other => panic!("{other} has no example: add a valid value"),
    }
}

pub(crate) async fn parameters(server: &Server, schema: &str) -> Map<String, Value> {
    let document = server.get("/openapi.json").await.json();
    document["components"]["schemas"][schema]["properties"].as_object().unwrap().clone()
}

fn words<'a>(property: &'a Value, name: &str) -> &'a str {
    property[name].as_str().unwrap()
}

async fn refused(server: &Server, path: &str, body: &str, name: &str) -> Value {
    let answer = server.post(path, body.to_owned()).await;
    assert_eq!(answer.status, 400, "{name}: {body:.200} gives {}", answer.body);
    let error = answer.json()["error"].clone();
    let param = error["param"].as_str().unwrap_or_else(|| panic!("{name}: {error}"));
    assert!(
        param == name || param.starts_with(&format!("{name}[")) || param.starts_with(&format!("{name}.")),
        "{error}"
    );
    assert!(error["message"].as_str().unwrap().starts_with(&format!("{param}: ")), "{error}");
    error
}

#[tokio::test]
async fn each_parameter_accepts_its_valid_values() {
    let server = Server::repeating("abcdefgh ");
    for (path, schema, body) in ENDPOINTS {
        for (name, property) in parameters(&server, schema).await {
            if words(&property, "x-ovfleet") == "refused" || NEED_MORE.contains(&name.as_str()) {
                continue;
            }
            let example = example(schema, &name);
            let answer: Answer = server.post(path, body(example.clone())).await;
            assert_eq!(answer.status, 200, "{path} {example}: {}", answer.body);
            // `null` is equivalent to an absent parameter.
            if !property_is_required(&server, schema, &name).await {
                let answer = server.post(path, body(json!({&name: null}))).await;
                assert_eq!(answer.status, 200, "{path} {name}: {}", answer.body);
            }
        }
    }
    server.idle().await;
}

async fn property_is_required(server: &Server, schema: &str, name: &str) -> bool {
    let document = server.get("/openapi.json").await.json();
    let required = document["components"]["schemas"][schema]["required"].as_array().unwrap().clone();
    // These endpoints require one of several members, so the schema does not list them as required.
    let one_of = [("TokenizeRequest", "text"), ("ResponsesRequest", "input")];
    required.contains(&json!(name)) || one_of.contains(&(schema, name))
}

#[tokio::test]
async fn unsupported_parameters_are_rejected_with_a_reason() {
    let server = Server::repeating("x");
    for (path, schema, body) in ENDPOINTS {
        for (name, property) in parameters(&server, schema).await {
            if words(&property, "x-ovfleet") != "refused" {
                continue;
            }
            let error = refused(&server, path, &body(json!({&name: true})), &name).await;
            assert_eq!(error["code"], "unsupported_parameter", "{error}");
            assert_eq!(error["message"], format!("{name}: {}", words(&property, "description")));
        }
    }
}

#[tokio::test]
async fn an_error_of_a_wrong_type_names_the_right_type() {
    let server = Server::repeating("x");
    let mut tried = 0;
    for (path, schema, body) in ENDPOINTS {
        for (name, property) in parameters(&server, schema).await {
            if words(&property, "x-ovfleet") == "refused" {
                continue;
            }
            let wrong = wrong(&property);
            assert!(!wrong.is_empty(), "no value has the wrong type for {name}");
            for value in wrong {
                let error = refused(&server, path, &body(json!({&name: value})), &name).await;
                assert_eq!(error["code"], "invalid_type", "{name}: {value} gives {error}");
                let message = error["message"].as_str().unwrap();
                let is_within = error["param"] != name;
                assert!(
                    is_within || message.ends_with(&format!(" is not {}", words(&property, "x-words"))),
                    "{message}"
                );
                tried += 1;
            }
        }
    }
    assert!(tried > 1_000, "{tried}");
}

#[tokio::test]
async fn an_error_of_a_value_out_of_range_names_the_range() {
    let server = Server::repeating("x");
    let mut tried = 0;
    for (path, schema, body) in ENDPOINTS {
        for (name, property) in parameters(&server, schema).await {
            if words(&property, "x-ovfleet") == "refused" {
                continue;
            }
            for (value, code) in beyond(&property) {
                let error = refused(&server, path, &body(json!({&name: value})), &name).await;
                assert_eq!(error["code"], code, "{name}: {error}");
                if value.is_number() && code != "invalid_type" {
                    let message = format!("{name}: {value} is not {}", words(&property, "x-words"));
                    assert_eq!(error["message"], message);
                }
                tried += 1;
            }
        }
    }
    assert!(tried > 250, "{tried}");
}

/// Returns values of types that the schema does not allow, including objects with such values as members.
fn wrong(schema: &Value) -> Vec<Value> {
    let values = [json!(true), json!(7), json!(7.5), json!("no-such"), json!([]), json!([[]]), json!({})];
    let mut wrong: Vec<Value> = values.into_iter().filter(|value| !has_type(schema, value)).collect();
    for (member, schema) in schema["properties"].as_object().into_iter().flatten() {
        wrong.extend(self::wrong(schema).into_iter().map(|value| json!({member: value})));
    }
    if let one @ Value::Object(_) = &schema["additionalProperties"] {
        wrong.extend(self::wrong(one).into_iter().map(|value| json!({"a": value})));
    }
    wrong
}

/// Whether the schema allows the type of the value and the types of its elements.
fn has_type(schema: &Value, value: &Value) -> bool {
    if let Some(kinds) = schema["anyOf"].as_array() {
        return kinds.iter().any(|kind| has_type(kind, value));
    }
    match schema["type"].as_str() {
        None => true,
        Some("boolean") => value.is_boolean(),
        Some("integer") => value.is_i64(),
        Some("number") => value.is_number(),
        Some("string") => value.is_string(),
        Some("object") => value.is_object(),
        Some("array") => value
            .as_array()
            .is_some_and(|values| values.iter().all(|value| has_type(&schema["items"], value))),
        Some(other) => panic!("{other}"),
    }
}

/// Returns values outside the schema's range, and the codes of their errors.
fn beyond(schema: &Value) -> Vec<(Value, &'static str)> {
    if let Some(kinds) = schema["anyOf"].as_array() {
        return kinds.iter().flat_map(beyond).collect();
    }
    let mut values = Vec::new();
    match schema["type"].as_str() {
        Some("integer") => {
            let bound = |name: &str| schema[name].as_i64();
            values.extend(bound("minimum").map(|min| (json!(min - 1), "integer_below_min_value")));
            values.extend(bound("maximum").map(|max| (json!(max + 1), "integer_above_max_value")));
            values.extend([(json!(u64::MAX), "integer_above_max_value"), (json!(1e300), "invalid_type")]);
        }
        Some("number") => {
            let bound = |name: &str| schema[name].as_f64();
            values.extend(bound("minimum").map(|min| (json!(min - 0.5), "decimal_below_min_value")));
            values.extend(bound("maximum").map(|max| (json!(max + 0.5), "decimal_above_max_value")));
            values.extend(bound("exclusiveMinimum").map(|min| (json!(min), "decimal_below_min_value")));
            values.push((json!(1e300), "decimal_above_max_value"));
        }
        Some("string") => {
            let longest = schema["maxLength"].as_u64();
            values.extend(
                longest.map(|length| (json!("x".repeat(length as usize + 1)), "string_above_max_length")),
            );
            if schema["enum"].is_array() {
                values.push((json!("no-such"), "invalid_value"));
            }
        }
        Some("object") => {
            if let Some(most) = schema["maxProperties"].as_u64() {
                let many: Map<String, Value> =
                    (0..=most).map(|index| (index.to_string(), json!("x"))).collect();
                values.push((json!(many), "object_above_max_properties"));
            }
            for (member, schema) in schema["properties"].as_object().into_iter().flatten() {
                values.extend(beyond(schema).into_iter().map(|(value, code)| (json!({member: value}), code)));
            }
            if let one @ Value::Object(_) = &schema["additionalProperties"] {
                values.extend(beyond(one).into_iter().map(|(value, code)| (json!({"a": value}), code)));
            }
        }
        Some("array") => {
            let item = match schema["items"]["type"].as_str() {
                Some("integer") => json!(1),
                Some("array") => json!([1]),
                Some("object") => json!({}),
                _ => schema["items"]["enum"].as_array().map_or(json!("x"), |words| words[0].clone()),
            };
            let most = schema["maxItems"].as_u64().filter(|most| *most < ELEMENTS_MAX);
            values.extend(most.map(|most| (json!(vec![item; most as usize + 1]), "array_above_max_length")));
            let elements = beyond(&schema["items"]).into_iter();
            values.extend(elements.map(|(value, code)| (json!([value]), code)));
        }
        _ => {}
    }
    values
}
