use serde_json::json;

use super::*;
use crate::prepare::tools::{BUILT_IN, ToolChoice};

fn read(tools: &Value) -> Result<RequestTools, Error> {
    let Value::Array(tools) = tools.clone() else { panic!("the tools must be an array") };
    RequestTools::read(tools.into_iter().map(|tool| tool.as_object().unwrap().clone()).collect())
}

fn names(tools: &RequestTools) -> Vec<&str> {
    tools.offered.iter().map(|tool| tool.name.as_str()).collect()
}

fn refused(tools: &Value) -> String {
    read(tools).unwrap_err().to_string()
}

/// Returns tools like those that Codex sends: functions, a custom tool with a grammar, a namespace for each MCP server,
/// and built-in tools.
fn codex() -> Value {
    json!([
        {"type": "function", "name": "exec_command", "description": "Runs a command.", "strict": false,
            "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]}},
        {"type": "custom", "name": "apply_patch", "description": "Edits files.",
            "format": {"type": "grammar", "syntax": "lark", "definition": "start: \"x\""}},
        {"type": "web_search", "external_web_access": true},
        {"type": "namespace", "name": "mcp__files", "description": "Files of the project.", "tools": [
            {"type": "function", "name": "read", "strict": false, "parameters": {"type": "object", "properties": {}}},
            {"type": "function", "name": "list", "description": "Lists a directory.", "defer_loading": true},
        ]},
        {"type": "namespace", "name": "mcp__web__", "description": "The web.", "tools": [
            {"type": "custom", "name": "fetch"},
        ]},
        {"type": "tool_search", "execution": "client", "description": "Finds tools."},
        {"type": "quantum_search"},
    ])
}

#[test]
fn the_tools_of_codex_are_offered_or_ignored_with_a_warning() {
    let tools = read(&codex()).unwrap();
    assert_eq!(
        names(&tools),
        ["exec_command", "apply_patch", "mcp__files__read", "mcp__files__list", "mcp__web__fetch"]
    );
    let paths: Vec<&str> = tools.offered.iter().map(|tool| tool.path.as_str()).collect();
    assert_eq!(
        paths,
        ["tools[0]", "tools[1]", "tools[3].tools[0]", "tools[3].tools[1]", "tools[4].tools[0]"]
    );
    let description = |index: usize| tools.offered[index].description.clone().unwrap();
    assert_eq!(description(1), "Edits files.\n\nThe input must match this Lark grammar:\nstart: \"x\"");
    assert_eq!(
        (description(2), description(3)),
        ("Files of the project.".to_owned(), "Lists a directory.".to_owned())
    );
    assert_eq!(tools.offered[1].parameters.as_ref().unwrap()["required"], json!(["input"]));
    let warnings: Vec<(&str, &str)> =
        tools.warnings.iter().map(|warning| (warning.code.as_str(), warning.param.as_str())).collect();
    assert_eq!(
        warnings,
        [
            ("unsupported_format", "tools[1].format"),
            ("unsupported_tool", "tools[2]"),
            ("unsupported_tool", "tools[5]"),
            ("unsupported_tool", "tools[6]"),
        ]
    );
    // The response repeats the declarations of the offered tools.
    let kinds: Vec<&Value> = tools.shown.iter().map(|tool| &tool["type"]).collect();
    assert_eq!(kinds, ["function", "custom", "namespace", "namespace"]);
    assert_eq!(tools.shown[1], codex()[1]);
    assert_eq!(tools.shown[2]["tools"][1]["name"], "list");
}

#[test]
fn calls_are_reported_as_their_tools_were_declared() {
    let calls = CallNames::of(&read(&codex()).unwrap().offered);
    let reported = |name: &str| {
        let CallName { namespace, name, kind } = calls.reported(name.to_owned());
        (namespace, name, kind)
    };
    assert_eq!(reported("exec_command"), (None, "exec_command".to_owned(), ToolKind::Function));
    assert_eq!(reported("apply_patch"), (None, "apply_patch".to_owned(), ToolKind::Custom));
    let files = Some("mcp__files".to_owned());
    assert_eq!(reported("mcp__files__read"), (files, "read".to_owned(), ToolKind::Function));
    let web = Some("mcp__web__".to_owned());
    assert_eq!(reported("mcp__web__fetch"), (web, "fetch".to_owned(), ToolKind::Custom));
    assert_eq!(reported("made_up"), (None, "made_up".to_owned(), ToolKind::Function));
}

#[test]
fn a_malformed_tool_is_rejected_with_its_path() {
    for (tools, problem) in [
        (json!([{"name": "f"}]), "tools[0].type: is missing"),
        (json!([{"type": 1}]), "tools[0].type: must be a string"),
        (json!([{"type": "namespace", "name": "n"}]), "tools[0].tools: is missing"),
        (json!([{"type": "namespace", "name": "n", "tools": {}}]), "tools[0].tools: must be an array"),
        (json!([{"type": "namespace", "name": "n", "tools": [1]}]), "tools[0].tools[0]: must be an object"),
        (json!([{"type": "namespace", "tools": []}]), "tools[0].name: is missing"),
        (
            json!([{"type": "namespace", "name": "n", "tools": [{"type": "namespace", "name": "m", "tools": []}]}]),
            "tools[0].tools[0].type: a namespace cannot contain a namespace",
        ),
        (json!([{"type": "custom"}]), "tools[0].name: is missing"),
        (json!([{"type": "custom", "name": "f", "format": "x"}]), "tools[0].format: must be an object"),
        (json!([{"type": "custom", "name": "f", "format": {}}]), "tools[0].format.type: is missing"),
        (
            json!([{"type": "custom", "name": "f", "format": {"type": "grammar", "syntax": "x", "definition": ""}}]),
            "tools[0].format.syntax: must be \"lark\" or \"regex\", not \"x\"",
        ),
        (
            json!([{"type": "custom", "name": "f", "format": {"type": "grammar", "syntax": "lark"}}]),
            "tools[0].format.definition: is missing",
        ),
        (
            json!([
                {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]},
                {"type": "function", "name": "n__f"},
            ]),
            "tools[1].name: another tool already has the name \"n__f\"",
        ),
        (
            json!([
                {"type": "function", "name": "f"},
                {"type": "function", "function": {"name": "f"}},
            ]),
            "tools[1].function.name: another tool already has the name \"f\"",
        ),
    ] {
        assert_eq!(refused(&tools), problem);
    }
    let long = "n".repeat(120);
    let tools =
        json!([{"type": "namespace", "name": long, "tools": [{"type": "function", "name": "a_function"}]}]);
    assert!(refused(&tools).starts_with("tools[0].tools[0].name: "), "{}", refused(&tools));
}

