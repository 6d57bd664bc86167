//! Tests structural tags in the format of requests.

use serde_json::{Value, json};
use server_guidance::{limits, structural_tag};

use crate::support::check;

fn accept(tag: &Value, fitting: &[&str], others: &[&str]) {
    let form = structural_tag(tag.as_object().unwrap(), "response_format").unwrap();
    check(&form, fitting, others);
}

#[test]
fn each_format_is_followed() {
    let integer = json!({"type": "json_schema", "json_schema": {"type": "integer"}});
    let word = json!({"type": "const_string", "value": "hi"});
    accept(&word, &["hi"], &["ho", ""]);
    accept(&json!({"type": "structural_tag", "format": word}), &["hi"], &["h"]);
    accept(&integer, &["12"], &["x", "1.5"]);
    accept(&json!({"type": "regex", "pattern": "[a-z]{3}"}), &["abc"], &["ab"]);
    accept(&json!({"type": "grammar", "grammar": "root ::= \"a\" | \"b\""}), &["a", "b"], &["c"]);
    accept(&json!({"type": "any_text"}), &["", "x y"], &["<end>"]);
    accept(&json!({"type": "any_text", "excludes": ["b"], "max_chars": 2}), &["aa"], &["ab", "aaa"]);
    accept(&json!({"type": "sequence", "elements": [word, integer]}), &["hi5"], &["hi", "5"]);
    accept(&json!({"type": "or", "elements": [word, integer]}), &["hi", "5"], &["hi5"]);
    accept(&json!({"type": "optional", "content": word}), &["", "hi"], &["hihi"]);
    accept(&json!({"type": "plus", "content": word}), &["hi", "hihi"], &[""]);
    accept(&json!({"type": "star", "content": word}), &["", "hihi"], &["h"]);
    accept(&json!({"type": "repeat", "min": 1, "max": 2, "content": word}), &["hi", "hihi"], &["", "hihihi"]);
    accept(&json!({"type": "repeat", "min": 2, "max": -1, "content": word}), &["hihihi"], &["hi"]);
    accept(&json!({"type": "token", "token": "<think>"}), &["<think>"], &[""]);
    accept(
        &json!({"type": "qwen_xml_parameter", "json_schema": {"properties": {"q": {"type": "string"}}, "required": ["q"]}}),
        &["<parameter=q>\nx\n</parameter>\n"],
        &["{\"q\":\"x\"}"],
    );
}

#[test]
fn tags_are_followed() {
    let tag = json!({"type": "tag", "begin": "<r>", "content": {"type": "json_schema", "json_schema": {"type": "integer"}}, "end": ["</r>", "</s>"]});
    accept(&tag, &["<r>1</r>", "<r>2</s>"], &["<r>x</r>", "1", "<r>1"]);
    let think =
        json!({"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"});
    accept(
        &json!({"type": "sequence", "elements": [think, tag]}),
        &["<think>a b</think><r>1</r>"],
        &["<r>1</r>"],
    );
    let spelled = json!({"type": "tag", "begin": "<t>", "content": {"type": "any_text", "excludes": ["</t>", "x"]}, "end": "</t>"});
    accept(&spelled, &["<t>ab</t>"], &["<t>axb</t>", "<t>a</t>b"]);
    let token = json!({"type": "token", "token": "<|tool_call>"});
    let call = json!({"type": "tag", "begin": token, "content": {"type": "regex", "pattern": "\\d"}, "end": {"type": "token", "token": "<tool_call|>"}});
    accept(
        &json!({"type": "token_triggered_tags", "trigger_tokens": ["<|tool_call>"], "tags": [call]}),
        &["", "x<|tool_call>1<tool_call|>y"],
        &["<|tool_call>x"],
    );
    let item = |name: &str| json!({"type": "tag", "begin": format!("<{name}>"), "content": {"type": "const_string", "value": name}, "end": "."});
    let separated = |more: Value| {
        let mut tags =
            json!({"type": "tags_with_separator", "tags": [item("a"), item("b")], "separator": ", "});
        tags.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        tags
    };
    accept(&separated(json!({})), &["", "<a>a.", "<a>a., <b>b., <a>a."], &["<a>a., ", "<a>b."]);
    accept(
        &separated(json!({"at_least_one": true, "stop_after_first": true})),
        &["<b>b."],
        &["", "<a>a., <b>b."],
    );
    accept(
        &json!({"type": "dispatch", "rules": [["f(", {"type": "regex", "pattern": "\\d\\)"}]], "loop": false}),
        &["", "x f(1)"],
        &["x f(y", "f(1) "],
    );
}

