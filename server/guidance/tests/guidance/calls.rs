//! Tests the arguments of tool calls in notations other than JSON.

use serde_json::{Map, Value, json};
use server_guidance::{Dialect, Form};

use crate::support::{COMPILER, check};

fn arguments(dialect: Dialect, schema: Value) -> Form {
    Form::Value { dialect, schema, at: "parameters".to_owned() }
}

/// Checks values of the argument `a`, which is required and has this schema.
fn check_value(dialect: Dialect, schema: &Value, fitting: &[&str], others: &[&str]) {
    let parameters = json!({
        "properties": {"a": schema},
        "required": ["a"],
        "$defs": {"count": {"type": "integer"}, "unit": {"enum": ["C", "F"]}},
    });
    let call = |value: &&str| match dialect {
        Dialect::Python => format!("a={value}"),
        Dialect::Gemma => format!("a:{value}"),
        Dialect::Qwen => format!("<parameter=a>\n{value}\n</parameter>\n"),
        Dialect::MiniCpm => format!("<param name=\"a\">{value}</param>"),
    };
    let fitting: Vec<String> = fitting.iter().map(call).collect();
    let others: Vec<String> = others.iter().map(call).collect();
    let fitting: Vec<&str> = fitting.iter().map(String::as_str).collect();
    let others: Vec<&str> = others.iter().map(String::as_str).collect();
    check(&arguments(dialect, parameters), &fitting, &others);
}

fn weather() -> Value {
    json!({
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "unit": {"enum": ["C", "F"]},
            "exact": {"type": "boolean"},
        },
        "required": ["city", "unit"],
        "additionalProperties": false,
    })
}

#[test]
fn python_arguments_have_names_and_literals() {
    check(
        &arguments(Dialect::Python, weather()),
        &[
            "city=\"Ulm\", unit=\"C\"",
            "city=\"a\\\"b\", days=3, unit=\"F\", exact=True",
            "city=\"\", unit=\"C\", exact=False",
        ],
        &[
            "",
            "city=\"Ulm\"",
            "city=\"Ulm\", unit=\"K\"",
            "unit=\"C\", city=\"Ulm\"",
            "city='Ulm', unit=\"C\"",
            "city=\"Ulm\", days=10, unit=\"C\"",
            "city=\"Ulm\", unit=\"C\", ",
        ],
    );
    let optional = json!({"properties": {"a": {"type": "integer"}, "b": {"type": "null"}}});
    check(
        &arguments(Dialect::Python, optional),
        &["a=1", "b=None", "a=1, b=None"],
        &["b=None, a=1", "a=1,", ", b=None"],
    );
    check(
        &arguments(Dialect::Python, json!({"type": "object"})),
        &["x=1", "x=\"y\", z_1=[1, {\"a\":None}]"],
        &["1", "x=", "x=1,y=2", "x=[null]"],
    );
}

#[test]
fn python_values_have_python_literals_at_any_depth() {
    let list = json!({"type": "array", "items": {"type": ["boolean", "null"]}, "maxItems": 2});
    check_value(
        Dialect::Python,
        &list,
        &["[]", "[True]", "[False, None]", "[True,None]"],
        &["[true]", "[null]", "[True, True, True]", "True"],
    );
    let object = json!({
        "type": "object",
        "properties": {"on": {"type": "boolean"}, "at": {"anyOf": [{"type": "string"}, {"type": "null"}]}},
        "required": ["on"],
    });
    check_value(
        Dialect::Python,
        &object,
        &["{\"on\": True}", "{\"on\":False,\"at\":\"x\"}", "{\"on\": True, \"at\": None}"],
        &["{\"on\": true}", "{\"on\": True, \"at\": null}", "{\"at\": None}", "{\"on\": True, \"b\": 1}"],
    );
    let map = json!({"type": "object", "additionalProperties": {"type": "boolean"}});
    check_value(
        Dialect::Python,
        &map,
        &["{}", "{\"a\": True, \"b\": False}"],
        &["{\"a\": true}", "{\"a\": 1}", "{a: True}"],
    );
    let listed = json!({"enum": [true, null, 1, "x", [false, {"a": null}]]});
    check_value(
        Dialect::Python,
        &listed,
        &["True", "None", "1", "\"x\"", "[False, {\"a\": None}]"],
        &["true", "null", "False", "[false, {\"a\": null}]"],
    );
    let units = json!({"type": "array", "items": {"$ref": "#/$defs/unit"}});
    check_value(Dialect::Python, &units, &["[\"C\", \"F\"]"], &["[\"K\"]"]);
    check_value(
        Dialect::Python,
        &json!({"description": "d"}),
        &["None", "1", "\"x\"", "[[True], {\"a\": [None]}]"],
        &["null", "[true]", "{\"a\": [null]}"],
    );
}

