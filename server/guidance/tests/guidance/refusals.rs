//! Tests that forms that cannot be followed are rejected with the path of the invalid part, within limits on time and
//! memory.

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde_json::{Value, json};
use server_guidance::{Dialect, Form, limits};

use crate::support::COMPILER;

fn rejection(form: &Form) -> (String, String) {
    let error = COMPILER.compile(form).expect_err("the form cannot be followed");
    (error.at, error.problem)
}

fn json_form(schema: Value) -> Form {
    Form::Json { schema, at: "schema".to_owned() }
}

#[test]
fn an_invalid_schema_is_rejected_with_the_path_of_the_problem() {
    for (schema, place, problem) in [
        (json!({"type": "strin"}), "schema.type", "\"strin\" is not one of"),
        (json!({"uniqueItems": true, "type": "array"}), "schema", "uniqueItems"),
        (
            json!({"type": "object", "properties": {"a": {"type": "array", "items": {"not": {"const": 1}}}}}),
            "schema.properties.a.items",
            "not",
        ),
        (
            json!({"anyOf": [{"type": "integer"}, {"type": "string", "pattern": "(?=x)y"}]}),
            "schema.anyOf[1]",
            "",
        ),
        (json!({"$defs": {"a": {"pattern": "["}}, "$ref": "#/$defs/a"}), "schema.$defs.a", ""),
        (json!({"$ref": "#/$defs/gone"}), "schema", ""),
        (
            json!({"$ref": "https://example.org/schema"}),
            "schema",
            "Resource 'https://example.org/schema' is not part of the schema, and external schemas are not fetched",
        ),
        (json!({"type": "integer", "minimum": 5, "maximum": 4}), "schema", ""),
        (json!({"oneOf": [{"type": "integer"}, {"type": "integer", "minimum": 3}]}), "schema", "oneOf"),
    ] {
        let (at, message) = rejection(&json_form(schema.clone()));
        assert_eq!(at, place, "{message}: {schema}");
        assert!(message.contains(problem) && !message.is_empty(), "{message}: {schema}");
        // The path is the same if the schema is a part of another form.
        let part = Form::Sequence(vec![Form::literal("x"), json_form(schema)]);
        assert_eq!(rejection(&part).0, place);
    }
    let endless = rejection(&json_form(json!({"$ref": "#"})));
    assert_eq!(
        endless,
        ("schema".to_owned(), "the form cannot be satisfied by any finite output".to_owned())
    );
}

#[test]
fn invalid_expressions_and_grammars_are_rejected_with_their_paths() {
    let regex = |pattern: &str| Form::Regex {
        pattern: pattern.to_owned(),
        at: "structured_outputs.regex".to_owned(),
    };
    for pattern in ["(", "a(?=b)", "[z-a]", "a{3,2}", "\\1"] {
        assert_eq!(rejection(&regex(pattern)).0, "structured_outputs.regex", "{pattern}");
        let part = Form::Choice(vec![Form::literal("x"), regex("ok"), regex(pattern)]);
        assert_eq!(rejection(&part).0, "structured_outputs.regex", "{pattern}");
    }
    let grammar = |text: &str| Form::Grammar { text: text.to_owned(), at: "grammar".to_owned() };
    for text in [
        "start: \"a",
        "start: b",
        "x: \"a\"",
        "root ::= b",
        "root ::= \"a",
        " ",
        "start: \"a\"\nstart: \"b\"",
        "start: <|no such token|>",
        "start: @other",
    ] {
        assert_eq!(rejection(&grammar(text)).0, "grammar", "{text}");
    }
    let endless = rejection(&grammar("start: start"));
    assert_eq!(endless.1, "the form cannot be satisfied by any finite output");
}

#[test]
fn names_that_a_python_call_cannot_have_are_rejected() {
    for name in ["filter[status]", "a b", "-x", "a=b", ""] {
        let schema = json!({"properties": {"a": {"type": "string"}, name: {"type": "string"}}});
        let at = "parameters".to_owned();
        let (at, problem) = rejection(&Form::Value { dialect: Dialect::Python, schema, at });
        assert_eq!(at, format!("parameters.properties.{name}"), "{problem}");
        assert!(problem.contains("the name of an argument may contain"), "{problem}");
    }
}

