//! Tests that the generated parts of the reference in `docs/` match the server's flags, metrics and parameters. To
//! update these parts: `UPDATE_EXPECT=1 cargo test -p server --test docs`.

use std::fmt::Write as _;

use axum::body::Body;
use axum::http::Request;
use clap::CommandFactory as _;
use expect_test::expect_file;
use process::reference::{flag_sections, flag_table, metric_table};
use serde_json::Value;
use server::{App, Args, HttpLimits, Metrics};
use tower::ServiceExt as _;

#[test]
fn the_flags_are_described() {
    let mut text = String::from(
        "# Flags of the server\n\nFor operators of servers: every flag of `ovfleet-server`, with its environment variable and its default. Subcommands \
         have\n[a page of their own](flags-server-commands.md).\nGenerated from `ovfleet-server --help`.\n",
    );
    text.push_str(&flag_sections(&Args::command(), "Model"));
    expect_file!["../../docs/reference/flags-server.md"].assert_eq(&text);
}

/// The flags of subcommands are on a separate page, because `engine.extraArgs` of an `LLMDeployment` may contain only
/// flags of the main page.
#[test]
fn the_flags_of_subcommands_are_described() {
    let mut text = String::from(
        "# Subcommands of the server\n\nFor operators who fetch models or drain servers manually: the subcommands of `ovfleet-server` and \
         their flags.\nGenerated from `ovfleet-server --help`.\n",
    );
    for subcommand in Args::command().get_subcommands().filter(|subcommand| !subcommand.is_hide_set()) {
        let about = subcommand.get_about().map(ToString::to_string).unwrap_or_default();
        let (name, about) = (subcommand.get_name(), about.trim_end_matches('.'));
        let _ = write!(text, "\n## ovfleet-server {name}\n\n{about}.\n\n");
        text.push_str(&flag_table(subcommand.get_arguments()));
    }
    expect_file!["../../docs/reference/flags-server-commands.md"].assert_eq(&text);
}

#[tokio::test]
async fn the_metrics_are_described() {
    let metrics = Metrics::new("MODEL", "BACKEND");
    let app = App::new(HttpLimits::default(), metrics.clone());
    // The registry lists a metric family only if the family has a time series.
    let bad = Request::post("/v1/completions").body(Body::from("{")).expect("a request");
    server::router(app.clone()).oneshot(bad).await.expect("an answer");
    metrics.count_adapter("ADAPTER");
    let mut text = String::from(
        "# Metrics of the server\n\nFor builders of dashboards and alerts: every metric of a server.\nGenerated from the output of `/metrics`.\n\n",
    );
    text.push_str(&metric_table(&app.scrape()));
    expect_file!["../../docs/reference/metrics.md"].assert_eq(&text);
}

#[tokio::test]
async fn the_parameters_are_described() {
    let app = App::new(HttpLimits::default(), Metrics::new("MODEL", "BACKEND"));
    let request = Request::get("/openapi.json").body(Body::empty()).expect("a request");
    let answer = server::router(app).oneshot(request).await.expect("an answer");
    let bytes = axum::body::to_bytes(answer.into_body(), usize::MAX).await.expect("a body");
    let document: Value = serde_json::from_slice(&bytes).expect("JSON");

    const PATH: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/reference/api.md");
    let known = std::fs::read_to_string(PATH).expect("the reference");
    let mut text = String::new();
    let mut rest = known.as_str();
    let mut described = Vec::new();
    while let Some((before, after)) = rest.split_once("<!-- parameters: ") {
        let (name, after) = after.split_once(" -->").expect("an end of the mark");
        let (_, after) = after.split_once("<!-- end -->").expect("an end of the table");
        let table = parameters(&document["components"]["schemas"][name]);
        let _ = write!(text, "{before}<!-- parameters: {name} -->\n{table}<!-- end -->");
        described.push(name.to_owned());
        rest = after;
    }
    text.push_str(rest);
    expect_file![PATH].assert_eq(&text);
    let schemas = document["components"]["schemas"].as_object().expect("schemas");
    for (name, _) in
        schemas.iter().filter(|(_, schema)| schema["properties"].as_object().is_some_and(is_table))
    {
        assert!(described.contains(name), "{name} has no table in the reference");
    }
}

/// Whether these properties are the parameters of a request. The reference must have a table of them.
fn is_table(properties: &serde_json::Map<String, Value>) -> bool {
    properties.values().any(|property| property["x-ovfleet"].is_string())
}

fn parameters(schema: &Value) -> String {
    let mut text = String::from(
        "| parameter | allowed values | default | OVMS | OpenAI | vLLM | ovfleet | |\n|---|---|---|---|---|---|---|---|\n",
    );
    let required = schema["required"].as_array().cloned().unwrap_or_default();
    for (name, property) in schema["properties"].as_object().expect("properties") {
        let word = |key: &str| property[key].as_str().unwrap_or_default().replace('|', "\\|");
        let peer = |key: &str| if word(key) == "no" { "–".to_owned() } else { word(key) };
        let default = if required.contains(&Value::from(name.as_str())) {
            "required".to_owned()
        } else {
            word("x-default")
        };
        let here = match word("x-ovfleet").as_str() {
            "works" => "**yes**".to_owned(),
            other => format!("*{other}*"),
        };
        let (ovms, openai, vllm) = (peer("x-ovms"), peer("x-openai"), peer("x-vllm"));
        let (words, note) = (word("x-words"), word("description"));
        let _ = writeln!(
            text,
            "| `{name}` | {words} | {default} | {ovms} | {openai} | {vllm} | {here} | {note} |"
        );
    }
    text
}
