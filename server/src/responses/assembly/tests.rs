use expect_test::{Expect, expect};
use serde_json::{Map, Value, json};
use server_openai::responses::{Object, ReasoningParameter, TextParameter};

use super::*;
use crate::store::{Kind, Store, StoreConfig};

pub(in crate::responses) fn new_response(status: Status, choices: u32) -> NewResponse {
    let id = Store::open(&StoreConfig::default()).unwrap().new_id(Kind::Response);
    let response = Response {
        id: id.to_string(),
        object: Object::Response,
        created_at: 1,
        status,
        background: status == Status::Queued,
        completed_at: None,
        error: None,
        incomplete_details: None,
        instructions: None,
        max_output_tokens: None,
        max_tool_calls: None,
        model: "m".to_owned(),
        output: Vec::new(),
        parallel_tool_calls: true,
        previous_response_id: None,
        conversation: None,
        prompt_cache_key: None,
        reasoning: ReasoningParameter::default(),
        safety_identifier: None,
        service_tier: "default".to_owned(),
        store: true,
        temperature: 1.0,
        text: TextParameter::default(),
        tool_choice: json!("auto"),
        tools: Vec::new(),
        top_logprobs: 0,
        top_p: 1.0,
        truncation: "disabled".to_owned(),
        usage: None,
        user: None,
        metadata: Map::new(),
        warnings: Vec::new(),
    };
    let show: LogprobFormat = Box::new(|tokens| {
        let show = |token: TokenText| ChatTokenLogprob {
            token: format!("t{}", token.token),
            logprob: token.logprob,
            bytes: Vec::new(),
            top_logprobs: Vec::new(),
        };
        tokens.into_iter().map(show).collect()
    });
    NewResponse { response, ids: id.items(), logprobs: Some(show), choices, call_names: CallNames::default() }
}

fn text(choice: u32, text: &str) -> ChoiceDelta {
    ChoiceDelta::Text { choice, text: text.to_owned(), tokens: Vec::new() }
}

fn reasoning(text: &str) -> ChoiceDelta {
    ChoiceDelta::Reasoning { choice: 0, text: text.to_owned(), tokens: Vec::new() }
}

fn call(call: u32, name: &str, arguments: &[&str], is_whole: bool) -> Vec<ChoiceDelta> {
    let (choice, id) = (0, format!("call_{call}"));
    let mut deltas = vec![ChoiceDelta::CallBegin { choice, call, id, name: name.to_owned() }];
    deltas.extend(arguments.iter().map(|text| ChoiceDelta::CallArguments {
        choice,
        call,
        text: (*text).to_owned(),
        tokens: Vec::new(),
    }));
    deltas.extend(is_whole.then_some(ChoiceDelta::CallEnd { choice, call }));
    deltas
}

fn end(choice: u32, reason: ChoiceFinishReason) -> ChoiceDelta {
    ChoiceDelta::End { choice, reason, tokens: Vec::new() }
}

/// Returns the events for the deltas, one per line, and the response.
fn run(new_response: NewResponse, deltas: Vec<ChoiceDelta>) -> (String, Response) {
    let mut assembly = Assembly::new(new_response);
    let mut lines = String::new();
    let mut number = 0;
    let mut sink = |event: &Event<'_>| {
        assert_eq!(event.sequence_number, number);
        number += 1;
        lines += &line(event);
        lines.push('\n');
    };
    assembly.create(&mut sink);
    assembly.begin(&mut sink);
    for delta in deltas {
        assembly.push(delta, &mut sink);
    }
    assembly.complete(ResponseUsage::default(), 9);
    assembly.conclude(&mut sink);
    (lines, assembly.response().clone())
}

