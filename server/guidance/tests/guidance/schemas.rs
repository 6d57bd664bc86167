//! Tests JSON schemas: an independent validator accepts all sampled values, and valid values match.

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde_json::{Map, Value, json};
use server_guidance::Form;

use crate::support::{Fit, compile, draw, fit};

/// Schemas for the supported keywords, with texts that match.
fn written() -> Vec<(Value, &'static [&'static str])> {
    vec![
        (json!({}), &["null", "{\"a\": [1, \"x\"]}"]),
        (json!({"type": "object"}), &["{}", "{\"a\":{}}"]),
        (json!({"type": "null"}), &["null"]),
        (json!({"type": "boolean"}), &["true", "false"]),
        (json!({"type": "integer"}), &["0", "-12", "300"]),
        (json!({"type": "number"}), &["0.5", "-1e5", "7"]),
        (json!({"type": "string"}), &["\"\"", "\"ä\\n\\\"\""]),
        (json!({"type": "array"}), &["[]", "[1, [\"x\"]]"]),
        (json!({"type": ["string", "null"]}), &["null", "\"x\""]),
        (json!({"type": ["integer", "boolean"]}), &["1", "true"]),
        (json!({"const": "x"}), &["\"x\""]),
        (json!({"const": {"a": [1, null]}}), &["{\"a\": [1, null]}"]),
        (json!({"const": 1.5}), &["1.5"]),
        (json!({"enum": ["red", "green", 7, null]}), &["\"red\"", "7", "null"]),
        (json!({"type": "string", "enum": ["a", "b"]}), &["\"b\""]),
        (json!({"minimum": 0, "type": "integer"}), &["0", "17"]),
        (json!({"type": "integer", "minimum": -5, "maximum": 5}), &["-5", "0", "5"]),
        (json!({"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 100}), &["1", "99"]),
        (json!({"type": "number", "minimum": 0, "maximum": 1}), &["0", "0.25", "1"]),
        (json!({"type": "number", "exclusiveMinimum": -1.5, "maximum": 2.25}), &["-1.4", "2.25"]),
        (json!({"type": "integer", "multipleOf": 5, "minimum": -1000, "maximum": 1000}), &["10", "-15", "0"]),
        (json!({"type": "integer", "minimum": 1, "maximum": 65535}), &["1", "65535", "8080"]),
        (json!({"type": "string", "minLength": 2, "maxLength": 4}), &["\"ab\"", "\"äöüß\""]),
        (json!({"type": "string", "maxLength": 0}), &["\"\""]),
        (json!({"type": "string", "pattern": "^[a-z]+$"}), &["\"abc\""]),
        (json!({"type": "string", "pattern": "^\\d{3}-\\d{4}$"}), &["\"123-4567\""]),
        (json!({"type": "string", "pattern": "[0-9]"}), &["\"a1b\""]),
        (json!({"type": "string", "pattern": "^(\\([0-9]{3}\\))?[0-9]{3}$"}), &["\"(555)123\"", "\"123\""]),
        (json!({"type": "string", "format": "date"}), &["\"2026-02-28\""]),
        (json!({"type": "string", "format": "time"}), &["\"12:30:00Z\""]),
        (json!({"type": "string", "format": "date-time"}), &["\"2026-02-28T12:30:00Z\""]),
        (json!({"type": "string", "format": "uuid"}), &["\"123e4567-e89b-12d3-a456-426614174000\""]),
        (json!({"type": "string", "format": "ipv4"}), &["\"127.0.0.1\""]),
        (json!({"type": "string", "format": "email"}), &["\"a@b.de\""]),
        (json!({"type": "string", "format": "hostname"}), &["\"example.org\""]),
        (json!({"type": "string", "format": "of our own"}), &["\"anything\""]),
        (json!({"type": "integer", "format": "int32"}), &["5"]),
        (json!({"type": "array", "items": {"type": "integer"}}), &["[]", "[1,2]"]),
        (json!({"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3}), &["[true]"]),
        (json!({"type": "array", "items": false}), &["[]"]),
        (
            json!({"type": "array", "prefixItems": [{"type": "string"}, {"type": "integer"}], "items": false, "minItems": 2}),
            &["[\"a\", 1]"],
        ),
        (json!({"type": "array", "items": {"type": "array", "items": {"const": 1}}}), &["[[1], []]"]),
        (json!({"type": "array", "maxItems": 0}), &["[]"]),
        (
            json!({"properties": {"a": {"type": "integer"}}, "required": ["a"], "type": "object"}),
            &["{\"a\": 1}"],
        ),
        (
            json!({"type": "object", "properties": {"a": {}, "b": {}}, "additionalProperties": false}),
            &["{}", "{\"b\":1}"],
        ),
        (
            json!({"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}}),
            &["{\"a\":1,\"z\":\"x\"}"],
        ),
        (json!({"type": "object", "additionalProperties": {"type": "integer"}}), &["{\"x\":1,\"y\":2}"]),
        (
            json!({"type": "object", "patternProperties": {"^x_": {"type": "integer"}}, "additionalProperties": false}),
            &["{\"x_1\":1}"],
        ),
        (json!({"type": "object", "required": ["q"]}), &["{\"q\":null}"]),
        (
            json!({"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1}),
            &["{\"x\":1}"],
        ),
        (
            json!({"type": "object", "properties": {"a b": {"const": 1}, "ä\"": {"const": 2}}, "required": ["a b", "ä\""], "additionalProperties": false}),
            &["{\"a b\":1,\"ä\\\"\":2}"],
        ),
        (
            json!({"type": "object", "properties": {"o": {"type": "object", "properties": {"p": {"type": "object", "properties": {"q": {"type": "integer"}}, "required": ["q"]}}, "required": ["p"]}}, "required": ["o"]}),
            &["{\"o\":{\"p\":{\"q\":1}}}"],
        ),
        (json!({"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 3}]}), &["1", "\"abc\""]),
        (
            json!({"anyOf": [{"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": false}, {"type": "object", "properties": {"b": {"const": 2}}, "required": ["b"], "additionalProperties": false}]}),
            &["{\"a\":1}", "{\"b\":2}"],
        ),
        (json!({"oneOf": [{"type": "integer"}, {"type": "string"}]}), &["1", "\"x\""]),
        (
            json!({"oneOf": [{"type": "object", "properties": {"kind": {"const": "a"}, "x": {"type": "integer"}}, "required": ["kind", "x"]}, {"type": "object", "properties": {"kind": {"const": "b"}}, "required": ["kind"]}]}),
            &["{\"kind\":\"b\"}"],
        ),
        (json!({"allOf": [{"type": "integer"}, {"minimum": 3}]}), &["3"]),
        (
            json!({"allOf": [{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, {"properties": {"b": {"type": "boolean"}}, "required": ["b"]}]}),
            &["{\"a\":1,\"b\":true}"],
        ),
        (json!({"$ref": "#/$defs/n", "$defs": {"n": {"type": "integer"}}}), &["1"]),
        (
            json!({"type": "array", "items": {"$ref": "#/definitions/x"}, "definitions": {"x": {"enum": ["x"]}}}),
            &["[\"x\"]"],
        ),
        (
            json!({"$ref": "#/$defs/tree", "$defs": {"tree": {"type": "object", "properties": {"v": {"type": "integer"}, "c": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}, "required": ["v"], "additionalProperties": false}}}),
            &["{\"v\":1,\"c\":[{\"v\":2}]}"],
        ),
        (
            json!({"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["next"], "additionalProperties": false}),
            &["{\"next\":{\"next\":null}}"],
        ),
        (
            json!({"title": "T", "description": "d", "type": "object", "properties": {"name": {"title": "Name", "type": "string", "default": "x", "examples": ["y"]}, "age": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": null}}, "required": ["name"]}),
            &["{\"name\":\"x\",\"age\":null}"],
        ),
        (
            json!({"type": "object", "properties": {"steps": {"type": "array", "items": {"type": "object", "properties": {"explanation": {"type": "string"}, "output": {"type": "string"}}, "required": ["explanation", "output"], "additionalProperties": false}}, "final_answer": {"type": "string"}}, "required": ["steps", "final_answer"], "additionalProperties": false}),
            &["{\"steps\":[],\"final_answer\":\"4\"}"],
        ),
    ]
}

/// A random schema with the keywords that requests use.
fn random(rng: &mut StdRng, depth: u32) -> Value {
    match rng.random_range(0..if depth == 0 { 7 } else { 12 }) {
        0 => json!({"type": "boolean"}),
        1 => {
            let min = rng.random_range(-50..50);
            json!({"type": "integer", "minimum": min, "maximum": min + rng.random_range(0..500)})
        }
        2 => json!({"type": "number", "minimum": 0, "maximum": rng.random_range(1..10)}),
        3 => {
            let min = rng.random_range(0..4);
            json!({"type": "string", "minLength": min, "maxLength": min + rng.random_range(0..9)})
        }
        4 => {
            let values = [json!("one"), json!("two"), json!(3), json!(null), json!(true)];
            json!({"enum": values[..rng.random_range(1..6)]})
        }
        5 => {
            let patterns = ["^[A-Z]{2}\\d+$", "^(a|b|ab)*$", "x$", "^\\w{1,8}$", "^[^\"]{0,5}$"];
            json!({"type": "string", "pattern": patterns[rng.random_range(0..patterns.len())]})
        }
        6 => {
            let types = [["string", "null"], ["integer", "null"], ["boolean", "string"]];
            json!({"type": types[rng.random_range(0..3)]})
        }
        7 | 8 => {
            let mut properties = Map::new();
            for name in ["a", "list", "äé", "long name", "b"] {
                if rng.random_bool(0.5) {
                    properties.insert(name.to_owned(), random(rng, depth - 1));
                }
            }
            let required: Vec<String> = properties.keys().filter(|_| rng.random_bool(0.6)).cloned().collect();
            let mut schema = json!({"type": "object", "properties": properties, "required": required});
            match rng.random_range(0..3) {
                0 => schema["additionalProperties"] = random(rng, 0),
                1 => {}
                _ => schema["additionalProperties"] = json!(false),
            }
            schema
        }
        9 | 10 => {
            let mut schema = json!({"type": "array", "items": random(rng, depth - 1)});
            if rng.random_bool(0.6) {
                let min = rng.random_range(0..3);
                schema["minItems"] = json!(min);
                schema["maxItems"] = json!(min + rng.random_range(0..3));
            }
            schema
        }
        _ => json!({"anyOf": [random(rng, depth - 1), random(rng, depth - 1)]}),
    }
}

/// The written and the random schemas, at least 200 in total.
fn all() -> Vec<Value> {
    let mut rng = StdRng::seed_from_u64(11);
    let random = (0..160).map(|_| random(&mut rng, 3));
    written().into_iter().map(|(schema, _)| schema).chain(random).collect()
}

fn form(schema: &Value) -> Form {
    Form::Json { schema: schema.clone(), at: "schema".to_owned() }
}

/// Whether parsing failed because a number is too large for the parser. JSON itself has no largest number.
fn is_beyond_numbers(error: &serde_json::Error) -> bool {
    error.to_string().starts_with("number out of range")
}

#[test]
fn values_sampled_from_200_schemas_are_valid() {
    let schemas = all();
    assert!(schemas.len() >= 200);
    let (mut whole, mut cut) = (0, 0);
    for (index, schema) in schemas.iter().enumerate() {
        let validator = jsonschema::options().should_validate_formats(true).build(schema).unwrap();
        let by_itself = form(schema);
        let tight = Form::Sequence(vec![Form::literal("<"), by_itself.clone(), Form::literal(">")]);
        for (form, is_tight) in [(by_itself, false), (tight, true)] {
            let guide = compile(&form);
            for seed in 0..5 {
                let drawn = draw(&guide, 1000 * index as u64 + seed, 500);
                if !drawn.is_whole {
                    cut += 1;
                    continue;
                }
                whole += 1;
                let text = drawn.text();
                let text = if is_tight { &text[1..text.len() - 1] } else { &text[..] };
                match serde_json::from_str::<Value>(text) {
                    Ok(value) => {
                        let error = validator.validate(&value).err().map(|error| error.to_string());
                        assert_eq!(error, None, "{text} by schema {index}: {schema}");
                    }
                    Err(error) => assert!(is_beyond_numbers(&error), "{error}: {text} by {schema}"),
                }
            }
        }
    }
    println!("{whole} texts of {} schemas are complete and valid, {cut} were cut off", schemas.len());
    assert!(whole > 4 * cut, "{whole} texts are complete, {cut} were cut off");
}

#[test]
fn valid_values_match() {
    for (schema, texts) in written() {
        let guide = compile(&form(&schema));
        let validator = jsonschema::validator_for(&schema).unwrap();
        for text in texts {
            assert!(validator.is_valid(&serde_json::from_str(text).unwrap()), "{text} by {schema}");
            assert_eq!(fit(&guide, text), Fit::Whole, "{text} by {schema}");
        }
    }
}

#[test]
fn invalid_values_do_not_match() {
    for (schema, text) in [
        (json!({"type": "integer", "maximum": 5}), "6"),
        (json!({"type": "string", "maxLength": 2}), "\"abc\""),
        (json!({"type": "array", "items": {"type": "integer"}}), "[\"a\"]"),
        (json!({"type": "object", "required": ["a"]}), "{}"),
        (json!({"enum": ["a"]}), "\"b\""),
        (json!({"type": "object", "properties": {"a": {}}, "additionalProperties": false}), "{\"b\":1}"),
        (json!({"type": "string", "format": "date"}), "\"tomorrow\""),
        (json!({"type": "string", "pattern": "^a"}), "\"b\""),
        (json!({"type": "string", "pattern": "^[^\"]*$"}), r#""\"""#),
        (json!({"type": "string", "pattern": "^[^\\\\]*$"}), r#""\\""#),
        (
            json!({"type": "object", "patternProperties": {"^[^\"]$": {}}, "additionalProperties": false}),
            r#"{"\"":1}"#,
        ),
        (json!({"anyOf": [{"type": "integer"}, {"type": "null"}]}), "true"),
    ] {
        let validator = jsonschema::options().should_validate_formats(true).build(&schema).unwrap();
        assert!(!validator.is_valid(&serde_json::from_str(text).unwrap()), "{text} by {schema}");
        assert_ne!(fit(&compile(&form(&schema)), text), Fit::Whole, "{text} by {schema}");
    }
}

#[test]
fn a_property_may_have_any_name_and_type() {
    let schema =
        json!({"type": "object", "properties": {"format": {"type": "string"}, "type": {"const": 1}}});
    assert_eq!(fit(&compile(&form(&schema)), "{\"format\": \"x\", \"type\": 1}"), Fit::Whole);
}
