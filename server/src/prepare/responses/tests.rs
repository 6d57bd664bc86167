use base64::decoded_len_estimate;
use expect_test::{Expect, expect};
use serde_json::json;
use server_engine::{EngineLimits, RequestLimits};
use tokio_util::sync::CancellationToken;

use super::references::REFERENCES_MAX;
use super::*;
use crate::backend::built_in_model_with_images;
use crate::limits::ByteBudget;
use crate::prepare::Media;
use crate::store::{Store, StoreConfig};

fn request(body: &Value) -> Request {
    Request::read(body).unwrap()
}

fn ids() -> ItemIds {
    Store::open(&StoreConfig::default()).unwrap().new_id(Kind::Response).items()
}

fn items(given: &Value) -> Result<Vec<Arc<Item>>, Error> {
    input(&request(&json!({"input": given})), Vec::new(), &mut ids())
}

/// Returns the messages for a template, one per line.
fn said(instructions: Option<&str>, given: &Value) -> String {
    let items = items(given).unwrap();
    let messages = messages::messages(instructions, &[], &items);
    messages.iter().map(|message| serde_json::to_string(message).unwrap() + "\n").collect()
}

fn refused(given: &Value, expected: &Expect) {
    expected.assert_eq(&items(given).unwrap_err().to_string());
}