/// Returns an event without its sequence number. Each item ID is reduced to its prefix and the number of the item, and
/// each response to its status and the number of its items.
fn line(event: &Event<'_>) -> String {
    let mut value = serde_json::to_value(event).unwrap();
    let object = value.as_object_mut().unwrap();
    object.remove("sequence_number");
    let kind = object.remove("type").unwrap();
    if let Some(response) = object.get_mut("response") {
        *response = json!(format!(
            "{} with {} items",
            response["status"].as_str().unwrap(),
            response["output"].as_array().unwrap().len()
        ));
    }
    shorten(&mut value);
    format!("{} {value}", kind.as_str().unwrap())
}

fn shorten(value: &mut Value) {
    match value {
        Value::Object(members) => {
            for (name, value) in members.iter_mut() {
                match value {
                    Value::String(id) if matches!(name.as_str(), "id" | "item_id") => {
                        let (kind, digits) = id.split_once('_').unwrap();
                        *id = format!("{kind}_{}", u32::from_str_radix(&digits[40..], 16).unwrap());
                    }
                    value => shorten(value),
                }
            }
        }
        Value::Array(values) => values.iter_mut().for_each(shorten),
        _ => {}
    }
}

fn check(deltas: Vec<ChoiceDelta>, expected: &Expect) -> Response {
    let (lines, response) = run(new_response(Status::InProgress, 1), deltas);
    expected.assert_eq(&lines);
    response
}