#[test]
fn tags_in_the_older_format_are_followed() {
    accept(
        &json!({
            "type": "structural_tag",
            "structures": [{"begin": "<f=a>", "schema": {"type": "object"}, "end": "</f>"}],
            "triggers": ["<f="],
        }),
        &["", "text", "x<f=a>{\"k\": 1}</f>y"],
        &["<f=b>{}</f>", "<f=a>1</f>"],
    );
}

#[test]
fn an_invalid_tag_is_rejected_with_the_path_of_the_problem() {
    for (tag, place) in [
        (json!({"type": "structural_tag"}), "r.format"),
        (json!({"type": "structural_tag", "format": 3}), "r.format"),
        (json!({"type": "unheard of"}), "r.type"),
        (json!({}), "r.type"),
        (json!({"type": "const_string"}), "r.value"),
        (json!({"type": "const_string", "value": 3}), "r.value"),
        (json!({"type": "sequence", "elements": [{"type": "regex"}]}), "r.elements[0].pattern"),
        (json!({"type": "or", "elements": {}}), "r.elements"),
        (json!({"type": "tag", "begin": 1, "content": {"type": "any_text"}, "end": ""}), "r.begin"),
        (json!({"type": "any_text", "max_tokens": 5}), "r.max_tokens"),
        (json!({"type": "any_text", "max_chars": limits::REPEAT_MAX + 1}), "r.max_chars"),
        (json!({"type": "json_schema", "json_schema": {}, "style": "glm_xml"}), "r.style"),
        (json!({"type": "repeat", "min": -1, "max": 2, "content": {"type": "any_text"}}), "r.min"),
        (json!({"type": "triggered_tags", "triggers": ["a"], "tags": [3]}), "r.tags[0]"),
        (json!({"type": "dispatch", "rules": [["a"]]}), "r.rules[0]"),
        (json!({"type": "structural_tag", "structures": [{"begin": "a", "end": "b"}]}), "r.triggers"),
    ] {
        let error = structural_tag(tag.as_object().unwrap(), "r").unwrap_err();
        assert_eq!(error.at, place, "{}: {tag}", error.problem);
    }
    // Some errors are found only when the form is compiled.
    for (tag, place) in [
        (
            json!({"type": "triggered_tags", "triggers": ["a"], "tags": [{"begin": "b", "content": {"type": "any_text"}, "end": ""}]}),
            "r.tags[0].begin",
        ),
        (
            json!({"type": "sequence", "elements": [{"type": "json_schema", "json_schema": {"type": "x"}}]}),
            "r.elements[0].json_schema.type",
        ),
    ] {
        let form = structural_tag(tag.as_object().unwrap(), "r").unwrap();
        let error = crate::support::COMPILER.compile(&form).unwrap_err();
        assert_eq!(error.at, place, "{}: {tag}", error.problem);
    }
}

#[test]
fn an_invalid_number_of_repetitions_is_rejected_with_the_allowed_numbers() {
    for (field, problem) in [
        ("min", "must be a non-negative integer"),
        ("max", "must be a non-negative integer, or -1 for no maximum"),
    ] {
        for value in [json!(-2), json!(1.5), json!("1")] {
            let tag = json!({"type": "repeat", field: value, "content": {"type": "any_text"}});
            let error = structural_tag(tag.as_object().unwrap(), "r").unwrap_err();
            assert_eq!((error.at, error.problem), (format!("r.{field}"), problem.to_owned()), "{tag}");
        }
    }
}
