//! Tests that forms that llguidance compiles with deep recursion do not exhaust the stack: they are compiled, or
//! rejected because they exceed a limit.

use std::fmt::Write as _;

use serde_json::{Map, Value, json};
use server_guidance::{Dialect, Form, limits};

use crate::support::{COMPILER, compile, first};

fn json_form(schema: Value) -> Form {
    Form::Json { schema, at: "schema".to_owned() }
}

fn grammar(text: String) -> Form {
    Form::Grammar { text, at: "grammar".to_owned() }
}

fn rejection(form: &Form) -> String {
    COMPILER.compile(form).expect_err("the form exceeds a limit").problem
}

/// A grammar that consists of `start` and `length` rules, each of which refers to the next. `rule` writes a rule, given
/// its number.
fn chain(start: &str, length: usize, rule: impl Fn(usize) -> String) -> Form {
    let mut text = start.to_owned();
    (0..length).for_each(|number| writeln!(text, "{}", rule(number)).unwrap());
    grammar(text)
}

/// A schema with the definitions `0` to `length`, each of which refers to the next. `schema` creates a definition that
/// contains the given reference.
fn references(length: usize, schema: impl Fn(Value) -> Value) -> Form {
    let reference = |number: usize| json!({"$ref": format!("#/$defs/{number}")});
    let mut definitions: Map<String, Value> =
        (0..length).map(|number| (number.to_string(), schema(reference(number + 1)))).collect();
    definitions.insert(length.to_string(), json!({"type": "integer"}));
    json_form(json!({"$ref": "#/$defs/0", "$defs": definitions}))
}

fn properties(count: usize) -> Value {
    (0..count).map(|number| (format!("p{number}"), json!({"type": "null"}))).collect()
}

#[test]
fn long_chains_of_references_and_properties_are_compiled() {
    let nested = |inner: Value| (0..30).fold(inner, |inner, _| json!({"type": "array", "items": inner}));
    for form in [
        chain("r5000: \"a\"\nstart: r0\n", 5000, |number| format!("r{number}: \"x\" r{}", number + 1)),
        chain("T5000: \"a\"\nstart: T0\n", 5000, |number| format!("T{number}: \"x\" T{}?", number + 1)),
        chain("root ::= r0\nr5000 ::= \"a\"\n", 5000, |number| {
            format!("r{number} ::= \"x\" r{}", number + 1)
        }),
        chain("r500: \"a\"\nstart: r0\n", 500, |number| {
            format!("r{number}: {}\"x\" r{}{}", "(".repeat(25), number + 1, ")".repeat(25))
        }),
        references(limits::REFERENCES_MAX - 1, |next| json!({"type": "array", "items": next})),
        references(limits::REFERENCES_MAX - 1, |next| json!({"allOf": [next, {"minimum": 1}]})),
        references(100, nested),
        json_form(json!({"type": "object", "properties": properties(limits::PROPERTIES_MAX)})),
        Form::Value {
            dialect: Dialect::Gemma,
            schema: json!({"type": "object", "properties": properties(1000)}),
            at: "schema".to_owned(),
        },
    ] {
        let (allowed, _) = first(&compile(&form));
        assert!(!allowed.is_empty());
    }
}

#[test]
fn forms_that_would_exhaust_the_stack_are_rejected() {
    let names: Vec<String> = (0..150_000).map(|number| format!("{number:x}")).collect();
    let chain_of_rules = chain("start: r0\n", 17_000, |number| format!("r{number:x}: r{:x}", number + 1));
    assert!(rejection(&chain_of_rules).contains("rules and groups"));
    for schema in [
        json!({"type": "object", "required": names}),
        json!({"type": "object", "properties": properties(limits::PROPERTIES_MAX), "required": ["other"]}),
        json!({"enum": [properties(limits::PROPERTIES_MAX + 1)]}),
        // Keywords that can be reached only through a reference are counted too.
        json!({"$ref": "#/other", "other": {"properties": properties(limits::PROPERTIES_MAX + 1)}}),
    ] {
        assert!(rejection(&json_form(schema)).contains("properties"));
    }
    assert!(rejection(&references(20_000, |next| next)).contains("different references"));
    let Form::Json { schema, .. } = references(300, |next| next) else { unreachable!() };
    let escaped = schema.to_string().replace("\"$ref\"", "\"\\u0024ref\"");
    assert!(rejection(&grammar(format!("start: \"x\" %json {escaped}"))).contains("different references"));
    let patterns: Map<String, Value> =
        (0..3000).map(|number| (format!("^p{number}$"), json!(true))).collect();
    let schema = json!({"type": "object", "patternProperties": patterns});
    assert!(rejection(&json_form(schema)).contains("pattern properties"));
}

#[test]
fn texts_that_must_match_many_patterns_are_rejected() {
    let pattern = |number: usize| json!({"type": "string", "pattern": format!("a{number}|b{number}")});
    let definitions: Map<String, Value> =
        (0..3).map(|number| (format!("d{number}"), pattern(number))).collect();
    let reference = |number: usize| json!({"$ref": format!("#/$defs/d{number}")});
    for schema in [
        json!({"allOf": [pattern(0), pattern(1), pattern(2)]}),
        json!({"allOf": [reference(0), reference(1), reference(2)], "$defs": definitions}),
        json!({"$ref": "#/$defs/d0", "pattern": "x", "anyOf": [reference(1)], "$defs": definitions}),
        json!({"anyOf": [{"properties": {"p": pattern(0)}}], "properties": {"p": pattern(1)},
            "oneOf": [{"additionalProperties": pattern(2)}]}),
    ] {
        assert!(rejection(&json_form(schema)).contains("different patterns alongside combined schemas"));
    }
    for text in [
        "T: /.*a.*/ & /.*b.*/ & /.*c.*/",
        "A: /.*a.*/ & /.*b.*/\nT: A & /.*c.*/",
        // Quotes, `#` and `//` within regular expressions and strings do not hide an operator.
        "T: /\"/ & /#/ & /.*c.*/ # \"",
        "T: \"\\\"#/\" & <[1]> & \"//\" // \"",
    ] {
        assert!(rejection(&grammar(format!("start: T\n{text}\n"))).contains("2 `&` operators"), "{text}");
    }
    for form in [
        json_form(json!({"allOf": [pattern(0), pattern(1), pattern(1)]})),
        json_form(
            json!({"type": "object", "properties": {"a": pattern(0), "b": pattern(1), "c": pattern(2)}}),
        ),
        json_form(json!({"anyOf": [pattern(0), pattern(1), pattern(2)], "title": "one of many"})),
        grammar("start: T\n# not & an & operator\nT: /[&a-z]*/ & ~\"&&\"\n".to_owned()),
    ] {
        compile(&form);
    }
}