#[test]
fn a_text_becomes_a_message() {
    let response = check(
        vec![text(0, "Hel"), text(0, "lo"), end(0, ChoiceFinishReason::Stop)],
        &expect![[r#"
            response.created {"response":"in_progress with 0 items"}
            response.in_progress {"response":"in_progress with 0 items"}
            response.output_item.added {"item":{"type":"message","id":"msg_1","status":"in_progress","content":[],"role":"assistant"},"output_index":0}
            response.content_part.added {"part":{"type":"output_text","annotations":[],"logprobs":[],"text":""},"item_id":"msg_1","output_index":0,"content_index":0}
            response.output_text.delta {"logprobs":[],"item_id":"msg_1","output_index":0,"content_index":0,"delta":"Hel"}
            response.output_text.delta {"logprobs":[],"item_id":"msg_1","output_index":0,"content_index":0,"delta":"lo"}
            response.output_text.done {"logprobs":[],"item_id":"msg_1","output_index":0,"content_index":0,"text":"Hello"}
            response.content_part.done {"part":{"type":"output_text","annotations":[],"logprobs":[],"text":"Hello"},"item_id":"msg_1","output_index":0,"content_index":0}
            response.output_item.done {"item":{"type":"message","id":"msg_1","status":"completed","content":[{"type":"output_text","annotations":[],"logprobs":[],"text":"Hello"}],"role":"assistant"},"output_index":0}
            response.completed {"response":"completed with 1 items"}
        "#]],
    );
    assert_eq!((response.status, response.completed_at), (Status::Completed, Some(9)));
}

#[test]
fn reasoning_calls_and_text_become_items() {
    let mut deltas = vec![reasoning("Hm"), reasoning("m"), text(0, "\n\n")];
    deltas.extend(call(0, "now", &["{", "}"], true));
    deltas.extend(call(1, "then", &["{\"a\":1}"], true));
    deltas.extend([text(0, "\n"), text(0, " done"), end(0, ChoiceFinishReason::ToolCalls)]);
    check(
        deltas,
        &expect![[r#"
        response.created {"response":"in_progress with 0 items"}
        response.in_progress {"response":"in_progress with 0 items"}
        response.output_item.added {"item":{"type":"reasoning","id":"rs_1","summary":[],"status":"in_progress"},"output_index":0}
        response.reasoning_summary_part.added {"part":{"type":"summary_text","text":""},"item_id":"rs_1","output_index":0,"summary_index":0}
        response.reasoning_summary_text.delta {"delta":"Hm","item_id":"rs_1","output_index":0,"summary_index":0}
        response.reasoning_summary_text.delta {"delta":"m","item_id":"rs_1","output_index":0,"summary_index":0}
        response.reasoning_summary_text.done {"text":"Hmm","item_id":"rs_1","output_index":0,"summary_index":0}
        response.reasoning_summary_part.done {"part":{"type":"summary_text","text":"Hmm"},"item_id":"rs_1","output_index":0,"summary_index":0}
        response.output_item.done {"item":{"type":"reasoning","id":"rs_1","summary":[{"type":"summary_text","text":"Hmm"}],"status":"completed"},"output_index":0}
        response.output_item.added {"item":{"type":"function_call","id":"fc_2","status":"in_progress","arguments":"","call_id":"call_0","name":"now"},"output_index":1}
        response.function_call_arguments.delta {"delta":"{","item_id":"fc_2","output_index":1,"call_id":"call_0"}
        response.function_call_arguments.delta {"delta":"}","item_id":"fc_2","output_index":1,"call_id":"call_0"}
        response.function_call_arguments.done {"arguments":"{}","item_id":"fc_2","output_index":1,"call_id":"call_0","name":"now"}
        response.output_item.done {"item":{"type":"function_call","id":"fc_2","status":"completed","arguments":"{}","call_id":"call_0","name":"now"},"output_index":1}
        response.output_item.added {"item":{"type":"function_call","id":"fc_3","status":"in_progress","arguments":"","call_id":"call_1","name":"then"},"output_index":2}
        response.function_call_arguments.delta {"delta":"{\"a\":1}","item_id":"fc_3","output_index":2,"call_id":"call_1"}
        response.function_call_arguments.done {"arguments":"{\"a\":1}","item_id":"fc_3","output_index":2,"call_id":"call_1","name":"then"}
        response.output_item.done {"item":{"type":"function_call","id":"fc_3","status":"completed","arguments":"{\"a\":1}","call_id":"call_1","name":"then"},"output_index":2}
        response.output_item.added {"item":{"type":"message","id":"msg_4","status":"in_progress","content":[],"role":"assistant"},"output_index":3}
        response.content_part.added {"part":{"type":"output_text","annotations":[],"logprobs":[],"text":""},"item_id":"msg_4","output_index":3,"content_index":0}
        response.output_text.delta {"logprobs":[],"item_id":"msg_4","output_index":3,"content_index":0,"delta":"\n done"}
        response.output_text.done {"logprobs":[],"item_id":"msg_4","output_index":3,"content_index":0,"text":"\n done"}
        response.content_part.done {"part":{"type":"output_text","annotations":[],"logprobs":[],"text":"\n done"},"item_id":"msg_4","output_index":3,"content_index":0}
        response.output_item.done {"item":{"type":"message","id":"msg_4","status":"completed","content":[{"type":"output_text","annotations":[],"logprobs":[],"text":"\n done"}],"role":"assistant"},"output_index":3}
        response.completed {"response":"completed with 4 items"}
    "#]],
    );
}

#[test]
fn a_text_that_is_cut_off_becomes_an_incomplete_message() {
    let response = check(
        vec![text(0, "Hel"), end(0, ChoiceFinishReason::Length)],
        &expect![[r#"
        response.created {"response":"in_progress with 0 items"}
        response.in_progress {"response":"in_progress with 0 items"}
        response.output_item.added {"item":{"type":"message","id":"msg_1","status":"in_progress","content":[],"role":"assistant"},"output_index":0}
        response.content_part.added {"part":{"type":"output_text","annotations":[],"logprobs":[],"text":""},"item_id":"msg_1","output_index":0,"content_index":0}
        response.output_text.delta {"logprobs":[],"item_id":"msg_1","output_index":0,"content_index":0,"delta":"Hel"}
        response.output_text.done {"logprobs":[],"item_id":"msg_1","output_index":0,"content_index":0,"text":"Hel"}
        response.content_part.done {"part":{"type":"output_text","annotations":[],"logprobs":[],"text":"Hel"},"item_id":"msg_1","output_index":0,"content_index":0}
        response.output_item.done {"item":{"type":"message","id":"msg_1","status":"incomplete","content":[{"type":"output_text","annotations":[],"logprobs":[],"text":"Hel"}],"role":"assistant"},"output_index":0}
        response.incomplete {"response":"incomplete with 1 items"}
    "#]],
    );
    assert_eq!((response.status, response.completed_at), (Status::Incomplete, None));
    assert_eq!(response.incomplete_details.unwrap().reason, "max_output_tokens");
}

#[test]
fn a_call_that_is_cut_off_retains_its_arguments() {
    let mut deltas = vec![text(0, "Let me see.")];
    deltas.extend(call(0, "now", &["{\"a"], false));
    deltas.push(end(0, ChoiceFinishReason::Length));
    let response = check(
        deltas,
        &expect![[r#"
        response.created {"response":"in_progress with 0 items"}
        response.in_progress {"response":"in_progress with 0 items"}
        response.output_item.added {"item":{"type":"message","id":"msg_1","status":"in_progress","content":[],"role":"assistant"},"output_index":0}
        response.content_part.added {"part":{"type":"output_text","annotations":[],"logprobs":[],"text":""},"item_id":"msg_1","output_index":0,"content_index":0}
        response.output_text.delta {"logprobs":[],"item_id":"msg_1","output_index":0,"content_index":0,"delta":"Let me see."}
        response.output_text.done {"logprobs":[],"item_id":"msg_1","output_index":0,"content_index":0,"text":"Let me see."}
        response.content_part.done {"part":{"type":"output_text","annotations":[],"logprobs":[],"text":"Let me see."},"item_id":"msg_1","output_index":0,"content_index":0}
        response.output_item.done {"item":{"type":"message","id":"msg_1","status":"completed","content":[{"type":"output_text","annotations":[],"logprobs":[],"text":"Let me see."}],"role":"assistant"},"output_index":0}
        response.output_item.added {"item":{"type":"function_call","id":"fc_2","status":"in_progress","arguments":"","call_id":"call_0","name":"now"},"output_index":1}
        response.function_call_arguments.delta {"delta":"{\"a","item_id":"fc_2","output_index":1,"call_id":"call_0"}
        response.function_call_arguments.done {"arguments":"{\"a","item_id":"fc_2","output_index":1,"call_id":"call_0","name":"now"}
        response.output_item.done {"item":{"type":"function_call","id":"fc_2","status":"incomplete","arguments":"{\"a","call_id":"call_0","name":"now"},"output_index":1}
        response.incomplete {"response":"incomplete with 2 items"}
    "#]],
    );
    let Item::FunctionCall(call) = &response.output[1] else { panic!("{response:?}") };
    assert_eq!((call.arguments.as_str(), call.status), ("{\"a", ItemStatus::Incomplete));
}

#[test]
fn reasoning_that_is_cut_off_has_no_message() {
    let response = check(
        vec![reasoning("Hm"), end(0, ChoiceFinishReason::Length)],
        &expect![[r#"
        response.created {"response":"in_progress with 0 items"}
        response.in_progress {"response":"in_progress with 0 items"}
        response.output_item.added {"item":{"type":"reasoning","id":"rs_1","summary":[],"status":"in_progress"},"output_index":0}
        response.reasoning_summary_part.added {"part":{"type":"summary_text","text":""},"item_id":"rs_1","output_index":0,"summary_index":0}
        response.reasoning_summary_text.delta {"delta":"Hm","item_id":"rs_1","output_index":0,"summary_index":0}
        response.reasoning_summary_text.done {"text":"Hm","item_id":"rs_1","output_index":0,"summary_index":0}
        response.reasoning_summary_part.done {"part":{"type":"summary_text","text":"Hm"},"item_id":"rs_1","output_index":0,"summary_index":0}
        response.output_item.done {"item":{"type":"reasoning","id":"rs_1","summary":[{"type":"summary_text","text":"Hm"}],"status":"incomplete"},"output_index":0}
        response.incomplete {"response":"incomplete with 1 items"}
    "#]],
    );
    assert_eq!(response.output.len(), 1);
}

#[test]
fn an_empty_answer_and_one_of_whitespace_are_messages() {
    check(
        vec![end(0, ChoiceFinishReason::Stop)],
        &expect![[r#"
        response.created {"response":"in_progress with 0 items"}
        response.in_progress {"response":"in_progress with 0 items"}
        response.output_item.added {"item":{"type":"message","id":"msg_1","status":"in_progress","content":[],"role":"assistant"},"output_index":0}
        response.content_part.added {"part":{"type":"output_text","annotations":[],"logprobs":[],"text":""},"item_id":"msg_1","output_index":0,"content_index":0}
        response.output_text.done {"logprobs":[],"item_id":"msg_1","output_index":0,"content_index":0,"text":""}
        response.content_part.done {"part":{"type":"output_text","annotations":[],"logprobs":[],"text":""},"item_id":"msg_1","output_index":0,"content_index":0}
        response.output_item.done {"item":{"type":"message","id":"msg_1","status":"completed","content":[{"type":"output_text","annotations":[],"logprobs":[],"text":""}],"role":"assistant"},"output_index":0}
        response.completed {"response":"completed with 1 items"}
    "#]],
    );
    let (_, response) =
        run(new_response(Status::InProgress, 1), vec![text(0, " \n"), end(0, ChoiceFinishReason::Stop)]);
    let Item::Message(message) = &response.output[0] else { panic!("{response:?}") };
    assert_eq!(message.content[0].text(), " \n");
}

#[test]
fn each_choice_has_its_own_items() {
    let deltas = vec![
        text(0, "a"),
        text(1, "b"),
        text(0, "c"),
        end(1, ChoiceFinishReason::Stop),
        end(0, ChoiceFinishReason::Stop),
    ];
    let (lines, response) = run(new_response(Status::InProgress, 2), deltas);
    expect![[r#"
        response.created {"response":"in_progress with 0 items"}
        response.in_progress {"response":"in_progress with 0 items"}
        response.output_item.added {"item":{"type":"message","id":"msg_1","status":"in_progress","content":[],"role":"assistant"},"output_index":0}
        response.content_part.added {"part":{"type":"output_text","annotations":[],"logprobs":[],"text":""},"item_id":"msg_1","output_index":0,"content_index":0}
        response.output_text.delta {"logprobs":[],"item_id":"msg_1","output_index":0,"content_index":0,"delta":"a"}
        response.output_item.added {"item":{"type":"message","id":"msg_2","status":"in_progress","content":[],"role":"assistant"},"output_index":1}
        response.content_part.added {"part":{"type":"output_text","annotations":[],"logprobs":[],"text":""},"item_id":"msg_2","output_index":1,"content_index":0}
        response.output_text.delta {"logprobs":[],"item_id":"msg_2","output_index":1,"content_index":0,"delta":"b"}
        response.output_text.delta {"logprobs":[],"item_id":"msg_1","output_index":0,"content_index":0,"delta":"c"}
        response.output_text.done {"logprobs":[],"item_id":"msg_2","output_index":1,"content_index":0,"text":"b"}
        response.content_part.done {"part":{"type":"output_text","annotations":[],"logprobs":[],"text":"b"},"item_id":"msg_2","output_index":1,"content_index":0}
        response.output_item.done {"item":{"type":"message","id":"msg_2","status":"completed","content":[{"type":"output_text","annotations":[],"logprobs":[],"text":"b"}],"role":"assistant"},"output_index":1}
        response.output_text.done {"logprobs":[],"item_id":"msg_1","output_index":0,"content_index":0,"text":"ac"}
        response.content_part.done {"part":{"type":"output_text","annotations":[],"logprobs":[],"text":"ac"},"item_id":"msg_1","output_index":0,"content_index":0}
        response.output_item.done {"item":{"type":"message","id":"msg_1","status":"completed","content":[{"type":"output_text","annotations":[],"logprobs":[],"text":"ac"}],"role":"assistant"},"output_index":0}
        response.completed {"response":"completed with 2 items"}
    "#]].assert_eq(&lines);
    let texts: Vec<&str> = response
        .output
        .iter()
        .map(|item| match item {
            Item::Message(message) => message.content[0].text(),
            _ => "",
        })
        .collect();
    assert_eq!(texts, ["ac", "b"]);
}

#[test]
fn log_probabilities_of_deltas_are_concatenated() {
    let token = |token| TokenText { token, start: 0, logprob: -0.5, top: Vec::new() };
    let tokens = |text: &str, numbers: &[u32]| ChoiceDelta::Text {
        choice: 0,
        text: text.to_owned(),
        tokens: numbers.iter().map(|&number| token(number)).collect(),
    };
    let deltas =
        vec![tokens("\n", &[1]), tokens("a", &[2]), tokens("", &[3]), end(0, ChoiceFinishReason::Stop)];
    let response = check(
        deltas,
        &expect![[r#"
        response.created {"response":"in_progress with 0 items"}
        response.in_progress {"response":"in_progress with 0 items"}
        response.output_item.added {"item":{"type":"message","id":"msg_1","status":"in_progress","content":[],"role":"assistant"},"output_index":0}
        response.content_part.added {"part":{"type":"output_text","annotations":[],"logprobs":[],"text":""},"item_id":"msg_1","output_index":0,"content_index":0}
        response.output_text.delta {"logprobs":[{"token":"t1","logprob":-0.5,"bytes":[],"top_logprobs":[]},{"token":"t2","logprob":-0.5,"bytes":[],"top_logprobs":[]}],"item_id":"msg_1","output_index":0,"content_index":0,"delta":"\na"}
        response.output_text.delta {"logprobs":[{"token":"t3","logprob":-0.5,"bytes":[],"top_logprobs":[]}],"item_id":"msg_1","output_index":0,"content_index":0,"delta":""}
        response.output_text.done {"logprobs":[{"token":"t1","logprob":-0.5,"bytes":[],"top_logprobs":[]},{"token":"t2","logprob":-0.5,"bytes":[],"top_logprobs":[]},{"token":"t3","logprob":-0.5,"bytes":[],"top_logprobs":[]}],"item_id":"msg_1","output_index":0,"content_index":0,"text":"\na"}
        response.content_part.done {"part":{"type":"output_text","annotations":[],"logprobs":[{"token":"t1","logprob":-0.5,"bytes":[],"top_logprobs":[]},{"token":"t2","logprob":-0.5,"bytes":[],"top_logprobs":[]},{"token":"t3","logprob":-0.5,"bytes":[],"top_logprobs":[]}],"text":"\na"},"item_id":"msg_1","output_index":0,"content_index":0}
        response.output_item.done {"item":{"type":"message","id":"msg_1","status":"completed","content":[{"type":"output_text","annotations":[],"logprobs":[{"token":"t1","logprob":-0.5,"bytes":[],"top_logprobs":[]},{"token":"t2","logprob":-0.5,"bytes":[],"top_logprobs":[]},{"token":"t3","logprob":-0.5,"bytes":[],"top_logprobs":[]}],"text":"\na"}],"role":"assistant"},"output_index":0}
        response.completed {"response":"completed with 1 items"}
    "#]],
    );
    let Item::Message(message) = &response.output[0] else { panic!("{response:?}") };
    let Part::OutputText { logprobs, .. } = &message.content[0] else { panic!("{message:?}") };
    assert_eq!(logprobs.len(), 3);
}

#[test]
fn long_texts_and_events_that_repeat_them_are_expensive_to_encode() {
    const PARTS: usize = 3;
    let part = "x".repeat(10_000);
    let long = part.repeat(PARTS);
    let new = || Assembly::new(new_response(Status::InProgress, 1));
    let last = [end(0, ChoiceFinishReason::Stop)];
    let mut assembly = new();
    assert_eq!(assembly.deltas_cost(&last), EncodingCost::Low);
    assert_eq!(assembly.deltas_cost(&[text(0, &long)]), EncodingCost::High);
    for _ in 0..PARTS {
        assert_eq!(assembly.deltas_cost(&[text(0, &part)]), EncodingCost::Low);
        assembly.push(text(0, &part), &mut |_: &Event<'_>| {});
    }
    assert_eq!(assembly.deltas_cost(&last), EncodingCost::High);
    assert_eq!(assembly.encoding_cost(), EncodingCost::High);

    let mut assembly = new();
    assert_eq!(assembly.deltas_cost(&call(0, "f", &[long.as_str()], false)), EncodingCost::High);
    let parts = [part.as_str(); PARTS];
    for delta in call(0, "f", &parts, false) {
        assert_eq!(assembly.deltas_cost(std::slice::from_ref(&delta)), EncodingCost::Low);
        assembly.push(delta, &mut |_: &Event<'_>| {});
    }
    assert_eq!(assembly.deltas_cost(&[ChoiceDelta::CallEnd { choice: 0, call: 0 }]), EncodingCost::High);
}

#[test]
fn a_failure_is_reported_and_the_output_so_far_remains() {
    let mut assembly = Assembly::new(new_response(Status::Queued, 1));
    let mut lines = String::new();
    let mut sink = |event: &Event<'_>| lines += &(line(event) + "\n");
    assembly.create(&mut sink);
    assembly.begin(&mut sink);
    assembly.push(text(0, "Hel"), &mut sink);
    assembly.fail(&Error::Internal("it broke".to_owned()), &mut sink);
    assembly.conclude(&mut sink);
    expect![[r#"
        response.created {"response":"queued with 0 items"}
        response.queued {"response":"queued with 0 items"}
        response.in_progress {"response":"in_progress with 0 items"}
        response.output_item.added {"item":{"type":"message","id":"msg_1","status":"in_progress","content":[],"role":"assistant"},"output_index":0}
        response.content_part.added {"part":{"type":"output_text","annotations":[],"logprobs":[],"text":""},"item_id":"msg_1","output_index":0,"content_index":0}
        response.output_text.delta {"logprobs":[],"item_id":"msg_1","output_index":0,"content_index":0,"delta":"Hel"}
        error {"param":null,"code":"internal","message":"it broke"}
        response.failed {"response":"failed with 1 items"}
    "#]].assert_eq(&lines);
    let response = assembly.response();
    assert_eq!(response.error.as_ref().unwrap().code, "server_error");
    let Item::Message(message) = &response.output[0] else { panic!("{response:?}") };
    assert_eq!((message.status, message.content[0].text()), (ItemStatus::Incomplete, "Hel"));
}

#[test]
fn an_interrupted_custom_call_retains_its_input() {
    let tools = json!([{"type": "custom", "name": "patch"}]);
    let request = json!({"model": "m", "input": "Hi", "tools": tools});
    let call_names = CallNames::of_request(&request);
    let mut assembly = Assembly::new(NewResponse { call_names, ..new_response(Status::InProgress, 1) });
    let mut sink = |_: &Event<'_>| {};
    assembly.begin(&mut sink);
    for delta in call(0, "patch", &["{\"input\": \"ab", "c\\"], false) {
        assembly.push(delta, &mut sink);
    }
    assembly.cancel();
    let Item::CustomToolCall(call) = &assembly.response().output[0] else {
        panic!("{:?}", assembly.response())
    };
    assert_eq!((call.status, call.input.as_str()), (ItemStatus::Incomplete, "abc"));
}

#[test]
fn an_event_is_encoded_with_its_type() {
    let mut assembly = Assembly::new(new_response(Status::InProgress, 1));
    let mut all = String::new();
    assembly.create(&mut |event| all += &encode(event));
    assert!(
        all.starts_with("event: response.created\ndata: {\"type\":\"response.created\",\"response\":{"),
        "{all}"
    );
    assert!(all.ends_with(",\"sequence_number\":0}\n\n"), "{all}");
}
