//! Tests rejected requests and their messages, for invalid parameters and for malformed bodies.

use expect_test::{Expect, expect};
use serde_json::{Value, json};

use crate::harness::{Server, Setup, chat, completion};

async fn refused(path: &str, bodies: Vec<String>, expect: Expect) {
    let server = Server::repeating("x");
    let mut shown = String::new();
    for body in bodies {
        let answer = server.post(path, body.clone()).await;
        assert!(answer.status.is_client_error(), "{body}: {}", answer.body);
        let error = &answer.json()["error"];
        assert!(error["type"].is_string() && error.as_object().unwrap().len() == 4, "{error}");
        let text = |field: &str| error[field].as_str().unwrap_or("-").to_owned();
        let [param, code, message] = ["param", "code", "message"].map(text);
        shown += &format!("{} {code} {param} | {message}\n", answer.status.as_u16());
    }
    expect.assert_eq(&shown);
    assert_eq!(
        server.post("/v3/completions", completion(json!({}))).await.status,
        200,
        "the server continues to serve"
    );
    server.idle().await;
}

#[tokio::test]
async fn bodies_that_are_not_requests_are_rejected() {
    let nested = format!("{}{}", "[".repeat(10_000), "]".repeat(10_000));
    let bodies = vec![
        String::new(),
        "{".to_owned(),
        "[]".to_owned(),
        "\"chat\"".to_owned(),
        nested.clone(),
        format!("{{\"messages\": {nested}}}"),
        format!("{{\"unknown\": {nested}}}"),
        "{\"model\": \"test-model\", \"temperature\": 1e999}".to_owned(),
        "{}".to_owned(),
        json!({"model": "other"}).to_string(),
        json!({"model": "test-model"}).to_string(),
        json!({"model": 1}).to_string(),
    ];
    refused(
        "/v3/chat/completions",
        bodies,
        expect![[r#"
            400 - - | failed to parse the request body as JSON: EOF while parsing a value at line 1 column 0
            400 - - | failed to parse the request body as JSON: EOF while parsing an object at line 1 column 1
            400 - - | the request body must be a JSON object
            400 - - | the request body must be a JSON object
            400 - - | failed to parse the request body as JSON: recursion limit exceeded at line 1 column 128
            400 - - | failed to parse the request body as JSON: recursion limit exceeded at line 1 column 140
            400 - - | failed to parse the request body as JSON: recursion limit exceeded at line 1 column 139
            400 - - | failed to parse the request body as JSON: number out of range at line 1 column 44
            400 missing_required_parameter model | model: is missing
            404 model_not_found model | this server does not serve the model "other"
            400 missing_required_parameter messages | messages: is missing
            400 invalid_type model | model: 1 is not a string
        "#]],
    )
    .await;
}

#[tokio::test]
async fn invalid_parameters_of_the_chat_endpoint_are_rejected() {
    let cases = [
        json!({"messages": "hi"}),
        json!({"messages": ["hi"]}),
        json!({"messages": [{"content": "x"}]}),
        json!({"messages": [{"role": 1, "content": "x"}]}),
        json!({"messages": [{"role": "user", "content": [{"text": "x"}]}]}),
        json!({"messages": []}),
        json!({"messages": [{"role": "user", "content": 5}]}),
        json!({"messages": [{"role": "user"}]}),
        json!({"messages": [{"role": "oracle", "content": "x"}]}),
        json!({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}),
        json!({"messages": [{"role": "user", "content": [{"type": "text"}]}]}),
        json!({"messages": [{"role": "user", "content": "x".repeat(600)}]}),
        json!({"logprobs": 5}),
        json!({"top_logprobs": 5}),
        json!({"logprobs": true, "top_logprobs": 21}),
        json!({"top_logprobs": "3"}),
        json!({"tools": {}}),
        json!({"documents": "a"}),
        json!({"tools": [{"type": "function"}], "tool_choice": "required"}),
        json!({"chat_template_kwargs": []}),
        json!({"chat_template_kwargs": {"messages": []}}),
        json!({"add_generation_prompt": "yes"}),
    ];
    refused("/v3/chat/completions", cases.map(chat).to_vec(), expect![[r#"
        400 invalid_type messages | messages: "hi" is not an array of objects
        400 invalid_type messages[0] | messages[0]: "hi" is not an object
        400 missing_required_parameter messages[0].role | messages[0].role: is missing
        400 invalid_type messages[0].role | messages[0].role: 1 is not a string
        400 missing_required_parameter messages[0].content[0].type | messages[0].content[0].type: is missing
        400 empty_array messages | messages: is empty
        400 invalid_type messages[0].content | messages[0].content: 5 is not a string or an array of content parts
        400 missing_required_parameter messages[0].content | messages[0].content: is missing
        400 invalid_value messages[0].role | messages[0].role: "oracle" is not one of system, developer, user, assistant, tool, function
        400 invalid_value messages[0].content[0].image_url | messages[0].content[0].image_url: this model does not support images
        400 missing_required_parameter messages[0].content[0].text | messages[0].content[0].text: is missing
        400 context_length_exceeded messages | messages: the prompt has 619 tokens, which leaves no room for generated tokens in the context length of 512 tokens
        400 invalid_type logprobs | logprobs: 5 is not true or false
        400 invalid_value top_logprobs | top_logprobs: requires logprobs = true
        400 integer_above_max_value top_logprobs | top_logprobs: 21 is not an integer from 0 to 20
        400 invalid_type top_logprobs | top_logprobs: "3" is not an integer from 0 to 20
        400 invalid_type tools | tools: an object is not an array of objects
        400 invalid_type documents | documents: "a" is not an array of objects
        400 missing_required_parameter tools[0].name | tools[0].name: is missing
        400 invalid_type chat_template_kwargs | chat_template_kwargs: an array is not an object
        400 invalid_value chat_template_kwargs.messages | chat_template_kwargs.messages: cannot be set here: another parameter or the model sets it
        400 invalid_type add_generation_prompt | add_generation_prompt: "yes" is not true or false
    "#]]).await;
}

#[tokio::test]
async fn invalid_parameters_of_the_completions_endpoint_are_rejected() {
    let cases = [
        json!({"prompt": null}),
        json!({"prompt": ""}),
        json!({"prompt": []}),
        json!({"prompt": [[]]}),
        json!({"prompt": ["a", ""]}),
        json!({"prompt": 7}),
        json!({"prompt": {"a": 1}}),
        json!({"prompt": ["a", 1]}),
        json!({"prompt": [1, "a"]}),
        json!({"prompt": [1, -1]}),
        json!({"prompt": [100_000]}),
        json!({"prompt": vec!["a"; 200]}),
        json!({"prompt": vec![97; 512]}),
        json!({"prompt": vec![97; 500], "max_tokens": 20}),
        json!({"logprobs": true}),
        json!({"logprobs": 21}),
        json!({"echo": 1}),
        json!({"suffix": "end"}),
        json!({"suffix": 7}),
        json!({"n": 2, "prompt": vec!["a"; 65]}),
    ];
    refused("/v3/completions", cases.map(completion).to_vec(), expect![[r#"
        400 missing_required_parameter prompt | prompt: is missing
        400 invalid_value prompt | prompt: is empty
        400 empty_array prompt | prompt: is empty
        400 invalid_value prompt | prompt: is empty
        400 invalid_value prompt | prompt: is empty
        400 invalid_type prompt | prompt: 7 is not a string, an array of at most 128 strings, an array of tokens or an array of at most 128 arrays of tokens
        400 invalid_type prompt | prompt: an object is not a string, an array of at most 128 strings, an array of tokens or an array of at most 128 arrays of tokens
        400 invalid_type prompt[1] | prompt[1]: 1 is not a string
        400 invalid_type prompt[1] | prompt[1]: "a" is not an integer from 0 to 4294967295
        400 integer_below_min_value prompt[1] | prompt[1]: -1 is not an integer from 0 to 4294967295
        400 invalid_value prompt | prompt: token 100000 is not in the vocabulary of 259 tokens
        400 array_above_max_length prompt | prompt: has 200 elements (limit: 128)
        400 context_length_exceeded prompt | prompt: the prompt has 512 tokens, which leaves no room for generated tokens in the context length of 512 tokens
        400 context_length_exceeded max_tokens | max_tokens: 500 prompt tokens and 20 generated tokens exceed the context length of 512 tokens
        400 invalid_type logprobs | logprobs: true is not an integer from 0 to 20
        400 integer_above_max_value logprobs | logprobs: 21 is not an integer from 0 to 20
        400 invalid_type echo | echo: 1 is not true or false
        400 unsupported_parameter suffix | suffix: this model does not support fill-in-the-middle: its vocabulary has no tokens for it
        400 invalid_type suffix | suffix: 7 is not a string
        400 integer_above_max_value n | n: 65 prompts with n = 2 exceed the limit of 128 choices
    "#]]).await;
}

/// Invalid values of parameters that `/chat/completions` and `/completions` share.
fn shared_parameters() -> Vec<Value> {
    vec![
        json!({"stream": "true"}),
        json!({"stream_options": {"include_usage": true}}),
        json!({"stream": true, "stream_options": true}),
        json!({"max_tokens": "4"}),
        json!({"max_tokens": 0}),
        json!({"max_completion_tokens": 0}),
        json!({"max_completion_tokens": []}),
        json!({"min_tokens": -1}),
        json!({"n": "2"}),
        json!({"best_of": {}}),
        json!({"top_p": [0.5]}),
        json!({"top_k": 1.5}),
        json!({"min_p": "0"}),
        json!({"repetition_penalty": {}}),
        json!({"frequency_penalty": "0"}),
        json!({"presence_penalty": true}),
        json!({"logit_bias": [1]}),
        json!({"response_format": "json"}),
        json!({"max_tokens": -1}),
        json!({"max_tokens": 1e30}),
        json!({"max_tokens": 100_000}),
        json!({"max_completion_tokens": 100_000}),
        json!({"min_tokens": 9}),
        json!({"n": 0}),
        json!({"n": 129}),
        json!({"best_of": 0}),
        json!({"n": 3, "best_of": 2}),
        json!({"min_tokens": 1e300}),
        json!({"prompt_logprobs": 21}),
        json!({"metadata": {"a": 1}}),
        json!({"service_tier": "gold"}),
        json!({"truncate_prompt_tokens": -2}),
        json!({"priority": 3}),
        json!({"logits_processors": ["x"]}),
        json!({"stop": 1}),
        json!({"stop": vec!["x"; 17]}),
        json!({"stop": ["a", "x".repeat(2000)]}),
        json!({"stop_token_ids": [0, 259]}),
        json!({"stop_token_ids": vec![1; 257]}),
        json!({"include_stop_str_in_output": 1}),
        json!({"ignore_eos": 1}),
        json!({"skip_special_tokens": "no"}),
        json!({"seed": 1.5}),
        json!({"temperature": -0.1}),
        json!({"temperature": 2.1}),
        json!({"temperature": "hot"}),
        json!({"top_p": 1.1}),
        json!({"top_p": 1e300}),
        json!({"top_k": -2}),
        json!({"min_p": -1}),
        json!({"repetition_penalty": 0}),
        json!({"repetition_penalty": 1e300}),
        json!({"frequency_penalty": 2.5}),
        json!({"presence_penalty": -2.5}),
        json!({"logit_bias": {"x": 1}}),
        json!({"logit_bias": {"05": 1}}),
        json!({"logit_bias": {"259": 1}}),
        json!({"logit_bias": {"1": "a"}}),
        json!({"logit_bias": {"1": 101}}),
        json!({"response_format": {"type": "no-such"}}),
        json!({"response_format": {}}),
    ]
}

#[tokio::test]
async fn invalid_parameters_that_both_endpoints_share_are_rejected() {
    let bodies = shared_parameters().into_iter().map(completion).collect();
    refused("/v3/completions", bodies, expect![[r#"
        400 invalid_type stream | stream: "true" is not true or false
        400 invalid_value stream_options | stream_options: requires stream = true
        400 invalid_type stream_options | stream_options: true is not an object
        400 invalid_type max_tokens | max_tokens: "4" is not an integer from 0 to 4294967295
        400 integer_below_min_value max_tokens | max_tokens: must be at least 1
        400 integer_below_min_value max_completion_tokens | max_completion_tokens: must be at least 1
        400 invalid_type max_completion_tokens | max_completion_tokens: an array is not an integer from 0 to 4294967295
        400 integer_below_min_value min_tokens | min_tokens: -1 is not an integer from 0 to 4294967295
        400 invalid_type n | n: "2" is not an integer from 1 to 128
        400 invalid_type best_of | best_of: an object is not an integer from 1 to 128
        400 invalid_type top_p | top_p: an array is not a number from 0 to 1
        400 invalid_type top_k | top_k: 1.5 is not an integer from -1 to 2147483647
        400 invalid_type min_p | min_p: "0" is not a number from 0 to 1
        400 invalid_type repetition_penalty | repetition_penalty: an object is not a number from 0.001 to 1000
        400 invalid_type frequency_penalty | frequency_penalty: "0" is not a number from -2 to 2
        400 invalid_type presence_penalty | presence_penalty: true is not a number from -2 to 2
        400 invalid_type logit_bias | logit_bias: an array is not an object
        400 invalid_type response_format | response_format: "json" is not an object
        400 integer_below_min_value max_tokens | max_tokens: -1 is not an integer from 0 to 4294967295
        400 invalid_type max_tokens | max_tokens: 1e+30 is not an integer from 0 to 4294967295
        400 context_length_exceeded max_tokens | max_tokens: 2 prompt tokens and 100000 generated tokens exceed the context length of 512 tokens
        400 context_length_exceeded max_completion_tokens | max_completion_tokens: 2 prompt tokens and 100000 generated tokens exceed the context length of 512 tokens
        400 integer_above_max_value min_tokens | min_tokens: 9 is greater than 8, the maximum number of generated tokens
        400 integer_below_min_value n | n: 0 is not an integer from 1 to 128
        400 integer_above_max_value n | n: 129 is not an integer from 1 to 128
        400 integer_below_min_value best_of | best_of: 0 is not an integer from 1 to 128
        400 integer_below_min_value best_of | best_of: 2 is less than n (3)
        400 invalid_type min_tokens | min_tokens: 1e+300 is not an integer from 0 to 4294967295
        400 integer_above_max_value prompt_logprobs | prompt_logprobs: 21 is not an integer from 0 to 20
        400 invalid_type metadata.a | metadata.a: 1 is not a string of at most 512 characters
        400 invalid_value service_tier | service_tier: "gold" is not "auto", "default", "flex", "scale", "priority" or "fast"
        400 integer_below_min_value truncate_prompt_tokens | truncate_prompt_tokens: -2 is not an integer from -1 to 4294967295
        400 integer_above_max_value priority | priority: 3 is not 0
        400 unsupported_parameter logits_processors | logits_processors: this server does not run code from requests
        400 invalid_type stop | stop: 1 is not a string of at most 1024 bytes or an array of at most 16 strings
        400 array_above_max_length stop | stop: has 17 elements (limit: 16)
        400 string_above_max_length stop[1] | stop[1]: "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx… (2002 bytes) is not a string of at most 1024 bytes
        400 invalid_value stop_token_ids[1] | stop_token_ids[1]: token 259 is not in the vocabulary of 259 tokens
        400 array_above_max_length stop_token_ids | stop_token_ids: has 257 elements (limit: 256)
        400 invalid_type include_stop_str_in_output | include_stop_str_in_output: 1 is not true or false
        400 invalid_type ignore_eos | ignore_eos: 1 is not true or false
        400 invalid_type skip_special_tokens | skip_special_tokens: "no" is not true or false
        400 invalid_type seed | seed: 1.5 is not an integer
        400 decimal_below_min_value temperature | temperature: -0.1 is not a number from 0 to 2
        400 decimal_above_max_value temperature | temperature: 2.1 is not a number from 0 to 2
        400 invalid_type temperature | temperature: "hot" is not a number from 0 to 2
        400 decimal_above_max_value top_p | top_p: 1.1 is not a number from 0 to 1
        400 decimal_above_max_value top_p | top_p: 1e+300 is not a number from 0 to 1
        400 integer_below_min_value top_k | top_k: -2 is not an integer from -1 to 2147483647
        400 decimal_below_min_value min_p | min_p: -1 is not a number from 0 to 1
        400 decimal_below_min_value repetition_penalty | repetition_penalty: 0 is not a number from 0.001 to 1000
        400 decimal_above_max_value repetition_penalty | repetition_penalty: 1e+300 is not a number from 0.001 to 1000
        400 decimal_above_max_value frequency_penalty | frequency_penalty: 2.5 is not a number from -2 to 2
        400 decimal_below_min_value presence_penalty | presence_penalty: -2.5 is not a number from -2 to 2
        400 invalid_value logit_bias.x | logit_bias.x: the name must be a token ID, an integer of at least 0
        400 invalid_value logit_bias.05 | logit_bias.05: the name must be a token ID, an integer of at least 0
        400 invalid_value logit_bias.259 | logit_bias.259: token 259 is not in the vocabulary of 259 tokens
        400 invalid_type logit_bias.1 | logit_bias.1: "a" is not a number from -100 to 100
        400 decimal_above_max_value logit_bias.1 | logit_bias.1: 101 is not a number from -100 to 100
        400 invalid_value response_format.type | response_format.type: must be text, json_object, json_schema, structural_tag or the type of a structural tag format, not "no-such"
        400 missing_required_parameter response_format.type | response_format.type: is missing
    "#]]).await;
}

#[tokio::test]
async fn both_endpoints_reject_shared_parameters_alike() {
    let server = Server::repeating("x");
    let others = [json!({"model": "y"}), json!({"model": ""}), json!({"model": null})];
    for parameters in shared_parameters().into_iter().chain(others) {
        let error = async |path: &str, body: String| -> (u16, Value) {
            let answer = server.post(path, body).await;
            let mut error = answer.json()["error"].clone();
            if error["code"] == "context_length_exceeded" {
                // The message contains the length of the prompt. For chats, the prompt includes the chat template.
                error["message"] = json!("…");
            }
            (answer.status.as_u16(), error)
        };
        let chat = error("/v1/chat/completions", chat(parameters.clone())).await;
        assert_eq!(chat, error("/v1/completions", completion(parameters.clone())).await);
        assert!((400..500).contains(&chat.0), "{parameters}: {}", chat.1);
    }
}

#[tokio::test]
async fn unknown_fields_and_nulls_are_ignored() {
    let server = Server::repeating("x");
    let nulls = json!({
        "user": "u", "no_such_field": {"a": [1]}, "temperature": null, "stop": null, "n": null, "seed": null,
        "logit_bias": null, "tools": null, "tool_choice": null, "response_format": {"type": "text"},
        "stream_options": null, "top_logprobs": null, "stop_token_ids": null, "best_of": 1,
    });
    let answer = server.post("/v3/chat/completions", chat(nulls)).await;
    assert_eq!(answer.status, 200, "{}", answer.body);
}

/// Some of these values are in range as JSON numbers, but not as the `f32` that the engine uses.
#[tokio::test]
async fn numbers_at_the_end_of_their_ranges_fail_no_step() {
    let server = Setup::new(crate::harness::faulty(Vec::new())).start();
    let numbers = [1e-50, 1e-45, 1e-40, 1e-38, 1e-7, 0.001, 1.0, 1.000_000_01, 1000.0, 3.4e38, 3.5e38, 1e300];
    for param in [
        "temperature",
        "top_p",
        "min_p",
        "repetition_penalty",
        "frequency_penalty",
        "presence_penalty",
        "length_penalty",
        "diversity_penalty",
    ] {
        for number in numbers.into_iter().flat_map(|number| [number, -number]) {
            let mut parameters = json!({"temperature": 0.7, "n": 2});
            if param.ends_with("y_penalty") && !param.contains("frequency") {
                parameters = json!({"use_beam_search": true, "n": 2});
            }
            parameters[param] = json!(number);
            let answer = server.post("/v3/chat/completions", chat(parameters)).await;
            assert!(matches!(answer.status.as_u16(), 200 | 400), "{param} {number}: {}", answer.body);
            if answer.status == 400 {
                assert_eq!(answer.json()["error"]["param"], param, "{number}: {}", answer.body);
            }
        }
    }
}