#[test]
fn python_values_may_contain_values_with_the_same_schema() {
    let node = json!({
        "type": "object",
        "properties": {
            "on": {"type": "boolean"},
            "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
        },
        "required": ["on", "next"],
    });
    let schema = json!({
        "properties": {"a": {"$ref": "#/$defs/node"}},
        "required": ["a"],
        "$defs": {"node": node},
    });
    check(
        &arguments(Dialect::Python, schema),
        &["a={\"on\": True, \"next\": {\"on\": False, \"next\": None}}"],
        &["a={\"on\": True, \"next\": {\"on\": False, \"next\": null}}", "a={\"on\": True, \"next\": {}}"],
    );
}

#[test]
fn python_values_with_keywords_that_only_json_supports_are_written_as_in_json() {
    let map = json!({"type": "object", "additionalProperties": {"type": "boolean"}, "minProperties": 1});
    check_value(Dialect::Python, &map, &["{\"a\": true}"], &["{}", "{\"a\": True}"]);
    let exclusive = json!({"oneOf": [{"type": "boolean"}, {"type": "integer"}]});
    check_value(Dialect::Python, &exclusive, &["true", "1"], &["True", "1.5"]);
    let count = json!({"$ref": "#/$defs/count", "maximum": 5});
    check_value(Dialect::Python, &count, &["5"], &["6", "True"]);
    let open = json!({
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "additionalProperties": {"type": "integer"},
    });
    check_value(Dialect::Python, &open, &["{\"a\": true, \"b\": 1}"], &["{\"a\": 1}", "{\"b\": true}"]);
}

#[test]
fn python_arguments_may_have_names_that_python_does_not_allow() {
    let names = ["$top", "@type", "3d", "xml:lang", "x-id", "a/b", "größe"];
    let properties: Map<String, Value> =
        names.iter().map(|name| ((*name).to_owned(), json!({"type": "integer"}))).collect();
    for name in names {
        let text = format!("{name}=1");
        check(&arguments(Dialect::Python, json!({"properties": properties})), &[&text], &[name]);
    }
}

#[test]
fn schemas_of_arguments_may_have_as_many_consecutive_references_as_the_limit() {
    let chain = |length: usize| {
        let reference = |number: usize| json!({"$ref": format!("#/$defs/{number}")});
        let mut definitions: Map<String, Value> =
            (1..length).map(|number| (number.to_string(), reference(number + 1))).collect();
        let last = json!({"properties": {"a": {"type": "integer"}}, "required": ["a"]});
        definitions.insert(length.to_string(), last);
        arguments(Dialect::Python, json!({"$ref": "#/$defs/1", "$defs": definitions}))
    };
    check(&chain(16), &["a=1"], &[""]);
    let error = COMPILER.compile(&chain(17)).unwrap_err();
    assert_eq!(error.at, "parameters.$defs.16");
    assert_eq!(error.problem, "is part of a chain of more than 16 references");
}