#[test]
fn the_members_of_namespaces_count_as_tools() {
    let member = |index: usize| json!({"type": "function", "name": format!("f{index}")});
    let members = |count: usize| (0..count).map(member).collect::<Vec<Value>>();
    let space = |name: &str, count| json!({"type": "namespace", "name": name, "tools": members(count)});
    assert_eq!(read(&json!([space("a", 256), space("b", 256)])).unwrap().offered.len(), TOOLS_MAX);
    for tools in [
        json!([space("a", TOOLS_MAX + 1)]),
        json!([space("a", 256), space("b", 257)]),
        json!([space("a", TOOLS_MAX), member(1)]),
    ] {
        assert!(refused(&tools).contains("more than 512 tools"), "{}", refused(&tools));
    }
}

#[test]
fn a_choice_uses_the_declared_names() {
    let tools = read(&codex()).unwrap().offered;
    let choice = |given: Value| ToolChoice::read(Some(&given), &tools);
    let named = |name: &str| Ok(ToolChoice::Named(name.to_owned()));
    assert_eq!(choice(json!({"type": "custom", "name": "apply_patch"})), named("apply_patch"));
    let member = json!({"type": "function", "namespace": "mcp__files", "name": "read"});
    assert_eq!(choice(member.clone()), named("mcp__files__read"));
    let allowed = |mode: &str, tools: Value| json!({"type": "allowed_tools", "mode": mode, "tools": tools});
    assert_eq!(
        choice(allowed(
            "auto",
            json!([{"type": "mcp", "server_label": "x"}, member, {"type": "web_search"}])
        )),
        Ok(ToolChoice::Allowed { names: vec!["mcp__files__read".to_owned()], is_required: false })
    );
    assert_eq!(choice(allowed("auto", json!([{"type": "web_search"}]))), Ok(ToolChoice::None));
    for (given, param) in [
        (allowed("required", json!([{"type": "web_search"}])), "tool_choice.tools"),
        (json!({"type": "image_generation"}), "tool_choice.type"),
        (json!({"type": "mcp", "server_label": "x"}), "tool_choice.type"),
        (json!({"type": "functoin", "name": "f"}), "tool_choice.type"),
        (json!({"type": "function", "namespace": "mcp__files", "name": "write"}), "tool_choice.name"),
    ] {
        let Err(Error::Invalid { param: at, .. }) = choice(given.clone()) else { panic!("{given}") };
        assert_eq!(at, param, "{given}");
    }
}

#[test]
fn every_built_in_type_is_ignored_for_a_reason() {
    for (kind, reason) in BUILT_IN {
        let tools = read(&json!([{"type": kind}])).unwrap();
        assert_eq!(tools.offered, []);
        assert_eq!(tools.warnings[0].message, format!("the tool of type {kind:?} is ignored: {reason}"));
    }
}

#[test]
fn the_input_of_a_custom_tool_is_read_from_its_arguments() {
    for (arguments, input) in [
        (r#"{"input": "a\n\"b\""}"#, "a\n\"b\""),
        (r#"{"input": ""}"#, ""),
        // These arguments are incomplete, as if generation had stopped at the token limit.
        (r#"{"input": "a\nb"#, "a\nb"),
        (r#"{"input": "a\"#, "a"),
        (r#"{"input": "a\u00"#, "a"),
        (r#"{"input": "a\ud83d\ude0"#, "a"),
        (r#"{"input": "a\ud83d"#, "a"),
        (r#"{"input": "#, r#"{"input": "#),
        // These arguments contain no string named `input`.
        (r#"{"patch": "a"}"#, r#"{"patch": "a"}"#),
        (r#"{"input": 1}"#, r#"{"input": 1}"#),
        ("", ""),
        ("é", "é"),
    ] {
        assert_eq!(custom_input(arguments), input, "{arguments}");
    }
}
