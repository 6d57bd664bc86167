//! Checks that the reference of the operator in `docs/reference` matches the code. `UPDATE_EXPECT=1 cargo test -p
//! operator --test docs` writes the reference.

use std::fmt::Write as _;
use std::time::Duration;

use clap::{Command, CommandFactory as _};
use expect_test::expect_file;
use operator::Args;
use operator::metrics::Metrics;
use process::reference::{flag_table, metric_table};
use serde_json::Value;

#[test]
fn the_flags_are_described() {
    let mut text = String::from(
        "# Flags of the operator\n\nFor platform engineers: every flag of `ovfleet-operator` and its subcommands, with its environment variable and its default.\n\
         Generated from `ovfleet-operator --help`. Each flag can also be set by its environment \
         variable.\n",
    );
    let command = Args::command();
    flags(&mut text, "All subcommands", &command);
    for subcommand in command.get_subcommands().filter(|subcommand| !subcommand.is_hide_set()) {
        flags(&mut text, &format!("ovfleet-operator {}", subcommand.get_name()), subcommand);
    }
    expect_file!["../../docs/reference/flags-operator.md"].assert_eq(&text);
}

fn flags(text: &mut String, heading: &str, command: &Command) {
    let about = command.get_about().map(ToString::to_string).unwrap_or_default();
    let _ = write!(text, "\n## {heading}\n\n{about}.\n");
    let table = flag_table(command.get_arguments().filter(|argument| argument.get_env().is_some()));
    if !table.is_empty() {
        let _ = write!(text, "\n{table}");
    }
}

#[test]
fn the_resource_is_described() {
    let definition = serde_json::to_value(operator_api::crd()).expect("a definition is JSON");
    let schema = &definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"];
    let mut text = String::from(
        "# LLMDeployment\n\nFor authors of LLMDeployments: every field of the resource, its status, and the rules that it must satisfy.\n\n\
         `ovfleet.dev/v1alpha1`, short name `llmd`. Generated from the definition in \
         [crds](../../crds/llmdeployments.yaml), which `kubectl explain llmd.spec` also shows.\n",
    );
    for (heading, part) in [("Spec", "spec"), ("Status", "status")] {
        let _ = write!(text, "\n## {heading}\n\n| field | type | default | |\n|---|---|---|---|\n");
        fields(&mut text, &schema[part], part);
    }
    text.push_str("\n## Rules\n\n");
    rules(&mut text, &definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]);
    expect_file!["../../docs/reference/llmdeployment.md"].assert_eq(&text);
}

/// Fields whose types are defined by Kubernetes and described in its documentation.
const KNOWN: [&str; 6] = [
    "spec.placement.affinity",
    "spec.placement.tolerations",
    "spec.placement.topologySpreadConstraints",
    "spec.resources",
    "spec.router.resources",
    "status.conditions",
];

fn fields(text: &mut String, schema: &Value, path: &str) {
    let Some(properties) = schema["properties"].as_object() else { return };
    let required =
        |name: &str| schema["required"].as_array().is_some_and(|all| all.iter().any(|known| known == name));
    for (name, field) in properties {
        let path = format!("{path}.{name}");
        let shown = path.split_once('.').map_or(path.as_str(), |(_, rest)| rest);
        let about = field["description"]
            .as_str()
            .unwrap_or_default()
            .split_whitespace()
            .collect::<Vec<_>>()
            .join(" ");
        let is_leaf = field["properties"].is_null() || KNOWN.contains(&path.as_str());
        let default = match &field["default"] {
            Value::Null if required(name) => "required".to_owned(),
            Value::Null => String::new(),
            _ if !is_leaf => String::new(),
            Value::Array(items) if items.is_empty() => String::new(),
            Value::Object(members) if members.is_empty() => String::new(),
            default => format!("`{default}`"),
        };
        let _ = writeln!(text, "| `{shown}` | {} | {default} | {} |", kind(field), about.replace('|', "\\|"));
        if !is_leaf {
            fields(text, field, &path);
        }
    }
}

fn kind(field: &Value) -> String {
    if let Some(values) = field["enum"].as_array() {
        let values = values.iter().filter_map(Value::as_str).map(|value| format!("`{value}`"));
        return values.collect::<Vec<_>>().join(", ");
    }
    if field["x-kubernetes-int-or-string"] == true {
        return int_or_string(field).to_owned();
    }
    match field["type"].as_str().unwrap_or("any") {
        "array" => format!("list of {}", kind(&field["items"])),
        "object" if !field["additionalProperties"].is_null() => "map".to_owned(),
        other => other.to_owned(),
    }
}

/// The type of an `IntOrString` field: a quantity if it has a rule about quantities, or else a number of replicas.
fn int_or_string(field: &Value) -> &'static str {
    let rules = field["x-kubernetes-validations"].as_array().into_iter().flatten();
    let is_quantity = |rule: &Value| rule["rule"].as_str().is_some_and(|rule| rule.contains("isQuantity("));
    if rules.into_iter().any(is_quantity) { "quantity" } else { "integer or percentage" }
}

fn rules(text: &mut String, schema: &Value) {
    for rule in schema["x-kubernetes-validations"].as_array().into_iter().flatten() {
        let _ = writeln!(text, "- {}", rule["message"].as_str().unwrap_or_default());
    }
    for field in schema["properties"].as_object().into_iter().flat_map(|properties| properties.values()) {
        rules(text, field);
    }
}

#[test]
fn the_metrics_are_described() {
    let mut text = String::from(
        "# Metrics of the operator\n\nFor builders of dashboards and alerts: every metric of the operator.\nGenerated from the output of `/metrics`.\n\n",
    );
    let metrics = Metrics::default();
    // A metric with labels appears in the output only once it has a value.
    metrics.record_reconcile("applied", Duration::ZERO);
    metrics.record_api_call("get", "Pod");
    metrics.record_watch_failure("Pod");
    metrics.set_deployments(|_| 0);
    metrics.set_releases(|_| 0);
    text.push_str(&metric_table(&metrics.scrape()));
    expect_file!["../../docs/reference/metrics-operator.md"].assert_eq(&text);
}
