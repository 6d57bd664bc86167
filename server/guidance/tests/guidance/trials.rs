//! Tests that grammars whose cost could be large are tried before they are compiled.

use std::sync::{Arc, Mutex};

use serde_json::{Map, Value, json};
use server_guidance::{Compiler, Form, FormError, Tag, Trial, TrialError, TriggeredTags, try_grammar};

use crate::support::vocabulary;

/// Runs trials in this process or returns a given outcome, and counts them.
struct Trials {
    count: Arc<Mutex<usize>>,
    outcome: Option<TrialError>,
}

impl Trial for Trials {
    fn run(&self, request: &[u8]) -> Result<(), TrialError> {
        *self.count.lock().unwrap() += 1;
        match &self.outcome {
            Some(error) => Err(error.clone()),
            None => try_grammar(request).map_err(TrialError::Invalid),
        }
    }
}

/// Compiles a form. Returns the result and the number of trials.
fn compile(form: &Form, outcome: Option<TrialError>) -> (Result<(), FormError>, usize) {
    let count = Arc::new(Mutex::new(0));
    let compiler = Compiler::new(vocabulary(), 1).unwrap();
    let compiler = compiler.with_trial(Box::new(Trials { count: Arc::clone(&count), outcome }));
    let result = compiler.compile(form).map(drop);
    let count = *count.lock().unwrap();
    (result, count)
}

fn json_form(schema: Value, at: &str) -> Form {
    Form::Json { schema, at: at.to_owned() }
}

fn grammar(text: &str) -> Form {
    Form::Grammar { text: text.to_owned(), at: "grammar".to_owned() }
}

fn object(count: usize) -> Value {
    let properties: Map<String, Value> = (0..count).map(|number| (format!("p{number}"), json!({}))).collect();
    json!({"type": "object", "properties": properties, "additionalProperties": false})
}

/// A schema whose compilation without limits would take gigabytes.
fn costly() -> Value {
    let mut schema = object(2000);
    schema["minProperties"] = json!(1);
    schema
}

#[test]
fn common_forms_need_no_trial() {
    let date = json!({"type": "string", "format": "date"});
    let tool = |name: &str| Tag { begin: format!("<{name}>"), rest: json_form(object(20), "tools") };
    for form in [
        Form::literal("a"),
        json_form(object(100), "schema"),
        json_form(json!({"type": "object", "properties": {"day": date, "n": {"multipleOf": 5}}}), "schema"),
        json_form(json!({"enum": (0..500).collect::<Vec<_>>()}), "schema"),
        Form::Regex { pattern: "[a-z]+@[a-z]+".to_owned(), at: String::new() },
        grammar("start: \"a&b\" | T start\nT: /[a-z&]*/ & ~/.*x.*/\n"),
        Form::TriggeredTags(TriggeredTags {
            triggers: vec!["<".to_owned()],
            tags: vec![tool("a"), tool("b")],
            at_least_one: false,
            stop_after_first: false,
            excludes: Vec::new(),
            at: String::new(),
        }),
    ] {
        assert_eq!(
            compile(&form, Some(TrialError::Invalid("unexpected".to_owned()))),
            (Ok(()), 0),
            "{form:?}"
        );
    }
}

#[test]
fn forms_that_could_be_costly_are_tried() {
    let with = |key: &str, value: Value| {
        let mut schema = object(3);
        schema[key] = value;
        schema
    };
    let numbers: Vec<usize> = (0..1500).collect();
    for form in [
        json_form(costly(), "schema"),
        json_form(object(600), "schema"),
        json_form(with("minProperties", json!(1)), "schema"),
        json_form(with("description", json!("x".repeat(40_000))), "schema"),
        json_form(json!({"multipleOf": 1001}), "schema"),
        json_form(json!({"allOf": [{"multipleOf": 97}, {"multipleOf": 89}, {"multipleOf": 83}]}), "schema"),
        json_form(json!({"multipleOf": 0.01}), "schema"),
        json_form(json!({"enum": numbers}), "schema"),
        // Keywords that can be reached only through a reference are found too.
        json_form(json!({"$ref": "#/other", "other": with("minProperties", json!(1))}), "schema"),
        Form::Sequence(vec![Form::literal("a"), json_form(costly(), "schema")]),
        grammar(&format!("start: %json {}\n", costly())),
    ] {
        let (result, trials) = compile(&form, Some(TrialError::TooExpensive("needs too much".to_owned())));
        let error = result.unwrap_err();
        assert_eq!((error.problem.as_str(), trials), ("needs too much", 1), "{form:?}");
        assert!(error.at.starts_with("schema") || error.at == "grammar", "{error}");
    }
}

#[test]
fn a_trial_has_the_result_of_the_compilation() {
    let valid = object(600);
    let (result, trials) = compile(&json_form(valid, "schema"), None);
    assert_eq!((result, trials), (Ok(()), 1));
    // The grammar identifies special tokens by their IDs, so the vocabulary of the trial must contain these IDs.
    let special = format!("start: <[257]> %json {}\n", object(600));
    assert_eq!(compile(&grammar(&special), None), (Ok(()), 1));

    let mut invalid = object(600);
    invalid["properties"]["p7"] = json!({"type": "string", "pattern": "("});
    let (result, trials) = compile(&json_form(invalid, "schema"), None);
    let error = result.unwrap_err();
    assert_eq!(error.at, "schema.properties.p7");
    assert!(error.problem.contains("regex") && trials == 1, "{error}: {trials}");
}

#[test]
fn a_trial_that_cannot_be_run_is_an_internal_error() {
    let failure = TrialError::Failed("no process".to_owned());
    let (result, trials) = compile(&json_form(costly(), "schema"), Some(failure));
    let error = result.unwrap_err();
    assert!(error.is_internal && error.problem == "no process" && trials == 1, "{error}");
}

#[test]
fn the_request_of_a_trial_is_checked() {
    for request in ["", "{}", r#"{"grammar":{"grammars":[],"max_tokens":null},"tokens":0}"#] {
        assert!(try_grammar(request.as_bytes()).is_err(), "{request}");
    }
}