#[test]
fn a_text_is_a_message_of_the_user() {
    expect![[r#"
        {"role":"system","content":"Be brief."}
        {"role":"user","content":"Hello"}
    "#]]
    .assert_eq(&said(Some("Be brief."), &json!("Hello")));
}

#[test]
fn the_first_system_texts_are_one_message() {
    let given = json!([
        {"role": "developer", "content": "a"},
        {"role": "system", "content": [{"type": "input_text", "text": "b"}, {"type": "input_text", "text": "c"}]},
        {"role": "user", "content": "d"},
        {"role": "developer", "content": "e"},
    ]);
    expect![[r#"
        {"role":"system","content":"x\n\na\n\nb\nc"}
        {"role":"user","content":"d"}
        {"role":"developer","content":"e"}
    "#]]
    .assert_eq(&said(Some("x"), &given));
}

#[test]
fn images_name_the_parameter_that_contains_them() {
    let given = json!([
        {"role": "system", "content": "a"},
        {"role": "user", "content": [
            {"type": "input_text", "text": "b"},
            {"type": "input_image", "image_url": "data:,", "detail": "low"},
        ]},
    ]);
    let items = items(&given).unwrap();
    let params = |messages: &[Message]| {
        let Some(server_openai::Content::Parts(parts)) = &messages[1].content else {
            panic!("the content has no parts")
        };
        let image = parts[1].image_url.as_ref().unwrap();
        assert_eq!((image.url.as_str(), image.detail.as_deref()), ("data:,", Some("low")));
        image.param.clone().unwrap()
    };
    assert_eq!(params(&messages::messages(None, &[], &items)), "input[1].content[1].image_url");
    assert_eq!(params(&messages::messages(None, &items, &[])), "input");
}

#[test]
fn reasoning_text_and_calls_of_a_turn_are_one_message() {
    let given = json!([
        {"role": "user", "content": "What time is it in Paris and Rome?"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Two"}], "content": []},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "calls."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]},
        {"type": "function_call", "call_id": "c1", "name": "time", "arguments": "{\"city\":\"Paris\"}"},
        {"type": "function_call", "id": "c2", "name": "time", "arguments": "{\"city\":\"Rome\"}"},
        {"type": "function_call_output", "call_id": "c1", "output": "12:00"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "12:00"}]},
        {"role": "assistant", "content": "Noon in both."},
        {"role": "assistant", "content": "Anything else?"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Wait."}]},
    ]);
    expect![[r#"
        {"role":"user","content":"What time is it in Paris and Rome?"}
        {"role":"assistant","content":"Let me see.","reasoning_content":"Two\ncalls.","tool_calls":[{"id":"c1","type":"function","function":{"name":"time","arguments":"{\"city\":\"Paris\"}"}},{"id":"c2","type":"function","function":{"name":"time","arguments":"{\"city\":\"Rome\"}"}}]}
        {"role":"tool","content":"12:00","name":"time","tool_call_id":"c1"}
        {"role":"tool","content":"12:00","name":"time","tool_call_id":"c2"}
        {"role":"assistant","content":"Noon in both."}
        {"role":"assistant","content":"Anything else?"}
        {"role":"assistant","content":null,"reasoning_content":"Wait."}
    "#]]
    .assert_eq(&said(None, &given));
}

#[test]
fn calls_before_a_text_become_a_part_of_its_message() {
    let given = json!([
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"role": "assistant", "content": "I called."},
        {"type": "function_call_output", "output": "done"},
    ]);
    expect![[r#"
        {"role":"assistant","content":"I called.","tool_calls":[{"id":"c1","type":"function","function":{"name":"f","arguments":"{}"}}]}
        {"role":"tool","content":"done"}
    "#]].assert_eq(&said(None, &given));
}

#[test]
fn an_error_names_the_path_of_a_malformed_item() {
    refused(&json!([]), &expect!["input: is empty"]);
    refused(&json!(""), &expect!["input: is empty"]);
    refused(&json!([{}]), &expect!["input[0].role: is missing"]);
    refused(&json!([{"role": "user"}]), &expect!["input[0].content: is missing"]);
    refused(&json!([{"role": "user", "content": []}]), &expect!["input[0].content: is empty"]);
    refused(
        &json!([{"role": "robot", "content": "x"}]),
        &expect![[r#"input[0].role: "robot" is not one of user, assistant, system, developer"#]],
    );
    refused(
        &json!([{"role": "user", "content": [{"type": "input_text"}]}]),
        &expect!["input[0].content[0].text: is missing"],
    );
    refused(
        &json!([{"role": "user", "content": [
            {"type": "input_text", "text": "x"}, {"type": "input_file", "file_url": "https://example.org"},
        ]}]),
        &expect![[
            r#"input[0].content[1].type: parts of type "input_file" are not supported; use input_text, output_text, refusal or, if the model supports images, input_image"#
        ]],
    );
    refused(
        &json!([{"role": "user", "content": [{"type": "input_image", "file_id": "file-1"}]}]),
        &expect!["input[0].content[0].file_id: this server stores no files; send the image as image_url"],
    );
    refused(
        &json!([{"role": "user", "content": [{"type": "input_image"}]}]),
        &expect!["input[0].content[0].image_url: is missing"],
    );
    let image = json!({"type": "input_image", "image_url": "data:,"});
    refused(
        &json!([{"role": "assistant", "content": [{"type": "output_text", "text": "x"}, image]}]),
        &expect![[
            r#"input[0].content[1].type: messages with the role "assistant" cannot contain images; only messages with the role "user" can"#
        ]],
    );
    refused(
        &json!([{"role": "user", "content": [{"type": "input_image", "image_url": "data:,", "detail": "huge"}]}]),
        &expect![[r#"input[0].content[0].detail: "huge" is not one of auto, low, high"#]],
    );
    refused(
        &json!([{"type": "function_call_output", "call_id": "c", "output": [image]}]),
        &expect![
            "input[0].output[0].type: tool results cannot contain images; send the image in a user message"
        ],
    );
    refused(
        &json!([{"type": "web_search_call", "id": "x"}]),
        &expect![[
            r#"input[0].type: "web_search_call" is not supported; supported types: message, reasoning, function_call, function_call_output, custom_tool_call, custom_tool_call_output and item_reference"#
        ]],
    );
    refused(&json!([{"type": "function_call", "name": "f"}]), &expect!["input[0].call_id: is missing"]);
    refused(
        &json!([{"type": "function_call", "call_id": "c", "name": "f"}]),
        &expect!["input[0].arguments: is missing"],
    );
    refused(
        &json!([{"type": "function_call_output", "call_id": "c"}]),
        &expect!["input[0].output: is missing"],
    );
    refused(&json!([{"type": "item_reference"}]), &expect!["input[0].id: is missing"]);
}

#[test]
fn items_retain_their_ids_and_get_unique_new_ones() {
    let items = items(&json!([
        {"role": "user", "content": "a", "id": "msg_mine"},
        {"role": "user", "content": "b"},
        {"role": "user", "content": "c", "id": "x".repeat(1000)},
    ]))
    .unwrap();
    let names: Vec<&str> = items.iter().map(|item| item.id()).collect();
    assert_eq!(names[0], "msg_mine");
    assert!(
        names[1].starts_with("msg_") && names[2].starts_with("msg_") && names[1] != names[2],
        "{names:?}"
    );
}

#[test]
fn references_are_found_with_their_paths() {
    let found = references(&request(&json!({
        "previous_response_id": "resp_1",
        "input": [{"role": "user", "content": "a"}, {"type": "item_reference", "id": "msg_1"}, {"id": "msg_2"}],
    })));
    let found = found.unwrap();
    assert_eq!(found.previous.as_deref(), Some("resp_1"));
    let reference = |param: &str, id: &str| ItemReference { param: param.to_owned(), id: id.to_owned() };
    assert_eq!(found.items, [reference("input[1].id", "msg_1"), reference("input[2].id", "msg_2")]);
    for named in [json!("conv_1"), json!({"id": "conv_1"})] {
        let found = references(&request(&json!({"conversation": named}))).unwrap();
        assert_eq!(found.conversation.as_deref(), Some("conv_1"));
    }
    for wrong in [
        json!({"conversation": 1}),
        json!({"conversation": {}}),
        json!({"conversation": {"id": 1}}),
        json!({"conversation": "conv_1", "previous_response_id": "resp_1"}),
        json!({"input": vec![json!({"type": "item_reference", "id": "msg_1"}); REFERENCES_MAX + 1]}),
    ] {
        assert!(references(&request(&wrong)).is_err(), "{wrong}");
    }
}

#[test]
fn a_reference_is_replaced_by_its_item() {
    let request = request(
        &json!({"input": [{"type": "item_reference", "id": "msg_1"}, {"role": "user", "content": "b"}]}),
    );
    let referred = items(&json!("a")).unwrap();
    let all = input(&request, referred.clone(), &mut ids()).unwrap();
    assert_eq!(all[0], referred[0]);
    assert_eq!(all.len(), 2);
}

#[test]
fn a_schema_is_flat_here_and_nested_in_chat_completions() {
    let flat_one = json!({"type": "json_schema", "name": "n", "strict": true, "schema": {"type": "object"}});
    let nested = json!({"type": "json_schema", "json_schema": {"name": "n", "strict": true, "schema": {"type": "object"}}});
    let parsed_format = format(&request(&json!({"text": {"format": flat_one}})));
    assert_eq!(Value::Object(parsed_format.clone()), flat_one);
    assert_eq!(Value::Object(chat_format(&parsed_format)), nested);
    // OVMS clients send this form.
    let parsed_format = format(&request(&json!({"response_format": nested})));
    assert_eq!(Value::Object(parsed_format), flat_one);
    let bare = json!({"type": "json_schema", "json_schema": {"type": "object"}});
    let parsed_format = format(&request(&json!({"response_format": bare})));
    assert_eq!(Value::Object(parsed_format), json!({"type": "json_schema", "schema": {"type": "object"}}));
    assert_eq!(Value::Object(format(&request(&json!({})))), json!({"type": "text"}));
    let other = json!({"type": "regex", "pattern": "a+"});
    assert_eq!(Value::Object(chat_format(other.as_object().unwrap())), other);
}

#[test]
fn an_error_in_a_format_names_the_parameter_of_this_endpoint() {
    let error = Error::invalid("response_format.json_schema.schema.type", "is unknown");
    expect!["text.format.schema.type: is unknown"].assert_eq(&renamed(error).to_string());
    let error = Error::invalid("response_format.type", "is unknown");
    assert!(matches!(renamed(error), Error::Invalid { param, .. } if param == "text.format.type"));
    let error = Error::invalid("temperature", "is unknown");
    assert_eq!(renamed(error.clone()), error);
}

#[test]
fn the_response_repeats_the_choice_of_a_function_in_the_flat_form() {
    let shown = |given: Value| choice(&request(&json!({"tool_choice": given})));
    assert_eq!(shown(json!("required")), json!("required"));
    let flat = json!({"type": "function", "name": "f"});
    assert_eq!(shown(json!({"type": "function", "function": {"name": "f"}})), flat);
    assert_eq!(shown(flat.clone()), flat);
    assert_eq!(choice(&request(&json!({}))), json!("auto"));
}

#[test]
fn a_conversation_is_cut_at_messages_of_the_user_and_retains_the_system_message() {
    let message = |role: &str| Message { role: role.to_owned(), ..Message::default() };
    let all: Vec<Message> =
        ["system", "user", "assistant", "tool", "user", "assistant", "user"].map(message).into();
    assert_eq!(messages::cuts(&all), [4, 6]);
    let roles = |messages: Vec<Message>| messages.into_iter().map(|message| message.role).collect::<Vec<_>>();
    assert_eq!(roles(messages::without(&all, 4)), ["system", "user", "assistant", "user"]);
    assert_eq!(messages::cuts(&all[1..]), [3, 5]);
    assert_eq!(messages::cuts(&all[..2]), [0; 0]);
}

/// Truncation searches for a suffix of the conversation that leaves room for an answer of limited length, and then
/// prepares this suffix again without limiting the answer.
#[test]
fn a_truncated_conversation_needs_the_memory_of_its_images_only_once() {
    const IMAGE: &str = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9\
                         awAAAABJRU5ErkJggg==";
    let (model, _) = built_in_model_with_images(vec!["m".to_owned()], 1 << 20).unwrap();
    let bytes = decoded_len_estimate(IMAGE.len() - IMAGE.find(',').unwrap() - 1);
    let media = Media::new(ByteBudget::new(bytes, bytes));
    let requests = RequestLimits {
        block_tokens: 16,
        blocks_total: 1024,
        max_model_len: 200,
        max_num_seqs: 16,
        max_queue: 16,
    };
    let limits = EngineLimits { requests, vocabulary: 260, adapters: 0, reads_images: true };
    let canceled = CancellationToken::new();
    let target = Target { model: &model, limits, media: &media, canceled: &canceled, seed: 1 };
    let body = json!({
        "model": "m",
        "input": [
            {"role": "user", "content": "x".repeat(200)},
            {"role": "user", "content": [{"type": "input_image", "image_url": IMAGE}]},
        ],
        "truncation": "auto",
    });
    let id = Store::open(&StoreConfig::default()).unwrap().new_id(Kind::Response);
    let prepared = responses(&request(&body), Context::default(), id, target).unwrap().prepared;
    let prompt = &prepared.prompts[0];
    assert!(prompt.images.is_some());
    assert_eq!(
        prompt.stop.max_tokens as usize,
        200 - prompt.prompt.len(),
        "the answer may fill the context length"
    );
}