#[test]
fn forms_above_a_limit_are_rejected() {
    let long = "x".repeat(limits::REGEX_BYTES_MAX + 1);
    assert!(rejection(&Form::Regex { pattern: long, at: "regex".to_owned() }).1.contains("bytes"));
    let long = format!("start: \"{}\"", "x".repeat(limits::GRAMMAR_BYTES_MAX));
    assert!(rejection(&Form::Grammar { text: long, at: "grammar".to_owned() }).1.contains("bytes"));
    let long = Form::literal("x".repeat(limits::FORM_BYTES_MAX + 1));
    assert!(rejection(&long).1.contains("bytes"));
    let many = Form::Choice(vec![Form::literal("x"); limits::ELEMENTS_MAX + 1]);
    assert!(rejection(&many).1.contains("elements"));
    let mut deep = Form::literal("x");
    for _ in 0..=limits::FORM_DEPTH_MAX {
        deep = Form::Sequence(vec![Form::literal("("), deep]);
    }
    assert!(rejection(&deep).1.contains("deeper"));
    let often = Form::Repeat { form: Box::new(Form::literal("x")), min: limits::REPEAT_MAX + 1, max: None };
    assert!(rejection(&often).1.contains("repetition"));
    let repeated: String = (0..2100).map(|number| format!(" \"{number}\"{{0,5000}}")).collect();
    let many = Form::Grammar { text: format!("start:{repeated}\n"), at: "grammar".to_owned() };
    let (at, problem) = rejection(&many);
    assert!(at == "grammar" && problem.contains("symbols") && problem.len() < 100, "{problem}");
    assert!(rejection(&Form::literal("")).1.contains("empty"));
}

#[test]
fn schemas_that_grow_without_bound_do_not_hang_the_compiler() {
    // If `allOf` is distributed over `anyOf`, each level contains the inner schema twice.
    let mut doubled = json!({"type": "object", "properties": {"x": {"type": "string"}}});
    for _ in 0..24 {
        doubled = json!({"allOf": [{"anyOf": [doubled.clone(), {"type": "integer"}]}, {"anyOf": [{"type": "object"}, {"minimum": 3}]}]});
    }
    let many: Vec<Value> = (0..5000).map(|index| json!(format!("value {index}"))).collect();
    let names = (0..2000).map(|index| (format!("p{index}"), json!({"type": "string"})));
    for schema in [
        doubled,
        json!({"enum": many}),
        json!({"type": "object", "properties": names.collect::<serde_json::Map<_, _>>()}),
        json!({"type": "string", "minLength": 100_000, "maxLength": 1_000_000}),
        json!({"type": "array", "items": {"type": "integer"}, "minItems": 50_000}),
        json!({"type": "string", "pattern": "^(((a{1,100}){1,100}){1,100}){1,100}$"}),
    ] {
        // The compiler may accept or reject the schema, but must return.
        let _ = COMPILER.compile(&json_form(schema));
    }
}

#[test]
fn arguments_that_a_notation_cannot_express_are_rejected_with_their_paths() {
    for (dialect, schema, place) in [
        (
            Dialect::Gemma,
            json!({"properties": {"a": {"type": "string", "pattern": "x"}}}),
            "p.properties.a.pattern",
        ),
        (
            Dialect::Gemma,
            json!({"properties": {"a": {"type": "object", "minProperties": 3}}}),
            "p.properties.a.minProperties",
        ),
        (Dialect::Qwen, json!({"anyOf": [{"type": "object"}]}), "p.anyOf"),
        (Dialect::MiniCpm, json!({"properties": {}, "required": ["x"]}), "p.required"),
        (Dialect::Python, json!({"type": "array"}), "p.type"),
        (Dialect::Python, json!({"properties": {"a": {"uniqueItems": true, "type": "array"}}}), "p"),
        (Dialect::Qwen, json!({"properties": {"a": {"type": "zahl"}}}), "p.properties.a.type"),
        (Dialect::Qwen, json!({"properties": {"a": {"$ref": "#/$defs/x"}}}), "p.properties.a.$ref"),
        (
            Dialect::Python,
            json!({"$ref": "#/$defs/x", "required": ["b"], "$defs": {"x": {"properties": {"b": {}}}}}),
            "p.$ref",
        ),
        (
            Dialect::Gemma,
            json!({"properties": {"a": {"$ref": "#/$defs/x", "maximum": 5}}, "$defs": {"x": {"type": "integer"}}}),
            "p.properties.a.$ref",
        ),
        (
            Dialect::Qwen,
            json!({"properties": {"a": {"$ref": "#/$defs/x", "maxLength": 5}}, "$defs": {"x": {"type": "string"}}}),
            "p.properties.a.$ref",
        ),
        (
            Dialect::Qwen,
            json!({"properties": {"a": {"type": "string", "allOf": [{"minLength": 1}, {"maxLength": 2}]}}}),
            "p.properties.a.allOf",
        ),
        (Dialect::MiniCpm, json!({"properties": {"a": {"not": {"const": "x"}}}}), "p.properties.a.not"),
        (
            Dialect::Gemma,
            json!({"properties": {"a": {"enum": ["x", "y"], "pattern": "x"}}}),
            "p.properties.a.enum",
        ),
        (
            Dialect::Gemma,
            json!({"properties": {"a": {"type": "array", "items": [{"type": "integer"}]}}}),
            "p.properties.a.items",
        ),
        (Dialect::Qwen, json!({"properties": {"a": {"type": "integer", "enum": ["x"]}}}), "p.properties.a"),
        (Dialect::Gemma, json!({"properties": {"a": false}}), "p.properties.a"),
    ] {
        let form = Form::Value { dialect, schema: schema.clone(), at: "p".to_owned() };
        let (at, problem) = rejection(&form);
        assert_eq!(at, place, "{problem}: {schema}");
    }
}

