//! Checks that the generated files match the types and the documentation. `UPDATE_EXPECT=1 cargo test -p operator-api`
//! regenerates the files.

use expect_test::expect_file;

fn definition() -> String {
    let yaml = serde_yaml::to_string(&operator_api::crd()).expect("a definition is YAML");
    format!("# Generated from operator/api by `UPDATE_EXPECT=1 cargo test -p operator-api`.\n{yaml}")
}

#[test]
fn the_definition_in_crds_is_up_to_date() {
    expect_file!["../../../crds/llmdeployments.yaml"].assert_eq(&definition());
}

/// The chart contains a copy of the file instead of a link, so that the chart can be copied without the repository.
#[test]
fn the_definition_in_the_chart_is_up_to_date() {
    expect_file!["../../../charts/ovfleet-crds/manifests/llmdeployments.yaml"].assert_eq(&definition());
}

/// The flags in a generated reference, one per line.
fn flags(reference: &str) -> String {
    let mut flags: Vec<&str> =
        reference.lines().filter_map(|line| line.strip_prefix("| `--")?.split('`').next()).collect();
    flags.sort_unstable();
    flags.iter().map(|flag| format!("--{flag}\n")).collect()
}

#[test]
fn the_known_flags_are_those_of_the_programs() {
    let server = flags(include_str!("../../../docs/reference/flags-server.md"));
    assert!(server.contains("--kv-cache-size\n"), "{server}");
    expect_file!["../src/server-flags.txt"].assert_eq(&server);
    let router = flags(include_str!("../../../docs/reference/flags-router.md"));
    assert!(router.contains("--hang-timeout\n"), "{router}");
    expect_file!["../src/router-flags.txt"].assert_eq(&router);
}

/// If a value violates `pattern`, the API server reports the regular expression without an explanation.
#[test]
fn every_rule_about_a_string_has_a_message() {
    assert!(!definition().contains("pattern:"));
}

/// Returns the paths of the LLMDeployment fields whose schemas satisfy `has_property`.
fn fields_with(has_property: fn(&serde_json::Value) -> bool) -> Vec<String> {
    fn visit(
        schema: &serde_json::Value,
        path: &str,
        has_property: fn(&serde_json::Value) -> bool,
        found: &mut Vec<String>,
    ) {
        if has_property(schema) {
            found.push(path.to_owned());
        }
        for (name, property) in schema["properties"].as_object().into_iter().flatten() {
            visit(property, &format!("{path}.{name}"), has_property, found);
        }
        for part in ["items", "additionalProperties"] {
            if schema[part].is_object() {
                visit(&schema[part], &format!("{path}[]"), has_property, found);
            }
        }
    }
    let definition = serde_json::to_value(operator_api::crd()).expect("a definition is JSON");
    let mut found = Vec::new();
    visit(&definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"], "", has_property, &mut found);
    found
}

/// Server-side apply merges a list according to its list type, and replaces a list without a type as a whole.
#[test]
fn every_list_has_a_list_type() {
    let found = fields_with(|schema| schema["type"] == "array" && schema["x-kubernetes-list-type"].is_null());
    assert!(found.is_empty(), "{found:#?}");
}

/// If a client sends a null for a nullable field, the API server stores the null instead of the default, and the type
/// of the field may be unable to represent it.
#[test]
fn no_field_with_a_default_is_nullable() {
    let found = fields_with(|schema| schema["nullable"] == true && !schema["default"].is_null());
    assert!(found.is_empty(), "{found:#?}");
}

/// If the operator set a flag that the server or the router no longer supports, the pods of that program would fail to
/// start.
#[test]
fn the_flags_that_the_operator_sets_exist() {
    use operator_api::{RESERVED_ROUTER_FLAGS, RESERVED_SERVER_FLAGS, ROUTER_FLAGS, SERVER_FLAGS};
    for (reserved, known) in
        [(&RESERVED_SERVER_FLAGS[..], SERVER_FLAGS), (&RESERVED_ROUTER_FLAGS[..], ROUTER_FLAGS)]
    {
        for (flag, _) in reserved {
            assert!(known.lines().any(|line| line == *flag), "unknown flag {flag}");
        }
    }
}