#[test]
fn gemma_keys_have_quotes_if_the_parser_could_not_read_them_otherwise() {
    let schema = |name: &str| json!({"properties": {name: {"type": "integer"}}, "required": [name]});
    for name in ["$top", "@type", "3d", "x-id", "first name"] {
        check(&arguments(Dialect::Gemma, schema(name)), &[&format!("{name}:1")], &[&format!("\"{name}\":1")]);
    }
    for (name, key) in [
        ("filter[status]", "\"filter[status]\""),
        ("xml:lang", "\"xml:lang\""),
        ("a,b", "\"a,b\""),
        ("say \"hi\"", "\"say \\\"hi\\\"\""),
        (" a", "\" a\""),
        ("", "\"\""),
    ] {
        check(&arguments(Dialect::Gemma, schema(name)), &[&format!("{key}:1")], &[&format!("{name}:1")]);
    }
    let constant = json!({"properties": {"x": {"const": {"a:b": 1}}}, "required": ["x"]});
    check(&arguments(Dialect::Gemma, constant), &["x:{\"a:b\":1}"], &["x:{a:b:1}"]);
}

#[test]
fn gemma_arguments_have_bare_keys_and_special_quotes() {
    check(
        &arguments(Dialect::Gemma, weather()),
        &[
            "city:<|\"|>Ulm<|\"|>,unit:<|\"|>C<|\"|>",
            "city:<|\"|>a\"b\\<|\"|>,days:3,unit:<|\"|>F<|\"|>,exact:true",
        ],
        &[
            "",
            "city:\"Ulm\",unit:<|\"|>C<|\"|>",
            "city:<|\"|>Ulm<|\"|>,unit:C",
            "city:<|\"|>Ulm<|\"|>, unit:<|\"|>C<|\"|>",
        ],
    );
    let nested = json!({
        "$defs": {"p": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}},
        "properties": {
            "list": {"type": "array", "items": {"$ref": "#/$defs/p"}, "minItems": 1, "maxItems": 2},
            "any": {"anyOf": [{"type": "string", "maxLength": 2}, {"type": "null"}]},
        },
        "required": ["list", "any"],
    });
    check(
        &arguments(Dialect::Gemma, nested),
        &["list:[{x:1.5}],any:null", "list:[{x:1},{x:-2e1}],any:<|\"|>ab<|\"|>"],
        &[
            "list:[],any:null",
            "list:[{x:1},{x:1},{x:1}],any:null",
            "list:[{}],any:null",
            "list:[{x:1}],any:<|\"|>abc<|\"|>",
        ],
    );
    check(&arguments(Dialect::Gemma, json!(true)), &["a:1", "a:<|\"|>x<|\"|>,b_2:true"], &["a:x", "1:2"]);
}

#[test]
fn a_schema_without_a_type_allows_the_types_that_its_keywords_constrain() {
    let minimum = json!({"minimum": 5});
    check_value(Dialect::Gemma, &minimum, &["5", "6.5"], &["4", "true", "<|\"|>x<|\"|>"]);
    check_value(Dialect::Qwen, &minimum, &["5"], &["4", "x"]);
    let length = json!({"minLength": 2, "maxLength": 3});
    check_value(Dialect::Gemma, &length, &["<|\"|>ab<|\"|>"], &["<|\"|>a<|\"|>", "12"]);
    check_value(Dialect::MiniCpm, &length, &["ab", "abc"], &["a", "abcd"]);
    let list = json!({"items": {"type": "integer"}});
    check_value(Dialect::Gemma, &list, &["[]", "[1,2]"], &["1", "[true]"]);
    let object = json!({"properties": {"x": {"type": "integer"}}, "required": ["x"]});
    check_value(Dialect::Gemma, &object, &["{x:1}"], &["1", "{}", "{x:true}"]);
    let map = json!({"additionalProperties": {"type": "integer"}});
    check_value(Dialect::Qwen, &map, &["{\"x\": 1}"], &["1", "x", "{\"x\": true}"]);
    let any = json!({"description": "d"});
    check_value(Dialect::Gemma, &any, &["1", "null", "<|\"|>x<|\"|>"], &["x"]);
    check_value(Dialect::Qwen, &any, &["1", "x"], &[]);
}

