use super::*;
use serde_json::json;

fn types(property: &Value) -> Vec<&'static str> {
    let schema = json!({
        "properties": {"p": property},
        "$defs": {"Place": {"type": "object"}, "Loop": {"$ref": "#/$defs/Loop"}},
    });
    let types = Tools::new([("f", Some(&schema))]).types("f", "p");
    let all = [
        (types.text, "string"),
        (types.integer, "integer"),
        (types.number, "number"),
        (types.boolean, "boolean"),
        (types.null, "null"),
        (types.object, "object"),
        (types.array, "array"),
    ];
    all.into_iter().filter(|(may, _)| *may).map(|(_, name)| name).collect()
}

#[test]
fn types_are_found_in_unions_references_and_values() {
    assert_eq!(types(&json!({"type": "integer"})), ["integer"]);
    assert_eq!(types(&json!({"type": ["string", "null"]})), ["string", "null"]);
    assert_eq!(types(&json!({"anyOf": [{"type": "number"}, {"type": "null"}]})), ["number", "null"]);
    assert_eq!(types(&json!({"$ref": "#/$defs/Place"})), ["object"]);
    assert_eq!(types(&json!({"allOf": [{"$ref": "#/$defs/Place"}]})), ["object"]);
    assert_eq!(types(&json!({"enum": ["a", "b"]})), ["string"]);
    assert_eq!(types(&json!({"enum": [1, 2]})), ["integer"]);
    assert_eq!(types(&json!({"const": true})), ["boolean"]);
    assert_eq!(types(&json!({"items": {}})), ["array"]);
    assert_eq!(types(&json!({"properties": {}})), ["object"]);
    assert_eq!(types(&json!({"minimum": 1})), ["number"]);
    assert_eq!(types(&json!({"maxLength": 1})), ["string"]);
    assert_eq!(types(&json!({"additionalProperties": {"type": "integer"}})), ["object"]);
    assert_eq!(types(&json!({"anyOf": [{"type": "null"}, {"properties": {}}]})), ["null", "object"]);
}

#[test]
fn parameters_without_a_type_are_unknown() {
    for schema in [json!({}), json!({"$ref": "#/$defs/Loop"}), json!({"$ref": "elsewhere"}), json!(true)] {
        assert_eq!(types(&schema), Vec::<&str>::new(), "{schema}");
    }
    let tools = Tools::new([("f", None), ("g", Some(&json!({"properties": 1})))]);
    assert!(!tools.is_empty());
    assert!(tools.types("f", "p").is_unknown());
    assert!(tools.types("g", "p").is_unknown());
    assert!(tools.types("h", "p").is_unknown());
}
