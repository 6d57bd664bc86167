use expect_test::expect;
use serde_json::{Value, json};

use super::*;

#[test]
fn errors_name_the_path_of_a_value_of_a_wrong_type() {
    let error = |body: Value| Request::parse(body.to_string().as_bytes()).unwrap_err().message;
    expect!["input[1].content[0].text: 1 is not a string"].assert_eq(&error(json!({
        "input": [{"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "input_text", "text": 1}]}]
    })));
    expect!["input: 3 is not a string or an array of objects"].assert_eq(&error(json!({"input": 3})));
    expect![[r#"text.format: "json" is not an object"#]]
        .assert_eq(&error(json!({"text": {"format": "json"}})));
    expect![[r#"temperature: "hot" is not a number"#]].assert_eq(&error(json!({"temperature": "hot"})));
}

#[test]
fn items_parse_and_serialize_without_a_change() {
    let items = json!([
        {"type": "message", "id": "msg_1", "status": "completed", "content": [
            {"type": "output_text", "annotations": [], "logprobs": [], "text": "a"},
            {"type": "refusal", "refusal": "no"},
        ], "role": "assistant"},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "b"}], "status": "completed"},
        {"type": "function_call", "id": "fc_1", "status": "incomplete", "arguments": "{", "call_id": "c", "name": "f"},
        {"type": "function_call_output", "id": "fco_1", "status": "completed", "call_id": "c", "output": "d"},
        {"type": "function_call_output", "id": "fco_2", "status": "completed", "call_id": "c", "output": [
            {"type": "input_text", "text": "e"},
        ]},
    ]);
    let read: Vec<Item> = serde_json::from_value(items.clone()).unwrap();
    assert_eq!(serde_json::to_value(&read).unwrap(), items);
    assert_eq!(read.iter().map(Item::id).collect::<Vec<_>>(), ["msg_1", "rs_1", "fc_1", "fco_1", "fco_2"]);
}

#[test]
fn an_event_serializes_its_type_first_and_its_number_last() {
    let data = EventData::TextDelta {
        item_id: "msg_1",
        output_index: 0,
        content_index: 0,
        delta: "a",
        logprobs: &[],
    };
    let event = Event { r#type: kind::TEXT_DELTA, data, sequence_number: 4 };
    expect![[r#"{"type":"response.output_text.delta","item_id":"msg_1","output_index":0,"content_index":0,"delta":"a","logprobs":[],"sequence_number":4}"#]]
        .assert_eq(&serde_json::to_string(&event).unwrap());
}