#[test]
fn alternatives_that_contain_themselves_are_rejected() {
    let union = json!({"anyOf": [{"$ref": "#/$defs/x"}, {"type": "null"}]});
    let schema = json!({"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": union}});
    for dialect in [Dialect::Gemma, Dialect::Qwen, Dialect::MiniCpm] {
        let (at, problem) =
            rejection(&Form::Value { dialect, schema: schema.clone(), at: "parameters".to_owned() });
        assert_eq!(at, "parameters.$defs.x", "{problem}");
        assert!(problem.contains("refers to itself"), "{problem}");
    }
}

#[test]
fn random_forms_are_compiled_or_rejected_with_a_path() {
    let mut rng = StdRng::seed_from_u64(23);
    let sources = [
        "{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"string\",\"pattern\":\"^[a-z]{1,3}$\"}},\"required\":[\"a\"]}",
        "{\"anyOf\":[{\"$ref\":\"#/$defs/x\"},{\"type\":\"integer\",\"minimum\":-5}],\"$defs\":{\"x\":{\"enum\":[1,null]}}}",
        "{\"type\":\"array\",\"items\":{\"type\":\"number\",\"multipleOf\":0.5},\"minItems\":1,\"maxItems\":9}",
        "root ::= \"(\" root? \")\" | [a-z]{1,4} (\",\" root)*\nx ::= root x | \"\\x41\"",
        "start: a (\",\" a)*\na: /[0-9]+/ | \"(\" start \")\" | %json {\"type\":\"null\"}",
        "(?:[a-c]{2,5}|\\d+\\.\\d*)?x|[^y-z]",
    ];
    let (mut compiled, mut refused) = (0, 0);
    for _ in 0..600 {
        let mut text: Vec<char> = sources[rng.random_range(0..sources.len())].chars().collect();
        for _ in 0..rng.random_range(1..4) {
            let (at, other) = (rng.random_range(0..text.len()), rng.random_range(0..text.len()));
            match rng.random_range(0..4) {
                0 => drop(text.remove(at)),
                1 => text.insert(at, text[other]),
                2 => text.swap(at, other),
                _ => text[at] = ['(', ')', '{', '"', '9', '*', '\\', 'ä', '\0'][rng.random_range(0..9)],
            }
        }
        let text: String = text.into_iter().collect();
        let at = || "at".to_owned();
        let form = match serde_json::from_str(&text) {
            Ok(schema) => Form::Json { schema, at: at() },
            Err(_) if rng.random_bool(0.5) => Form::Grammar { text, at: at() },
            Err(_) => Form::Regex { pattern: text, at: at() },
        };
        match COMPILER.compile(&form) {
            Ok(_) => compiled += 1,
            Err(error) => {
                refused += 1;
                assert!(error.at.starts_with("at") && !error.problem.is_empty(), "{error}: {form:?}");
            }
        }
    }
    assert!(compiled > 20 && refused > 20, "{compiled} were compiled, {refused} refused");
}