#[test]
fn keywords_beside_alternatives_and_references_constrain_values() {
    let number = json!({"type": "integer", "anyOf": [{"minimum": 8}, {"maximum": 1}]});
    check_value(Dialect::Gemma, &number, &["0", "8"], &["5", "8.5", "true"]);
    check_value(Dialect::Qwen, &number, &["0", "8"], &["5", "8.5", "x"]);
    let object = json!({"type": "object", "anyOf": [{"required": ["x"], "properties": {"x": {}}}, {}]});
    check_value(Dialect::Gemma, &object, &["{x:1}", "{y:1}"], &["1"]);
    let count = json!({"$ref": "#/$defs/count", "type": "number", "description": "d"});
    check_value(Dialect::Gemma, &count, &["1"], &["1.5", "true"]);
    // Some libraries write references with descriptions like this.
    let unit = json!({"allOf": [{"$ref": "#/$defs/unit"}], "description": "d"});
    check_value(Dialect::Gemma, &unit, &["<|\"|>C<|\"|>"], &["<|\"|>K<|\"|>", "1"]);
    check_value(Dialect::Qwen, &unit, &["C"], &["K"]);
    let listed = json!({"type": ["string", "null"], "enum": ["a", "abc", null, 1], "maxLength": 2});
    check_value(Dialect::Gemma, &listed, &["<|\"|>a<|\"|>", "null"], &["<|\"|>abc<|\"|>", "1"]);
    check_value(Dialect::MiniCpm, &listed, &["a", "null"], &["abc", "1"]);
}

#[test]
fn tagged_arguments_have_plain_texts_and_json_values() {
    let qwen = |parameters: &[(&str, &str)]| -> String {
        parameters
            .iter()
            .map(|(name, value)| format!("<parameter={name}>\n{value}\n</parameter>\n"))
            .collect()
    };
    let city = ("city", "New\n</param \"York\"");
    let fitting = [
        qwen(&[city, ("unit", "C")]),
        qwen(&[("city", ""), ("days", "9"), ("unit", "F"), ("exact", "true")]),
    ];
    let others = [
        qwen(&[city]),
        qwen(&[city, ("unit", "\"C\"")]),
        qwen(&[("unit", "C"), city]),
        qwen(&[city, ("days", "0"), ("unit", "C")]),
        qwen(&[city, ("unit", "C"), ("other", "x")]),
    ];
    let texts = |texts: &[String]| texts.to_vec();
    let (fitting, others) = (texts(&fitting), texts(&others));
    let (fitting, others): (Vec<&str>, Vec<&str>) =
        (fitting.iter().map(String::as_str).collect(), others.iter().map(String::as_str).collect());
    check(&arguments(Dialect::Qwen, weather()), &fitting, &others);
    check(
        &arguments(Dialect::MiniCpm, weather()),
        &["<param name=\"city\">a<b</param><param name=\"unit\">C</param>"],
        &["<param name=\"city\">a</param>", "<param name='city'>a</param><param name=\"unit\">C</param>"],
    );
}

#[test]
fn tagged_texts_respect_lengths_and_patterns() {
    let schema = json!({
        "properties": {
            "code": {"type": "string", "pattern": "^[A-Z]{2}[0-9]+$", "maxLength": 4},
            "note": {"anyOf": [{"type": "string", "enum": ["a", "b"]}, {"type": "null"}]},
        },
        "required": ["code", "note"],
    });
    let call = |code: &str, note: &str| {
        format!("<param name=\"code\">{code}</param><param name=\"note\">{note}</param>")
    };
    let fitting = [call("AB1", "a"), call("AB12", "null")];
    let others =
        [call("AB", "a"), call("AB123", "a"), call("ab1", "a"), call("AB1", "c"), call("AB1", "\"a\"")];
    let strings = |texts: &[String]| -> Vec<String> { texts.to_vec() };
    let (fitting, others) = (strings(&fitting), strings(&others));
    let (fitting, others): (Vec<&str>, Vec<&str>) =
        (fitting.iter().map(String::as_str).collect(), others.iter().map(String::as_str).collect());
    check(&arguments(Dialect::MiniCpm, schema), &fitting, &others);
    let any = json!({"type": "object"});
    check(
        &arguments(Dialect::Qwen, any),
        &["", "<parameter=x>\n1\n</parameter>\n"],
        &["<parameter=x>1</parameter>"],
    );
}
